"""Stitched segments: the free ends of two pages made one piece, where no whole pages are left for a request.

Contract: the lock is held, except where Python calls. A stitched segment is a segment whose first and last page have
memory that has an address elsewhere too: the end of one page and the start of another, which are free there. Those
blocks are lent as long as the stitched segment is there, so each byte is used from one address only. What lies between
them are pages of its own.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.constants import (
    ACTION_SEGMENT_MAP,
    ACTION_SEGMENT_UNMAP,
    BLOCK_FREE,
    BLOCK_LENT,
    GRANULE,
    POOL_USED,
    PRIVATE_KINDS,
)
from stalloc.core.counters import count_joined, count_parted
from stalloc.core.event_log import record
from stalloc.core.free_lists import insert_free
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.pages import count_pages, cut_out, has_rows, join, take_off
from stalloc.core.records import block_at, pool_at, segment_at
from stalloc.core.segments import (
    allocate_block_row,
    allocate_segment_row,
    release_block_row,
    release_segment_row,
    set_up_block,
)


@inner()
def _is_stitched(segment):
    return segment.address != 0 and (segment.tail != 0 or segment.head != 0)


@inner()
def _may_lend(state, row, stream):
    """Whether what is free in a segment may be lent to a stream."""
    segment = segment_at(state, row)
    if segment.address == 0 or segment.is_paged == 0 or segment.interval_high != 0 or _is_stitched(segment):
        return False
    pool = pool_at(state, segment.pool)
    return pool.stream == stream and pool.status == POOL_USED and pool.kind < PRIVATE_KINDS


@inner()
def _remnants(state, row):
    """The bytes of a free block from its begin to the end of that page, and from the start of the last page on.

    0 where the block does not reach over the page's end, or is all of the page.
    """
    block = block_at(state, row)
    begin, end = block.address, block.address + block.size_bytes
    up, down = (begin + (GRANULE - 1)) & -GRANULE, end & -GRANULE
    return up - begin if up <= end else 0, end - down if down >= begin else 0


@inner()
def _find(state, stream, least, is_tail):
    """The smallest remnant of at least so many bytes, or else the largest: its address, and bytes."""
    address = best = 0
    for number in range(1, state.heap.segments_used):
        row = segment_at(state, number).first if _may_lend(state, number, stream) else 0
        while row != 0:
            block = block_at(state, row)
            if block.state == BLOCK_FREE:
                tail, head = _remnants(state, row)
                size = tail if is_tail else head
                if (least <= size < best) or (best < least and size > best):
                    address = block.address if is_tail else block.address + block.size_bytes - size
                    best = size
            row = block.next
    return address, best


@njit(**BORROWING)
def find_stitch(device, pool, size):
    """What a stitched segment for a request of `size` bytes begins and ends with, so that it needs the fewest pages.
    For Python.

    Address and bytes of the end of a page and of the start of another; 0 bytes: it needs none.
    """
    state = locked(device)
    stream = pool_at(state, pool).stream
    _, tail = _find(state, stream, GRANULE, True)
    _, head = _find(state, stream, GRANULE, False)
    rest = size - max(size - tail - head + (GRANULE - 1), 0) // GRANULE * GRANULE
    head_at, head = _find(state, stream, max(rest - tail, 0), False) if rest > tail else (0, 0)
    tail_at, tail = _find(state, stream, max(rest - head, 0), True) if rest > head else (0, 0)
    unlock(state)
    return tail_at, tail, head_at, head


@inner()
def _record_memory(state, action, row):
    """Record that the memory of a block is used from its address from here on, or no more."""
    if state.hot.recording == 1:
        block = block_at(state, row)
        stream = pool_at(state, segment_at(state, block.segment).pool).stream
        record(state, action, stream, block.address, block.size_bytes)


@inner()
def _lend(state, stream, address, size):
    """Lend free bytes; the row of their block, 0 if somebody was quicker."""
    for number in range(1, state.heap.segments_used):
        row = segment_at(state, number).first if _may_lend(state, number, stream) else 0
        while row != 0:
            block = block_at(state, row)
            following = block.next
            inside = block.address <= address and address + size <= block.address + block.size_bytes
            if block.state == BLOCK_FREE and inside:
                row = cut_out(state, row, address, size)
                block_at(state, row).state = BLOCK_LENT
                block_at(state, row).requested_bytes = 0
                block_at(state, row).born = -1
                segment_at(state, number).num_live += 1
                _record_memory(state, ACTION_SEGMENT_UNMAP, row)
                return row
            row = following
    return 0


@inner()
def _take_back(state, row):
    """End the lending of a block."""
    if row != 0:
        segment_at(state, block_at(state, row).segment).num_live -= 1
        _record_memory(state, ACTION_SEGMENT_MAP, row)
        join(state, row, BLOCK_FREE)


@njit()
def begin_stitch(device, pool, address, mapped, tail_at, tail, head_at, head):
    """Serve `tail` bytes before an address, `mapped` bytes and `head` bytes behind those as one piece. For Python.

    False if what it begins and ends with is not free any more, or a table is full.
    """
    state = locked(device)
    stream = pool_at(state, pool).stream
    lends = tail_row = head_row = segment = 0
    if has_rows(state, 5):
        tail_row = _lend(state, stream, tail_at, tail) if tail > 0 else 0
        head_row = _lend(state, stream, head_at, head) if head > 0 else 0
        lends = (tail_row != 0) == (tail > 0) and (head_row != 0) == (head > 0)
    if lends:
        block = allocate_block_row(state)
        segment = allocate_segment_row(state, pool, address - tail, tail + mapped + head, block)
        if segment == 0:
            release_block_row(state, block)
    if segment != 0:
        set_up_block(state, block, address - tail, tail + mapped + head, segment, BLOCK_FREE)
        insert_free(state, block)
        _record_memory(state, ACTION_SEGMENT_MAP, block)
        made = segment_at(state, segment)
        made.is_paged = 1
        made.mapped_bytes = 0
        made.tail = tail_row
        made.head = head_row
        count_pages(state, segment, mapped)
        count_parted(state, 2)
        state.statistics.num_segment_allocs += 1
    else:
        _take_back(state, head_row)
        _take_back(state, tail_row)
    unlock(state)
    return segment != 0


@njit(**BORROWING)
def end_stitched(device, addresses):
    """Take stitched in which nothing lives out of the heap: writes where they begin, returns how many. For Python."""
    state = locked(device)
    count = 0
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        if count == len(addresses) or not _is_stitched(segment) or segment.num_live != 0 or segment.is_paged == 0:
            continue
        row = segment.first
        while row != 0:
            following = block_at(state, row).next
            if block_at(state, row).state == BLOCK_FREE:
                _record_memory(state, ACTION_SEGMENT_UNMAP, row)
            take_off(state, row)
            release_block_row(state, row)
            row = following
        count_pages(state, number, -segment.mapped_bytes)
        _take_back(state, segment.head)
        _take_back(state, segment.tail)
        addresses[count] = segment.address
        count += 1
        segment.tail = segment.head = 0
        release_segment_row(state, number)
        count_joined(state, 2)
        state.statistics.num_segment_frees += 1
    unlock(state)
    return count
