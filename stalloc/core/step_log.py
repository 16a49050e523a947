"""Planned steps as they end: what each was like, and whether the plan still fits the program.

Contract: the lock is held. After an iteration in which requests were displaced Python is asked at the next boundary; a
plan that misses much in iteration after iteration is given up by the next request that asks Python.
"""

from stalloc.compiled import inner, njit
from stalloc.core.constants import BYPASS, BYPASS_NEXT_ITERATION, CLOCK, MODE_REPLAY, STEP_LOG_ROWS
from stalloc.core.intrinsics import locked, now_ns, unlock
from stalloc.core.records import step_at

_BAD_SHARE = 4  # an iteration is bad if more than one request in so many was not served though it has a place
_MAX_BAD_ITERATIONS = 8  # in a row, after which the plan is given up
_HARDLY = 4  # requests
_OFF_PLAN = 8  # requests of an iteration that are on no schedule, or were displaced
_BACK, _BACK_SHIFT = (
    16,
    4,
)  # requests, and 1 / 2 ** shift of an iteration, by which the program is seen to follow it again


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
    """Requests of this iteration over the plan that have a place and were served elsewhere."""
    return state.conflicts - state.conflicts_before - state.step_unplanned


@inner()
def goes_as_planned(state):
    """Whether hardly anything was asked for in this iteration that is not planned, or found its place taken."""
    return max(state.step_misses - state.step_unplanned, num_displaced(state)) < _HARDLY


@inner()
def is_off_plan(state):
    """Whether a small request that matches the plan may do so by chance: much of this iteration is not as planned."""
    lost, hits = state.step_misses - state.step_unplanned, state.hits - state.hits_before
    return lost >= _OFF_PLAN and 2 * lost > hits


@inner()
def bypassed(state, position):
    """Whether the heap serves what the plan has, an entry of it too: up to an iteration that begins as planned."""
    if state.bypassed == BYPASS_NEXT_ITERATION and goes_as_planned(state):
        served = state.step_misses - _HARDLY  # by the heap
        least = max(_BACK, (state.cycle_end - state.cycle_start) >> _BACK_SHIFT)
        if least <= served <= position - state.cycle_start <= state.step_misses + _HARDLY:
            state.bypassed = 0
    return state.bypassed != 0


@inner()
def end_step(state):
    """The cycle begins again: write the log's row and start counting anew."""
    hits, lost = state.hits - state.hits_before, state.step_misses - state.step_unplanned
    _write_row(state, hits)
    if state.arena_pages != 0 and num_displaced(state) > 0:
        state.ask_at_boundary = max(state.ask_at_boundary, 1)  # should it go on, the arena moves away from there
    state.bad_iterations = state.bad_iterations + 1 if _BAD_SHARE * lost > lost + hits else 0
    if state.bad_iterations >= _MAX_BAD_ITERATIONS:
        # some requests still match, so misses alone might never outnumber matches: let the next one ask
        state.excess_misses = max(state.excess_misses, state.ask_after_misses + state.cycle_end)
    if state.bypassed == BYPASS:
        state.bypassed = BYPASS_NEXT_ITERATION
    state.step_count += 1
    state.steps_ever += 1
    if state.steps_ever == state.ask_at_step:
        state.ask_at_boundary = max(state.ask_at_boundary, 1)
    state.intervals_released += 1  # when intervals are needed next has changed
    begin_counting(state)


@njit()
def take_peak(device):
    """The most allocated since this was asked last; under a plan, in this iteration and the last. For Python."""
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
