"""An arena becomes segments of the heap, and segments an arena.

Contract: the lock is held; what lives in the arena or in a segment stays where it is, whichever it becomes. All of a
segment is of one stream, so intervals that several streams use have to be parted first (handovers.py).
"""

from stalloc.compiled import inner, njit
from stalloc.core.arena import clear
from stalloc.core.arena_intervals import has_page, intervals_empty, region_end
from stalloc.core.constants import (
    BLOCK_FREE,
    BLOCK_UNMAPPED,
    GENERAL_KIND,
    GRANULE,
    MAX_STREAMS,
    MODE_PLANNED,
    NO_STREAM,
    STREAM_BITS,
    UNMAPPED,
)
from stalloc.core.counters import count_parted
from stalloc.core.hash_table import add_live
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.learnt_lifespans import note_staying
from stalloc.core.leases import end_lease, revoke_all
from stalloc.core.pages import put_on, take_off
from stalloc.core.pools import find_pool
from stalloc.core.records import block_at, entry_at, interval_at, segment_at, slot_at
from stalloc.core.segments import (
    allocate_block_row,
    allocate_segment_row,
    release_block_row,
    set_up_block,
)
from stalloc.core.shared_pages import part_at_pages
from stalloc.core.slots import find_slot


@njit()
def dissolve_arena(device, addresses):
    """Make ordinary segments of an arena that is no longer served; writes where they begin, returns how many.

    What lives there keeps its place, what is free can be used at once. The segments came from the device as one and go
    back as one. 0: the arena has to stay, since streams share a part of it, or the tables are full. For Python.
    """
    state = locked(device)
    regions = 0
    if state.hot.mode != MODE_PLANNED and state.plan.arena_bytes > 0:
        revoke_all(state)
        regions = part_at_pages(state, _num_regions(state, len(addresses)))
    arena, first = state.plan.arena, 0
    for i in range(regions):
        end = region_end(state, first)
        addresses[i] = arena + interval_at(state, first).offset
        _dissolve_region(state, first, end, arena if regions > 1 else 0)
        first = end
    if regions > 0:
        count_parted(state, regions)
        clear(state)
    unlock(state)
    return regions


@inner()
def _link(state, segment, previous, row):
    """Let a block follow another in a segment; previous 0: it is the first."""
    block_at(state, row).previous = previous
    if previous != 0:
        block_at(state, previous).next = row
    else:
        segment_at(state, segment).first = row


@inner()
def _append(state, segment, previous, address, size, status):
    """Append a block to a segment that is being made, or let the one before it grow if it is as free; the last row."""
    if status in (BLOCK_FREE, BLOCK_UNMAPPED) and previous != 0 and block_at(state, previous).state == status:
        take_off(state, previous)
        block_at(state, previous).size_bytes += size
        put_on(state, previous, status)
        return previous
    row = allocate_block_row(state)
    set_up_block(state, row, address, size, segment, status)
    _link(state, segment, previous, row)
    if status in (BLOCK_FREE, BLOCK_UNMAPPED):
        put_on(state, row, status)
    return row


@inner()
def _append_pages(state, segment, previous, begin, end):
    """Append the bytes [begin, end) of the arena, of which some have no memory and none is used; the last row."""
    while begin < end:
        page = begin // GRANULE
        following = min(end, (page + 1) * GRANULE)
        status = BLOCK_FREE if has_page(state, page) else BLOCK_UNMAPPED
        if status == BLOCK_UNMAPPED:
            segment_at(state, segment).mapped_bytes -= following - begin
        previous = _append(state, segment, previous, state.plan.arena + begin, following - begin, status)
        begin = following
    return previous


@inner()
def _append_lease(state, segment, previous, lease):
    """Move the blocks of a lease to a segment that is being made, and end the lease; the last block's row."""
    row = segment_at(state, lease).first
    while row != 0:
        block = block_at(state, row)
        following = block.next
        if block.state in (BLOCK_FREE, BLOCK_UNMAPPED):
            begin = block.address - state.plan.arena
            end = begin + block.size_bytes
            take_off(state, row)
            release_block_row(state, row)
            previous = _append_pages(state, segment, previous, begin, end)
        else:
            if block.born >= 0:
                note_staying(state, row)
            block.segment = segment
            block.next = 0
            _link(state, segment, previous, row)
            previous = row
        row = following
    end_lease(state, lease)
    return previous


@inner()
def _append_planned(state, segment, previous, slot):
    """Append what lives in a slot to a segment that is being made; its block's row."""
    planned = slot_at(state, slot)
    address, size = state.plan.arena + planned.offset, entry_at(state, planned.entry).key >> STREAM_BITS
    row = _append(state, segment, previous, address, size, planned.state)
    block_at(state, row).requested_bytes = planned.requested_bytes
    add_live(state, address, row)
    return row


@inner()
def _num_regions(state, most):
    """How many segments the arena makes: 0 if an interval is of several streams, or too little room for them."""
    regions = 0
    i = 0
    while i < state.plan.num_intervals:
        stream = interval_at(state, i).stream
        if stream == NO_STREAM or find_pool(state, stream & (MAX_STREAMS - 1), GENERAL_KIND, True) < 0:
            return 0
        regions += 1
        i = region_end(state, i)
    rows = 2 * state.plan.arena_live + 2 * state.dynamic.num_leases + regions + 1
    if state.plan.arena_pages != 0:
        rows += state.plan.arena_bytes // GRANULE + 1
    if state.heap.blocks_capacity - state.heap.blocks_used < rows:
        return 0
    if min(state.heap.segments_capacity - state.heap.segments_used, most) < regions:
        return 0
    return regions if 2 * (state.lookup.live_count + state.plan.arena_live) < state.lookup.max_live_mask else 0


@inner()
def _dissolve_region(state, first, end, group):
    """Make a segment of the intervals [first, end), which are of one stream: what lives stays, the rest is free."""
    arena, begin = state.plan.arena, interval_at(state, first).offset
    pool = find_pool(state, interval_at(state, first).stream & (MAX_STREAMS - 1), GENERAL_KIND, True)
    segment = allocate_segment_row(state, pool, arena + begin, interval_at(state, end).offset - begin, 0)
    previous, gap, live, i = 0, begin, 0, first
    while i <= end:
        offset = interval_at(state, i).offset
        if i < end and intervals_empty(state.plan.interval_bits, i, i + 1):
            i += 1
            continue
        if offset > gap:
            previous = _append(state, segment, previous, arena + gap, offset - gap, BLOCK_FREE)
        if i == end:
            break
        lease = interval_at(state, i).lease
        if lease == UNMAPPED:
            i += 1
            previous = _append_pages(state, segment, previous, offset, interval_at(state, i).offset)
        elif lease != 0:
            i, live = segment_at(state, lease).interval_high, live + segment_at(state, lease).num_live
            previous = _append_lease(state, segment, previous, lease)
        else:
            slot = find_slot(state, arena + offset)
            previous = _append_planned(state, segment, previous, slot)
            i, live = entry_at(state, slot_at(state, slot).entry).interval_high, live + 1
        gap = interval_at(state, i).offset
    made = segment_at(state, segment)
    made.num_live = live
    made.is_paged = state.plan.arena_pages != 0
    made.group = group if made.is_paged == 0 else 0
