"""The program marks a step: its tape is followed from there on. For Python."""

from stalloc.compiled import inner, njit
from stalloc.core.constants import MODE_HEAP
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.tape_cursor import SURE, go_to


@inner()
def follow(state, begin, end, position):
    """Follow the tape [begin, end) from a position on: the place is beyond doubt."""
    if state.cursor != position or state.ring_start != begin:
        go_to(state, begin, end, position)
    state.miss_run = 0
    state.last_miss = min(state.last_miss, state.history_count - SURE)


@njit()
def begin_step(device, begin, end, position, tapes):
    """Follow the tape [begin, end) from a position on, whatever was followed before; it is one of these `tapes`."""
    state = locked(device)
    if state.mode != MODE_HEAP:
        state.tapes = tapes
        follow(state, begin, end, position)
    unlock(state)
