"""What is counted and recorded: memory now, at most and ever; iterations as they end; events, of which plans are made.

Contract: the lock is held, except where Python calls. A block that its owner freed while other streams still use it is
no longer allocated, but still active and requested, as torch counts it. The small part is that of requests of up to
SMALL_LIMIT bytes, wherever they lie, and of the segments of small pools; the large part is the rest.

After an iteration in which requests were displaced Python is asked at the next boundary; a plan that misses much in
iteration after iteration is given up by the next request that asks Python. Python also hears of a full table of events:
it ends the recording, or (`events_wrap`) is a ring from then on, with event i in row i % events_capacity. The clock
takes longer than all else here, so what is freed has the time of what was asked for before it: 0 in the table.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.constants import (
    ACTION_ALLOC,
    ACTION_FREE_COMPLETED,
    BYPASS,
    BYPASS_NEXT_ITERATION,
    CLOCK,
    GENERAL_KIND,
    ITERATION_LOG_ROWS,
    MODE_PLANNED,
    SMALL_KIND,
    SMALL_LIMIT,
    TINY,
)
from stalloc.core.intrinsics import add_ever, add_now, address_of, copy_words, now_ns, raise_peaks, under_lock
from stalloc.core.records import Event, dtype_of, event_at, iteration_at, state_at

_EVENT_WORDS = dtype_of(Event).itemsize // 8
_SPARE_SHIFT = 5  # reserved may exceed what was allocated at most by a thirty-second before all that is idle is lent
_BAD_SHARE = 4  # an iteration is bad if more than one request in so many was not served though it has a place
_MAX_BAD_ITERATIONS = 8  # in a row, after which the plan is given up
_HARDLY = 4  # requests
_OFF_PLAN = 8  # requests of an iteration that are on no schedule, or were displaced
# requests, and 1 / 2 ** shift of an iteration, by which the program is seen to follow it again
_BACK, _BACK_SHIFT = 16, 4


@inner(forceinline=True)
def count_alloc(state, size, requested):
    """Count a request that was served; the sizes are bytes, rounded and as asked for."""
    total = state.total
    part = state.small if size <= SMALL_LIMIT else state.large
    add_now(total, size, requested, 1, 1)
    raise_peaks(total)
    add_now(part, size, requested, 1, 1)
    raise_peaks(part)
    add_ever(part, size, requested)
    if total.allocated_bytes > state.hot.iteration_allocated_peak:
        state.hot.iteration_allocated_peak = total.allocated_bytes
    if state.hot.num_deferred > 0:
        _raise_active(state)


@inner(forceinline=True)
def count_free(state, size, requested):
    """Count a block whose memory is free again."""
    add_now(state.total, -size, -requested, -1, 0)
    add_now(state.small if size <= SMALL_LIMIT else state.large, -size, -requested, -1, 0)


@inner(forceinline=True)
def _raise(peaks, total, small):
    peaks.total = max(peaks.total, total)
    peaks.large = max(peaks.large, total - small)
    peaks.small = max(peaks.small, small)


@inner()
def _raise_active(state):
    """The peaks of what is active; while nothing is deferred they are those of what is allocated."""
    total, small, shared = state.total, state.small, state.shared
    size, small_size = shared.deferred_bytes, shared.small_deferred_bytes
    _raise(shared.active_bytes_peak, total.allocated_bytes + size, small.allocated_bytes + small_size)
    number, small_number = state.hot.num_deferred, shared.small_deferred
    _raise(shared.active_blocks_peak, total.num_live + number, small.num_live + small_number)


@inner()
def count_deferred(state, size, number):
    """Count a block that was freed while other streams use it (number 1), or that they are done with (-1)."""
    small = int(size <= SMALL_LIMIT) * number
    state.hot.num_deferred += number
    state.shared.deferred_bytes += number * size
    state.shared.small_deferred += small
    state.shared.small_deferred_bytes += small * size
    add_now(state.total, -number * size, 0, -number, 0)
    add_now(state.small if size <= SMALL_LIMIT else state.large, -number * size, 0, -number, 0)


@inner()
def count_reserved(state, kind, size, number):
    """Count bytes that came from the device for a kind of pool as so many segments; negative: they went back."""
    counts, small = state.statistics, int(kind == SMALL_KIND)
    counts.reserved_bytes += size
    counts.num_segments += number
    counts.small_reserved_bytes += small * size
    counts.small_segments += small * number
    if size > 0:
        counts.reserved_ever += size
        counts.segments_ever += number
        counts.small_reserved_ever += small * size
        counts.small_segments_ever += small * number
    _raise(counts.reserved_peak, counts.reserved_bytes, counts.small_reserved_bytes)
    state.iterations.iteration_reserved_peak = max(state.iterations.iteration_reserved_peak, counts.reserved_bytes)
    _raise(counts.segments_peak, counts.num_segments, counts.small_segments)


@inner()
def count_parted(state, number):
    """Count that one segment became several; negative: that so many became one again."""
    state.statistics.num_segments += number - 1 if number > 0 else number + 1
    state.statistics.segments_ever += max(number - 1, 0)


@inner(forceinline=True)
def _reset(peaks, total, small):
    peaks.total = total
    peaks.large = total - small
    peaks.small = small


def _let_begin_anew(counts):
    counts.allocated_peak = counts.allocated_bytes
    counts.requested_peak = counts.requested_bytes
    counts.live_peak = counts.num_live


# one for each type: numba warns of a record that it takes for another one, and programs may have warnings as errors
_reset_total = inner(forceinline=True)(_let_begin_anew)
_reset_counts = inner(forceinline=True)(_let_begin_anew)


@under_lock()
def reset_peaks(state):
    _reset(state.shared.active_bytes_peak, 0, 0)
    _reset(state.shared.active_blocks_peak, 0, 0)
    _raise_active(state)
    _reset_total(state.total)
    _reset_counts(state.large)
    _reset_counts(state.small)
    counts = state.statistics
    _reset(counts.reserved_peak, counts.reserved_bytes, counts.small_reserved_bytes)
    _reset(counts.segments_peak, counts.num_segments, counts.small_segments)


@under_lock()
def restart_allocated_peak(state):
    peak = state.total.allocated_peak
    state.total.allocated_peak = state.total.allocated_bytes
    return peak


@under_lock()
def count_arena(state, size):
    count_reserved(state, GENERAL_KIND, size, 1 if size > 0 else -1)


@inner()
def exceeds_peak(state, size):
    """Whether reserved would exceed the allocated peak by more than a thirty-second with a segment of `size` bytes."""
    expected = state.policy.expected_peak
    peak = max(expected, state.iterations.span_allocated_peak, state.hot.iteration_allocated_peak)
    return expected > 0 and state.statistics.reserved_bytes + size > peak + (peak >> _SPARE_SHIFT)


@inner(forceinline=True)
def num_displaced(state):
    """Requests of this iteration over the plan that have a place and were served elsewhere."""
    return state.iterations.conflicts - state.iterations.conflicts_before - state.iterations.iteration_unplanned


@inner(forceinline=True)
def _num_lost(state):
    """Requests of this iteration that are on no schedule, or have a place and were served elsewhere."""
    return state.iterations.iteration_misses - state.iterations.iteration_unplanned


@inner()
def goes_as_planned(state):
    """Whether hardly anything was asked for in this iteration that is not planned, or found its place taken."""
    return max(_num_lost(state), num_displaced(state)) < _HARDLY


@inner()
def is_off_plan(state):
    """Whether a small request that matches the plan may do so by chance: much of this iteration is not as planned."""
    lost = _num_lost(state)
    return lost >= _OFF_PLAN and 2 * lost > state.follow.hits - state.iterations.hits_before


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
    iterations, peak = state.iterations, state.hot.iteration_allocated_peak
    hits, lost = state.follow.hits - iterations.hits_before, _num_lost(state)
    row = iteration_at(state, iterations.iteration_count % ITERATION_LOG_ROWS)
    row.time_ns = now_ns(state, CLOCK)
    row.hits = hits
    row.misses = iterations.iteration_misses
    row.allocated_peak = peak
    row.reserved_peak = iterations.iteration_reserved_peak
    iterations.span_allocated_peak = max(iterations.span_allocated_peak, peak)
    iterations.span_reserved_peak = max(iterations.span_reserved_peak, iterations.iteration_reserved_peak)
    iterations.bad_iterations = iterations.bad_iterations + 1 if _BAD_SHARE * lost > lost + hits else 0
    if iterations.bad_iterations >= _MAX_BAD_ITERATIONS:
        # some requests still match, so misses alone might never outnumber matches: let the next one ask
        least = state.triggers.ask_after_misses + state.follow.cycle_end
        state.follow.misses_over_matches = max(state.follow.misses_over_matches, least)
    if state.follow.bypassed == BYPASS:
        state.follow.bypassed = BYPASS_NEXT_ITERATION
    iterations.iteration_count += 1
    iterations.iterations_ever += 1
    displaced = state.plan.arena_pages != 0 and num_displaced(state) > 0  # should it go on, the arena moves away
    if displaced or iterations.iterations_ever == state.triggers.ask_after_iterations:
        state.triggers.ask_at_boundary = max(state.triggers.ask_at_boundary, 1)
    state.dynamic.intervals_released += 1  # when intervals are needed next has changed
    begin_counting(state)


@under_lock()
def take_peak(state):
    iterations, peak = state.iterations, state.hot.iteration_allocated_peak
    if state.hot.mode != MODE_PLANNED:
        iterations.span_allocated_peak = max(iterations.span_allocated_peak, peak)
        state.hot.iteration_allocated_peak = state.total.allocated_bytes
    elif iterations.iteration_count > 0:
        peak = max(peak, iteration_at(state, (iterations.iteration_count - 1) % ITERATION_LOG_ROWS).allocated_peak)
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


@inner()
def record(state, action, stream, address, size):
    """Add an event to the record."""
    count = state.log.num_events
    if count == state.log.events_capacity:
        state.triggers.check_at = 1
    if count >= state.log.events_capacity and state.log.events_wrap == 0:
        state.hot.recording = 0
        return
    event = event_at(state, count if count < state.log.events_capacity else count % state.log.events_capacity)
    event.action = action | stream << 8
    event.address = address
    event.requested_bytes = size
    event.time_ns = 0 if action == ACTION_FREE_COMPLETED else now_ns(state, state.log.events_clock)
    event.is_noise = 0
    state.log.num_events = count + 1


@under_lock(**BORROWING)
def narrow(state, capacity, moved):
    """Let the record be a ring of `capacity` events; `moved` (address) has room for as many while they change rows."""
    count, before = state.log.num_events, state.log.events_capacity
    if capacity < before:
        first = max(count - capacity, 0)
        for i in range(first, count if first > 0 else 0):
            copy_words(address_of(event_at(state, i % before)), moved + 8 * _EVENT_WORDS * (i - first), _EVENT_WORDS)
        for i in range(first, count if first > 0 else 0):
            copy_words(moved + 8 * _EVENT_WORDS * (i - first), address_of(event_at(state, i % capacity)), _EVENT_WORDS)
        state.log.events_capacity = capacity


@njit(**BORROWING)
def copy_requests(device, begin, end, sizes, streams, is_noise):
    state, count = state_at(device), 0
    for i in range(begin, end):
        event = event_at(state, i % state.log.events_capacity)
        if event.action & 0xFF == ACTION_ALLOC and event.requested_bytes > TINY:
            sizes[count] = event.requested_bytes
            streams[count] = event.action >> 8
            is_noise[count] = event.is_noise
            count += 1
    return count
