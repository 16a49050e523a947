"""free: what lives at an address is freed at once, or waits for the other streams that use it (torch's record_stream).

Contract: as in requests.py; functions that take a state are called with the lock held unless they say otherwise. A use
is over when its stream has done all that it had been given when the block was freed. Its event is recorded then, or
later if that cannot be (a graph is captured; the driver refuses), which only takes longer. The driver is never called
with the lock held; the block is nobody's meanwhile. One thread at a time asks which uses are over, and it alone takes
blocks out of the queue of those that wait. Where Python has something to do before such a block is free
(STALLOC_POISON), only Python asks.
"""

from stalloc.compiled import BORROWING, cfunc, inner, njit
from stalloc.core.constants import (
    ACTION_FREE_COMPLETED,
    ACTION_FREE_REQUESTED,
    BLOCK_DEFERRED,
    BLOCK_FREE,
    BLOCK_IN_HANDOVER,
    BLOCK_LIVE,
    BLOCK_SHARED,
    DRIVER_STATUS,
    MAX_STREAMS,
    MODE_PLANNED,
    NEED_EVENTS,
    NO_HANDLE,
    NOT_READY,
    STATE_BITS,
    STATE_MASK,
    STREAM_BITS,
    USE_BEING_RECORDED,
    USE_LIVE,
    USE_OVER,
    USE_RECORDED,
    USE_UNRECORDED,
)
from stalloc.core.counters import count_deferred, count_free, record
from stalloc.core.graph_loans import end_loan, is_loan, stream_of_loan
from stalloc.core.handovers import is_captured, note_user, record_free, relax, restore
from stalloc.core.heap import heap_free, rounded_bytes
from stalloc.core.intrinsics import address_of, call3, lock, locked, under_lock, unlock
from stalloc.core.lending import flip_intervals, note_end
from stalloc.core.lookup import find_live, find_slot, in_arena
from stalloc.core.records import block_at, entry_at, pool_at, slot_at, state_at, stream_at, stream_use_at
from stalloc.core.segments import pool_of

_PATIENCE = 3  # times that events could not be made
BUSY, UNKNOWN, KNOWN = -1, 0, 1  # another thread is asking; of some uses the driver did not know; it did


@inner(forceinline=True)
def free(device, address):
    """Free a block, or, if other streams have used it, let it wait for them."""
    if address == 0:
        return
    state = locked(device)
    slot, block = find_block(state, address)
    status, uses = status_at(state, slot, block), 0
    if status == BLOCK_LIVE:
        if state.hot.has_handovers == 1:
            _hand_over(state, address, slot, block)
        else:
            release(state, address, slot, block)
    elif status & STATE_MASK == BLOCK_SHARED:
        uses = _defer(state, address, slot, block, status >> STATE_BITS)
    else:
        state.statistics.num_unknown_frees += 1
    unlock(state)
    if uses != 0:
        _record_uses(state, uses)


@inner()
def _defer(state, address, slot, block, first):
    """Let a block wait for its uses; those that are to be recorded as soon as the lock is released, 0: none."""
    set_status(state, slot, block, BLOCK_DEFERRED | first << STATE_BITS)
    count_deferred(state, size_at(state, slot, block), 1)
    if state.hot.recording == 1 and (slot >= 0 or not is_loan(state, block)):
        record(state, ACTION_FREE_REQUESTED, 0, address, 0)
    if first == 0:
        return 0
    records, row = state.hot.private_kind == 0 and state.driver.record_event != 0, first
    while row != 0:
        _set_status(state, stream_use_at(state, row), USE_BEING_RECORDED if records else USE_UNRECORDED)
        row = stream_use_at(state, row).next
    stream_use_at(state, first).next_freed = 0
    _queue_after(state, state.shared.last_freed_use, first)
    state.shared.last_freed_use = first
    return first if records else 0


@inner(forceinline=True)
def find_block(state, address):
    """What lives at an address: the row of its slot (-1: none) and of its block (0: none)."""
    slot = find_slot(state, address) if in_arena(state, address) else -1
    return slot, find_live(state, address) if slot < 0 else 0


@inner(forceinline=True)
def status_at(state, slot, block):
    """The state of a slot or a block."""
    if slot >= 0:
        return slot_at(state, slot).state
    return block_at(state, block).state if block != 0 else BLOCK_FREE


@inner(forceinline=True)
def set_status(state, slot, block, status):
    """Write the status of a slot or, without one, of a block."""
    if slot >= 0:
        slot_at(state, slot).state = status
    else:
        block_at(state, block).state = status


@inner()
def size_at(state, slot, block):
    """The bytes of what lives in a slot or a block, rounded up."""
    if slot >= 0:
        return entry_at(state, slot_at(state, slot).entry).key >> STREAM_BITS
    return rounded_bytes(state, block)


@inner()
def _release_block(state, address, block):
    size, requested = rounded_bytes(state, block), block_at(state, block).requested_bytes
    stream, was_loan = pool_at(state, pool_of(state, block)).stream, is_loan(state, block)
    if was_loan:
        end_loan(state, block)
    elif block_at(state, block).born >= 0 and state.hot.mode == MODE_PLANNED:
        note_end(state, block, False)
    heap_free(state, block)
    count_free(state, size, requested)
    if state.hot.recording == 1 and not was_loan:
        record(state, ACTION_FREE_COMPLETED, stream, address, requested)


@inner(forceinline=True)
def release(state, address, slot, block):
    """Free the slot or the block that lives at an address."""
    if slot >= 0:
        planned = slot_at(state, slot)
        entry = entry_at(state, planned.entry)
        flip_intervals(state.plan.interval_bits, entry.interval_low, entry.interval_high)
        planned.entry = -1
        planned.state = BLOCK_FREE
        state.plan.arena_live -= 1
        count_free(state, entry.key >> STREAM_BITS, planned.requested_bytes)
        if state.hot.recording == 1:
            record(state, ACTION_FREE_COMPLETED, entry.key & (MAX_STREAMS - 1), address, planned.requested_bytes)
    else:
        _release_block(state, address, block)


@inner()
def _hand_over(state, address, slot, block):
    """Free a block; if another stream takes its memory on the plan, with an event that says when it may be used.

    The lock is released while the event is recorded: the block is nobody's then, but its intervals stay taken.
    """
    position = slot_at(state, slot).entry if slot >= 0 else -1
    recorded = False
    if position >= 0 and entry_at(state, position).hands_over == 1 and state.hot.private_kind == 0:
        slot_at(state, slot).state = BLOCK_IN_HANDOVER
        unlock(state)
        recorded = record_free(state, position)
        lock(state)
        slot, block = find_block(state, address)  # a segment may have been made of the arena meanwhile
    if slot >= 0:
        note_user(state, slot_at(state, slot).entry, recorded)
    release(state, address, slot, block)


@under_lock(**BORROWING)
def give_events(state, events):
    for i in range(len(events)):
        row = state.shared.stream_uses_used
        state.shared.stream_uses_used += 1
        stream_use_at(state, row).event = events[i]
        _give_back(state, row)


@inner()
def _give_back(state, row):
    stream_use_at(state, row).next = state.shared.free_stream_use
    state.shared.free_stream_use = row


@inner()
def _note_use(state, address, status, stream):
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
def _queue_after(state, previous, first):
    """Let a block (its first use, 0: none) be the next in the queue after another one (0: the first)."""
    if previous == 0:
        state.shared.first_freed_use = first
    else:
        stream_use_at(state, previous).next_freed = first


@inner()
def _set_status(state, use, status):
    if status == USE_UNRECORDED and use.status != USE_UNRECORDED:
        state.shared.num_unrecorded += 1
        use.number = state.shared.num_unrecorded
    use.status = status


@inner()
def _record_uses(state, first):
    """Record the events of the uses of a block that was freed, without the lock."""
    while first != 0:
        use = stream_use_at(state, first)
        first = use.next  # the last one may be over, and another block's, once its status is written
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
def _begin_asking(state):
    """Whether no other thread is asking; then this one is, until `_end_asking`."""
    lock(state)
    begins = state.shared.is_asking == 0
    state.shared.is_asking = 1
    unlock(state)
    return begins


@inner()
def _end_asking(state):
    lock(state)
    state.shared.is_asking = 0
    unlock(state)


@inner()
def _ask_uses(state, before):
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
def _is_over(state, first):
    while first != 0:
        use = stream_use_at(state, first)
        if use.status != USE_OVER:
            return False
        first = use.next
    return True


@inner()
def _forget_uses(state, previous, first):
    """A block does not wait any more; `previous`: the first use of the one before it in the queue, 0: there is none."""
    _queue_after(state, previous, stream_use_at(state, first).next_freed)
    if state.shared.last_freed_use == first:
        state.shared.last_freed_use = previous
    while first != 0:
        following = stream_use_at(state, first).next
        _give_back(state, first)
        first = following


@inner()
def share(device, address, stream):
    """Note that a stream (handle) uses a block; what is not stalloc's, or is the stream's own, is left alone."""
    num_failures = 0
    while True:
        state = locked(device)
        slot, block = find_block(state, address)
        status = status_at(state, slot, block)
        if status & STATE_MASK not in (BLOCK_LIVE, BLOCK_SHARED) or own_stream(state, slot, block) == stream:
            break
        noted = _note_use(state, address, status, stream)
        if noted == 0 and num_failures == _PATIENCE:
            noted = BLOCK_SHARED  # the driver is lost: a block that is known to wait for nothing is never free again
        if noted != 0:
            set_status(state, slot, block, noted)
            break
        unlock(state)
        num_failures += call3(state.driver.slow_function, state.driver.device, NEED_EVENTS, 0) != 1
    unlock(state)


@inner()
def own_stream(state, slot, block):
    """The handle of the stream that a block was asked for on."""
    if slot >= 0:
        index = entry_at(state, slot_at(state, slot).entry).key & (MAX_STREAMS - 1)
    elif is_loan(state, block):
        return stream_of_loan(state, block)
    else:
        index = pool_at(state, pool_of(state, block)).stream
    return stream_at(state, index).value


@njit()
def release_those_over(device):
    """Free the blocks that wait no more; all that `ask` found, if it had room for them."""
    state, previous = state_at(device), 0
    lock(state)
    first = state.shared.first_freed_use
    unlock(state)
    while first != 0:
        lock(state)
        uses, first = first, stream_use_at(state, first).next_freed
        if _is_over(state, uses):
            address = stream_use_at(state, uses).address
            _forget_uses(state, previous, uses)
            slot, block = find_block(state, address)
            count_deferred(state, size_at(state, slot, block), -1)
            if slot >= 0 and state.hot.has_handovers == 1:
                note_user(state, slot_at(state, slot).entry, False)
            release(state, address, slot, block)
        else:
            previous = uses
        unlock(state)


@inner()
def free_those_over(state):
    """Free blocks whose other streams are done with them; whether there is nothing more to be done now."""
    if state.shared.frees_in_python == 1 or state.driver.record_event == 0:
        return False
    return poll(address_of(state), 0) != UNKNOWN


@njit()
def poll(device, before):
    """Free blocks whose uses are over, unseen by Python: BUSY, UNKNOWN or KNOWN; `before` as in `_ask_uses`."""
    state = state_at(device)
    if not _begin_asking(state):
        return BUSY
    knew = _ask_uses(state, before)
    release_those_over(device)
    _end_asking(state)
    return KNOWN if knew else UNKNOWN


@njit(**BORROWING)
def ask(device, before, addresses):
    """Write the addresses of blocks whose other streams are done with them, as many as there is room for.

    How many, or BUSY; and whether the driver knew. They wait until `release_those_over`.
    """
    state = state_at(device)
    if not _begin_asking(state):
        return BUSY, False
    knew = _ask_uses(state, before)
    count = 0
    lock(state)
    first = state.shared.first_freed_use
    while first != 0 and count < len(addresses):
        if _is_over(state, first):
            addresses[count] = stream_use_at(state, first).address
            count += 1
        first = stream_use_at(state, first).next_freed
    unlock(state)
    _end_asking(state)
    return count, knew


@cfunc("void(int64, int64, int64)")
def share_entry(device, address, stream):
    """What C code calls: `address` has it."""
    share(device, address, stream)
