"""The pools of the heap: for each stream and kind of request one, which has segments.

Contract: the lock is held, except where Python calls. Small requests share segments; large requests split general
segments, as a caching allocator does, except what is expected to last (the state of an optimizer): it has segments that
hold nothing else, so that it does not pin what is transient. While a CUDA graph is captured everything comes from a
private pool, whose memory nobody else gets as long as the graph can be replayed: two rows, of which one (LASTING_BIT)
has what is expected to outlive the capture.
"""

from stalloc.compiled import inner, njit
from stalloc.core.constants import (
    GENERAL_KIND,
    LASTING_BIT,
    LEASED_KIND,
    POOL_PINNED,
    POOL_USED,
    PRIVATE_KINDS,
)
from stalloc.core.free_lists import allocate_bins, largest_block
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.records import pool_at


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
        if pool.stream == stream and pool.kind == kind:
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
