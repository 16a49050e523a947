"""Planned steps as they end: what each was like, and whether the plan still fits the program.

Contract: the lock is held. After a pass in which requests were displaced Python is asked at the next boundary; a plan
that misses much in pass after pass is given up by the next request that asks Python.
"""

from stalloc.compiled import inner, njit
from stalloc.core.constants import ASIDE, ASIDE_IN_NEXT_PASS, CLOCK, MODE_REPLAY, STEP_LOG_ROWS
from stalloc.core.intrinsics import locked, now_ns, unlock
from stalloc.core.records import step_at

_BAD_SHARE = 4  # a pass is bad if more than one request in so many was not served though it has a place
_MAX_BAD_PASSES = 8  # in a row, after which the plan is given up
_HARDLY = 4  # requests
_ASTRAY = 8  # requests of a pass that are on no tape, or were displaced
_BACK, _BACK_SHIFT = 16, 4  # requests, and 1 / 2 ** shift of a pass, by which the program is seen to follow it again


@inner()
def _write_row(state, hits):
    step = step_at(state, state.step_count % STEP_LOG_ROWS)
    step.time_ns = now_ns(state, CLOCK)
    step.hits = hits
    step.misses = state.step_misses
    step.allocated_peak = state.step_allocated_peak
    step.reserved_peak = state.step_reserved_peak
    state.span_allocated_peak = max(state.span_allocated_peak, state.step_allocated_peak)
    state.span_reserved_peak = max(state.span_reserved_peak, state.step_reserved_peak)


@inner(forceinline=True)
def num_displaced(state):
    """Requests of this pass over the plan that have a place and were served elsewhere."""
    return state.conflicts - state.conflicts_before - state.step_unplanned


@inner()
def goes_as_planned(state):
    """Whether hardly anything was asked for in this pass that is not planned, or found its place taken."""
    return max(state.step_misses - state.step_unplanned, num_displaced(state)) < _HARDLY


@inner()
def is_astray(state):
    """Whether a small request that matches the plan may do so by chance: much of this pass is not as planned."""
    lost, hits = state.step_misses - state.step_unplanned, state.hits - state.hits_before
    return lost >= _ASTRAY and 2 * lost > hits


@inner()
def stands_aside(state, position):
    """Whether the heap serves what the plan has, an entry of it too: up to a pass that begins as planned."""
    if state.stands_aside == ASIDE_IN_NEXT_PASS and goes_as_planned(state):
        served = state.step_misses - _HARDLY  # by the heap
        least = max(_BACK, (state.ring_end - state.ring_start) >> _BACK_SHIFT)
        if least <= served <= position - state.ring_start <= state.step_misses + _HARDLY:
            state.stands_aside = 0
    return state.stands_aside != 0


@inner()
def end_step(state):
    """The ring begins again: write the log's row and start counting anew."""
    hits, lost = state.hits - state.hits_before, state.step_misses - state.step_unplanned
    _write_row(state, hits)
    if state.arena_pages != 0 and num_displaced(state) > 0:
        state.ask_at_boundary = max(state.ask_at_boundary, 1)  # should it go on, the arena moves away from there
    state.bad_passes = state.bad_passes + 1 if _BAD_SHARE * lost > lost + hits else 0
    if state.bad_passes >= _MAX_BAD_PASSES:
        # some requests still match, so misses alone might never outnumber matches: let the next one ask
        state.excess_misses = max(state.excess_misses, state.ask_after_misses + state.ring_end)
    if state.stands_aside == ASIDE:
        state.stands_aside = ASIDE_IN_NEXT_PASS
    state.step_count += 1
    state.steps_ever += 1
    if state.steps_ever == state.ask_at_step:
        state.ask_at_boundary = max(state.ask_at_boundary, 1)
    state.cells_released += 1  # when cells are needed next has changed
    begin_counting(state)


@njit()
def take_peak(device):
    """What was allocated at most since this was asked last; in a pass of a plan and the one before. For Python."""
    state = locked(device)
    peak = state.step_allocated_peak
    if state.mode != MODE_REPLAY:
        state.span_allocated_peak = max(state.span_allocated_peak, peak)
        state.step_allocated_peak = state.total.allocated_bytes
    elif state.step_count > 0:
        peak = max(peak, step_at(state, (state.step_count - 1) % STEP_LOG_ROWS).allocated_peak)
    unlock(state)
    return peak


@inner()
def begin_counting(state):
    """Count for a new step."""
    state.hits_before = state.hits
    state.conflicts_before = state.conflicts
    state.step_misses = 0
    state.step_unplanned = 0
    state.step_allocated_peak = state.total.allocated_bytes
    state.step_reserved_peak = state.reserved_bytes
