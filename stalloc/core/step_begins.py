"""The program marks a step: its schedule is followed from there on. For Python."""

from stalloc.compiled import inner, njit
from stalloc.core.constants import MODE_HEAP
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.schedule_cursor import SURE, go_to


@inner()
def follow(state, begin, end, position):
    """Follow the schedule [begin, end) from a position on: the place is beyond doubt."""
    if state.follow.cursor != position or state.follow.cycle_start != begin:
        go_to(state, begin, end, position)
    state.follow.miss_run = 0
    state.iterations.last_miss = min(state.iterations.last_miss, state.follow.history_count - SURE)


@njit()
def begin_step(device, begin, end, position, schedules):
    """Follow [begin, end), one of these `schedules`, from a position on, whatever was followed before."""
    state = locked(device)
    if state.hot.mode != MODE_HEAP:
        state.tables.schedules = schedules
        follow(state, begin, end, position)
    unlock(state)
