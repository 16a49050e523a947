"""The intervals of the arena: who has them, and what the heap borrows of them, for which request and how long.

Contract: the lock is held. Intervals are the ranges between all boundaries of the plan; what the arena has beyond it is
one more. One is taken (its bit is 1) while a planned request lives there or while it belongs to a lease; nobody else
gets it then. A lease covers whole idle intervals of one stream and is a segment of the heap, so its blocks are
allocated, split and coalesced like any other. It is revoked only when nothing lives in it: a planned request that meets
a live block in a lease goes to the heap, and nothing is ever moved or overlapped.

A lease is taken where the plan needs the intervals the latest, and at least for as long as such requests lived there
before (STAlloc's paper, section 5.2, goes by layers; here lifespans are learnt, by size and place in the iteration, in
the time of the schedule, which stands still while the program does something else). Meanwhile, what is free at the end
of a lease counts with the idle intervals behind it, so that blocks lie side by side as in any other segment.
"""

from stalloc.compiled import inner
from stalloc.core.constants import (
    BLOCK_FREE,
    GRANULE,
    LEASED_KIND,
    LIFESPAN_BITS,
    LIFESPAN_PLACES,
    LIFESPAN_PLACES_BITS,
    LIFESPAN_ROWS,
    LIFESPAN_SIZES,
    UNMAPPED,
)
from stalloc.core.heap import take_block
from stalloc.core.intrinsics import first_at_least, last_bit
from stalloc.core.lookup import live_is_full
from stalloc.core.records import block_at, entry_at, interval_at, lifespan_at, segment_at, use_at, use_start_at, word_at
from stalloc.core.segments import (
    add_segment,
    best_fit,
    find_pool,
    put_on,
    release_blocks,
    release_segment_row,
    take_off,
)

NEVER = 1 << 60  # schedule time
_STAYS = 4  # iterations: what lives for less than one is known again when a few like it have
_MAX_LEASES = 4096
_MIN_LEASE = 2 << 20  # bytes; small requests share a lease of this size
_DYNAMIC_LEASE = 12 << 20  # the same for dynamic requests, of which more follow: the end of each lease is lost
_HALVINGS = 4  # of the time that a request lasts, to find intervals that are needed late if none is needed late enough
_LOST = 16  # requests in a row that are not on the schedule, after which the program does something else


@inner(forceinline=True)
def _mask(word, low, high):
    """The bits of a word of intervals that belong to the intervals [low, high)."""
    mask = -1
    if word == low >> 6:
        mask &= -1 << (low & 63)
    if word == high >> 6:
        mask &= (1 << (high & 63)) - 1
    return mask


@inner(forceinline=True)
def intervals_empty(bits, low, high):
    """Whether nobody has any of the intervals [low, high); `bits` is State.plan.interval_bits."""
    taken = 0
    for word in range(low >> 6, ((high - 1) >> 6) + 1):
        taken |= word_at(bits, word).value & _mask(word, low, high)
    return taken == 0


@inner(forceinline=True)
def flip_intervals(bits, low, high):
    """Take empty intervals, or empty taken ones."""
    for word in range(low >> 6, ((high - 1) >> 6) + 1):
        word_at(bits, word).value ^= _mask(word, low, high)


@inner()
def has_page(state, page):
    """Whether a page of the arena has memory."""
    return state.plan.arena_pages == 0 or (word_at(state.plan.arena_pages, page >> 6).value >> (page & 63)) & 1 == 1


@inner()
def has_memory(state, index):
    """Whether all of an interval has memory."""
    page, last = interval_at(state, index).offset // GRANULE, (interval_at(state, index + 1).offset - 1) // GRANULE
    while page <= last and has_page(state, page):
        page += 1
    return page > last


@inner()
def region_end(state, first):
    """The end of the intervals from `first` on that are of one stream."""
    end = first + 1
    while end < state.plan.num_intervals and interval_at(state, end).stream == interval_at(state, first).stream:
        end += 1
    return end


@inner(forceinline=True)
def schedule_time(state):
    """Requests that the schedule was followed by since it was put in force: the clock of leases."""
    return state.iterations.iteration_start + state.follow.cursor


@inner()
def needed_at(state, index, now):
    """The schedule time at which the plan needs an interval next."""
    interval = interval_at(state, index)
    if interval.needed_at >= now:
        return interval.needed_at
    uses = state.tables.uses
    if uses == 0:
        return now + 1
    first, end, time = use_start_at(state, index).value, use_start_at(state, index + 1).value, NEVER
    use = first_at_least(uses, first, end, now - state.iterations.iteration_start)
    if use < end and use_at(state, use).value < state.follow.cycle_end:
        time = state.iterations.iteration_start + use_at(state, use).value
    elif first < end and use_at(state, end - 1).value >= state.follow.cycle_start:
        # in the next iteration, if it is one of the same schedule: the first use that belongs to the cycle
        use = first_at_least(uses, first, end, state.follow.cycle_start)
        if use_at(state, use).value < state.follow.cycle_end:
            length = state.follow.cycle_end - state.follow.cycle_start
            time = state.iterations.iteration_start + use_at(state, use).value + length
    interval.needed_at = time
    return time


@inner()
def end_lease(state, row):
    """Give a lease's intervals back to the plan, and its row."""
    segment = segment_at(state, row)
    low, high = segment.interval_low, segment.interval_high
    flip_intervals(state.plan.interval_bits, low, high)
    state.dynamic.intervals_released += 1
    for index in range(low, high):
        interval_at(state, index).lease = 0
        if state.plan.arena_pages != 0 and not has_memory(state, index):
            interval_at(state, index).lease = UNMAPPED
            flip_intervals(state.plan.interval_bits, index, index + 1)
    state.dynamic.num_leases -= 1
    state.dynamic.leased_bytes -= segment.size_bytes
    release_segment_row(state, row)


@inner()
def _revoke(state, row):
    release_blocks(state, row)
    end_lease(state, row)


@inner()
def revoke_all(state):
    """End all leases in which nothing lives; whether none is left."""
    i = 0
    while i < state.plan.num_intervals and state.dynamic.num_leases > 0:
        row = interval_at(state, i).lease
        if row <= 0:
            i += 1
            continue
        segment = segment_at(state, row)
        i = segment.interval_high
        if segment.num_live == 0:
            _revoke(state, row)
    return state.dynamic.num_leases == 0


@inner()
def revoke(state, low, high):
    """End the leases that have any of the intervals [low, high), if nothing lives there; whether all are empty."""
    if state.dynamic.num_leases == 0:
        return False
    i = low
    while i < high:
        row = interval_at(state, i).lease
        if row == UNMAPPED:
            return False
        if row == 0:
            i += 1
            continue
        segment = segment_at(state, row)
        i = segment.interval_high
        if segment.num_live != 0:
            return False
        _revoke(state, row)
        state.dynamic.num_revoked += 1
    return intervals_empty(state.plan.interval_bits, low, high)


@inner()
def _free_end(state, pool, index):
    """The free block at the end of the lease before an interval, if that is one of the pool; 0: there is none."""
    row = interval_at(state, index - 1).lease if index > 0 else 0
    if pool < 0 or row <= 0 or segment_at(state, row).pool != pool:
        return 0
    block = segment_at(state, row).first
    while block_at(state, block).next != 0:
        block = block_at(state, block).next
    return block if block_at(state, block).state == BLOCK_FREE else 0


@inner()
def lifespan_row(state, size):
    """The row of a request of this size, at this place in the iteration, in the table of lifespans."""
    start = state.follow.cycle_start
    length = state.follow.cycle_end - start
    shift = max(last_bit(length | 1) - LIFESPAN_PLACES_BITS + 1, 0)  # a division takes long
    place = min(max(state.follow.cursor - start, 0) >> shift, LIFESPAN_PLACES - 1)
    units = size >> 9
    octave = max(last_bit(units) - 1, 0)
    return place * LIFESPAN_SIZES + min(2 * octave + ((units >> octave) & 1), LIFESPAN_SIZES - 1)  # two an octave


@inner()
def outlives_iteration(state, row):
    """Whether requests like those of a row are known to live for longer than an iteration."""
    return lifespan_at(state, row).value > state.follow.cycle_end - state.follow.cycle_start


@inner()
def note_birth(state, block, row):
    """An unplanned request begins to live, in whatever segment; `row` is its row in the table of lifespans."""
    block_at(state, block).born = schedule_time(state) << LIFESPAN_BITS | row


@inner()
def note_end(state, block, stays):
    """Learn from an unplanned request how long the next one like it will live: the longest counts.

    It fades, but for a dynamic request: where experts are left out, a short life follows a long one by chance. If it
    `stays` while the arena moves away, it lives for several iterations, as far as anyone knows.
    """
    born = block_at(state, block).born
    least = _STAYS * (state.follow.cycle_end - state.follow.cycle_start) if stays else 0
    lived = max(schedule_time(state) - (born >> LIFESPAN_BITS) + 1, least)
    row = born & ((1 << LIFESPAN_BITS) - 1)
    known = lifespan_at(state, row)
    if lived > 0:
        fades = known.value >> 3 if row < LIFESPAN_ROWS else 0
        known.value = max(lived, known.value - fades)


@inner()
def _find_idle(state, stream, size, until, pool, width):
    """The first interval of the smallest idle range of a stream for `size` bytes, not needed before `until`.

    With what is free at the end of the lease before it, if that is one of the pool. None whose intervals are narrower
    than `width` on average: many little requests would be displaced. -1 if there is none.
    """
    bits, count, now = state.plan.interval_bits, state.plan.num_intervals, schedule_time(state)
    best, best_bytes, run, i = -1, NEVER, -1, 0
    while i <= count:
        idle = False
        if i < count:
            word = word_at(bits, i >> 6).value
            if word == -1 and i & 63 == 0 and run < 0:
                i += 64
                continue
            idle = (word >> (i & 63)) & 1 == 0 and interval_at(state, i).stream == stream
            idle = idle and needed_at(state, i, now) >= until
        if idle:
            if run < 0:
                run = i
        elif run >= 0:
            length = interval_at(state, i).offset - interval_at(state, run).offset
            before = _free_end(state, pool, run) if length < best_bytes else 0
            length += block_at(state, before).size_bytes if before != 0 else 0
            if size <= length < best_bytes and length >= (i - run) * width:
                best, best_bytes = run, length
            run = -1
        i += 1
    return best


@inner(forceinline=True)
def _take(state, block, size, requested, row):
    address = take_block(state, block, size, requested)
    note_birth(state, block, row)
    return address


@inner(forceinline=True)
def _times_released(state):
    """How often intervals were given back: by planned requests that were freed, and otherwise."""
    return state.follow.hits - state.plan.arena_live + state.dynamic.intervals_released


@inner()
def _planned_to_last(state, now, known):
    """The most that the entry before the cursor lives, as the plan has it: until one of its intervals is needed again.

    It is served from a lease because its place is taken. If it stood where others belong, they would be displaced in
    turn, and so on from step to step. One without a place lives on through steps, as far as anyone knows; 0 where it is
    `known` for how long.
    """
    cursor = state.follow.cursor
    entry = entry_at(state, (cursor if cursor != state.follow.cycle_start else state.follow.cycle_end) - 1)
    if entry.offset < 0:
        return 0 if known > 0 else state.follow.cycle_end - state.follow.cycle_start
    if state.tables.uses == 0:
        return 0
    until = NEVER
    for index in range(entry.interval_low, entry.interval_high):
        until = min(until, needed_at(state, index, now))
    return until - now


@inner()
def _find_for(state, pool, stream, size, lasts, is_lost, width):
    """Idle intervals for a request that is expected to last so long (0: unknown): the first one, and for how long.

    -1 if there are none, and the search is remembered then: it finds nothing until intervals are given back.
    """
    length, search = state.follow.cycle_end - state.follow.cycle_start, state.dynamic.failed_search
    least = 0 if is_lost else lasts if lasts > 0 else length >> 2
    failed = search.released_before == _times_released(state) and search.stream == stream
    if failed and size >= search.size_bytes and least >= search.lasts and width > 0:  # with 0 there is more to be found
        return -1, 0
    now, low = schedule_time(state), -1
    if is_lost:  # rather those that the plan needs late
        late, before = lasts if state.follow.miss_run < _LOST else 0, state.dynamic.num_leases
        for shift in range(_HALVINGS if late > 0 else 0):
            low = _find_idle(state, stream, size, now + (late >> shift), pool, width) if low < 0 else low
        low = low if low >= 0 else _find_idle(state, stream, size, 0, pool, width)
        if low < 0:
            revoke_all(state)
            low = _find_idle(state, stream, size, 0, pool, width) if state.dynamic.num_leases < before else -1
        lasts = 0
    elif lasts > 0:
        low = _find_idle(state, stream, size, now + lasts, -1, width)
    else:
        for lasts in (length, least):  # nothing is known: only what is idle for long
            low = _find_idle(state, stream, size, now + lasts, -1, width)
            if low >= 0:
                break
    if low < 0:
        search.released_before = _times_released(state)
        search.stream = stream
        search.size_bytes = size
        search.lasts = least
    return low, lasts


@inner()
def _lease(state, pool, stream, low, size, least, lasts, is_lost):
    """Lease the idle intervals from `low` on, of `least` bytes if as many are idle for so long: a free block, or 0."""
    begin, now, bits = interval_at(state, low).offset, schedule_time(state), state.plan.interval_bits
    before = _free_end(state, pool, low) if is_lost else 0
    wanted = max(size - (block_at(state, before).size_bytes if before != 0 else 0), least)
    high, until = low, NEVER
    while high < state.plan.num_intervals and interval_at(state, high).offset - begin < wanted:
        usable = intervals_empty(bits, high, high + 1) and interval_at(state, high).stream == stream
        needed = needed_at(state, high, now) if usable else 0
        if not usable or (needed < now + lasts and not is_lost):
            break
        until = min(until, needed)
        high += 1
    more = interval_at(state, high).offset - begin
    if before != 0:  # the lease that ends in a free block has them, too
        row = block_at(state, before).segment
        segment_at(state, row).size_bytes += more
        segment_at(state, row).mapped_bytes += more
        segment_at(state, row).until = min(segment_at(state, row).until, until)
        take_off(state, before)
        block_at(state, before).size_bytes += more
        put_on(state, before, BLOCK_FREE)
    else:
        row = add_segment(state, pool, state.plan.arena + begin, more, BLOCK_FREE)
        if row == 0:
            return 0
        segment_at(state, row).interval_low = low
        segment_at(state, row).until = until
        state.dynamic.num_leases += 1
        before = segment_at(state, row).first
    segment_at(state, row).interval_high = high
    state.dynamic.leased_bytes += more
    flip_intervals(bits, low, high)
    for index in range(low, high):
        interval_at(state, index).lease = row
    return before


@inner()
def lend(state, stream, size, requested, row, anything, width):
    """Serve a request that the plan does not from an idle part of the arena: its address, 0 if there is none.

    While the program does something that is on no schedule all that is idle will do, as with `anything`, before memory
    runs short. `row` is that of the request in the table of lifespans; `width` how wide the intervals have to be on
    average: LITTLE, or 0 if there is no memory anywhere else.
    """
    if state.plan.interval_streams >> (stream & 63) & 1 == 0 or live_is_full(state):
        return 0
    now, is_lost = schedule_time(state), anything or state.follow.miss_run >= _LOST
    if is_lost and not anything and outlives_iteration(state, row):
        return 0  # it would stand in the way of the next iteration, whatever this one is
    known = lifespan_at(state, row).value
    displaced = state.follow.miss_run == 0 and row < LIFESPAN_ROWS
    lasts = max(known, _planned_to_last(state, now, known) if displaced else 0)
    ends = state.iterations.iteration_start + state.follow.cycle_end
    if state.follow.num_schedules > 1 and not is_lost and now + lasts > ends:
        return 0  # a step of another kind may come next: what this one leaves idle is that one's
    pool = find_pool(state, stream, LEASED_KIND, True)
    if pool < 0:
        return 0
    fit = best_fit(state, pool, size)
    if fit != 0 and (is_lost or segment_at(state, block_at(state, fit).segment).until >= now + lasts):
        return _take(state, fit, size, requested, row)
    if state.dynamic.num_leases >= _MAX_LEASES or state.plan.num_intervals == 0:
        return 0
    low, lasts = _find_for(state, pool, stream, size, lasts, is_lost, width)
    if low < 0:
        return 0
    least = _DYNAMIC_LEASE if row >= LIFESPAN_ROWS else _MIN_LEASE
    block = _lease(state, pool, stream, low, size, least, lasts, is_lost)
    return _take(state, block, size, requested, row) if block != 0 else 0
