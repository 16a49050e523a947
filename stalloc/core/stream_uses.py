"""Uses of blocks by streams other than their own (torch's record_stream), and the events that say when they are over.

Contract: a use is over when its stream has done all that it had been given when the block was freed. Its event is
recorded then, or later if that cannot be (a graph is captured, and an event of a capture can never be asked; the driver
refuses), which only takes longer. The driver is never called with the lock held; the block is nobody's meanwhile. One
thread at a time asks which uses are over, and it alone takes blocks out of the queue of those that wait.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.captured import is_captured, relax, restore
from stalloc.core.constants import (
    BLOCK_SHARED,
    DRIVER_STATUS,
    NO_HANDLE,
    NOT_READY,
    STATE_BITS,
    USE_BEING_RECORDED,
    USE_LIVE,
    USE_OVER,
    USE_RECORDED,
    USE_UNRECORDED,
)
from stalloc.core.intrinsics import call3, lock, locked, unlock
from stalloc.core.records import stream_use_at


@njit(**BORROWING)
def give_events(device, events):
    """Let as many more uses be known as there are events for them (handles). For Python."""
    state = locked(device)
    for i in range(len(events)):
        row = state.shared.stream_uses_used
        state.shared.stream_uses_used += 1
        stream_use_at(state, row).event = events[i]
        _give_back(state, row)
    unlock(state)


@inner()
def _give_back(state, row):
    stream_use_at(state, row).next = state.shared.free_stream_use
    state.shared.free_stream_use = row


@inner()
def note_use(state, address, status, stream):
    """Note that a stream (handle) uses the block at an address; the block's state then, 0: there is no event for it."""
    first = status >> STATE_BITS
    row = first
    while row != 0:
        if stream_use_at(state, row).stream == stream:
            return status
        row = stream_use_at(state, row).next
    row = state.shared.free_stream_use
    if row == 0:
        return 0
    use = stream_use_at(state, row)
    state.shared.free_stream_use = use.next
    use.address = address
    use.stream = stream
    use.status = USE_LIVE
    use.next = first
    return BLOCK_SHARED | row << STATE_BITS


@inner()
def await_uses(state, first):
    """A block was freed, and waits for its uses; whether they are to be recorded now. With the lock held."""
    records = state.hot.private_kind == 0 and state.driver.record_event != 0
    row = first
    while row != 0:
        use = stream_use_at(state, row)
        _set_status(state, use, USE_BEING_RECORDED if records else USE_UNRECORDED)
        row = use.next
    stream_use_at(state, first).next_freed = 0
    _queue_after(state, state.shared.last_freed_use, first)
    state.shared.last_freed_use = first
    return records


@inner()
def _queue_after(state, previous, first):
    """Let a block (its first use, 0: none) be the next in the queue after another one (0: the first)."""
    if previous == 0:
        state.shared.first_freed_use = first
    else:
        stream_use_at(state, previous).next_freed = first


@inner()
def _set_status(state, use, status):
    """Write the status of a use of a freed block. With the lock held."""
    if status == USE_UNRECORDED and use.status != USE_UNRECORDED:
        state.shared.num_unrecorded += 1
        use.number = state.shared.num_unrecorded
    use.status = status


@inner()
def record_uses(state, first):
    """Record the events of the uses of a block that was freed, without the lock."""
    row = first
    while row != 0:
        use = stream_use_at(state, row)
        row = use.next  # the last one may be over, and another block's, once its status is written
        status = USE_RECORDED if _record(state, use) else USE_UNRECORDED
        lock(state)
        _set_status(state, use, status)
        unlock(state)


@inner()
def _record(state, use):
    if state.driver.record_event == 0 or is_captured(state, use.stream):
        return False
    return call3(state.driver.record_event, use.event, use.stream, 0) & DRIVER_STATUS == 0


@inner()
def begin_asking(state):
    """Whether no other thread is asking; then this one is, until `end_asking`."""
    lock(state)
    begins = state.shared.is_asking == 0
    state.shared.is_asking = 1
    unlock(state)
    return begins


@inner()
def end_asking(state):
    """Let other threads ask the driver about uses."""
    lock(state)
    state.shared.is_asking = 0
    unlock(state)


@inner()
def ask_uses(state, before):
    """Ask which uses of freed blocks are over, without the lock; whether the driver knew.

    Of those that are not recorded the first `before` ever to be so are over: their streams were seen idle since.
    """
    held_up, knew = NO_HANDLE, True
    lock(state)
    first = state.shared.first_freed_use
    unlock(state)
    if first == 0:
        return True
    relax(state)
    while first != 0:
        row = first
        while row != 0:
            use = stream_use_at(state, row)
            row = use.next
            status = _ask(state, use, before, held_up)
            if status == USE_RECORDED:
                held_up = use.stream  # so are all that it was given later
            knew = knew and status != USE_UNRECORDED
            if status != USE_OVER:
                break
        lock(state)
        first = stream_use_at(state, first).next_freed
        unlock(state)
    restore(state)
    return knew


@inner()
def _ask(state, use, before, held_up):
    """The status of a use now, after its event was recorded and asked if need be."""
    lock(state)
    status = use.status
    unlock(state)
    if status in (USE_OVER, USE_BEING_RECORDED):
        return status
    if use.stream == held_up:
        return USE_RECORDED if status == USE_RECORDED else USE_BEING_RECORDED
    if status == USE_UNRECORDED and use.number <= before:
        status = USE_OVER
    elif status == USE_RECORDED or _record(state, use):
        answer = call3(state.driver.query_event, use.event, 0, 0) & DRIVER_STATUS
        status = USE_RECORDED
        if answer != NOT_READY:
            status = USE_OVER if answer == 0 else USE_UNRECORDED
    lock(state)
    _set_status(state, use, status)
    unlock(state)
    return status


@inner()
def is_over(state, first):
    """Whether all uses of a block are over. With the lock held."""
    row = first
    while row != 0:
        use = stream_use_at(state, row)
        if use.status != USE_OVER:
            return False
        row = use.next
    return True


@inner()
def forget_uses(state, previous, first):
    """A block does not wait any more; `previous`: the first use of the one before it in the queue, 0: there is none."""
    _queue_after(state, previous, stream_use_at(state, first).next_freed)
    if state.shared.last_freed_use == first:
        state.shared.last_freed_use = previous
    row = first
    while row != 0:
        following = stream_use_at(state, row).next
        _give_back(state, row)
        row = following
