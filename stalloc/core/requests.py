"""malloc: what torch's and CuPy's allocation calls run, compiled, without the GIL and without Python.

Contract, upheld under one lock a device:
- an address of the arena is handed out only if no live block covers any byte of it: the plan's address space is cut
  into intervals at every boundary that occurs in it, and a planned request is served only while all its intervals are
  empty;
- a request that is not the expected one, or whose intervals are taken, is served by the heap: a deviation costs memory,
  never correctness;
- the lock is never held while Python is entered, and Python is entered only for what needs it: a segment from the
  device, a search of the record, the switch to a plan.

A planned request that meets empty intervals costs one atomic exchange, about 32 loads (five of them of four words) and
22 tests that go the same way in every step; its free one exchange, 20 loads and 10 tests. All of them are in nine lines
of the cache: those that `State` names as read by every request, its counts, the entry, its slot and its word of
intervals.
"""

from stalloc.compiled import cfunc, inner
from stalloc.core.arena import lacks_only_pages
from stalloc.core.constants import (
    ACTION_ALLOC,
    ACTION_OOM,
    ALIGNMENT,
    ASKED,
    AT_BOUNDARY,
    BLOCK_LIVE,
    CHECK,
    FIRST_TRY,
    FULL_STREAMS,
    GOT_PAGES,
    HEAP_ONLY,
    IN_CAPTURE,
    IS_LOAN,
    LITTLE,
    MAX_REQUEST,
    MODE_HEAP,
    MODE_PLANNED,
    NEED_PAGES,
    OUT_OF_MEMORY,
    OVER_CAP,
    POLL,
    POLL_FOR_PLACE,
    POLLED,
    REASON_BITS,
    REFUSED,
    SMALL_LIMIT,
    STALE,
    STREAM_BITS,
    TINY,
)
from stalloc.core.counters import bypassed, count_alloc, end_iteration, exceeds_peak, is_off_plan, record
from stalloc.core.frees import find_block, free, free_those_over, release
from stalloc.core.graph_loans import borrow
from stalloc.core.handovers import is_captured, wait_for_users
from stalloc.core.heap import Outcome, any_pool_fit, heap_allocate
from stalloc.core.intrinsics import call3, lock, unlock
from stalloc.core.lending import (
    flip_intervals,
    intervals_empty,
    lend,
    lifespan_row,
    note_birth,
    outlives_iteration,
    revoke,
)
from stalloc.core.lookup import find_live, find_slot, in_arena, stream_index
from stalloc.core.records import entry_at, slot_at, state_at
from stalloc.core.schedule_cursor import dynamic_row, follow, is_asked_for


@inner(forceinline=True)
def _count(state, stream, address, size, requested, records):
    count_alloc(state, size, requested)
    if records and state.hot.recording == 1:
        record(state, ACTION_ALLOC, stream, address, requested)
        state.log.num_sizable += size > TINY


@inner(forceinline=True)
def malloc(device, requested, handle):
    """Serve one request of `requested` bytes on a stream; its address, 0 if there is no memory."""
    if requested <= 0:
        return 0
    state = state_at(device)
    if requested > MAX_REQUEST:
        return _refuse(state, requested)
    size = (requested + (ALIGNMENT - 1)) & -ALIGNMENT
    stage, position = FIRST_TRY, 0
    while True:
        lock(state)
        stream = stream_index(state, handle)
        outcome = _try(state, stream, size, requested, stage, position)
        if outcome.address != 0:
            _count(state, stream, outcome.address, size, requested, outcome.reason != IS_LOAN)
            unlock(state)
            # nobody can capture the legacy default stream, 0; a plan's address too is the graph's for good
            if handle != 0 and stage == FIRST_TRY and state.hot.private_kind == 0 and is_captured(state, handle):
                _give_up(state, outcome.address)
                stage = _ask(state, IN_CAPTURE, 0, size, stage)
                continue
            if state.hot.has_handovers == 0 or _secure(state, outcome.address):
                return outcome.address
            stage = HEAP_ONLY
        else:
            unlock(state)
            position = outcome.subject
            stage = _ask(state, outcome.reason, position, size, stage)
            if stage < 0:
                return _last_resort(state, stream, size, requested)


@inner(forceinline=True)
def _try(state, stream, size, requested, stage, position):
    """One try with the lock held; `position`: the entry that pages were asked for."""
    if stream < 0:
        return Outcome(0, REFUSED, FULL_STREAMS)
    if state.loans.borrower != 0 and stage == FIRST_TRY:
        address = borrow(state, size, requested)
        if address != 0:
            return Outcome(address, IS_LOAN, 0)
    if stage == FIRST_TRY and state.total.allocated_bytes + size > state.triggers.ask_above > 0:
        return Outcome(0, OVER_CAP, 0)
    # events must not be asked for while a graph is captured
    waiting = state.hot.num_deferred > 0 and state.hot.private_kind == 0
    if stage == FIRST_TRY and waiting and state.total.num_allocs & 31 == 0:
        return Outcome(0, POLL, 0)
    if size > TINY and stage != HEAP_ONLY and state.hot.private_kind == 0:
        if state.hot.mode != MODE_HEAP:
            key = size << STREAM_BITS | stream
            if stage == FIRST_TRY and state.triggers.ask_at_boundary != 0 and is_asked_for(state, key):
                state.triggers.ask_at_boundary = 0
                return Outcome(0, AT_BOUNDARY, 0)
            if stage in (GOT_PAGES, POLLED):
                outcome = _take_place(state, position, key, requested, stage)
            else:
                outcome = _serve_planned(state, key, requested, waiting)
            if outcome.address != 0 or outcome.reason != 0:
                return outcome
            if state.follow.misses_over_matches >= state.triggers.ask_after_misses > 0:
                state.triggers.ask_after_misses = 0
                return Outcome(0, STALE, 0)
            if state.total.num_allocs >= state.triggers.doubt_at > 0:
                state.triggers.doubt_at = 0
                return Outcome(0, STALE, 0)
            if state.hot.mode == MODE_PLANNED and state.policy.allocating_persistent == 0:
                return _serve_unplanned(state, stream, size, requested, outcome.subject)
        elif stage == FIRST_TRY and state.log.num_sizable >= state.triggers.check_at > 0:
            state.triggers.check_at = 0
            return Outcome(0, CHECK, 0)
    if stage == FIRST_TRY and state.capture.capture_is_unannounced != 0:
        return Outcome(0, IN_CAPTURE, 0)
    return heap_allocate(state, stream, size, requested, stage)


@inner()
def _serve_unplanned(state, stream, size, requested, row):
    """Serve a request that the plan does not, while it serves others; `row`: as `_serve_planned` tells it."""
    is_dynamic, pages_move = row != 0, state.plan.arena_pages != 0
    row = row if is_dynamic else lifespan_row(state, size)
    together = size < LITTLE or (state.policy.small_apart != 0 and size <= SMALL_LIMIT)  # what lives on keeps a page
    address = lend(state, stream, size, requested, row, False, LITTLE) if not together else 0
    if address == 0:
        outcome = heap_allocate(state, stream, size, requested, FIRST_TRY)
        if outcome.address != 0:
            note_birth(state, find_live(state, outcome.address), row)
            return outcome
        if (
            not together
            and exceeds_peak(state, size)
            and not (pages_move and (is_dynamic or outlives_iteration(state, row)))
        ):
            # what the plan needs again soon comes before more than the program ever used: it costs this step some hits;
            # for what lives on through it, or comes in every step, pages move instead
            address = lend(state, stream, size, requested, row, True, LITTLE)
        if address == 0:
            return outcome
    state.dynamic.num_lent += 1
    return Outcome(address, 0, 0)


@inner()
def _ask(state, reason, subject, size, stage):
    """Do what a request needs, in Python for the most part; the stage to go on with, -1 if nothing helped."""
    polls = reason in (POLL, POLL_FOR_PLACE)
    helped = polls and free_those_over(state)
    if not helped:
        helped = call3(state.driver.slow_function, state.driver.device, reason | subject << REASON_BITS, size) == 1
    if reason in (AT_BOUNDARY, POLL, CHECK, IN_CAPTURE, OVER_CAP):
        return ASKED  # the schedule has not moved yet
    if reason == POLL_FOR_PLACE:
        return POLLED
    if reason == NEED_PAGES:
        return GOT_PAGES
    if reason == STALE or (helped and (reason != REFUSED or stage != HEAP_ONLY)):
        return HEAP_ONLY  # the schedule has moved past this request
    return -1


@inner()
def _secure(state, address):
    """Let the stream wait for those that used a planned address before; False: it was given up again."""
    slot = find_slot(state, address) if in_arena(state, address) else -1
    waits = wait_for_users(state, slot_at(state, slot).entry) if slot >= 0 else 0
    if waits == 0:
        return True
    if waits < 0:
        _give_up(state, address)
        return False
    lock(state)
    state.driver.num_waits += waits
    unlock(state)
    return True


@inner()
def _give_up(state, address):
    """Take back what was just served, since its stream may not use it."""
    lock(state)
    state.iterations.conflicts += in_arena(state, address)
    slot, block = find_block(state, address)
    release(state, address, slot, block)
    unlock(state)


@inner()
def _refuse(state, requested):
    """Python explains a request that no device can serve."""
    call3(state.driver.slow_function, state.driver.device, REFUSED, requested)
    lock(state)
    state.statistics.num_ooms += 1
    unlock(state)
    call3(state.driver.slow_function, state.driver.device, OUT_OF_MEMORY, requested)
    return 0


@inner()
def _last_resort(state, stream, size, requested):
    """Serve a request from whatever is free, if anything is; its address, 0: it is out of memory."""
    lock(state)
    address = 0
    if stream >= 0 and state.hot.mode == MODE_PLANNED and state.hot.private_kind == 0:
        address = lend(state, stream, size, requested, lifespan_row(state, size), True, 0)
    if stream >= 0 and address == 0:
        address = any_pool_fit(state, stream, size, requested)
    if address > 0:
        _count(state, stream, address, size, requested, True)
    else:
        state.statistics.num_ooms += 1
        if state.hot.recording == 1:
            record(state, ACTION_OOM, max(stream, 0), 0, requested)
    unlock(state)
    if address == 0:
        call3(state.driver.slow_function, state.driver.device, OUT_OF_MEMORY, requested)
    return address


@inner(forceinline=True)
def _serve_planned(state, key, requested, waiting):
    """Serve a request from its place on the plan, or say what that needs; nothing at all: it has none that is free.

    `waiting`: some that were freed wait for other streams, which may be done with them.
    """
    position, begins = follow(state, key)
    if position < 0 or state.hot.mode != MODE_PLANNED:
        return Outcome(0, 0, dynamic_row(position))
    if begins:
        end_iteration(state)
    entry, bits = entry_at(state, position), state.plan.interval_bits
    low, high = entry.interval_low, entry.interval_high
    # what comes once has a place that lasts
    lasts = state.policy.allocating_persistent == 1 and position >= state.follow.cycle_start
    if state.policy.small_apart != 0 and key >> STREAM_BITS <= SMALL_LIMIT and is_off_plan(state):
        lasts = True  # its place would keep a page for it alone: with others like it it has a part of one
    lasts = lasts or bypassed(state, position)
    if entry.offset < 0 or lasts or not (intervals_empty(bits, low, high) or revoke(state, low, high)):
        has_place = entry.offset >= 0 and not lasts
        if has_place and state.plan.arena_pages != 0 and lacks_only_pages(state, low, high):
            return Outcome(0, NEED_PAGES, position)
        if has_place and waiting:
            return Outcome(0, POLL_FOR_PLACE, position)
        return _count_conflict(state, not has_place)
    return _take_intervals(state, position, requested)


@inner()
def _count_conflict(state, unplanned):
    state.iterations.conflicts += 1
    state.iterations.iteration_misses += 1
    state.iterations.iteration_unplanned += unplanned
    return Outcome(0, 0, 0)


@inner()
def _take_place(state, position, key, requested, stage):
    """Serve a request from the place of an entry, after Python was asked for pages or what waited was freed (`stage`).

    The outcome may ask for pages after the latter; nothing: it is not to be had.
    """
    if state.hot.mode != MODE_PLANNED or position >= state.tables.num_entries:
        return Outcome(0, 0, 0)
    entry, bits = entry_at(state, position), state.plan.interval_bits
    low, high = entry.interval_low, entry.interval_high
    if entry.key == key and entry.offset >= 0 and (intervals_empty(bits, low, high) or revoke(state, low, high)):
        return _take_intervals(state, position, requested)
    if stage == POLLED and entry.key == key and state.plan.arena_pages != 0 and lacks_only_pages(state, low, high):
        return Outcome(0, NEED_PAGES, position)
    return _count_conflict(state, entry.offset < 0)


@inner(forceinline=True)
def _take_intervals(state, position, requested):
    """Serve a request from the empty intervals of an entry."""
    entry = entry_at(state, position)
    flip_intervals(state.plan.interval_bits, entry.interval_low, entry.interval_high)
    slot = slot_at(state, entry.slot)
    slot.entry = position
    slot.requested_bytes = requested
    slot.state = BLOCK_LIVE
    state.plan.arena_live += 1
    state.follow.hits += 1
    return Outcome(state.plan.arena + entry.offset, 0, 0)


@cfunc("int64(int64, int64, int64)")
def malloc_entry(device, requested, handle):
    """What C code calls: `address` has it."""
    return malloc(device, requested, handle)


@cfunc("void(int64, int64)")
def free_entry(device, address):
    """What C code calls to free a block: `address` has it."""
    free(device, address)
