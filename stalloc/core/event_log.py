"""The record of what a program did, from which plans are made.

Contract: the lock is held. A full table ends the recording, and Python is to hear of it.
"""

from stalloc.compiled import inner
from stalloc.core.intrinsics import call3, now_ns, this_thread
from stalloc.core.records import event_at

_NO_TASK = 0xFFFF_FFFF  # -1, in 32 bits


@inner()
def this_asker(state):
    """Who asks: the thread that runs; or, below -1, the piece of work of another thread's that it is at."""
    if state.task_of != 0:
        task = call3(state.task_of, 0, 0, 0) & _NO_TASK
        if task != _NO_TASK:
            return -2 - task
    return this_thread()


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
    event.thread = this_asker(state)
    state.num_events = count + 1
