"""An arena whose memory comes by pages, as the plan is followed for the first time, and can go where it is idle.

Contract: the lock is held, except where Python calls. An interval of which any byte has no memory is taken (its bit is
1), and its lease is UNMAPPED: nobody gets it. Memory is mapped before `use_arena_pages`, and unmapped only after
`leave_arena_pages`.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.arena import begin_serving
from stalloc.core.arena_intervals import flip_intervals, has_memory, has_page, intervals_empty, needed_at, schedule_time
from stalloc.core.constants import (
    ACTION_SEGMENT_MAP,
    ACTION_SEGMENT_UNMAP,
    GENERAL_KIND,
    GRANULE,
    STREAM_BITS,
    UNMAPPED,
)
from stalloc.core.counters import count_parted, count_resized
from stalloc.core.event_log import record
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.iteration_log import goes_as_planned
from stalloc.core.leases import revoke_all
from stalloc.core.pages import free_pages, has_rows, unmap_part
from stalloc.core.records import block_at, entry_at, interval_at, segment_at, word_at

_MOST_LOOKS = 4096  # at pages, for those that lack memory: the lock is held meanwhile


@inner()
def lacks_only_pages(state, low, high):
    """Whether the intervals [low, high) could be had, if only all of them had memory."""
    lacks = False
    for index in range(low, high):
        lease = interval_at(state, index).lease
        if lease == UNMAPPED:
            lacks = True
        elif lease != 0:
            if segment_at(state, lease).num_live != 0:
                return False
        elif not intervals_empty(state.plan.interval_bits, index, index + 1):
            return False
    return lacks


@inner()
def _interval_around(state, offset):
    """The interval that holds the byte at an offset."""
    low, high = 0, state.plan.num_intervals
    while high - low > 1:
        middle = (low + high) >> 1
        if interval_at(state, middle).offset <= offset:
            low = middle
        else:
            high = middle
    return low


@njit(**BORROWING)
def serve_pages(device, arena, arena_bytes, pages, anew):
    """Serve the schedule from addresses that have no memory so far; `pages`: where a bit for each is. For Python.

    `anew`: it is another plan than before, of which hits are counted from here on.
    """
    state = locked(device)
    begin_serving(state, arena, arena_bytes, anew)
    state.plan.arena_pages = pages
    state.plan.arena_mapped_bytes = 0
    for index in range(state.plan.num_intervals):
        interval_at(state, index).lease = UNMAPPED
    flip_intervals(state.plan.interval_bits, 0, state.plan.num_intervals)
    count_parted(state, 2)
    unlock(state)


@inner()
def _set_pages(state, begin, end, mapped):
    for page in range(begin // GRANULE, end // GRANULE):
        word = word_at(state.plan.arena_pages, page >> 6)
        bit = 1 << (page & 63)
        word.value = word.value | bit if mapped else word.value & ~bit
    size = end - begin if mapped else begin - end
    state.plan.arena_mapped_bytes += size
    count_resized(state, GENERAL_KIND, size)
    state.statistics.num_segment_allocs += mapped
    state.statistics.num_segment_frees += not mapped
    if state.hot.recording == 1:
        record(state, ACTION_SEGMENT_MAP if mapped else ACTION_SEGMENT_UNMAP, 0, state.plan.arena + begin, end - begin)


@njit(**BORROWING)
def use_arena_pages(device, begin, end):
    """The pages [begin, end), bytes from where the arena begins, have memory now, and had none. For Python."""
    state = locked(device)
    _set_pages(state, begin, end, True)
    index = _interval_around(state, begin)
    while index < state.plan.num_intervals and interval_at(state, index).offset < end:
        interval = interval_at(state, index)
        if interval.lease == UNMAPPED and has_memory(state, index):
            interval.lease = 0
            flip_intervals(state.plan.interval_bits, index, index + 1)
            state.dynamic.intervals_released += 1
        index += 1
    unlock(state)


@inner()
def _is_idle(state, index):
    """Whether nobody has an interval, or nobody could, since some of it has no memory."""
    return intervals_empty(state.plan.interval_bits, index, index + 1) or interval_at(state, index).lease == UNMAPPED


@inner()
def _may_go(state, page, low, high):
    """Whether a page has memory and is none of [low, high)."""
    return has_page(state, page) and not low <= page < high


@inner()
def _leave_run(state, first, end, wanted, low, high, addresses, sizes, count):
    """Let pages of the idle intervals [first, end) go that have memory, at most `wanted` bytes, none of [low, high).

    Writes ranges behind `count` that are written; how many there are then, and how many bytes these are.
    """
    page, last = -(-interval_at(state, first).offset // GRANULE), interval_at(state, end).offset // GRANULE
    left = 0
    while page < last and left < wanted and count < len(addresses):
        begin = page
        while page < last and left < wanted and _may_go(state, page, low, high):
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
    """Let pages of idle intervals go that the plan does not need before `until` (schedule time), at most `wanted`
    bytes.

    None of the pages [low, high). How many ranges are written then, and how many bytes are still wanted.
    """
    index, num_intervals, now = 0, state.plan.num_intervals, schedule_time(state)
    while index < num_intervals and wanted > 0 and count < len(addresses):
        first = index
        while index < num_intervals and _is_idle(state, index) and needed_at(state, index, now) >= until:
            index += 1
        if index > first:
            count, left = _leave_run(state, first, index, wanted, low, high, addresses, sizes, count)
            wanted -= left
        index += 1
    return count, wanted


@inner()
def _leave_leases(state, wanted, addresses, sizes, count):
    """Let free pages of any leases go, at most `wanted` bytes; the ranges written by then, and bytes still wanted."""
    for number in range(1, state.heap.segments_used):
        segment = segment_at(state, number)
        row = segment.first if segment.address != 0 and segment.interval_high != 0 else 0
        while row != 0 and wanted > 0 and count < len(addresses) and has_rows(state, 2):
            begin, end = free_pages(state, row)
            size = min(end - begin, wanted)
            if size > 0:
                row = unmap_part(state, row, begin, size)
                addresses[count] = begin
                sizes[count] = size
                _set_pages(state, begin - state.plan.arena, begin - state.plan.arena + size, False)
                count += 1
                wanted -= size
            row = block_at(state, row).next
    return count, wanted


@inner()
def leave_arena_pages(state, wanted, ahead, low, high, addresses, sizes, count):
    """Serve no more from idle pages of the arena, at most `wanted` bytes of them; how many ranges are written then.

    First those that the plan does not need in the next quarter of an iteration; no others for the last bytes, which are
    `ahead` of need; and none that hold bytes [low, high) of the arena, which are about to be used. `count` ranges are
    written before.
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


@njit(**BORROWING)
def lacking_ahead(device, position, begins):
    """Write where pages begin that have no memory, and that the plan needs soon after an entry; how many. For Python.

    In the order in which it needs them, in the next eighth of an iteration, and at most as many as the column holds;
    none of the entry's own, and none at all in an iteration that does not go as planned, whose pages others need.
    """
    state = locked(device)
    count = 0
    if state.plan.arena_pages != 0 and position < state.tables.num_entries and goes_as_planned(state):
        own = entry_at(state, position)
        low, high = own.offset // GRANULE, -(-(own.offset + (own.key >> STREAM_BITS)) // GRANULE)
        end = min(state.follow.cycle_end, position + 1 + ((state.follow.cycle_end - state.follow.cycle_start) >> 3))
        number, looks = position + 1, 0
        while number < end and count < len(begins) and looks < _MOST_LOOKS:
            entry = entry_at(state, number)
            page = entry.offset // GRANULE
            last = (entry.offset + (entry.key >> STREAM_BITS) - 1) // GRANULE
            while entry.offset >= 0 and page <= last and count < len(begins):
                known = has_page(state, page) or low <= page < high
                for index in range(count):
                    known = known or begins[index] == page * GRANULE
                if not known:
                    begins[count] = page * GRANULE
                    count += 1
                page += 1
                looks += 1
            number += 1
    unlock(state)
    return count
