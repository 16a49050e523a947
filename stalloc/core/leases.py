"""Leases: idle intervals of the arena that the heap has for a while.

Contract: the lock is held. A lease covers whole intervals of one stream and is a segment of the heap, so its blocks are
allocated, split and coalesced like any other. It is revoked only when nothing lives in it: a planned request that meets
a live block in a lease goes to the heap, and nothing is ever moved or overlapped.
"""

from stalloc.compiled import inner
from stalloc.core.arena_intervals import flip_intervals, has_memory, intervals_empty
from stalloc.core.constants import BLOCK_FREE, UNMAPPED
from stalloc.core.pages import put_on, take_off
from stalloc.core.records import block_at, interval_at, segment_at
from stalloc.core.segments import release_block_row, release_segment_row


@inner()
def _take_intervals(state, row, low, high):
    """Let a lease have the empty intervals [low, high)."""
    flip_intervals(state.plan.interval_bits, low, high)
    for index in range(low, high):
        interval_at(state, index).lease = row


@inner()
def begin_lease(state, row, low, high, until):
    """Make a segment the lease of the empty intervals [low, high)."""
    segment = segment_at(state, row)
    segment.interval_low = low
    segment.interval_high = high
    segment.until = until
    _take_intervals(state, row, low, high)
    state.dynamic.num_leases += 1
    state.dynamic.leased_bytes += segment.size_bytes


@inner()
def extend_lease(state, block, low, high, until):
    """Let a lease that ends in a free block have the empty intervals [low, high) behind it, too."""
    row = block_at(state, block).segment
    segment, more = segment_at(state, row), interval_at(state, high).offset - interval_at(state, low).offset
    _take_intervals(state, row, low, high)
    segment.interval_high = high
    segment.until = min(segment.until, until)
    segment.size_bytes += more
    segment.mapped_bytes += more
    take_off(state, block)
    block_at(state, block).size_bytes += more
    put_on(state, block, BLOCK_FREE)
    state.dynamic.leased_bytes += more


@inner()
def end_lease(state, row):
    """Give a lease's intervals back to the plan, and its row."""
    segment = segment_at(state, row)
    low, high = segment.interval_low, segment.interval_high
    flip_intervals(state.plan.interval_bits, low, high)
    state.dynamic.intervals_released += 1
    for index in range(low, high):
        interval_at(state, index).lease = 0
        if state.plan.arena_pages != 0 and not has_memory(state, index):
            interval_at(state, index).lease = UNMAPPED
            flip_intervals(state.plan.interval_bits, index, index + 1)
    state.dynamic.num_leases -= 1
    state.dynamic.leased_bytes -= segment.size_bytes
    release_segment_row(state, row)


@inner()
def _revoke(state, row):
    """End a lease in which nothing lives."""
    block = segment_at(state, row).first
    while block != 0:
        following = block_at(state, block).next
        take_off(state, block)
        release_block_row(state, block)
        block = following
    end_lease(state, row)


@inner()
def revoke_all(state):
    """End all leases in which nothing lives; whether none is left."""
    i = 0
    while i < state.plan.num_intervals and state.dynamic.num_leases > 0:
        row = interval_at(state, i).lease
        if row <= 0:
            i += 1
            continue
        segment = segment_at(state, row)
        i = segment.interval_high
        if segment.num_live == 0:
            _revoke(state, row)
    return state.dynamic.num_leases == 0


@inner()
def revoke(state, low, high):
    """End the leases that have any of the intervals [low, high), if nothing lives there; whether all are empty."""
    if state.dynamic.num_leases == 0:
        return False
    i = low
    while i < high:
        row = interval_at(state, i).lease
        if row == UNMAPPED:
            return False
        if row == 0:
            i += 1
            continue
        segment = segment_at(state, row)
        i = segment.interval_high
        if segment.num_live != 0:
            return False
        _revoke(state, row)
        state.dynamic.num_revoked += 1
    return intervals_empty(state.plan.interval_bits, low, high)


@inner()
def free_end(state, pool, index):
    """The free block at the end of the lease before an interval, if that is one of the pool; 0: there is none."""
    row = interval_at(state, index - 1).lease if index > 0 else 0
    if pool < 0 or row <= 0 or segment_at(state, row).pool != pool:
        return 0
    block = segment_at(state, row).first
    while block_at(state, block).next != 0:
        block = block_at(state, block).next
    return block if block_at(state, block).state == BLOCK_FREE else 0
