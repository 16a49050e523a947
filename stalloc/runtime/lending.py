"""The cells of the arena, and what the heap may borrow of them: idle ranges, leased for a while.

Contract: every function runs with the state's lock held. A cell is taken while a planned request lives there or while
it belongs to a lease; nobody else gets it then. A lease covers whole cells of one stream and is a chunk of the heap, so
its blocks are allocated, split and merged like any other. It is called back only when nothing lives in it: a planned
request that meets a live block in a lease goes to the heap, and nothing is ever moved or overlapped.

A lease is taken where the plan needs the cells the latest, and at least for as long as requests of that size at that
place in the pass lived before (paper of STAlloc, section 5.2, places requests of a layer in space that is idle from
that layer to the one of their free; here time is the place in the pass, and lifespans are learnt).
"""

# ruff: noqa: F403, F405  (the names of layout are constants to the compiler)

from stalloc.compiled import njit
from stalloc.runtime.free_blocks import best_fit, block, insert_free, remove_free, set_block
from stalloc.runtime.heap import (
    add_live,
    add_segment,
    drop_chunk,
    find_pool,
    give_row,
    home,
    live_is_full,
    new_chunk,
    set_up_block,
    take,
    take_row,
)
from stalloc.runtime.layout import *
from stalloc.runtime.words import add, first_at_least, last_bit, peek, poke

_MOST_LEASES = 4096
_LEAST_LEASE = 2 << 20  # bytes; small requests share a lease of this size
_LOST = 16  # requests in a row that are not on the tape, after which the program does something else
_FAR = 1 << 60  # tape time


# --- cells ---------------------------------------------------------------------------------------------------------


@njit(inline="always")
def _cell_mask(word, low, high):
    """The bits of a word of cells that belong to the cells [low, high)."""
    mask = -1
    if word == low >> 6:
        mask &= -1 << (low & 63)
    if word == high >> 6:
        mask &= (1 << (high & 63)) - 1
    return mask


@njit(inline="always")
def cells_empty(cells, low, high):
    """Whether nobody has any of the cells [low, high)."""
    taken = 0
    for word in range(low >> 6, ((high - 1) >> 6) + 1):
        taken |= peek(cells, word) & _cell_mask(word, low, high)
    return taken == 0


@njit(inline="always")
def flip_cells(cells, low, high):
    """Take empty cells, or empty taken ones."""
    for word in range(low >> 6, ((high - 1) >> 6) + 1):
        poke(cells, word, peek(cells, word) ^ _cell_mask(word, low, high))


@njit(inline="always")
def cell(state, index, field):
    """A field of a cell; the offset of cell NUM_CELLS is the end of the last one."""
    return peek(peek(state, CELL_INFO), index * CELL_ROW + field)


@njit(inline="always")
def _set_cell(state, index, field, value):
    poke(peek(state, CELL_INFO), index * CELL_ROW + field, value)


@njit()
def cell_at(state, offset):
    """The cell that begins at an offset, NUM_CELLS for the end of the last; -1 if none does."""
    low, high = 0, peek(state, NUM_CELLS)
    while low < high:
        middle = (low + high) >> 1
        if cell(state, middle, CI_OFFSET) < offset:
            low = middle + 1
        else:
            high = middle
    return low if cell(state, low, CI_OFFSET) == offset else -1


@njit(inline="always")
def tape_time(state):
    """Requests of the tape since it was put in force: the clock of leases."""
    return peek(state, PASS_BASE) + peek(state, CURSOR)


@njit()
def _needed_next(state, index, now):
    """The tape time at which the plan needs a cell next."""
    known = cell(state, index, CI_NEXT)
    if known >= now:
        return known
    uses, starts = peek(state, USES), peek(state, USE_STARTS)
    if uses == 0:
        return now + 1
    low, end = peek(starts, index), peek(starts, index + 1)
    first = low
    low = first_at_least(uses, first, end, now - peek(state, PASS_BASE))
    time = _FAR
    if low < end and peek(uses, low) < peek(state, TAPE_LENGTH):
        time = peek(state, PASS_BASE) + peek(uses, low)
    elif first < end and peek(uses, end - 1) >= peek(state, RING_START):
        # in the next pass, if it is one of the same tape: the first use that belongs to the ring
        low = first_at_least(uses, first, end, peek(state, RING_START))
        if peek(uses, low) < peek(state, TAPE_LENGTH):
            time = peek(state, PASS_BASE) + peek(uses, low) + peek(state, TAPE_LENGTH) - peek(state, RING_START)
    _set_cell(state, index, CI_NEXT, time)
    return time


@njit()
def go_to(state, begin, end, position):
    """Follow the tape [begin, end) from a position; the clock goes on, when cells are needed is looked up anew."""
    poke(state, PASS_BASE, tape_time(state) - position)
    poke(state, RING_START, begin)
    poke(state, TAPE_LENGTH, end)
    poke(state, CURSOR, position)
    for index in range(peek(state, NUM_CELLS)):
        _set_cell(state, index, CI_NEXT, -1)
    add(state, CELLS_FREED, 1)


# --- leases --------------------------------------------------------------------------------------------------------


@njit()
def _mark(state, chunk, low, high, until):
    """Make a chunk the lease of the empty cells [low, high)."""
    row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
    poke(row, C_LOW, low)
    poke(row, C_HIGH, high)
    poke(row, C_UNTIL, until)
    flip_cells(peek(state, CELLS), low, high)
    for index in range(low, high):
        _set_cell(state, index, CI_LEASE, chunk)
    poke(state, NUM_LEASES, peek(state, NUM_LEASES) + 1)
    poke(state, BYTES_LEASED, peek(state, BYTES_LEASED) + peek(row, C_SIZE))


@njit()
def _unmark(state, chunk):
    """Give a lease's cells back to the plan, and its row."""
    row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
    low, high = peek(row, C_LOW), peek(row, C_HIGH)
    flip_cells(peek(state, CELLS), low, high)
    add(state, CELLS_FREED, 1)
    for index in range(low, high):
        _set_cell(state, index, CI_LEASE, 0)
    poke(state, NUM_LEASES, peek(state, NUM_LEASES) - 1)
    poke(state, BYTES_LEASED, peek(state, BYTES_LEASED) - peek(row, C_SIZE))
    drop_chunk(state, chunk)


@njit()
def _call_back(state, chunk):
    """End a lease in which nothing lives."""
    index = peek(peek(state, CHUNKS), chunk * CHUNK_ROW + C_FIRST)
    remove_free(state, index)
    give_row(state, index)
    _unmark(state, chunk)


@njit()
def call_back_idle(state):
    """End all leases in which nothing lives; whether there were any."""
    before = peek(state, NUM_LEASES)
    call_back_all(state)
    return peek(state, NUM_LEASES) < before


@njit()
def call_back_all(state):
    """End all leases in which nothing lives; whether none is left."""
    i = 0
    while i < peek(state, NUM_CELLS) and peek(state, NUM_LEASES) > 0:
        chunk = cell(state, i, CI_LEASE)
        if chunk == 0:
            i += 1
            continue
        row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
        i = peek(row, C_HIGH)
        if peek(row, C_LIVE) == 0:
            _call_back(state, chunk)
    return peek(state, NUM_LEASES) == 0


@njit()
def call_back(state, low, high):
    """End the leases that stand in the way of the cells [low, high), if nothing lives there; whether all are empty."""
    if peek(state, NUM_LEASES) == 0:
        return False
    i = low
    while i < high:
        chunk = cell(state, i, CI_LEASE)
        if chunk == 0:
            i += 1
            continue
        row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
        i = peek(row, C_HIGH)
        if peek(row, C_LIVE) != 0:
            return False
        _call_back(state, chunk)
        poke(state, NUM_REVOKED, peek(state, NUM_REVOKED) + 1)
    return cells_empty(peek(state, CELLS), low, high)


@njit()
def _find_idle(state, stream, size, until):
    """The first cell of the smallest idle range of a stream that holds `size` bytes and is not needed before `until`.

    -1 if there is none.
    """
    cells, count, now = peek(state, CELLS), peek(state, NUM_CELLS), tape_time(state)
    best, best_bytes, run = -1, _FAR, -1
    i = 0
    while i <= count:
        idle = False
        if i < count:
            word = peek(cells, i >> 6)
            if word == -1 and i & 63 == 0 and run < 0:
                i += 64
                continue
            idle = (word >> (i & 63)) & 1 == 0 and cell(state, i, CI_STREAM) == stream
            idle = idle and _needed_next(state, i, now) >= until
        if idle:
            if run < 0:
                run = i
        elif run >= 0:
            length = cell(state, i, CI_OFFSET) - cell(state, run, CI_OFFSET)
            if size <= length < best_bytes:
                best, best_bytes = run, length
            run = -1
        i += 1
    return best


@njit()
def lifespan_row(state, size):
    """The row of a request of this size, at this place in the pass, in the table of lifespans."""
    start = peek(state, RING_START)
    length = peek(state, TAPE_LENGTH) - start
    shift = max(last_bit(length | 1) - LIFESPAN_PLACES_BITS + 1, 0)  # a division takes long
    place = min(max(peek(state, CURSOR) - start, 0) >> shift, LIFESPAN_PLACES - 1)
    units = size >> 9
    octave = max(last_bit(units) - 1, 0)
    return place * LIFESPAN_SIZES + min(2 * octave + ((units >> octave) & 1), LIFESPAN_SIZES - 1)  # two an octave


@njit()
def note_birth(state, index, row):
    """An unplanned request begins to live, in whatever segment; `row` is its row in the table of lifespans."""
    set_block(state, index, B_BORN, tape_time(state) << LIFESPAN_BITS | row)


@njit()
def note_death(state, index):
    """Learn from an unplanned request how long the next one like it will live: the longest counts, and fades."""
    born = block(state, index, B_BORN)
    lived = tape_time(state) - (born >> LIFESPAN_BITS) + 1
    row = peek(state, LIFESPANS) + (born & ((1 << LIFESPAN_BITS) - 1)) * 8
    known = peek(row, 0)
    if lived > 0:
        poke(row, 0, max(lived, known - (known >> 3)))


@njit(inline="always")
def _take(state, index, size, requested, row):
    address = take(state, index, size, requested)
    note_birth(state, index, row)
    return address


@njit(inline="always")
def _times_given_back(state):
    """How often cells were given back: by planned requests that died, and otherwise."""
    return peek(state, HITS) - peek(state, ARENA_LIVE) + peek(state, CELLS_FREED)


@njit(inline="always")
def _in_vain(state, stream, size, lasts):
    """Whether the last search found nothing, and this one asks for no less: no cell was given back since."""
    same = peek(state, VAIN_AT) == _times_given_back(state) and peek(state, VAIN_STREAM) == stream
    return same and size >= peek(state, VAIN_SIZE) and lasts >= peek(state, VAIN_LASTS)


@njit()
def _planned_to_last(state, now):
    """The most that the entry before the cursor lives, as the plan has it: until one of its cells is needed again.

    It is served from a lease because its place is taken. If it stood where others belong, they would be displaced in
    turn, and so on from step to step. 0: it has no place.
    """
    cursor = peek(state, CURSOR)
    position = (cursor if cursor != peek(state, RING_START) else peek(state, TAPE_LENGTH)) - 1
    entry = peek(state, TAPE) + position * TAPE_ROW * 8
    if peek(state, USES) == 0 or peek(entry, T_OFFSET) < 0:
        return 0
    until = _FAR
    for index in range(peek(entry, T_CELL_LOW), peek(entry, T_CELL_HIGH)):
        until = min(until, _needed_next(state, index, now))
    return until - now


@njit()
def lend(state, stream, size, requested, row, anything):
    """Serve a request that the plan does not from an idle part of the arena: its address, 0 if there is none.

    While the program does something that is not on the tape, the plan does not need anything: all that is idle will do,
    as it does with `anything`, before memory runs short.
    """
    if peek(state, CELL_STREAMS) >> (stream & 63) & 1 == 0 or live_is_full(state):
        return 0
    now, lost = tape_time(state), anything or peek(state, MISS_RUN) >= _LOST
    lasts = peek(peek(state, LIFESPANS), row)
    if peek(state, MISS_RUN) == 0:
        lasts = max(lasts, _planned_to_last(state, now))
    pool = find_pool(state, stream, LEASED_KIND, True)
    if pool < 0:
        return 0
    found = best_fit(state, pool, size)
    if found != 0:
        until = peek(peek(state, CHUNKS), block(state, found, B_CHUNK) * CHUNK_ROW + C_UNTIL)
        if lost or until >= now + lasts:
            return _take(state, found, size, requested, row)
    if peek(state, NUM_LEASES) >= _MOST_LEASES or peek(state, NUM_CELLS) == 0:
        return 0
    length = peek(state, TAPE_LENGTH) - peek(state, RING_START)
    least = 0 if lost else lasts if lasts > 0 else length >> 2
    if _in_vain(state, stream, size, least):
        return 0
    low = -1
    if lost:
        lasts = 0
        low = _find_idle(state, stream, size, 0)
        if low < 0 and call_back_idle(state):
            low = _find_idle(state, stream, size, 0)
    elif lasts > 0:
        low = _find_idle(state, stream, size, now + lasts)
    else:
        for wanted in (length, least):  # nothing is known: only what is idle for long
            low = _find_idle(state, stream, size, now + wanted)
            if low >= 0:
                lasts = wanted
                break
    if low < 0:
        poke(state, VAIN_AT, _times_given_back(state))
        poke(state, VAIN_STREAM, stream)
        poke(state, VAIN_SIZE, size)
        poke(state, VAIN_LASTS, least)
        return 0
    begin = cell(state, low, CI_OFFSET)
    wanted = max(size, _LEAST_LEASE)
    high, until, cells = low, _FAR, peek(state, CELLS)
    while high < peek(state, NUM_CELLS) and cell(state, high, CI_OFFSET) - begin < wanted:
        usable = cells_empty(cells, high, high + 1) and cell(state, high, CI_STREAM) == stream
        needed = _needed_next(state, high, now)
        if not usable or (needed < now + lasts and not lost):
            break
        until = min(until, needed)
        high += 1
    chunk = add_segment(state, pool, peek(state, ARENA) + begin, cell(state, high, CI_OFFSET) - begin)
    if chunk == 0:
        return 0
    _mark(state, chunk, low, high, until)
    return _take(state, peek(peek(state, CHUNKS), chunk * CHUNK_ROW + C_FIRST), size, requested, row)


# --- from an arena to a segment, and back --------------------------------------------------------------------------


@njit()
def _append(state, chunk, previous, address, size, held):
    """Append a block to a chunk that is being made, or let the free block before it grow; the last block's row."""
    if held == BLOCK_FREE and previous != 0 and block(state, previous, B_STATE) == BLOCK_FREE:
        remove_free(state, previous)
        set_block(state, previous, B_SIZE, block(state, previous, B_SIZE) + size)
        insert_free(state, previous)
        return previous
    index = take_row(state)
    set_up_block(state, index, address, size, chunk, held)
    _link(state, chunk, previous, index)
    if held == BLOCK_FREE:
        insert_free(state, index)
    return index


@njit()
def _link(state, chunk, previous, index):
    set_block(state, index, B_PREVIOUS, previous)
    if previous != 0:
        set_block(state, previous, B_NEXT, index)
    else:
        poke(peek(state, CHUNKS), chunk * CHUNK_ROW + C_FIRST, index)


@njit()
def region_end(state, first):
    """The end of the cells from `first` on that are of one stream."""
    end = first + 1
    while end < peek(state, NUM_CELLS) and cell(state, end, CI_STREAM) == cell(state, first, CI_STREAM):
        end += 1
    return end


@njit()
def can_dissolve(state):
    """Whether every cell is of one stream, and the tables have room for what lives in the arena."""
    regions = 0
    i = 0
    while i < peek(state, NUM_CELLS):
        if cell(state, i, CI_STREAM) == NO_STREAM:
            return 0
        if find_pool(state, cell(state, i, CI_STREAM), GENERAL_KIND, True) < 0:
            return 0
        regions += 1
        i = region_end(state, i)
    rows = 2 * peek(state, ARENA_LIVE) + 2 * peek(state, NUM_LEASES) + regions + 1
    if peek(state, BLOCKS_CAPACITY) - peek(state, BLOCKS_USED) < rows:
        return 0
    if peek(state, CHUNKS_CAPACITY) - peek(state, CHUNKS_USED) < regions:
        return 0
    return regions if 2 * (peek(state, LIVE_COUNT) + peek(state, ARENA_LIVE)) < peek(state, MOST_LIVE) else 0


@njit()
def dissolve_region(state, first, end, group):
    """Make a segment of the cells [first, end), which are of one stream: what lives there stays, the rest is free."""
    arena = peek(state, ARENA)
    pool = find_pool(state, cell(state, first, CI_STREAM), GENERAL_KIND, True)
    begin = cell(state, first, CI_OFFSET)
    chunk = new_chunk(state, pool, arena + begin, cell(state, end, CI_OFFSET) - begin, 0)
    row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
    previous, gap, live, i = 0, begin, 0, first
    while i <= end:
        at = cell(state, i, CI_OFFSET)
        if i < end and cells_empty(peek(state, CELLS), i, i + 1):
            i += 1
            continue
        if at > gap:
            previous = _append(state, chunk, previous, arena + gap, at - gap, BLOCK_FREE)
        if i == end:
            break
        lease = cell(state, i, CI_LEASE)
        if lease != 0:
            lease_row = peek(state, CHUNKS) + lease * CHUNK_ROW * 8
            i, live = peek(lease_row, C_HIGH), live + peek(lease_row, C_LIVE)
            index = peek(lease_row, C_FIRST)
            while index != 0:
                following = block(state, index, B_NEXT)
                if block(state, index, B_STATE) == BLOCK_FREE:
                    address, size = block(state, index, B_ADDRESS), block(state, index, B_SIZE)
                    remove_free(state, index)
                    give_row(state, index)
                    previous = _append(state, chunk, previous, address, size, BLOCK_FREE)
                else:
                    set_block(state, index, B_CHUNK, chunk)
                    set_block(state, index, B_NEXT, 0)
                    _link(state, chunk, previous, index)
                    previous = index
                index = following
            _unmark(state, lease)
        else:
            slot = find_slot(state, arena + at)
            entry = peek(state, TAPE) + peek(slot, S_ENTRY) * TAPE_ROW * 8
            size = peek(entry, T_KEY) >> STREAM_BITS
            previous = _append(state, chunk, previous, arena + at, size, peek(slot, S_STATE))
            set_block(state, previous, B_REQUESTED, peek(slot, S_REQUESTED))
            add_live(state, arena + at, previous)
            i, live = peek(entry, T_CELL_HIGH), live + 1
        gap = cell(state, i, CI_OFFSET)
    poke(row, C_LIVE, live)
    poke(row, C_GROUP, group)


@njit()
def find_slot(state, address):
    """The address of the slot's row for an address in the arena; 0 if no planned request lives there."""
    offset = address - peek(state, ARENA)
    table, mask = peek(state, SLOTS), peek(state, SLOTS_MASK)
    i = home(offset, mask)
    while True:
        key = peek(table, i * SLOT_ROW + S_OFFSET)
        if key == offset:
            return table + i * SLOT_ROW * 8 if peek(table, i * SLOT_ROW + S_ENTRY) >= 0 else 0
        if key < 0:
            return 0
        i = (i + 1) & mask


@njit()
def find_chunk(state, base):
    """The segment that begins at an address, 0 if there is none; leases are no segments."""
    table = peek(state, CHUNKS)
    for chunk in range(1, peek(state, CHUNKS_USED)):
        row = table + chunk * CHUNK_ROW * 8
        if peek(row, C_BASE) == base and peek(row, C_HIGH) == 0:
            return chunk
    return 0


@njit()
def relabel(state, chunk, kind):
    """Let the blocks of a segment belong to another kind of pool of their stream; False if there is no such pool."""
    row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
    pool = find_pool(state, peek(peek(state, POOLS), peek(row, C_POOL) * POOL_ROW + P_STREAM), kind, True)
    if pool < 0:
        return False
    index = peek(row, C_FIRST)
    while index != 0:
        if block(state, index, B_STATE) == BLOCK_FREE:
            remove_free(state, index)
        index = block(state, index, B_NEXT)
    poke(row, C_POOL, pool)
    index = peek(row, C_FIRST)
    while index != 0:
        if block(state, index, B_STATE) == BLOCK_FREE:
            insert_free(state, index)
        index = block(state, index, B_NEXT)
    return True


@njit()
def _run_end(state, index):
    """The last of the blocks from `index` on that live side by side."""
    while True:
        following = block(state, index, B_NEXT)
        if following == 0 or block(state, following, B_STATE) == BLOCK_FREE:
            return index
        index = following


@njit()
def group_size(state, group):
    """How many segments came from the device as this one piece."""
    table, count = peek(state, CHUNKS), 0
    for chunk in range(1, peek(state, CHUNKS_USED)):
        row = table + chunk * CHUNK_ROW * 8
        count += peek(row, C_BASE) != 0 and peek(row, C_GROUP) == group
    return count


@njit()
def runs_to_keep(state, chunk, arena):
    """How many leases keep what lives in a fenced segment, of the cells that are in place now.

    -1 if that cannot be: its blocks do not end where cells do, or its cells are another stream's.
    """
    row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
    first = peek(row, C_FIRST)
    stream = peek(peek(state, POOLS), peek(row, C_POOL) * POOL_ROW + P_STREAM)
    if find_pool(state, stream, LEASED_KIND, True) < 0:
        return -1
    low, high = (
        cell_at(state, peek(row, C_BASE) - arena),
        cell_at(state, peek(row, C_BASE) + peek(row, C_SIZE) - arena),
    )
    if low < 0 or high < 0:
        return -1
    for i in range(low, high):
        if cell(state, i, CI_STREAM) != stream:
            return -1
    runs, index = 0, first
    while index != 0:
        if block(state, index, B_STATE) != BLOCK_FREE:
            begin = block(state, index, B_ADDRESS) - arena
            index = _run_end(state, index)
            end = block(state, index, B_ADDRESS) + block(state, index, B_SIZE) - arena
            if cell_at(state, begin) < 0 or cell_at(state, end) < 0:
                return -1
            runs += 1
        index = block(state, index, B_NEXT)
    return runs


@njit()
def reclaim(state, chunk, arena):
    """Turn a fenced segment into the arena: what lives there is kept in leases, the rest belongs to the plan."""
    row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
    index = peek(row, C_FIRST)
    stream = peek(peek(state, POOLS), peek(row, C_POOL) * POOL_ROW + P_STREAM)
    pool = find_pool(state, stream, LEASED_KIND, True)
    while index != 0:
        if block(state, index, B_STATE) == BLOCK_FREE:
            following = block(state, index, B_NEXT)
            remove_free(state, index)
            give_row(state, index)
            index = following
            continue
        last = _run_end(state, index)
        begin = block(state, index, B_ADDRESS)
        end = block(state, last, B_ADDRESS) + block(state, last, B_SIZE)
        following = block(state, last, B_NEXT)
        lease = new_chunk(state, pool, begin, end - begin, index)
        set_block(state, index, B_PREVIOUS, 0)
        set_block(state, last, B_NEXT, 0)
        live = 0
        while index != 0:
            set_block(state, index, B_CHUNK, lease)
            live += 1
            index = block(state, index, B_NEXT)
        poke(peek(state, CHUNKS), lease * CHUNK_ROW + C_LIVE, live)
        _mark(state, lease, cell_at(state, begin - arena), cell_at(state, end - arena), 0)
        index = following
    drop_chunk(state, chunk)
