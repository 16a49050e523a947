"""The pools of the heap: for each stream and kind of request one, which has segments.

Contract: the lock is held, except where Python calls. Small requests share segments; large requests split general
segments, as a caching allocator does, except what is expected to last (the state of an optimizer): it has segments that
hold nothing else, so that it does not pin what is transient. While a CUDA graph is captured everything comes from a
private pool, whose memory nobody else gets as long as the graph can be replayed: two rows, of which one (LASTING_BIT)
has what is expected to outlive the capture.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.constants import (
    BLOCK_FREE,
    GENERAL_KIND,
    GRANULE,
    LASTING_BIT,
    LEASED_KIND,
    POOL_ASLEEP,
    POOL_PINNED,
    POOL_USED,
    PRIVATE_KINDS,
)
from stalloc.core.free_lists import allocate_bins, insert_free, largest_block, remove_free
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.records import block_at, pool_at, segment_at


@inner()
def find_pool(state, stream, kind, create):
    """The row of the pool for a stream and a kind; -1 if there is none and none is made."""
    mask = state.heap.pools_mask
    row = ((kind >> 9) * 31 + kind + stream * 7919) & mask
    while True:
        pool = pool_at(state, row)
        if pool.status == 0:
            used = state.heap.pools_used
            # one in eight rows is kept for small and general pools, so that a program of many sizes still gets those
            if not create or used >= mask or (kind > GENERAL_KIND and used >= mask - (mask >> 3)):
                return -1
            state.heap.pools_used = used + 1
            pool.status = POOL_PINNED if kind >= PRIVATE_KINDS else POOL_USED
            pool.stream = stream
            pool.kind = kind
            if kind <= LEASED_KIND or kind >= PRIVATE_KINDS:
                allocate_bins(state, row)
            return row
        if pool.stream == stream and pool.kind == kind and pool.status != POOL_ASLEEP:
            return row
        row = (row + 1) & mask


@njit()
def unpin_pools(device, kind):
    """The graphs that a private kind of pool served are gone: its free segments may go back. For Python."""
    state = locked(device)
    for row in range(state.heap.pools_mask + 1):
        pool = pool_at(state, row)
        if pool.status == POOL_PINNED and (pool.kind | LASTING_BIT) == (kind | LASTING_BIT):
            pool.status = POOL_USED
    unlock(state)


@njit()
def largest_free(device):
    """The largest free block of the heap, bytes. For Python."""
    state = locked(device)
    largest = 0
    for row in range(state.heap.pools_mask + 1):
        if pool_at(state, row).status == POOL_USED:
            largest = max(largest, largest_block(state, row))
    unlock(state)
    return largest


@njit(**BORROWING)
def let_pools_sleep(device, pages):
    """Serve nobody from the pools that have memory in any of the pages, until `wake_pools`. For Python.

    Requests get other pools of the same stream and kind. What is freed is free, and its pages may go.
    """
    state = locked(device)
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        if segment.address == 0 or pool_at(state, segment.pool).status != POOL_USED:
            continue
        for page in pages:
            if page < segment.address + segment.size_bytes and page + GRANULE > segment.address:
                pool_at(state, segment.pool).status = POOL_ASLEEP
                break
    unlock(state)


@inner()
def _give_segment_to(state, number, pool):
    """Let another pool of the same kind have a segment with what is free in it."""
    segment = segment_at(state, number)
    row = segment.first
    while row != 0:
        if block_at(state, row).state == BLOCK_FREE:
            remove_free(state, row)
        row = block_at(state, row).next
    segment.pool = pool
    row = segment.first
    while row != 0:
        if block_at(state, row).state == BLOCK_FREE:
            insert_free(state, row)
        row = block_at(state, row).next


@njit()
def wake_pools(device):
    """Serve from all pools again, those of one stream and kind as one. For Python."""
    state = locked(device)
    for row in range(state.heap.pools_mask + 1):
        if pool_at(state, row).status == POOL_ASLEEP:
            pool_at(state, row).status = POOL_USED
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        if segment.address != 0:
            pool = find_pool(state, pool_at(state, segment.pool).stream, pool_at(state, segment.pool).kind, False)
            if pool != segment.pool:
                _give_segment_to(state, number, pool)
    unlock(state)
