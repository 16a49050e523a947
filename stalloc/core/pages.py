"""Segments whose memory comes and goes by pages: a range of addresses of which a part is mapped.

Contract: the lock is held, except where Python calls. What has no memory is an unmapped block of whole pages; no two of
them are neighbours, and all are on one list. Memory is mapped before a block becomes free here, and unmapped only
after it ceased to be: nobody is ever given addresses without memory. Nothing of a pool that belongs to a graph goes.

A gap is what lies between two blocks that live: free blocks and unmapped ones. A request is put at the begin or at the
end of the gap that lacks the fewest pages for it, among those in the smallest, so that large gaps stay for large
requests. Where no whole pages are left, the free end of one page and the free start of another are stitched to one
segment, with pages of its own between them: the blocks there are lent for as long as it lives, so each byte is used
from one address only.

Memory goes from the highest addresses first, where segments grow again, rather than from holes that the next requests
fill. A page that is free in all of several segments that have a part of it is the first one's from then on, so that no
byte goes from one stream to another before the device is done with it; the others begin behind it, or are gone.
"""

from stalloc.compiled import BORROWING, inner
from stalloc.core.constants import (
    ACTION_SEGMENT_MAP,
    ACTION_SEGMENT_UNMAP,
    BLOCK_FREE,
    BLOCK_LENT,
    BLOCK_UNMAPPED,
    GRANULE,
    POOL_PINNED,
    POOL_USED,
    PRIVATE_KINDS,
)
from stalloc.core.counters import count_parted, count_reserved, record
from stalloc.core.intrinsics import under_lock
from stalloc.core.records import block_at, pool_at, segment_at
from stalloc.core.segments import (
    add_segment,
    cut,
    join,
    put_on,
    release_block_row,
    release_segment_row,
    remove_segment,
    take_off,
)


@inner()
def has_rows(state, count):
    """Whether the table of blocks has room for so many more."""
    room, spare = state.heap.blocks_capacity - state.heap.blocks_used, state.heap.free_block_row
    while room < count and spare != 0:
        room += 1
        spare = block_at(state, spare).next
    return room >= count


@inner()
def cut_out(state, row, begin, size):
    """Take the part [begin, begin + size) of a free or unmapped block off its list; its row. Up to two are needed."""
    block = block_at(state, row)
    before = block.state
    take_off(state, row)
    if block.address < begin:
        rest = cut(state, row, begin - block.address)
        put_on(state, row, before)
        row = rest
    rest = cut(state, row, size)
    if rest != 0:
        put_on(state, rest, before)
    return row


@inner()
def count_pages(state, segment, size):
    """Count memory that a segment got, or that it lost where `size` is negative."""
    segment_at(state, segment).mapped_bytes += size
    count_reserved(state, pool_at(state, segment_at(state, segment).pool).kind, size, 0)


@inner()
def note_pages(state, segment, begin, size):
    """Count and record memory that a segment got at an address, or that it lost where `size` is negative."""
    count_pages(state, segment, size)
    if state.hot.recording == 1:
        action = ACTION_SEGMENT_MAP if size > 0 else ACTION_SEGMENT_UNMAP
        record(state, action, pool_at(state, segment_at(state, segment).pool).stream, begin, abs(size))


@under_lock()
def give_range(state, pool, address, size):
    row = add_segment(state, pool, address, size, BLOCK_UNMAPPED)
    if row != 0:
        segment_at(state, row).mapped_bytes = 0
        segment_at(state, row).is_paged = 1
        count_parted(state, 2)
    return row != 0


@under_lock()
def use_pages(state, address, size):
    row = state.heap.first_unmapped
    while row != 0:
        block = block_at(state, row)
        if block.address <= address < block.address + block.size_bytes:
            break
        row = block.right
    if row == 0 or block_at(state, row).address + block_at(state, row).size_bytes < address + size:
        return False
    if not has_rows(state, 2):
        return False
    note_pages(state, block_at(state, row).segment, address, size)
    join(state, cut_out(state, row, address, size), BLOCK_FREE)
    state.statistics.num_segment_allocs += 1
    return True


@inner()
def free_pages(state, row):
    """The whole pages of a block, if it is free: where they begin and end; as much as nothing otherwise."""
    block = block_at(state, row)
    if block.state != BLOCK_FREE:
        return 0, 0
    return (block.address + (GRANULE - 1)) & -GRANULE, (block.address + block.size_bytes) & -GRANULE


@under_lock(**BORROWING)
def remove_empty_ranges(state, addresses):
    count = 0
    for row in range(1, state.heap.segments_used):
        segment = segment_at(state, row)
        is_empty = segment.address != 0 and segment.is_paged == 1 and segment.mapped_bytes == 0
        if is_empty and not _is_stitched(segment) and count < len(addresses):  # a stitched one has memory of others
            addresses[count] = segment.address
            count += 1
            remove_segment(state, row)
            count_parted(state, -2)
    return count


@under_lock()
def keep_ranges(state):
    for row in range(1, state.heap.segments_used):
        segment = segment_at(state, row)
        if segment.address != 0 and segment.is_paged == 1:
            segment.is_paged = 0
            segment.num_live += 1  # it is never given back
    row = state.heap.first_unmapped
    while row != 0:
        following = block_at(state, row).right
        block_at(state, row).left = 0
        block_at(state, row).right = 0
        row = following
    state.heap.first_unmapped = 0


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
def _lacking(state, row, size, backward, addresses, sizes, writes):
    """The bytes without memory among the first `size` of a gap, from its first or, `backward`, from its last block.

    And in how many ranges they are, which are written if `writes`; -1: there is no room for them.
    """
    lacking = count = 0
    while size > 0:
        block = block_at(state, row)
        if block.state == BLOCK_UNMAPPED:
            here = (min(size, block.size_bytes) + (GRANULE - 1)) & -GRANULE
            lacking += here
            if writes and count == len(addresses):
                return lacking, -1
            if writes:
                addresses[count] = block.address + (block.size_bytes - here if backward else 0)
                sizes[count] = here
            count += 1
        size -= block.size_bytes
        row = block.previous if backward else block.next
    return lacking, count


@under_lock(**BORROWING)
def find_growth(state, pool, size, addresses, sizes):
    """As `DeviceHeap.find_growth`: how many ranges are written (0: nowhere), where the place begins and ends."""
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
                lacking, _ = _lacking(state, start, size, backward == 1, addresses, sizes, False)
                at = block_at(state, first).address + (gap - size if backward else 0)
                same = lacking == least and (gap < least_gap or (gap == least_gap and at < begin))
                if least == 0 or lacking < least or same:
                    least, least_gap, begin, best, best_backward = lacking, gap, at, start, backward == 1
        row = block_at(state, row).right
    if best == 0:
        return 0, begin, begin + size
    _, count = _lacking(state, best, size, best_backward, addresses, sizes, True)
    return max(count, 0), begin, begin + size


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
def _find(state, stream, least, is_tail):
    """The smallest end of a page (`is_tail`), or start of one, that is free and has so many bytes, or else the largest.

    Its address, and bytes; none where a block does not reach over the page's end, or is all of the page.
    """
    address = best = 0
    for number in range(1, state.heap.segments_used):
        row = segment_at(state, number).first if _may_lend(state, number, stream) else 0
        while row != 0:
            block = block_at(state, row)
            begin, end = block.address, block.address + block.size_bytes
            up, down = (begin + (GRANULE - 1)) & -GRANULE, end & -GRANULE
            size = (up - begin if up <= end else 0) if is_tail else end - down if down >= begin else 0
            if block.state == BLOCK_FREE and ((least <= size < best) or (best < least and size > best)):
                address = begin if is_tail else end - size
                best = size
            row = block.next
    return address, best


@under_lock(**BORROWING)
def find_stitch(state, pool, size):
    stream = pool_at(state, pool).stream
    _, tail = _find(state, stream, GRANULE, True)
    _, head = _find(state, stream, GRANULE, False)
    rest = size - max(size - tail - head + (GRANULE - 1), 0) // GRANULE * GRANULE
    head_at, head = _find(state, stream, max(rest - tail, 0), False) if rest > tail else (0, 0)
    tail_at, tail = _find(state, stream, max(rest - head, 0), True) if rest > head else (0, 0)
    return tail_at, tail, head_at, head


@inner()
def _record_memory(state, action, row):
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
            inside = block.address <= address and address + size <= block.address + block.size_bytes
            if block.state == BLOCK_FREE and inside:
                row = cut_out(state, row, address, size)
                lent = block_at(state, row)
                lent.state = BLOCK_LENT
                lent.requested_bytes = 0
                lent.born = -1
                segment_at(state, number).num_live += 1
                _record_memory(state, ACTION_SEGMENT_UNMAP, row)
                return row
            row = block.next
    return 0


@inner()
def _take_back(state, row):
    if row != 0:
        segment_at(state, block_at(state, row).segment).num_live -= 1
        _record_memory(state, ACTION_SEGMENT_MAP, row)
        join(state, row, BLOCK_FREE)


@under_lock()
def begin_stitch(state, pool, address, mapped, tail_at, tail, head_at, head):
    if not has_rows(state, 5):
        return False
    stream, segment = pool_at(state, pool).stream, 0
    tail_row = _lend(state, stream, tail_at, tail) if tail > 0 else 0
    head_row = _lend(state, stream, head_at, head) if head > 0 else 0
    if (tail_row != 0) == (tail > 0) and (head_row != 0) == (head > 0):
        segment = add_segment(state, pool, address - tail, tail + mapped + head, BLOCK_FREE)
    if segment == 0:
        _take_back(state, head_row)
        _take_back(state, tail_row)
        return False
    made = segment_at(state, segment)
    made.is_paged = 1
    made.mapped_bytes = 0
    made.tail = tail_row
    made.head = head_row
    _record_memory(state, ACTION_SEGMENT_MAP, made.first)
    count_pages(state, segment, mapped)
    count_parted(state, 2)
    state.statistics.num_segment_allocs += 1
    return True


@under_lock(**BORROWING)
def end_stitched(state, addresses):
    count = 0
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        if count == len(addresses) or not _is_stitched(segment) or segment.num_live != 0 or segment.is_paged == 0:
            continue
        row = segment.first
        while row != 0:
            if block_at(state, row).state == BLOCK_FREE:
                _record_memory(state, ACTION_SEGMENT_UNMAP, row)
            row = block_at(state, row).next
        count_pages(state, number, -segment.mapped_bytes)
        _take_back(state, segment.head)
        _take_back(state, segment.tail)
        addresses[count] = segment.address
        count += 1
        segment.tail = segment.head = 0
        remove_segment(state, number)
        count_parted(state, -2)
        state.statistics.num_segment_frees += 1
    return count


@inner()
def leave_free_pages(state, wanted, low, high, addresses, sizes):
    """From segments, beside what is free in [low, high): how many ranges are written, bytes that are wanted yet."""
    count = 0
    for number in range(state.heap.segments_used - 1, 0, -1):
        segment = segment_at(state, number)
        is_paged = segment.address != 0 and segment.is_paged == 1
        row = segment.first if is_paged and pool_at(state, segment.pool).status != POOL_PINNED else 0
        while row != 0 and block_at(state, row).next != 0:
            row = block_at(state, row).next
        while row != 0 and wanted > 0 and count < len(addresses) and has_rows(state, 2):
            block = block_at(state, row)
            previous, following = block.previous, block.next
            begin, end = free_pages(state, row)
            if begin < end and block.address < high and low < block.address + block.size_bytes:
                if block.address < low:
                    end = low & -GRANULE
                else:
                    begin = (high + (GRANULE - 1)) & -GRANULE
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
                state.statistics.num_segment_frees += 1
                note_pages(state, number, begin, -size)
                join(state, cut_out(state, row, begin, size), BLOCK_UNMAPPED)
            row = previous
    return count, wanted


@inner()
def _has_part(segment, page):
    """Whether a segment has a part of a page, and is no stitched segment, whose pages have other addresses too."""
    if segment.address == 0 or segment.is_paged == 0 or _is_stitched(segment):
        return False
    return segment.address < page + GRANULE and segment.address + segment.size_bytes > page


@inner()
def _block_in(state, segment, page):
    """The block that all of a segment's part of a page is in; 0 if there are several."""
    begin = max(segment.address, page)
    end = min(segment.address + segment.size_bytes, page + GRANULE)
    row = segment.first
    while row != 0 and block_at(state, row).address + block_at(state, row).size_bytes <= begin:
        row = block_at(state, row).next
    return row if row != 0 and block_at(state, row).address + block_at(state, row).size_bytes >= end else 0


@inner()
def _first_if_free(state, page):
    """The first of the segments that have a part of a page, and how many have, if all parts are free; else 0, 0."""
    first = count = size = 0
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        if not _has_part(segment, page):
            continue
        row = _block_in(state, segment, page)
        if row == 0 or block_at(state, row).state != BLOCK_FREE or pool_at(state, segment.pool).status != POOL_USED:
            return 0, 0
        size += min(segment.address + segment.size_bytes, page + GRANULE) - max(segment.address, page)
        count += 1
        if first == 0 or segment.address < segment_at(state, first).address:
            first = number
    return (first, count) if size == GRANULE and has_rows(state, 2) else (0, 0)


@inner()
def _cut_begin(state, number, page):
    """Take what a segment has of a page away from its begin; where it begins then, 0 if that was all of it."""
    segment = segment_at(state, number)
    begin, end = segment.address, segment.address + segment.size_bytes
    size = min(end, page + GRANULE) - begin
    row = cut_out(state, segment.first, begin, size)
    note_pages(state, number, begin, -size)
    following = block_at(state, row).next
    release_block_row(state, row)
    if following == 0:
        release_segment_row(state, number)
        count_parted(state, -2)
        return 0
    block_at(state, following).previous = 0
    segment.first = following
    segment.address = begin + size
    segment.size_bytes -= size
    return begin + size


@inner()
def _grow_end(state, number, page):
    """Let a segment that has the start of a page have all of it, without memory."""
    segment = segment_at(state, number)
    row = _block_in(state, segment, page)
    begin, end = max(segment.address, page), segment.address + segment.size_bytes
    row = cut_out(state, row, begin, end - begin)
    note_pages(state, number, begin, begin - end)
    block_at(state, row).size_bytes = page + GRANULE - begin
    segment.size_bytes += page + GRANULE - end
    join(state, row, BLOCK_UNMAPPED)


@inner()
def leave_shared_pages(state, wanted, low, high, addresses, sizes, count, before, after):
    """From pages that are free in several segments, beside [low, high), behind `count` ranges that are written.

    Writes where segments began and begin now (0: they are gone); how many ranges are written then, bytes that are still
    wanted, and how many segments moved.
    """
    moved = 0
    for number in range(1, state.heap.segments_used):
        page = segment_at(state, number).address & -GRANULE
        if page == segment_at(state, number).address or wanted <= 0 or (low < page + GRANULE and page < high):
            continue
        first, parts = _first_if_free(state, page)
        if first == 0 or count == len(addresses) or moved + parts > len(before):
            continue
        for other in range(1, state.heap.segments_used):
            if other != first and _has_part(segment_at(state, other), page):
                before[moved] = segment_at(state, other).address
                after[moved] = _cut_begin(state, other, page)
                moved += 1
        _grow_end(state, first, page)
        addresses[count] = page
        sizes[count] = GRANULE
        count += 1
        wanted -= GRANULE
        state.statistics.num_segment_frees += 1
    return count, wanted, moved
