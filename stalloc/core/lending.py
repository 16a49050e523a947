"""What the heap borrows of the arena for requests that the plan does not serve, and for how long.

Contract: the lock is held. A lease is taken where the plan needs the intervals the latest, and at least for as long as
such requests lived there before (STAlloc's paper, section 5.2, goes by layers; here time is the place in the iteration,
and lifespans are learnt). While the program does something that is on no schedule, what is free at the end of a lease
counts with the idle intervals behind it, so that blocks lie side by side as in any other segment.
"""

from stalloc.compiled import inner
from stalloc.core.arena_intervals import NEVER, intervals_empty, needed_at, schedule_time
from stalloc.core.constants import LEASED_KIND, LIFESPAN_ROWS
from stalloc.core.free_lists import best_fit
from stalloc.core.hash_table import live_is_full
from stalloc.core.heap import take_block
from stalloc.core.learnt_lifespans import note_birth, outlives_iteration
from stalloc.core.leases import begin_lease, extend_lease, free_end, revoke_all
from stalloc.core.pools import find_pool
from stalloc.core.records import block_at, entry_at, interval_at, lifespan_at, segment_at, word_at
from stalloc.core.segments import add_segment

_MAX_LEASES = 4096
_MIN_LEASE = 2 << 20  # bytes; small requests share a lease of this size
_DYNAMIC_LEASE = 12 << 20  # the same for dynamic requests, of which more follow: the end of each lease is lost
_HALVINGS = 4  # of the time that a request lasts, to find intervals that are needed late if none is needed late enough
_LOST = 16  # requests in a row that are not on the schedule, after which the program does something else


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
            before = free_end(state, pool, run) if length < best_bytes else 0
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


@inner(forceinline=True)
def _failed_before(state, stream, size, lasts):
    """Whether the last search found nothing, and this one asks for no less: no interval was given back since."""
    search = state.dynamic.failed_search
    same = search.released_before == _times_released(state) and search.stream == stream
    return same and size >= search.size_bytes and lasts >= search.lasts


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
def _find_late(state, stream, size, now, lasts, pool, width):
    """The first of idle intervals for a request that lasts so long, rather those that the plan needs late; or -1."""
    low = -1
    for shift in range(_HALVINGS if lasts > 0 else 0):
        low = _find_idle(state, stream, size, now + (lasts >> shift), pool, width) if low < 0 else low
    return low if low >= 0 else _find_idle(state, stream, size, 0, pool, width)


@inner()
def _find_for(state, pool, stream, size, lasts, is_lost, width):
    """Idle intervals for a request that is expected to last so long (0: unknown): the first one, and for how long.

    The first is -1 if there are none, and the search is remembered then.
    """
    length = state.follow.cycle_end - state.follow.cycle_start
    least = 0 if is_lost else lasts if lasts > 0 else length >> 2
    if width > 0 and _failed_before(state, stream, size, least):  # with 0 there is more to be found
        return -1, 0
    now, low = schedule_time(state), -1
    if is_lost:
        low = _find_late(state, stream, size, now, lasts if state.follow.miss_run < _LOST else 0, pool, width)
        lasts = 0
        before = state.dynamic.num_leases
        if low < 0:
            revoke_all(state)
            low = _find_idle(state, stream, size, 0, pool, width) if state.dynamic.num_leases < before else -1
    elif lasts > 0:
        low = _find_idle(state, stream, size, now + lasts, -1, width)
    else:
        for lasts in (length, least):  # nothing is known: only what is idle for long
            low = _find_idle(state, stream, size, now + lasts, -1, width)
            if low >= 0:
                break
    if low < 0:
        search = state.dynamic.failed_search
        search.released_before = _times_released(state)
        search.stream = stream
        search.size_bytes = size
        search.lasts = least
    return low, lasts


@inner()
def _lease(state, pool, stream, low, size, least, lasts, is_lost):
    """Lease the idle intervals from `low` on, of `least` bytes if as many are idle for so long: a free block, or 0."""
    begin, now, bits = interval_at(state, low).offset, schedule_time(state), state.plan.interval_bits
    before = free_end(state, pool, low) if is_lost else 0
    wanted = max(size - (block_at(state, before).size_bytes if before != 0 else 0), least)
    high, until = low, NEVER
    while high < state.plan.num_intervals and interval_at(state, high).offset - begin < wanted:
        usable = intervals_empty(bits, high, high + 1) and interval_at(state, high).stream == stream
        needed = needed_at(state, high, now) if usable else 0
        if not usable or (needed < now + lasts and not is_lost):
            break
        until = min(until, needed)
        high += 1
    if before != 0:
        extend_lease(state, before, low, high, until)
        return before
    row = add_segment(state, pool, state.plan.arena + begin, interval_at(state, high).offset - begin)
    if row != 0:
        begin_lease(state, row, low, high, until)
    return segment_at(state, row).first if row != 0 else 0


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
    if (
        state.follow.num_schedules > 1
        and not is_lost
        and now + lasts > state.iterations.iteration_start + state.follow.cycle_end
    ):
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
