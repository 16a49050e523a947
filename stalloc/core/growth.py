"""Where the segments of a pool best get memory for a request, and from where memory that is free best goes.

Contract: the lock is held, except where Python calls. A gap is what lies between two blocks that live: free blocks and
unmapped ones. A request is put at the begin or at the end of the gap that lacks the fewest pages for it, among those in
the smallest, so that large gaps stay for large requests. Memory goes from the highest addresses first, where segments
grow again, rather than from holes that the next requests fill.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.constants import BLOCK_FREE, BLOCK_UNMAPPED, GRANULE, POOL_PINNED
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.pages import free_pages, has_rows, unmap_free
from stalloc.core.records import block_at, pool_at, segment_at


@inner()
def _is_gap(state, row):
    status = block_at(state, row).state
    return row != 0 and status in (BLOCK_FREE, BLOCK_UNMAPPED)


@inner()
def _first_of_gap(state, row):
    """The first block of the gap that an unmapped block is in; 0 if another unmapped one stands before it there."""
    previous = block_at(state, row).previous
    if not _is_gap(state, previous):
        return row
    before = block_at(state, previous).previous
    return 0 if _is_gap(state, before) else previous


@inner()
def _last_of_gap(state, row):
    """The last block of a gap, and the bytes from the start of one of its blocks on."""
    size = block_at(state, row).size_bytes
    following = block_at(state, row).next
    while _is_gap(state, following):
        row = following
        size += block_at(state, row).size_bytes
        following = block_at(state, row).next
    return row, size


@inner()
def _lacking(state, row, size, backward):
    """The bytes without memory among the first `size` of a gap, from its first or, `backward`, from its last block."""
    lacking = 0
    while size > 0:
        block = block_at(state, row)
        if block.state == BLOCK_UNMAPPED:
            lacking += (min(size, block.size_bytes) + (GRANULE - 1)) & -GRANULE
        size -= block.size_bytes
        row = block.previous if backward else block.next
    return lacking


@inner()
def _write_lacking(state, row, size, backward, addresses, sizes):
    """Write the ranges that `_lacking` counts, and where the place begins; how many ranges, -1: no room for them."""
    count = 0
    while size > 0:
        block = block_at(state, row)
        if block.state == BLOCK_UNMAPPED:
            if count == len(addresses):
                return -1
            lacking = (min(size, block.size_bytes) + (GRANULE - 1)) & -GRANULE
            addresses[count] = block.address + (block.size_bytes - lacking if backward else 0)
            sizes[count] = lacking
            count += 1
        size -= block.size_bytes
        row = block.previous if backward else block.next
    return count


@njit(**BORROWING)
def find_growth(device, pool, size, addresses, sizes):
    """Where memory is best mapped, so that a pool can serve `size` bytes. For Python.

    Writes the ranges without memory; returns how many, and the place: where it begins and ends. 0 ranges if there is no
    place, in the ranges of addresses that the pool has.
    """
    state = locked(device)
    least = least_gap = begin = best = 0
    best_backward = False
    row = state.heap.first_unmapped
    while row != 0:
        first = _first_of_gap(state, row) if segment_at(state, block_at(state, row).segment).pool == pool else 0
        if first != 0:
            last, gap = _last_of_gap(state, first)
            ends = block_at(state, last).next == 0  # what lies behind it is nobody's
            for backward in range(0 if gap < size else 1 if gap == size or ends else 2):
                start = last if backward else first
                lacking = _lacking(state, start, size, backward == 1)
                at = block_at(state, first).address + (gap - size if backward else 0)
                same = lacking == least and (gap < least_gap or (gap == least_gap and at < begin))
                if least == 0 or lacking < least or same:
                    least, least_gap, begin, best, best_backward = lacking, gap, at, start, backward == 1
        row = block_at(state, row).right
    count = _write_lacking(state, best, size, best_backward, addresses, sizes) if best != 0 else 0
    unlock(state)
    return max(count, 0), begin, begin + size


@inner()
def _may_leave(state, row):
    """Whether the memory of what is free in a segment may go."""
    segment = segment_at(state, row)
    return segment.address != 0 and segment.is_paged == 1 and pool_at(state, segment.pool).status != POOL_PINNED


@inner()
def _pages_beside(state, row, low, high):
    """The whole pages of a block, if it is free, without those in [low, high): where they begin and end."""
    block = block_at(state, row)
    begin, end = free_pages(state, row)
    if begin < end and block.address < high and low < block.address + block.size_bytes:
        if block.address < low:
            end = low & -GRANULE
        else:
            begin = (high + (GRANULE - 1)) & -GRANULE
    return begin, end


@inner()
def leave_free_pages(state, wanted, low, high, addresses, sizes):
    """Serve no more from free pages of segments, at most `wanted` bytes of them; how many ranges are written.

    What is free in [low, high) is left as it is.
    """
    count = 0
    for number in range(state.heap.segments_used - 1, 0, -1):
        row = segment_at(state, number).first if _may_leave(state, number) else 0
        while row != 0 and block_at(state, row).next != 0:
            row = block_at(state, row).next
        while row != 0 and wanted > 0 and count < len(addresses) and has_rows(state, 2):
            block = block_at(state, row)
            previous, following = block.previous, block.next
            begin, end = _pages_beside(state, row, low, high)
            size = min(end - begin, wanted)
            if size > 0:
                # what has no memory stays in one piece
                below = previous != 0 and block_at(state, previous).state == BLOCK_UNMAPPED
                above = following != 0 and block_at(state, following).state == BLOCK_UNMAPPED
                if above or not below:
                    begin = end - size
                addresses[count] = begin
                sizes[count] = size
                wanted -= size
                count += 1
                unmap_free(state, row, begin, size)
            row = previous
    return count
