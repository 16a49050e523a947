"""Iterations as they end: what each was like, and whether the plan still fits the program.

Contract: the lock is held. After an iteration in which requests were displaced Python is asked at the next boundary; a
plan that misses much in iteration after iteration is given up by the next request that asks Python.
"""

from stalloc.compiled import inner, njit
from stalloc.core.constants import BYPASS, BYPASS_NEXT_ITERATION, CLOCK, ITERATION_LOG_ROWS, MODE_PLANNED
from stalloc.core.intrinsics import locked, now_ns, unlock
from stalloc.core.records import iteration_at

_BAD_SHARE = 4  # an iteration is bad if more than one request in so many was not served though it has a place
_MAX_BAD_ITERATIONS = 8  # in a row, after which the plan is given up
_HARDLY = 4  # requests
_OFF_PLAN = 8  # requests of an iteration that are on no schedule, or were displaced
# requests, and 1 / 2 ** shift of an iteration, by which the program is seen to follow it again
_BACK, _BACK_SHIFT = 16, 4


@inner()
def _write_row(state, hits):
    iterations = state.iterations
    row = iteration_at(state, iterations.iteration_count % ITERATION_LOG_ROWS)
    row.time_ns = now_ns(state, CLOCK)
    row.hits = hits
    row.misses = iterations.iteration_misses
    row.allocated_peak = state.hot.iteration_allocated_peak
    row.reserved_peak = iterations.iteration_reserved_peak
    iterations.span_allocated_peak = max(iterations.span_allocated_peak, state.hot.iteration_allocated_peak)
    iterations.span_reserved_peak = max(iterations.span_reserved_peak, iterations.iteration_reserved_peak)


@inner(forceinline=True)
def num_displaced(state):
    """Requests of this iteration over the plan that have a place and were served elsewhere."""
    return state.iterations.conflicts - state.iterations.conflicts_before - state.iterations.iteration_unplanned


@inner()
def goes_as_planned(state):
    """Whether hardly anything was asked for in this iteration that is not planned, or found its place taken."""
    return max(state.iterations.iteration_misses - state.iterations.iteration_unplanned, num_displaced(state)) < _HARDLY


@inner()
def is_off_plan(state):
    """Whether a small request that matches the plan may do so by chance: much of this iteration is not as planned."""
    lost, hits = (
        state.iterations.iteration_misses - state.iterations.iteration_unplanned,
        state.follow.hits - state.iterations.hits_before,
    )
    return lost >= _OFF_PLAN and 2 * lost > hits


@inner()
def bypassed(state, position):
    """Whether the heap serves what the plan has, an entry of it too: up to an iteration that begins as planned."""
    if state.follow.bypassed == BYPASS_NEXT_ITERATION and goes_as_planned(state):
        served = state.iterations.iteration_misses - _HARDLY  # by the heap
        least = max(_BACK, (state.follow.cycle_end - state.follow.cycle_start) >> _BACK_SHIFT)
        if least <= served <= position - state.follow.cycle_start <= state.iterations.iteration_misses + _HARDLY:
            state.follow.bypassed = 0
    return state.follow.bypassed != 0


@inner()
def end_iteration(state):
    """The cycle begins again: write the log's row and start counting anew."""
    hits, lost = (
        state.follow.hits - state.iterations.hits_before,
        state.iterations.iteration_misses - state.iterations.iteration_unplanned,
    )
    _write_row(state, hits)
    if state.plan.arena_pages != 0 and num_displaced(state) > 0:
        # should it go on, the arena moves away from there
        state.triggers.ask_at_boundary = max(state.triggers.ask_at_boundary, 1)
    state.iterations.bad_iterations = state.iterations.bad_iterations + 1 if _BAD_SHARE * lost > lost + hits else 0
    if state.iterations.bad_iterations >= _MAX_BAD_ITERATIONS:
        # some requests still match, so misses alone might never outnumber matches: let the next one ask
        state.follow.misses_over_matches = max(
            state.follow.misses_over_matches, state.triggers.ask_after_misses + state.follow.cycle_end
        )
    if state.follow.bypassed == BYPASS:
        state.follow.bypassed = BYPASS_NEXT_ITERATION
    state.iterations.iteration_count += 1
    state.iterations.iterations_ever += 1
    if state.iterations.iterations_ever == state.triggers.ask_after_iterations:
        state.triggers.ask_at_boundary = max(state.triggers.ask_at_boundary, 1)
    state.dynamic.intervals_released += 1  # when intervals are needed next has changed
    begin_counting(state)


@njit()
def take_peak(device):
    """The most allocated since this was asked last; under a plan, in this iteration and the last. For Python."""
    state = locked(device)
    peak = state.hot.iteration_allocated_peak
    if state.hot.mode != MODE_PLANNED:
        state.iterations.span_allocated_peak = max(state.iterations.span_allocated_peak, peak)
        state.hot.iteration_allocated_peak = state.total.allocated_bytes
    elif state.iterations.iteration_count > 0:
        peak = max(
            peak, iteration_at(state, (state.iterations.iteration_count - 1) % ITERATION_LOG_ROWS).allocated_peak
        )
    unlock(state)
    return peak


@inner()
def begin_counting(state):
    """Count for a new step."""
    state.iterations.hits_before = state.follow.hits
    state.iterations.conflicts_before = state.iterations.conflicts
    state.iterations.iteration_misses = 0
    state.iterations.iteration_unplanned = 0
    state.hot.iteration_allocated_peak = state.total.allocated_bytes
    state.iterations.iteration_reserved_peak = state.statistics.reserved_bytes
