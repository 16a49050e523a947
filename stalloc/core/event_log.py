"""The record of what a program did, from which plans are made.

Contract: the lock is held. A full table ends the recording, and Python is to hear of it.
"""

from stalloc.compiled import inner
from stalloc.core.intrinsics import now_ns, this_thread
from stalloc.core.records import event_at


@inner()
def record(state, action, stream, address, size):
    """Add an event to the record."""
    count = state.num_events
    if count >= state.events_capacity:
        state.recording = 0
        state.check_at = 1
        return
    event = event_at(state, count)
    event.action = action | stream << 8
    event.address = address
    event.requested_bytes = size
    event.time_ns = now_ns(state)
    event.thread = this_thread()
    state.num_events = count + 1
