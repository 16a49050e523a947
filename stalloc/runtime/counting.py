"""What has been allocated and reserved, now, at most and ever: the words that torch's statistics are read from.

Contract: every function runs with the state's lock held. A block that its owner freed while other streams still use it
is no longer allocated, but still active and requested, as torch counts it. The small pool's share is that of requests
of up to SMALL_LIMIT bytes, wherever they lie, and of the segments of small pools; the large pool has the rest.
"""

# ruff: noqa: F403, F405  (the names of layout are constants to the compiler)

from stalloc.compiled import njit
from stalloc.runtime.layout import *
from stalloc.runtime.words import add, add_four, peek, poke, raise_four, raise_to


@njit(inline="always")
def _part(state, size):
    """The address of the counts of small or of large requests."""
    return state + (LARGE + (SMALL - LARGE) * (size <= SMALL_LIMIT)) * 8


@njit(inline="always")
def count_alloc(state, size, requested):
    """Count a request that was served; the sizes are bytes, rounded and as asked for."""
    part = _part(state, size)
    total = state + ALLOCATED * 8
    add_four(total, size, requested, 1, 1)
    raise_four(total + PEAKS * 8, total)
    add_four(part, size, requested, 1, 1)
    raise_four(part + PEAKS * 8, part)
    add_four(part + EVER * 8, size, requested, 0, 0)
    raise_to(state, STEP_ALLOCATED_PEAK, peek(state, ALLOCATED))
    if peek(state, NUM_DEFERRED) > 0:
        _raise_active(state)


@njit(inline="always")
def count_free(state, size, requested):
    """Count a block whose memory is free again."""
    add_four(state + ALLOCATED * 8, -size, -requested, -1, 0)
    add_four(_part(state, size), -size, -requested, -1, 0)


@njit()
def _raise_active(state):
    """The peaks of what is active; while nothing is deferred they are those of what is allocated."""
    active, small = active_bytes(state)
    number, small_number = active_blocks(state)
    for i, value in enumerate((active, active - small, small, number, number - small_number, small_number)):
        raise_to(state, ACTIVE_PEAKS + i, value)


@njit()
def active_bytes(state):
    """Bytes that streams may use: all, and those of small requests."""
    small = peek(state, SMALL_ALLOCATED) + peek(state, SMALL_BYTES_DEFERRED)
    return peek(state, ALLOCATED) + peek(state, BYTES_DEFERRED), small


@njit()
def active_blocks(state):
    """Blocks that streams may use: all, and those of small requests."""
    small = peek(state, SMALL_LIVE) + peek(state, SMALL_DEFERRED)
    return peek(state, NUM_LIVE) + peek(state, NUM_DEFERRED), small


@njit()
def count_deferred(state, size, number):
    """Count a block that was freed while other streams use it (number 1), or that they are done with (-1)."""
    small = int(size <= SMALL_LIMIT) * number
    add(state, NUM_DEFERRED, number)
    add(state, BYTES_DEFERRED, number * size)
    add(state, SMALL_DEFERRED, small)
    add(state, SMALL_BYTES_DEFERRED, small * size)
    add_four(state + ALLOCATED * 8, -number * size, 0, -number, 0)
    add_four(_part(state, size), -number * size, 0, -number, 0)


@njit()
def count_segment(state, kind, size):
    """Count bytes that came from the device for a kind of pool as one segment; negative: they went back."""
    _count_reserved(state, kind, size, 1 if size > 0 else -1)


@njit()
def count_resized(state, kind, size):
    """Count bytes by which a segment has grown; negative: by which it is smaller."""
    _count_reserved(state, kind, size, 0)


@njit()
def _count_reserved(state, kind, size, number):
    small = int(kind == SMALL_KIND)
    add(state, RESERVED, size)
    add(state, SEGMENTS, number)
    add(state, SMALL_RESERVED, small * size)
    add(state, SMALL_SEGMENTS, small * number)
    if size > 0:
        add(state, RESERVED_EVER, size)
        add(state, SEGMENTS_EVER, number)
        add(state, SMALL_RESERVED_EVER, small * size)
        add(state, SMALL_SEGMENTS_EVER, small * number)
    raise_to(state, RESERVED_PEAK, peek(state, RESERVED))
    raise_to(state, STEP_RESERVED_PEAK, peek(state, RESERVED))
    raise_to(state, SEGMENTS_PEAK, peek(state, SEGMENTS))
    raise_to(state, SEGMENT_PEAKS, peek(state, RESERVED) - peek(state, SMALL_RESERVED))
    raise_to(state, SEGMENT_PEAKS + 1, peek(state, SMALL_RESERVED))
    raise_to(state, SEGMENT_PEAKS + 2, peek(state, SEGMENTS) - peek(state, SMALL_SEGMENTS))
    raise_to(state, SEGMENT_PEAKS + 3, peek(state, SMALL_SEGMENTS))


@njit()
def count_parted(state, number):
    """Count that one segment became several."""
    add(state, SEGMENTS, number - 1)
    add(state, SEGMENTS_EVER, number - 1)


@njit()
def count_joined(state, number):
    """Count that several segments became one again."""
    add(state, SEGMENTS, 1 - number)


@njit()
def begin_peaks(state):
    """Let the peaks that the program asks for begin anew."""
    for word in range(ACTIVE_PEAKS, ACTIVE_PEAKS + 6):
        poke(state, word, 0)
    _raise_active(state)
    for counts in (ALLOCATED, LARGE, SMALL):
        for i in range(3):
            poke(state, counts + PEAKS + i, peek(state, counts + i))
    poke(state, RESERVED_PEAK, peek(state, RESERVED))
    poke(state, SEGMENTS_PEAK, peek(state, SEGMENTS))
    poke(state, SEGMENT_PEAKS, peek(state, RESERVED) - peek(state, SMALL_RESERVED))
    poke(state, SEGMENT_PEAKS + 1, peek(state, SMALL_RESERVED))
    poke(state, SEGMENT_PEAKS + 2, peek(state, SEGMENTS) - peek(state, SMALL_SEGMENTS))
    poke(state, SEGMENT_PEAKS + 3, peek(state, SMALL_SEGMENTS))
