"""Segments and their blocks: made, resized, handed to another pool, removed.

Contract: the lock is held, except where Python calls. The blocks of a segment cover it without a gap, in order; free
neighbours are one block, so a segment in which nothing lives is one free block. Segments that came from the device as
one piece go back together.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.constants import (
    ACTION_SEGMENT_ALLOC,
    ACTION_SEGMENT_FREE,
    BLOCK_FREE,
    POOL_PINNED,
)
from stalloc.core.counters import count_segment
from stalloc.core.event_log import record
from stalloc.core.free_lists import insert_free, remove_free
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.records import block_at, pool_at, segment_at


@inner()
def allocate_block_row(state):
    """A row for a block; 0 if the table is full."""
    spare = state.heap.free_block_row
    if spare != 0:
        state.heap.free_block_row = block_at(state, spare).next
        return spare
    used = state.heap.blocks_used
    if used >= state.heap.blocks_capacity:
        return 0
    state.heap.blocks_used = used + 1
    return used


@inner()
def release_block_row(state, row):
    """Give the row of a block back."""
    block_at(state, row).next = state.heap.free_block_row
    state.heap.free_block_row = row


@inner()
def absorb(state, row, following):
    """Let a block have the range of the one above it; neither is on a list."""
    block, gone = block_at(state, row), block_at(state, following)
    block.size_bytes += gone.size_bytes
    block.next = gone.next
    if gone.next != 0:
        block_at(state, gone.next).previous = row
    release_block_row(state, following)


@inner()
def allocate_segment_row(state, pool, address, size, first):
    """A row for a segment of a pool whose first block is `first`; 0 if the table is full."""
    row = state.heap.free_segment_row
    if row != 0:
        state.heap.free_segment_row = segment_at(state, row).first
    else:
        row = state.heap.segments_used
        if row >= state.heap.segments_capacity:
            return 0
        state.heap.segments_used = row + 1
    segment = segment_at(state, row)
    segment.address = address
    segment.pool = pool
    segment.size_bytes = size
    segment.num_live = 0
    segment.first = first
    segment.interval_low = 0
    segment.interval_high = 0
    segment.until = 0
    segment.group = 0
    segment.mapped_bytes = size
    segment.is_paged = 0
    segment.tail = 0
    segment.head = 0
    segment.last_used = state.iterations.iterations_ever
    return row


@inner()
def release_segment_row(state, row):
    """Give the row of a segment back."""
    segment = segment_at(state, row)
    segment.address = 0
    segment.interval_high = 0
    segment.first = state.heap.free_segment_row
    state.heap.free_segment_row = row


@inner()
def set_up_block(state, row, address, size, segment, status):
    """Fill the row of a block without neighbours."""
    block = block_at(state, row)
    block.address = address
    block.size_bytes = size
    block.previous = 0
    block.next = 0
    block.segment = segment
    block.state = status
    block.born = -1


@inner()
def add_segment(state, pool, address, size):
    """Give a pool a segment, one free block; its row, 0 if the tables are full."""
    block = allocate_block_row(state)
    if block == 0:
        return 0
    segment = allocate_segment_row(state, pool, address, size, block)
    if segment == 0:
        release_block_row(state, block)
        return 0
    set_up_block(state, block, address, size, segment, BLOCK_FREE)
    insert_free(state, block)
    return segment


@inner()
def _group_in_use(state, group):
    for row in range(1, state.heap.segments_used):
        segment = segment_at(state, row)
        if segment.address != 0 and segment.group == group and segment.num_live != 0:
            return True
    return False


@inner()
def _is_removable(state, segment, used_before):
    """Whether a segment holds nothing, was not used of late, and neither a lease nor a graph keeps it."""
    if segment.address == 0 or segment.num_live != 0 or segment.interval_high != 0 or segment.is_paged == 1:
        return False
    if segment.group != 0 and _group_in_use(state, segment.group):
        return False
    status = pool_at(state, segment.pool).status
    return segment.last_used < used_before and status != POOL_PINNED


@njit()
def give_segment(device, pool, address, size):
    """Add a segment of `size` bytes to a pool; False if the tables are full. For Python."""
    state = locked(device)
    done = add_segment(state, pool, address, size) != 0
    if done:
        count_segment(state, pool_at(state, pool).kind, size)
        state.statistics.num_segment_allocs += 1
        if state.hot.recording == 1:
            record(state, ACTION_SEGMENT_ALLOC, pool_at(state, pool).stream, address, size)
    unlock(state)
    return done


@njit(**BORROWING)
def remove_free_segments(device, addresses, sizes, idle_iterations):
    """Take free segments out of the heap, as many as there is room for in two columns; how many. For Python.

    Only those from which nothing was taken in the last `idle_iterations`; of those that came from the device as one
    piece all or none.
    """
    state = locked(device)
    used_before, count = state.iterations.iterations_ever + 1 - idle_iterations, 0
    for row in range(1, state.heap.segments_used):
        segment = segment_at(state, row)
        if count == len(addresses) or not _is_removable(state, segment, used_before):
            continue
        count_segment(state, pool_at(state, segment.pool).kind, -segment.size_bytes)
        addresses[count] = segment.address
        sizes[count] = segment.size_bytes
        remove_free(state, segment.first)
        release_block_row(state, segment.first)
        release_segment_row(state, row)
        state.statistics.num_segment_frees += 1
        if state.hot.recording == 1:
            record(state, ACTION_SEGMENT_FREE, 0, addresses[count], sizes[count])
        count += 1
    unlock(state)
    return count
