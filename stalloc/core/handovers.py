"""Handovers: memory that passes from one stream to another, with an event at its free and a wait before its use.

Contract: a planned request on one stream gets intervals that another stream used last only after its stream waits for
an event that the other one recorded after the free was asked for; if that cannot be had (a capture, an error of the
driver), the request goes to the heap. Who used an interval last is looked up when it is taken, not read from the plan,
so this holds too when the program deviates from it. The plan only says where an event is worth recording early: at the
free, so that the wait covers no kernel that came later. Elsewhere it is recorded when the intervals are taken.

The driver is never called with the lock held. The thread that takes intervals has them to itself while it looks at
their previous users, and its block keeps the arena and its tables in place.
"""

from stalloc.compiled import inner, njit
from stalloc.core.arena_intervals import intervals_empty
from stalloc.core.captured import is_captured
from stalloc.core.constants import (
    DRIVER_STATUS,
    MAX_STREAMS,
    MODE_PLANNED,
    NO_PREVIOUS_USER,
    NO_STREAM,
    UNMAPPED,
    UNRECORDED_USER,
)
from stalloc.core.intrinsics import call3, locked, unlock
from stalloc.core.records import entry_at, interval_at, previous_user_at, segment_at, slot_at, stream_at
from stalloc.core.slots import find_slot


@inner()
def _is_handle(stream):
    """Whether the driver knows the stream by this; a thread's own default stream goes by another name here."""
    return stream & 7 != 2


@inner(forceinline=True)
def _stream_of(entry):
    return entry.key & (MAX_STREAMS - 1)


@inner()
def record_free(state, position):
    """Record an entry's event on its stream, without the lock: True if it holds what the stream was given so far."""
    entry = entry_at(state, position)
    stream = _stream_of(entry)
    if not _may_be_ordered(state, stream):
        return False
    return call3(state.driver.record_event, entry.event, stream_at(state, stream).value, 0) & DRIVER_STATUS == 0


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
def _using_stream(state, user):
    if user < NO_PREVIOUS_USER:
        return UNRECORDED_USER - user
    return _stream_of(entry_at(state, user))


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
        if user == NO_PREVIOUS_USER or _using_stream(state, user) == stream:
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
    return _is_handle(handle) and not is_captured(state, handle)


@inner()
def _wait_for(state, entry, user, stream):
    event = entry.event  # nobody waits for the entry's own one while it lives
    if user > NO_PREVIOUS_USER:
        event = entry_at(state, user).event
    else:
        used_on = UNRECORDED_USER - user
        if not _may_be_ordered(state, used_on):
            return False
        if call3(state.driver.record_event, event, stream_at(state, used_on).value, 0) & DRIVER_STATUS != 0:
            return False
    return call3(state.driver.wait_event, stream_at(state, stream).value, event, 0) & DRIVER_STATUS == 0


@njit()
def end_sharing(device, stream):
    """Part the intervals that streams share, once no schedule is served; `stream` (index) gets empty ones. For Python.

    What is empty may be used when all streams have done what they were given before; `dissolve_arena` then finds
    regions.
    """
    state = locked(device)
    if state.hot.mode != MODE_PLANNED and state.hot.has_handovers == 1:
        _part_streams(state, stream)
    unlock(state)


@inner()
def _part_streams(state, stream):
    """Give every interval that streams share to the stream of what lives there, or to `stream` if it is empty."""
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
