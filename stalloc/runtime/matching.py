"""Where a program stands on its tape: the expected request first, then a look for where it went on.

Contract: with the state's lock held; the cursor moves only to an entry that the program has just asked for. One extra
request never moves it on its own. A search costs steps for each place on the tape where such a request stands, not for
each entry of the tape, so a request that is on no tape costs next to nothing.
"""

# ruff: noqa: F403, F405  (the names of layout are constants to the compiler)

from stalloc.compiled import njit
from stalloc.runtime.layout import *
from stalloc.runtime.lending import call_back, cells_empty, flip_cells, go_to
from stalloc.runtime.words import add, first_at_least, now_ns, peek, poke, raise_to

_NEAR = 2  # entries: a request this close to the expected one replaces or skips what lies between
_WINDOW = 64  # entries looked ahead for the last two requests in a row
_CONTEXT = 4  # requests in a row that find their place anywhere on the tape
_WIDE_EVERY = 8  # misses between two searches of the whole tape
SURE = 16  # matches in a row after which the place on the tape is beyond doubt
_BAD_SHARE = 4  # a pass is bad if more than one request in so many was not served though it has a place
_HEAL_SHARE = 64  # a pass in which one request in so many was displaced is followed by one that heals
_HEAL_EVERY = 64  # passes
_BAD_PASSES = 8  # bad passes in a row after which the plan is given up
_HASH = 0x1E3779B97F4A7C15


@njit(inline="always")
def key_home(key, mask):
    """Where the search for a key begins in the table of keys."""
    return (key * _HASH >> 24) & mask


@njit()
def make_places(keys, mask, key, order):
    """Fill an empty table of keys: `key` (k,) are those of the tape's entries, `order` (k,) the entries by key."""
    first = 0
    while first < len(order):
        this, end = key[order[first]], first + 1
        while end < len(order) and key[order[end]] == this:
            end += 1
        row = key_home(this, mask)
        while keys[row, K_KEY] != 0:
            row = (row + 1) & mask
        keys[row, K_KEY], keys[row, K_FIRST], keys[row, K_END] = this, first, end
        first = end


@njit(inline="always")
def _key_at(state, position):
    return peek(peek(state, TAPE), position * TAPE_ROW + T_KEY)


@njit(inline="always")
def _next(state, position):
    position += 1
    return position if position < peek(state, TAPE_LENGTH) else peek(state, RING_START)


@njit()
def _places(state, key):
    """Where in the table of places those begin and end at which a request stands; equal if it is on no tape."""
    table, mask = peek(state, KEYS), peek(state, KEYS_MASK)
    i = key_home(key, mask)
    while True:
        row = table + i * KEY_ROW * 8
        found = peek(row, K_KEY)
        if found == key:
            return peek(row, K_FIRST), peek(row, K_END)
        if found == 0:
            return 0, 0
        i = (i + 1) & mask


@njit()
def _matches_history(state, position):
    """Whether the last requests, this one included, are the tape's entries up to `position`."""
    count = peek(state, HISTORY_COUNT)
    if count < _CONTEXT:
        return False
    ring_start, length = peek(state, RING_START), peek(state, TAPE_LENGTH)
    for back in range(_CONTEXT):
        if peek(state, HISTORY + ((count - 1 - back) & 3)) != _key_at(state, position):
            return False
        if position == ring_start and ring_start > 0:
            # before the ring lies the prologue or the end of the ring: the first pass decides for the ring
            position = length - 1
        else:
            position = position - 1 if position > 0 else length - 1
    return True


@njit()
def _realign(state, key):
    """Where on the tape an unexpected request stands; -1: nowhere near, it was inserted.

    The request itself must be one of the next few entries, or it and the one before it must be a pair within the
    window, or the last four must be found anywhere: one extra request never moves the cursor on its own.
    """
    cursor = peek(state, CURSOR)
    run = peek(state, MISS_RUN)
    if run == 0:
        return -1
    position = cursor
    for _ in range(_NEAR):
        position = _next(state, position)
        if _key_at(state, position) == key:
            return position
    first, end = _places(state, key)
    if first == end:
        return -1
    position = _pair_ahead(state, first, end)
    if position < 0 and run + 1 >= _CONTEXT:
        rare = end - first <= _WINDOW
        if rare or run < 2 * _CONTEXT or run % _WIDE_EVERY == 0:
            position = _anywhere(state, first, end)
            if position < 0:
                position = _elsewhere(state, first, end)
    return position


@njit()
def _pair_ahead(state, first, end):
    """The next place of this request, within the window, before which the tape has the request before it; -1: none."""
    cursor, start, length = peek(state, CURSOR), peek(state, RING_START), peek(state, TAPE_LENGTH)
    before = peek(state, HISTORY + ((peek(state, HISTORY_COUNT) - 2) & 3))
    i = first_at_least(peek(state, PLACES), first, end, cursor + 1)
    while i < end:
        position = peek(peek(state, PLACES), i)
        if position > cursor + _WINDOW or position >= length:
            break
        if _key_at(state, position - 1) == before:
            return position
        i += 1
    around = cursor + _WINDOW - length + 1  # entries of the window that lie beyond the end of the ring
    if around > 0:
        i = first_at_least(peek(state, PLACES), first, end, start)
        while i < end:
            position = peek(peek(state, PLACES), i)
            if position >= start + around or position > max(cursor, start):
                break
            if _key_at(state, position - 1 if position > start else length - 1) == before:
                return position
            i += 1
    return -1


@njit()
def _anywhere(state, first, end):
    """The place of the last four requests on the tape that is followed, the next one from the cursor on; -1: none."""
    cursor, start, length = peek(state, CURSOR), peek(state, RING_START), peek(state, TAPE_LENGTH)
    for low, high in ((cursor, length), (start, cursor)):
        i = first_at_least(peek(state, PLACES), first, end, low)
        while i < end:
            position = peek(peek(state, PLACES), i)
            if position >= high:
                break
            if _matches_history(state, position):
                return position
            i += 1
    return -1


@njit()
def _elsewhere(state, first, end):
    """The place of the last four requests on any tape, which becomes the one that is followed; -1: nowhere."""
    count, table = peek(state, HISTORY_COUNT), peek(state, TAPES)
    for tape in range(peek(state, NUM_TAPES) if peek(state, NUM_TAPES) > 1 else 0):
        tape_begin, tape_end = peek(table, tape * TAPES_ROW + TP_BEGIN), peek(table, tape * TAPES_ROW + TP_END)
        i = first_at_least(peek(state, PLACES), first, end, tape_begin + _CONTEXT - 1)
        while i < end:
            position = peek(peek(state, PLACES), i)
            if position >= tape_end:
                break
            back = 1
            while back < _CONTEXT and _key_at(state, position - back) == peek(
                state, HISTORY + ((count - 1 - back) & 3)
            ):
                back += 1
            if back == _CONTEXT:
                go_to(state, tape_begin, tape_end, position)
                return position
            i += 1
    return -1


@njit(inline="always")
def _matches_in_a_row(state):
    """How many requests have matched since the last one that did not."""
    return peek(state, HISTORY_COUNT) - peek(state, LAST_MISS)


@njit()
def _branch(state, key):
    """The place on another tape that begins as this pass did and goes on with `key`; it is followed then. -1: none."""
    start, cursor, table = peek(state, RING_START), peek(state, CURSOR), peek(state, TAPES)
    done = cursor - start
    if _matches_in_a_row(state) <= done:  # this request, which is counted already, is none
        return -1
    for tape in range(peek(state, NUM_TAPES)):
        begin, end = peek(table, tape * TAPES_ROW + TP_BEGIN), peek(table, tape * TAPES_ROW + TP_END)
        if begin == start or begin + done >= end or _key_at(state, begin + done) != key:
            continue
        i = 0
        while i < done and _key_at(state, begin + i) == _key_at(state, start + i):
            i += 1
        if i == done:
            go_to(state, begin, end, begin + done)
            return begin + done
    return -1


@njit()
def _end_step(state):
    """The ring begins again: write the log's row and start counting anew."""
    count = peek(state, STEP_COUNT)
    row = peek(state, STEP_LOG) + (count % STEP_LOG_ROWS) * STEP_ROW * 8
    poke(row, ST_TIME, now_ns(state + SCRATCH * 8))
    hits = peek(state, HITS) - peek(state, HITS_BEFORE)
    poke(row, ST_HITS, hits)
    poke(row, ST_MISSES, peek(state, STEP_MISSES))
    poke(row, ST_ALLOCATED_PEAK, peek(state, STEP_ALLOCATED_PEAK))
    poke(row, ST_RESERVED_PEAK, peek(state, STEP_RESERVED_PEAK))
    raise_to(state, SPAN_ALLOCATED_PEAK, peek(state, STEP_ALLOCATED_PEAK))
    raise_to(state, SPAN_RESERVED_PEAK, peek(state, STEP_RESERVED_PEAK))
    unplanned = peek(state, STEP_UNPLANNED)
    lost = peek(state, STEP_MISSES) - unplanned
    bad = _BAD_SHARE * lost > lost + hits
    displaced = peek(state, CONFLICTS) - peek(state, CONFLICTS_BEFORE) - unplanned
    missed = lost - displaced  # what borrows for these displaces others, and will again
    heal = _HEAL_SHARE * displaced > displaced + hits and peek(state, STEPS_EVER) >= peek(state, HEAL_AFTER)
    heal = heal and _BAD_SHARE * missed <= missed + hits
    poke(state, HEALING, heal)
    if heal:
        poke(state, HEAL_AFTER, peek(state, STEPS_EVER) + _HEAL_EVERY)
    poke(state, CONFLICTS_BEFORE, peek(state, CONFLICTS))
    poke(state, BAD_PASSES, peek(state, BAD_PASSES) + 1 if bad else 0)
    if peek(state, BAD_PASSES) >= _BAD_PASSES:
        # some requests still match, so misses alone might never outnumber matches: let the next one ask
        raise_to(state, SURPLUS_MISSES, peek(state, ASK_AFTER_MISSES) + peek(state, TAPE_LENGTH))
    poke(state, STEP_COUNT, count + 1)
    add(state, STEPS_EVER, 1)
    add(state, CELLS_FREED, 1)  # when cells are needed next has changed
    poke(state, HITS_BEFORE, peek(state, HITS))
    poke(state, STEP_MISSES, 0)
    poke(state, STEP_UNPLANNED, 0)
    poke(state, STEP_ALLOCATED_PEAK, peek(state, ALLOCATED))
    poke(state, STEP_RESERVED_PEAK, peek(state, RESERVED))


@njit()
def at_boundary(state, key):
    """Whether this request begins the ring anew, after enough matches in a row to be sure of the place."""
    start = peek(state, RING_START)
    if peek(state, CURSOR) != start or _key_at(state, start) != key:
        return False
    return _matches_in_a_row(state) >= min(peek(state, TAPE_LENGTH) - start, SURE)


@njit()
def _passes_start(state, position):
    """Whether the way forward from the cursor to a position touches the begin of the ring; a way back does not."""
    cursor, start = peek(state, CURSOR), peek(state, RING_START)
    if position < start:
        return False
    if cursor < start:
        return True
    length = peek(state, TAPE_LENGTH) - start
    ahead = (position - cursor) % length
    return (start - cursor) % length <= ahead <= length // 2


@njit()
def follow(state, key, requested):
    """Follow the tape with one request: its address in the arena, or 0 if the heap is to serve it."""
    count = peek(state, HISTORY_COUNT)
    poke(state, HISTORY + (count & 3), key)
    poke(state, HISTORY_COUNT, count + 1)
    position = peek(state, CURSOR)
    begins = position == peek(state, RING_START)
    if _key_at(state, position) != key:
        position = _branch(state, key) if peek(state, NUM_TAPES) > 1 else -1
        if position >= 0:
            begins = position == peek(state, RING_START)
        else:
            position = _realign(state, key)
            begins = position >= 0 and _passes_start(state, position)
        if position < 0:
            add(state, MISSES, 1)
            add(state, STEP_MISSES, 1)
            add(state, SURPLUS_MISSES, 1)
            add(state, MISS_RUN, 1)
            poke(state, LAST_MISS, count + 1)
            return 0
    poke(state, MISS_RUN, 0)
    if peek(state, SURPLUS_MISSES) > 0:
        add(state, SURPLUS_MISSES, -1)
    following = position + 1
    if following == peek(state, TAPE_LENGTH):
        following = peek(state, RING_START)
        add(state, PASS_BASE, position + 1 - following)
    poke(state, CURSOR, following)
    if peek(state, MODE) != MODE_REPLAY:
        return 0
    if begins:
        _end_step(state)
    entry = peek(state, TAPE) + position * TAPE_ROW * 8
    offset = peek(entry, T_OFFSET)
    low, high = peek(entry, T_CELL_LOW), peek(entry, T_CELL_HIGH)
    if offset < 0 or not (cells_empty(peek(state, CELLS), low, high) or call_back(state, low, high)):
        add(state, CONFLICTS, 1)
        add(state, STEP_MISSES, 1)
        add(state, STEP_UNPLANNED, offset < 0)
        return 0
    flip_cells(peek(state, CELLS), low, high)
    slot = peek(state, SLOTS) + peek(entry, T_SLOT) * SLOT_ROW * 8
    poke(slot, S_ENTRY, position)
    poke(slot, S_REQUESTED, requested)
    poke(slot, S_STATE, BLOCK_LIVE)
    add(state, ARENA_LIVE, 1)
    add(state, HITS, 1)
    return peek(state, ARENA) + offset
