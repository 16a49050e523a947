"""Handovers: memory that passes from one stream to another, with an event at its free and a wait before its use.

Contract: a planned request on one stream gets intervals that another stream used last only after its stream waits for
an event that the other one recorded after the free was asked for; if that cannot be had (a capture, an error of the
driver), the request goes to the heap. Who used an interval last is looked up when it is taken, not read from the plan,
so this holds too when the program deviates from it. The plan only says where an event is worth recording early: at the
free, so that the wait covers no kernel that came later. Elsewhere it is recorded when the intervals are taken.

The driver is never called with the lock held. The thread that takes intervals has them to itself while it looks at
their previous users, and its block keeps the arena and its tables in place. No event is recorded on a stream that is
captured, since one of a capture can never be asked, and who waits for it is captured too. Events are asked for with
this thread's mode relaxed: then no capture minds.
"""

from stalloc.compiled import inner
from stalloc.core.constants import (
    DRIVER_STATUS,
    MAX_STREAMS,
    MODE_PLANNED,
    NO_PREVIOUS_USER,
    NO_STREAM,
    UNMAPPED,
    UNRECORDED_USER,
)
from stalloc.core.intrinsics import address_of, answer_of, call3, under_lock
from stalloc.core.lending import intervals_empty
from stalloc.core.lookup import find_slot
from stalloc.core.records import entry_at, interval_at, mode_of_asker, previous_user_at, segment_at, slot_at, stream_at
from stalloc.device.capture import HANDLE_BITS, PER_THREAD

_RELAXED = 2


@inner()
def is_captured(state, handle):
    """Whether a stream is being captured, or (the default one) may not be asked since another one is."""
    if state.driver.is_capturing == 0:
        return False
    return answer_of(state.driver.is_capturing, PER_THREAD if handle & HANDLE_BITS == PER_THREAD else handle) != 0


@inner()
def relax(state):
    """Let no capture mind what this thread asks, until `restore`; one thread at a time."""
    state.driver.mode_of_asker = _RELAXED
    restore(state)


@inner()
def restore(state):
    """Have this thread heed captures as it did."""
    if state.driver.exchange_mode != 0:
        call3(state.driver.exchange_mode, address_of(mode_of_asker(state)), 0, 0)


@inner(forceinline=True)
def _stream_of(entry):
    return entry.key & (MAX_STREAMS - 1)


@inner()
def record_free(state, position):
    """Record an entry's event on its stream, without the lock: True if it holds what the stream was given so far."""
    entry = entry_at(state, position)
    return _record_on(state, entry.event, _stream_of(entry))


@inner()
def _record_on(state, event, stream):
    handle = stream_at(state, stream).value
    if not _may_be_ordered(state, stream):
        return False
    return call3(state.driver.record_event, event, handle, 0) & DRIVER_STATUS == 0


@inner()
def note_user(state, position, recorded):
    """An entry's block is about to be freed: who takes its intervals next has to wait for it. With the lock held."""
    entry = entry_at(state, position)
    if entry.event == 0:
        return
    user = position if recorded else UNRECORDED_USER - _stream_of(entry)
    for i in range(entry.interval_low, entry.interval_high):
        previous_user_at(state, i).value = user


@inner()
def wait_for_users(state, position):
    """Let the stream that took an entry's intervals wait for all others that used them last, without the lock.

    Return the number of waits, or -1 if the stream cannot wait; the intervals must not be used then. What it has waited
    for is kept in mind either way.
    """
    entry = entry_at(state, position)
    if entry.event == 0:
        return 0
    high, stream = entry.interval_high, _stream_of(entry)
    waits = 0
    for i in range(entry.interval_low, high):
        user = previous_user_at(state, i).value
        if user == NO_PREVIOUS_USER:
            continue
        if stream == (UNRECORDED_USER - user if user < NO_PREVIOUS_USER else _stream_of(entry_at(state, user))):
            continue
        if waits == 0 and not _may_be_ordered(state, stream):
            return -1
        if not _wait_for(state, entry, user, stream):
            return -1
        waits += 1
        for j in range(i, high):  # the stream's own work comes after the user's from now on
            if previous_user_at(state, j).value == user:
                previous_user_at(state, j).value = UNRECORDED_USER - stream
    return waits


@inner()
def _may_be_ordered(state, stream):
    """Whether a stream (index) is not being captured into a graph: what is outside of that may not depend on it."""
    handle = stream_at(state, stream).value
    # a thread's own default stream, by which the driver does not know it here, goes by another name
    return handle & 7 != 2 and not is_captured(state, handle)


@inner()
def _wait_for(state, entry, user, stream):
    event = entry.event  # nobody waits for the entry's own one while it lives
    if user > NO_PREVIOUS_USER:
        event = entry_at(state, user).event
    elif not _record_on(state, event, UNRECORDED_USER - user):
        return False
    return call3(state.driver.wait_event, stream_at(state, stream).value, event, 0) & DRIVER_STATUS == 0


@under_lock()
def end_sharing(state, stream):
    """Give every interval that streams share to the stream of what lives there, or to `stream` if it is empty."""
    if state.hot.mode == MODE_PLANNED or state.hot.has_handovers == 0:
        return
    i = 0
    while i < state.plan.num_intervals:
        high, owner = i + 1, stream
        lease = interval_at(state, i).lease
        if lease > 0:  # of one stream already
            i = segment_at(state, lease).interval_high
            continue
        if lease != UNMAPPED and not intervals_empty(state.plan.interval_bits, i, i + 1):
            slot = slot_at(state, find_slot(state, state.plan.arena + interval_at(state, i).offset))
            entry = entry_at(state, slot.entry)
            high, owner = entry.interval_high, _stream_of(entry)
        for j in range(i, high):
            interval = interval_at(state, j)
            if interval.stream == NO_STREAM:
                interval.stream = owner
        i = high
