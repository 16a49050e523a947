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
    step = step_at(state, state.steps.step_count % STEP_LOG_ROWS)
    step.time_ns = now_ns(state, CLOCK)
    step.hits = hits
    step.misses = state.steps.step_misses
    step.allocated_peak = state.hot.step_allocated_peak
    step.reserved_peak = state.steps.step_reserved_peak
    state.steps.span_allocated_peak = max(state.steps.span_allocated_peak, state.hot.step_allocated_peak)
    state.steps.span_reserved_peak = max(state.steps.span_reserved_peak, state.steps.step_reserved_peak)


@inner(forceinline=True)
def num_displaced(state):
    """Requests of this iteration over the plan that have a place and were served elsewhere."""
    return state.steps.conflicts - state.steps.conflicts_before - state.steps.step_unplanned


@inner()
def goes_as_planned(state):
    """Whether hardly anything was asked for in this iteration that is not planned, or found its place taken."""
    return max(state.steps.step_misses - state.steps.step_unplanned, num_displaced(state)) < _HARDLY


@inner()
def is_off_plan(state):
    """Whether a small request that matches the plan may do so by chance: much of this iteration is not as planned."""
    lost, hits = state.steps.step_misses - state.steps.step_unplanned, state.follow.hits - state.steps.hits_before
    return lost >= _OFF_PLAN and 2 * lost > hits


@inner()
def bypassed(state, position):
    """Whether the heap serves what the plan has, an entry of it too: up to an iteration that begins as planned."""
    if state.follow.bypassed == BYPASS_NEXT_ITERATION and goes_as_planned(state):
        served = state.steps.step_misses - _HARDLY  # by the heap
        least = max(_BACK, (state.follow.cycle_end - state.follow.cycle_start) >> _BACK_SHIFT)
        if least <= served <= position - state.follow.cycle_start <= state.steps.step_misses + _HARDLY:
            state.follow.bypassed = 0
    return state.follow.bypassed != 0


@inner()
def end_step(state):
    """The cycle begins again: write the log's row and start counting anew."""
    hits, lost = state.follow.hits - state.steps.hits_before, state.steps.step_misses - state.steps.step_unplanned
    _write_row(state, hits)
    if state.plan.arena_pages != 0 and num_displaced(state) > 0:
        state.triggers.ask_at_boundary = max(
            state.triggers.ask_at_boundary, 1
        )  # should it go on, the arena moves away from there
    state.steps.bad_iterations = state.steps.bad_iterations + 1 if _BAD_SHARE * lost > lost + hits else 0
    if state.steps.bad_iterations >= _MAX_BAD_ITERATIONS:
        # some requests still match, so misses alone might never outnumber matches: let the next one ask
        state.follow.excess_misses = max(
            state.follow.excess_misses, state.triggers.ask_after_misses + state.follow.cycle_end
        )
    if state.follow.bypassed == BYPASS:
        state.follow.bypassed = BYPASS_NEXT_ITERATION
    state.steps.step_count += 1
    state.steps.steps_ever += 1
    if state.steps.steps_ever == state.triggers.ask_at_step:
        state.triggers.ask_at_boundary = max(state.triggers.ask_at_boundary, 1)
    state.dynamic.intervals_released += 1  # when intervals are needed next has changed
    begin_counting(state)


@njit()
def take_peak(device):
    """The most allocated since this was asked last; under a plan, in this iteration and the last. For Python."""
    state = locked(device)
    peak = state.hot.step_allocated_peak
    if state.hot.mode != MODE_REPLAY:
        state.steps.span_allocated_peak = max(state.steps.span_allocated_peak, peak)
        state.hot.step_allocated_peak = state.total.allocated_bytes
    elif state.steps.step_count > 0:
        peak = max(peak, step_at(state, (state.steps.step_count - 1) % STEP_LOG_ROWS).allocated_peak)
    unlock(state)
    return peak


@inner()
def begin_counting(state):
    """Count for a new step."""
    state.steps.hits_before = state.follow.hits
    state.steps.conflicts_before = state.steps.conflicts
    state.steps.step_misses = 0
    state.steps.step_unplanned = 0
    state.hot.step_allocated_peak = state.total.allocated_bytes
    state.steps.step_reserved_peak = state.statistics.reserved_bytes
