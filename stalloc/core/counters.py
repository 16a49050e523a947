"""What is allocated and reserved, now, at most and ever: the counts that torch's statistics are read from.

Contract: a block that its owner freed while other streams still use it is no longer allocated, but still active and
requested, as torch counts it. The small part is that of requests of up to SMALL_LIMIT bytes, wherever they lie, and of
the segments of small pools; the large part is the rest. The lock is held, except where Python calls.
"""

from stalloc.compiled import inner, njit
from stalloc.core.constants import GENERAL_KIND, SMALL_KIND, SMALL_LIMIT
from stalloc.core.intrinsics import add_ever, add_now, locked, raise_peaks, unlock

_SPARE_SHIFT = 5  # reserved may exceed what was allocated at most by a thirty-second before all that is idle is lent


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
    """Let peaks be at least what is counted now."""
    peaks.total = max(peaks.total, total)
    peaks.large = max(peaks.large, total - small)
    peaks.small = max(peaks.small, small)


@inner()
def _raise_active(state):
    """The peaks of what is active; while nothing is deferred they are those of what is allocated."""
    total, small = state.total, state.small
    size, small_size = (
        total.allocated_bytes + state.shared.deferred_bytes,
        small.allocated_bytes + state.shared.small_deferred_bytes,
    )
    _raise(state.shared.active_bytes_peak, size, small_size)
    _raise(
        state.shared.active_blocks_peak,
        total.num_live + state.hot.num_deferred,
        small.num_live + state.shared.small_deferred,
    )


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
def count_segment(state, kind, size):
    """Count bytes that came from the device for a kind of pool as one segment; negative: they went back."""
    _count_reserved(state, kind, size, 1 if size > 0 else -1)


@inner()
def count_resized(state, kind, size):
    """Count bytes by which a segment has grown; negative: by which it is smaller."""
    _count_reserved(state, kind, size, 0)


@inner()
def _count_reserved(state, kind, size, number):
    small = int(kind == SMALL_KIND)
    state.statistics.reserved_bytes += size
    state.statistics.num_segments += number
    state.statistics.small_reserved_bytes += small * size
    state.statistics.small_segments += small * number
    if size > 0:
        state.statistics.reserved_ever += size
        state.statistics.segments_ever += number
        state.statistics.small_reserved_ever += small * size
        state.statistics.small_segments_ever += small * number
    _raise(state.statistics.reserved_peak, state.statistics.reserved_bytes, state.statistics.small_reserved_bytes)
    state.iterations.iteration_reserved_peak = max(
        state.iterations.iteration_reserved_peak, state.statistics.reserved_bytes
    )
    _raise(state.statistics.segments_peak, state.statistics.num_segments, state.statistics.small_segments)


@inner()
def count_parted(state, number):
    """Count that one segment became several."""
    state.statistics.num_segments += number - 1
    state.statistics.segments_ever += number - 1


@inner()
def count_joined(state, number):
    """Count that several segments became one again."""
    state.statistics.num_segments += 1 - number


@inner(forceinline=True)
def _reset(peaks, total, small):
    """Let peaks begin with what is counted now."""
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


@njit()
def reset_peaks(device):
    """Let the peaks that the program asks for begin anew. Python calls this."""
    state = locked(device)
    _reset(state.shared.active_bytes_peak, 0, 0)
    _reset(state.shared.active_blocks_peak, 0, 0)
    _raise_active(state)
    _reset_total(state.total)
    _reset_counts(state.large)
    _reset_counts(state.small)
    _reset(state.statistics.reserved_peak, state.statistics.reserved_bytes, state.statistics.small_reserved_bytes)
    _reset(state.statistics.segments_peak, state.statistics.num_segments, state.statistics.small_segments)
    unlock(state)


@njit()
def restart_allocated_peak(device):
    """Let the peak of what is allocated begin anew; what it was, in bytes. Python calls this."""
    state = locked(device)
    peak = state.total.allocated_peak
    state.total.allocated_peak = state.total.allocated_bytes
    unlock(state)
    return peak


@njit()
def count_arena(device, size):
    """Count an arena of `size` bytes that came from the device (negative: went back). Python calls this."""
    state = locked(device)
    count_segment(state, GENERAL_KIND, size)
    unlock(state)


@inner()
def exceeds_peak(state, size):
    """Whether reserved would exceed the allocated peak by more than a thirty-second with a segment of `size` bytes."""
    expected = state.policy.expected_peak
    peak = max(expected, state.iterations.span_allocated_peak, state.hot.iteration_allocated_peak)
    return expected > 0 and state.statistics.reserved_bytes + size > peak + (peak >> _SPARE_SHIFT)
