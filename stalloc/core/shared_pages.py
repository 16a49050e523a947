"""Pages that several segments have a part of: a shared arena is cut where its intervals are, not its pages.

Contract: the lock is held. What has no memory is whole pages of one segment. A page that is free in all of the segments
that have a part of it ceases to be served, and is the first one's from then on, so that no byte goes from one stream to
another before the device is done with it; the others begin behind it, or are gone.
"""

from stalloc.compiled import inner
from stalloc.core.arena_intervals import has_page
from stalloc.core.constants import ACTION_SEGMENT_UNMAP, BLOCK_FREE, BLOCK_UNMAPPED, GRANULE, POOL_USED
from stalloc.core.counters import count_joined
from stalloc.core.event_log import record
from stalloc.core.pages import count_pages, cut_out, has_rows, join
from stalloc.core.records import block_at, interval_at, pool_at, segment_at
from stalloc.core.segments import release_block_row, release_segment_row

_ROWS = 2  # of the table of blocks, that cutting a block may take


@inner()
def _has_part(segment, page):
    """Whether a segment has a part of a page, and is no stitched segment, whose pages have other addresses too."""
    if segment.address == 0 or segment.is_paged == 0 or segment.tail != 0 or segment.head != 0:
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
    return (first, count) if size == GRANULE and has_rows(state, _ROWS) else (0, 0)


@inner()
def _note_gone(state, number, begin, size):
    """A part of a page has no memory any more."""
    count_pages(state, number, -size)
    if state.hot.recording == 1:
        record(state, ACTION_SEGMENT_UNMAP, pool_at(state, segment_at(state, number).pool).stream, begin, size)


@inner()
def _cut_begin(state, number, page):
    """Take what a segment has of a page away from its begin; where it begins then, 0 if that was all of it."""
    segment = segment_at(state, number)
    begin, end = segment.address, segment.address + segment.size_bytes
    size = min(end, page + GRANULE) - begin
    row = cut_out(state, segment.first, begin, size)
    _note_gone(state, number, begin, size)
    following = block_at(state, row).next
    release_block_row(state, row)
    if following == 0:
        release_segment_row(state, number)
        count_joined(state, 2)
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
    _note_gone(state, number, begin, end - begin)
    block_at(state, row).size_bytes = page + GRANULE - begin
    segment.size_bytes += page + GRANULE - end
    join(state, row, BLOCK_UNMAPPED)


@inner()
def _give_to_first(state, page, first, before, after, count):
    """Let a page that is free belong to the `first` of the segments that have parts of it, without memory.

    Writes where the others began, and begin now (0: they are gone), behind `count` that were written before; how many
    were then.
    """
    for number in range(1, state.heap.segments_used):
        if number != first and _has_part(segment_at(state, number), page):
            before[count] = segment_at(state, number).address
            after[count] = _cut_begin(state, number, page)
            count += 1
    _grow_end(state, first, page)
    return count


@inner()
def part_at_pages(state, regions):
    """Let no page without memory be of two of the `regions` that an arena is to be cut to; how many they are then.

    The arena must not be served any more.
    """
    if regions == 0 or state.plan.arena_pages == 0:
        return regions
    regions = 1
    for index in range(1, state.plan.num_intervals):
        interval, before = interval_at(state, index), interval_at(state, index - 1)
        end = (interval.offset // GRANULE + 1) * GRANULE
        if (
            interval.stream != before.stream
            and interval.offset % GRANULE > 0
            and not has_page(state, interval.offset // GRANULE)
        ):
            if interval_at(state, index + 1).offset <= end:
                interval.stream = before.stream
            else:
                interval.offset = end
        regions += interval.stream != before.stream
    return regions


@inner()
def leave_shared_pages(state, wanted, low, high, addresses, sizes, count, before, after):
    """Serve no more from pages that are free in several segments, at most `wanted` bytes of them, none in [low, high).

    Writes the pages behind `count` ranges that are written, and which segments begin elsewhere now; how many of both.
    """
    moved = 0
    for number in range(1, state.heap.segments_used):
        page = segment_at(state, number).address & -GRANULE
        if page == segment_at(state, number).address or wanted <= 0 or (low < page + GRANULE and page < high):
            continue
        first, parts = _first_if_free(state, page)
        if first == 0 or count == len(addresses) or moved + parts > len(before):
            continue
        moved = _give_to_first(state, page, first, before, after, moved)
        addresses[count] = page
        sizes[count] = GRANULE
        count += 1
        wanted -= GRANULE
        state.statistics.num_segment_frees += 1
    return count, moved
