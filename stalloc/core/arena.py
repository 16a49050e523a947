"""The arena: the memory that the plan is served from, as one piece or by pages, and its end as segments of the heap.

Contract: the lock is held, except where Python calls. An interval of which any byte has no memory is taken (its bit is
1), and its lease is UNMAPPED: nobody gets it. Memory is mapped before `use_arena_pages`, and unmapped only after
`leave_pages`. When the arena becomes segments, what lives there stays where it is. All of a segment is of one
stream, so intervals that several streams use have to be parted first (handovers.py).
"""

from stalloc.compiled import BORROWING, inner
from stalloc.core.constants import (
    ACTION_SEGMENT_ALLOC,
    ACTION_SEGMENT_FREE,
    ACTION_SEGMENT_MAP,
    ACTION_SEGMENT_UNMAP,
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
from stalloc.core.counters import begin_counting, count_parted, count_reserved, goes_as_planned, record
from stalloc.core.intrinsics import under_lock
from stalloc.core.lending import (
    end_lease,
    flip_intervals,
    has_memory,
    has_page,
    intervals_empty,
    needed_at,
    note_end,
    region_end,
    revoke_all,
    schedule_time,
)
from stalloc.core.lookup import add_live, find_slot
from stalloc.core.pages import cut_out, free_pages, has_rows, leave_free_pages, leave_shared_pages
from stalloc.core.records import block_at, entry_at, interval_at, segment_at, slot_at, word_at
from stalloc.core.segments import (
    allocate_block_row,
    allocate_segment_row,
    find_pool,
    join,
    put_on,
    release_block_row,
    set_up_block,
    take_off,
)

_MOST_LOOKS = 4096  # at pages, for those that lack memory: the lock is held meanwhile


@under_lock(**BORROWING)
def serve_arena(state, arena, arena_bytes, pages, anew):
    """Serve the schedule from an arena; `pages`: where a bit for each is, none with memory so far; 0: all of it has.

    `anew`: it is another plan than before, whose planned steps and their peaks are counted from here on. For Python.
    """
    plan, count = state.plan, state.plan.num_intervals
    if interval_at(state, count).offset < arena_bytes:  # what lies beyond the plan is one more, which can be leased
        interval_at(state, count + 1).offset = arena_bytes
        plan.num_intervals = count + 1
    plan.arena = arena
    plan.arena_bytes = arena_bytes
    plan.arena_pages = pages
    plan.arena_mapped_bytes = arena_bytes if pages == 0 else 0
    state.hot.mode = MODE_PLANNED
    state.iterations.iteration_start = state.iterations.bad_iterations = 0
    state.follow.bypassed = state.follow.misses_over_matches = 0
    if anew:
        state.follow.hits = state.iterations.misses = state.iterations.conflicts = 0
        state.dynamic.num_dynamic = state.dynamic.num_lent = state.dynamic.num_revoked = 0
        state.iterations.iteration_count = 0
        state.iterations.span_allocated_peak = state.iterations.span_reserved_peak = 0
        begin_counting(state)
    if pages != 0:
        for index in range(plan.num_intervals):
            interval_at(state, index).lease = UNMAPPED
        flip_intervals(plan.interval_bits, 0, plan.num_intervals)
        count_parted(state, 2)
    elif state.hot.recording == 1:
        record(state, ACTION_SEGMENT_ALLOC, 0, arena, arena_bytes)


@inner()
def _clear(state):
    plan = state.plan
    plan.arena = plan.arena_bytes = plan.arena_mapped_bytes = plan.arena_pages = plan.arena_live = 0
    plan.num_intervals = 0
    state.dynamic.num_leases = 0
    state.dynamic.leased_bytes = 0
    state.hot.has_handovers = 0


@under_lock()
def arena_is_idle(state):
    return revoke_all(state) and state.plan.arena_live == 0


@under_lock()
def forget_arena(state):
    arena, arena_bytes = state.plan.arena, state.plan.arena_bytes
    if state.plan.arena_live != 0 or state.hot.mode == MODE_PLANNED or not revoke_all(state):
        return 0
    count_reserved(state, GENERAL_KIND, -state.plan.arena_mapped_bytes, -1)
    if state.hot.recording == 1 and state.plan.arena_pages == 0:
        record(state, ACTION_SEGMENT_FREE, 0, arena, arena_bytes)
    elif state.hot.recording == 1:
        for page in range(arena_bytes // GRANULE):
            if has_page(state, page):
                record(state, ACTION_SEGMENT_UNMAP, 0, arena + page * GRANULE, GRANULE)
    _clear(state)
    return arena_bytes


@inner()
def lacks_only_pages(state, low, high):
    """Whether the intervals [low, high) could be had, if only all of them had memory."""
    lacks = False
    for index in range(low, high):
        lease = interval_at(state, index).lease
        lives = lease == 0 and not intervals_empty(state.plan.interval_bits, index, index + 1)
        if lives or (lease > 0 and segment_at(state, lease).num_live != 0):
            return False
        lacks = lacks or lease == UNMAPPED
    return lacks


@inner()
def _set_pages(state, begin, end, mapped):
    for page in range(begin // GRANULE, end // GRANULE):
        word = word_at(state.plan.arena_pages, page >> 6)
        bit = 1 << (page & 63)
        word.value = word.value | bit if mapped else word.value & ~bit
    size = end - begin if mapped else begin - end
    state.plan.arena_mapped_bytes += size
    count_reserved(state, GENERAL_KIND, size, 0)
    state.statistics.num_segment_allocs += mapped
    state.statistics.num_segment_frees += not mapped
    if state.hot.recording == 1:
        record(state, ACTION_SEGMENT_MAP if mapped else ACTION_SEGMENT_UNMAP, 0, state.plan.arena + begin, end - begin)


@under_lock(**BORROWING)
def use_arena_pages(state, begin, end):
    """The pages [begin, end), bytes from where the arena begins, have memory now, and had none."""
    _set_pages(state, begin, end, True)
    index, high = 0, state.plan.num_intervals
    while high - index > 1:
        middle = (index + high) >> 1
        if interval_at(state, middle).offset <= begin:
            index = middle
        else:
            high = middle
    while index < state.plan.num_intervals and interval_at(state, index).offset < end:
        interval = interval_at(state, index)
        if interval.lease == UNMAPPED and has_memory(state, index):
            interval.lease = 0
            flip_intervals(state.plan.interval_bits, index, index + 1)
            state.dynamic.intervals_released += 1
        index += 1


@inner()
def _leave_run(state, first, end, wanted, low, high, addresses, sizes, count):
    """Let pages of idle intervals [first, end) go, at most `wanted` bytes, none of [low, high): ranges, and bytes."""
    page, last = -(-interval_at(state, first).offset // GRANULE), interval_at(state, end).offset // GRANULE
    left = 0
    while page < last and left < wanted and count < len(addresses):
        begin = page
        while page < last and left < wanted and has_page(state, page) and not low <= page < high:
            left += GRANULE
            page += 1
        if page > begin:
            addresses[count] = state.plan.arena + begin * GRANULE
            sizes[count] = (page - begin) * GRANULE
            _set_pages(state, begin * GRANULE, page * GRANULE, False)
            count += 1
        else:
            page += 1
    for interval in range(first, end if left > 0 else first):
        if interval_at(state, interval).lease != UNMAPPED and not has_memory(state, interval):
            interval_at(state, interval).lease = UNMAPPED
            flip_intervals(state.plan.interval_bits, interval, interval + 1)
    return count, left


@inner()
def _leave_idle_intervals(state, wanted, until, low, high, addresses, sizes, count):
    """`_leave_run` where nothing is needed before `until` (schedule time): ranges, and bytes that are wanted yet."""
    index, num_intervals, now, bits = 0, state.plan.num_intervals, schedule_time(state), state.plan.interval_bits
    while index < num_intervals and wanted > 0 and count < len(addresses):
        first = index
        while (
            index < num_intervals
            and (intervals_empty(bits, index, index + 1) or interval_at(state, index).lease == UNMAPPED)
            and needed_at(state, index, now) >= until
        ):
            index += 1
        if index > first:
            count, left = _leave_run(state, first, index, wanted, low, high, addresses, sizes, count)
            wanted -= left
        index += 1
    return count, wanted


@inner()
def _leave_leases(state, wanted, addresses, sizes, count):
    """Let free pages of any leases go: ranges by then, and bytes that are wanted yet."""
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        row = segment.first if segment.address != 0 and segment.interval_high != 0 else 0
        while row != 0 and wanted > 0 and count < len(addresses) and has_rows(state, 2):
            begin, end = free_pages(state, row)
            size = min(end - begin, wanted)
            if size > 0:
                row = join(state, cut_out(state, row, begin, size), BLOCK_UNMAPPED)
                addresses[count] = begin
                sizes[count] = size
                _set_pages(state, begin - state.plan.arena, begin - state.plan.arena + size, False)
                count += 1
                wanted -= size
            row = block_at(state, row).next
    return count, wanted


@inner()
def _leave_arena_pages(state, wanted, ahead, low, high, addresses, sizes, count):
    """Serve no more from idle pages of the arena, at most `wanted` bytes of them, behind `count` ranges: how many then.

    First those that the plan does not need in the next quarter of an iteration; no others for the last bytes, which are
    `ahead` of need; and none that hold bytes [low, high) of the arena, which are about to be used.
    """
    if wanted <= 0 or state.plan.arena_pages == 0:
        return count
    revoke_all(state)
    low, high = low // GRANULE, -(-high // GRANULE)
    until = schedule_time(state) + ((state.follow.cycle_end - state.follow.cycle_start) >> 2)
    count, wanted = _leave_idle_intervals(state, wanted, until, low, high, addresses, sizes, count)
    count, wanted = _leave_leases(state, wanted - ahead, addresses, sizes, count)
    count, wanted = _leave_idle_intervals(state, wanted, 0, low, high, addresses, sizes, count)
    return count


@under_lock(**BORROWING)
def leave_pages(state, wanted, ahead, spares_arena, low, high, begin, end, addresses, sizes, before, after):
    """As `DeviceState.leave_pages`: how many ranges are written, how many segments that begin elsewhere now."""
    wanted = -(-(wanted + ahead) // GRANULE) * GRANULE
    count, wanted = leave_free_pages(state, wanted, low, high, addresses, sizes)
    count, wanted, moved = leave_shared_pages(state, wanted, low, high, addresses, sizes, count, before, after)
    if not spares_arena:
        count = _leave_arena_pages(state, wanted, ahead, begin, end, addresses, sizes, count)
    return count, moved


@under_lock(**BORROWING)
def lacking_ahead(state, position, begins):
    """Write where pages begin that have no memory, and that the plan needs soon after an entry; how many.

    In the order in which it needs them, in the next eighth of an iteration, and at most as many as the column holds;
    none of the entry's own, and none at all in an iteration that does not go as planned, whose pages others need.
    """
    if state.plan.arena_pages == 0 or position >= state.tables.num_entries or not goes_as_planned(state):
        return 0
    own, start, end = entry_at(state, position), state.follow.cycle_start, state.follow.cycle_end
    low, high = own.offset // GRANULE, -(-(own.offset + (own.key >> STREAM_BITS)) // GRANULE)
    count = looks = 0
    for number in range(position + 1, min(end, position + 1 + ((end - start) >> 3))):
        entry = entry_at(state, number)
        page, last = entry.offset // GRANULE, (entry.offset + (entry.key >> STREAM_BITS) - 1) // GRANULE
        while entry.offset >= 0 and page <= last and count < len(begins):
            known = has_page(state, page) or low <= page < high
            for index in range(count):
                known = known or begins[index] == page * GRANULE
            if not known:
                begins[count] = page * GRANULE
                count += 1
            page += 1
            looks += 1
        if count == len(begins) or looks >= _MOST_LOOKS:
            break
    return count


@under_lock()
def dissolve_arena(state, addresses):
    """Make ordinary segments of an arena that is no longer served; writes where they begin, returns how many.

    What lives there keeps its place, what is free can be used at once. The segments came from the device as one and go
    back as one. 0: the arena has to stay, since streams share a part of it, or the tables are full. For Python.
    """
    arena, first = state.plan.arena, 0
    if state.hot.mode == MODE_PLANNED or state.plan.arena_bytes == 0:
        return 0
    revoke_all(state)
    regions = _part_at_pages(state, _num_regions(state, len(addresses)))
    for i in range(regions):
        end = region_end(state, first)
        addresses[i] = arena + interval_at(state, first).offset
        _dissolve_region(state, first, end, arena if regions > 1 else 0)
        first = end
    if regions > 0:
        count_parted(state, regions)
        _clear(state)
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
                note_end(state, row, True)
            block.segment = segment
            block.next = 0
            _link(state, segment, previous, row)
            previous = row
        row = following
    end_lease(state, lease)
    return previous


@inner()
def _num_regions(state, most):
    """How many segments the arena makes: 0 if an interval is of several streams, or too little room for them."""
    regions, i, heap = 0, 0, state.heap
    while i < state.plan.num_intervals:
        stream = interval_at(state, i).stream
        if stream == NO_STREAM or find_pool(state, stream & (MAX_STREAMS - 1), GENERAL_KIND, True) < 0:
            return 0
        regions += 1
        i = region_end(state, i)
    rows = 2 * state.plan.arena_live + 2 * state.dynamic.num_leases + regions + 1
    if state.plan.arena_pages != 0:
        rows += state.plan.arena_bytes // GRANULE + 1
    has_room = rows <= heap.blocks_capacity - heap.blocks_used
    has_room = has_room and regions <= min(heap.segments_capacity - heap.segments_used, most)
    fits = 2 * (state.lookup.live_count + state.plan.arena_live) < state.lookup.max_live_mask
    return regions if has_room and fits else 0


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
            planned = slot_at(state, find_slot(state, arena + offset))
            entry = entry_at(state, planned.entry)
            size, i, live = entry.key >> STREAM_BITS, entry.interval_high, live + 1
            previous = _append(state, segment, previous, arena + offset, size, planned.state)
            block_at(state, previous).requested_bytes = planned.requested_bytes
            add_live(state, arena + offset, previous)
        gap = interval_at(state, i).offset
    made = segment_at(state, segment)
    made.num_live = live
    made.is_paged = state.plan.arena_pages != 0
    made.group = group if made.is_paged == 0 else 0


@inner()
def _part_at_pages(state, regions):
    """Let no page without memory be of two of the `regions` that an arena is to be cut to; how many they are then."""
    if regions == 0 or state.plan.arena_pages == 0:
        return regions
    regions = 1
    for index in range(1, state.plan.num_intervals):
        interval, before = interval_at(state, index), interval_at(state, index - 1)
        end = (interval.offset // GRANULE + 1) * GRANULE
        parts = interval.stream != before.stream and interval.offset % GRANULE > 0
        if parts and not has_page(state, interval.offset // GRANULE):
            if interval_at(state, index + 1).offset <= end:
                interval.stream = before.stream
            else:
                interval.offset = end
        regions += interval.stream != before.stream
    return regions
