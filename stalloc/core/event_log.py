"""The record of what a program did, from which plans are made.

Contract: the lock is held. Python is to hear of a full table. It ends the recording, or (`events_wrap`) is a ring from
then on: event i is in row i % events_capacity, and the last `events_capacity` ones are there. The clock takes longer
than all else here, so what is freed has the time of what was asked for before it: 0 in the table.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.constants import ACTION_ALLOC, ACTION_FREE_COMPLETED, TINY
from stalloc.core.intrinsics import locked, now_ns, unlock
from stalloc.core.records import event_at, state_at


@inner()
def record(state, action, stream, address, size):
    """Add an event to the record."""
    count = state.log.num_events
    row = count
    if count >= state.log.events_capacity:
        if count == state.log.events_capacity:
            state.triggers.check_at = 1
        if state.log.events_wrap == 0:
            state.hot.recording = 0
            return
        row = count % state.log.events_capacity
    event = event_at(state, row)
    event.action = action | stream << 8
    event.address = address
    event.requested_bytes = size
    event.time_ns = 0 if action == ACTION_FREE_COMPLETED else now_ns(state, state.log.events_clock)
    event.is_noise = 0
    state.log.num_events = count + 1


@njit(**BORROWING)
def narrow(device, capacity, moved):
    """Let the record be a ring of `capacity` events; `moved` has room for as many while they change rows."""
    state = locked(device)
    count, before = state.log.num_events, state.log.events_capacity
    first = max(count - capacity, 0)
    if capacity < before and first > 0:
        for i in range(first, count):
            _copy(event_at(state, i % before), moved[i - first])
        for i in range(first, count):
            _copy(moved[i - first], event_at(state, i % capacity))
    if capacity < before:
        state.log.events_capacity = capacity
    unlock(state)


@njit(**BORROWING)
def copy_requests(device, begin, end, sizes, streams, is_noise):
    """Write the requests above TINY among the events [begin, end), which the record has; how many. For Python."""
    state, count = state_at(device), 0
    for i in range(begin, end):
        event = event_at(state, i % state.log.events_capacity)
        if event.action & 0xFF == ACTION_ALLOC and event.requested_bytes > TINY:
            sizes[count] = event.requested_bytes
            streams[count] = event.action >> 8
            is_noise[count] = event.is_noise
            count += 1
    return count


@inner()
def _copy(event, to):
    to.action = event.action
    to.address = event.address
    to.requested_bytes = event.requested_bytes
    to.time_ns = event.time_ns
    to.is_noise = event.is_noise
