"""The hot path: what torch's and CuPy's allocation calls run, compiled, without the GIL and without Python.

Contract, upheld under one lock a device:
- an address of the arena is handed out only if no live block covers any byte of it: the plan's address space is cut
  into cells at every boundary that occurs in it, and a planned request is served only while all its cells are empty;
- a request that is not the expected one, or whose cells are taken, is served by the heap: a deviation costs memory,
  never correctness;
- the lock is never held while Python is entered, and Python is entered only for what needs it: a segment from the
  device, a look at what was recorded, the switch to a plan.
"""

from stalloc.compiled import cfunc, njit
from stalloc.runtime.heap import (
    add_segment,
    block,
    find_live,
    find_pool,
    heap_allocate,
    heap_desperate,
    heap_free,
    home,
    take_free_segments,
    unpin_pools,
)
from stalloc.runtime.layout import *  # its names are constants to the compiler
from stalloc.runtime.lending import (
    call_back,
    call_back_all,
    can_dissolve,
    can_reclaim,
    cell,
    cells_empty,
    dissolve_region,
    find_chunk,
    find_slot,
    flip_cells,
    go_to,
    lend,
    note_birth,
    note_death,
    reclaim,
    region_end,
    relabel,
)
from stalloc.runtime.words import call3, lock, now_ns, peek, poke, unlock

_NEAR = 2  # entries: a request this close to the expected one replaces or skips what lies between
_WINDOW = 64  # entries looked ahead for the last two requests in a row
_CONTEXT = 4  # requests in a row that find their place anywhere on the tape
_WIDE_EVERY = 8  # misses between two searches of the whole tape
_SURE = 16  # matches in a row after which the place on the tape is beyond doubt
_BAD_SHARE = 4  # a pass is bad if more than one request in so many was not served though it has a place
_BAD_PASSES = 8  # bad passes in a row after which the plan is given up


@njit(inline="always")
def _add(state, word, amount):
    poke(state, word, peek(state, word) + amount)


@njit(inline="always")
def _raise_to(state, word, value):
    if value > peek(state, word):
        poke(state, word, value)


# --- streams and the record --------------------------------------------------------------------------------------


@njit()
def _new_stream(state, stream):
    table, count = peek(state, STREAMS), peek(state, NUM_STREAMS)
    index = count
    for i in range(count):
        if peek(table, i) == stream:
            index = i
            break
    if index == count:
        if count == MAX_STREAMS:
            return -1
        poke(table, count, stream)
        poke(state, NUM_STREAMS, count + 1)
    poke(state, LAST_STREAM, stream)
    poke(state, LAST_STREAM_INDEX, index)
    return index


@njit(inline="always")
def _stream_index(state, stream):
    if peek(state, LAST_STREAM) == stream:
        return peek(state, LAST_STREAM_INDEX)
    return _new_stream(state, stream)


@njit()
def record(state, action, stream, address, size):
    """Add an event to the record; a full table ends the recording, and Python is to hear of it."""
    count = peek(state, NUM_EVENTS)
    if count >= peek(state, EVENTS_CAPACITY):
        poke(state, RECORDING, 0)
        poke(state, CHECK_AT, 1)
        return
    table = peek(state, EVENTS)
    poke(table, count * EVENT_ROW + E_ACTION, action | stream << 8)
    poke(table, count * EVENT_ROW + E_ADDRESS, address)
    poke(table, count * EVENT_ROW + E_SIZE, size)
    poke(table, count * EVENT_ROW + E_TIME, now_ns(state + SCRATCH * 8))
    poke(state, NUM_EVENTS, count + 1)


# --- the tape ----------------------------------------------------------------------------------------------------


@njit(inline="always")
def _key_at(state, position):
    return peek(peek(state, TAPE), position * TAPE_ROW + T_KEY)


@njit(inline="always")
def _next(state, position):
    position += 1
    return position if position < peek(state, TAPE_LENGTH) else peek(state, RING_START)


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
    before = peek(state, HISTORY + ((peek(state, HISTORY_COUNT) - 2) & 3))
    position = cursor
    for _ in range(_WINDOW):
        following = _next(state, position)
        if _key_at(state, following) == key and _key_at(state, position) == before:
            return following
        position = following
    if run + 1 >= _CONTEXT and (run < 2 * _CONTEXT or run % _WIDE_EVERY == 0):
        position = cursor
        for _ in range(peek(state, TAPE_LENGTH)):
            if _key_at(state, position) == key and _matches_history(state, position):
                return position
            position = _next(state, position)
        return _elsewhere(state)
    return -1


@njit()
def _elsewhere(state):
    """The place of the last four requests on any tape, which becomes the one that is followed; -1: nowhere."""
    count, table = peek(state, HISTORY_COUNT), peek(state, TAPES)
    for tape in range(peek(state, NUM_TAPES) if peek(state, NUM_TAPES) > 1 else 0):
        begin, end = peek(table, tape * TAPES_ROW + TP_BEGIN), peek(table, tape * TAPES_ROW + TP_END)
        for position in range(begin + _CONTEXT - 1, end):
            back = 0
            while back < _CONTEXT and _key_at(state, position - back) == peek(
                state, HISTORY + ((count - 1 - back) & 3)
            ):
                back += 1
            if back == _CONTEXT:
                go_to(state, begin, end, position)
                return position
    return -1


@njit()
def _branch(state, key):
    """The place on another tape that begins as this pass did and goes on with `key`; it is followed then. -1: none."""
    start, cursor, table = peek(state, RING_START), peek(state, CURSOR), peek(state, TAPES)
    done = cursor - start
    if peek(state, MATCH_RUN) < done:
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
    poke(row, ST_HITS, peek(state, STEP_HITS))
    poke(row, ST_MISSES, peek(state, STEP_MISSES))
    poke(row, ST_ALLOCATED_PEAK, peek(state, STEP_ALLOCATED_PEAK))
    poke(row, ST_RESERVED_PEAK, peek(state, STEP_RESERVED_PEAK))
    _raise_to(state, SPAN_ALLOCATED_PEAK, peek(state, STEP_ALLOCATED_PEAK))
    _raise_to(state, SPAN_RESERVED_PEAK, peek(state, STEP_RESERVED_PEAK))
    lost = peek(state, STEP_MISSES) - peek(state, STEP_UNPLANNED)
    bad = _BAD_SHARE * lost > lost + peek(state, STEP_HITS)
    poke(state, BAD_PASSES, peek(state, BAD_PASSES) + 1 if bad else 0)
    if peek(state, BAD_PASSES) >= _BAD_PASSES:
        # some requests still match, so misses alone might never outnumber matches: let the next one ask
        _raise_to(state, SURPLUS_MISSES, peek(state, ASK_AFTER_MISSES) + peek(state, TAPE_LENGTH))
    poke(state, STEP_COUNT, count + 1)
    _add(state, STEPS_EVER, 1)
    poke(state, STEP_HITS, 0)
    poke(state, STEP_MISSES, 0)
    poke(state, STEP_UNPLANNED, 0)
    poke(state, STEP_ALLOCATED_PEAK, peek(state, ALLOCATED))
    poke(state, STEP_RESERVED_PEAK, peek(state, RESERVED))


@njit()
def _at_boundary(state, key):
    """Whether this request begins the ring anew, after enough matches in a row to be sure of the place."""
    start = peek(state, RING_START)
    if peek(state, CURSOR) != start or _key_at(state, start) != key:
        return False
    return peek(state, MATCH_RUN) >= min(peek(state, TAPE_LENGTH) - start, _SURE)


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
def _replay(state, key, requested):
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
            _add(state, MISSES, 1)
            _add(state, STEP_MISSES, 1)
            _add(state, SURPLUS_MISSES, 1)
            _add(state, MISS_RUN, 1)
            poke(state, MATCH_RUN, 0)
            return 0
    poke(state, MISS_RUN, 0)
    _add(state, MATCH_RUN, 1)
    if peek(state, SURPLUS_MISSES) > 0:
        _add(state, SURPLUS_MISSES, -1)
    following = position + 1
    if following == peek(state, TAPE_LENGTH):
        following = peek(state, RING_START)
        _add(state, PASS_BASE, position + 1 - following)
    poke(state, CURSOR, following)
    if peek(state, MODE) != MODE_REPLAY:
        return 0
    if begins:
        _end_step(state)
    entry = peek(state, TAPE) + position * TAPE_ROW * 8
    offset = peek(entry, T_OFFSET)
    low, high = peek(entry, T_CELL_LOW), peek(entry, T_CELL_HIGH)
    if offset < 0 or not (cells_empty(peek(state, CELLS), low, high) or call_back(state, low, high)):
        _add(state, CONFLICTS, 1)
        _add(state, STEP_MISSES, 1)
        _add(state, STEP_UNPLANNED, offset < 0)
        return 0
    flip_cells(peek(state, CELLS), low, high)
    slot = peek(state, SLOTS) + peek(entry, T_SLOT) * SLOT_ROW * 8
    poke(slot, S_ENTRY, position)
    poke(slot, S_REQUESTED, requested)
    poke(slot, S_STATE, BLOCK_LIVE)
    _add(state, ARENA_LIVE, 1)
    _add(state, HITS, 1)
    _add(state, STEP_HITS, 1)
    return peek(state, ARENA) + offset


@njit(inline="always")
def _in_arena(state, address):
    base = peek(state, ARENA)
    return base <= address < base + peek(state, ARENA_BYTES)


# --- allocate and free -------------------------------------------------------------------------------------------


@njit(inline="always")
def _count_alloc(state, stream, address, size, requested):
    allocated = peek(state, ALLOCATED) + size
    poke(state, ALLOCATED, allocated)
    _raise_to(state, ALLOCATED_PEAK, allocated)
    _raise_to(state, STEP_ALLOCATED_PEAK, allocated)
    _add(state, REQUESTED, requested)
    _raise_to(state, REQUESTED_PEAK, peek(state, REQUESTED))
    _add(state, NUM_ALLOCS, 1)
    _add(state, NUM_LIVE, 1)
    if peek(state, RECORDING) == 1:
        record(state, ACTION_ALLOC, stream, address, requested)
        if size > TINY:
            _add(state, NUM_SIZABLE, 1)


@njit()
def _serve_unplanned(state, stream, size, requested):
    address = lend(state, stream, size, requested)
    if address != 0:
        _add(state, NUM_LENT, 1)
    else:
        address = heap_allocate(state, stream, size, requested)
    if address > 0:
        note_birth(state, find_live(state, address), size)
    return address


@njit()
def _try_allocate(state, stream, size, requested, way):
    """One try with the lock held: an address, or -(reason | argument << REASON_BITS), or 0 for no memory."""
    # events must not be asked for while a graph is captured
    waiting = peek(state, NUM_DEFERRED) > 0 and peek(state, PRIVATE) == 0
    if way == WAY_FIRST and waiting and peek(state, NUM_ALLOCS) & 31 == 0:
        return -POLL
    if size > TINY and way != WAY_HEAP and peek(state, PRIVATE) == 0:
        if peek(state, MODE) != MODE_HEAP:
            key = size << STREAM_BITS | stream
            if way == WAY_FIRST and peek(state, ASK_AT_BOUNDARY) == 1 and _at_boundary(state, key):
                poke(state, ASK_AT_BOUNDARY, 0)
                return -AT_BOUNDARY
            address = _replay(state, key, requested)
            if address != 0:
                return address
            if peek(state, SURPLUS_MISSES) >= peek(state, ASK_AFTER_MISSES) > 0:
                poke(state, ASK_AFTER_MISSES, 0)
                return -STALE
            if peek(state, MODE) == MODE_REPLAY:
                return _serve_unplanned(state, stream, size, requested)
        elif way == WAY_FIRST and peek(state, NUM_SIZABLE) >= peek(state, CHECK_AT) > 0:
            poke(state, CHECK_AT, 0)
            return -CHECK
    return heap_allocate(state, stream, size, requested)


@njit()
def allocate_on(state, requested, raw_stream):
    """Serve one request of `requested` bytes on a stream; its address, 0 if there is no memory."""
    if requested <= 0:
        return 0
    if requested > LARGEST:
        return _refuse(state, requested)
    size = (requested + (ALIGNMENT - 1)) & -ALIGNMENT
    way = WAY_FIRST
    while True:
        lock(state)
        stream = _stream_index(state, raw_stream)
        address = _try_allocate(state, stream, size, requested, way) if stream >= 0 else 0
        if address > 0:
            _count_alloc(state, stream, address, size, requested)
            unlock(state)
            return address
        unlock(state)
        reason = -address & ((1 << REASON_BITS) - 1)
        helped = False
        if address < 0:
            helped = call3(peek(state, SLOW_FUNCTION), peek(state, DEVICE), -address, size) == 1
        if reason in (AT_BOUNDARY, POLL, CHECK):
            way = WAY_AFTER_ASKING  # the tape has not moved yet
        elif reason == STALE or helped:
            way = WAY_HEAP  # the tape has moved past this request
        else:
            return _last_resort(state, stream, size, requested)


@njit()
def _refuse(state, requested):
    """Python explains a request that no device can serve."""
    call3(peek(state, SLOW_FUNCTION), peek(state, DEVICE), REFUSED, requested)
    lock(state)
    _add(state, NUM_OOMS, 1)
    unlock(state)
    return 0


@njit()
def _last_resort(state, stream, size, requested):
    lock(state)
    address = heap_desperate(state, stream, size, requested) if stream >= 0 else 0
    if address > 0:
        _count_alloc(state, stream, address, size, requested)
    else:
        _add(state, NUM_OOMS, 1)
        if peek(state, RECORDING) == 1:
            record(state, ACTION_OOM, max(stream, 0), 0, requested)
    unlock(state)
    return address


@njit()
def _state_word(state, address):
    """The address of the word that holds the BLOCK_ state of what lives at an address; 0 if nothing does."""
    slot = find_slot(state, address) if _in_arena(state, address) else 0
    if slot != 0:
        return slot + S_STATE * 8
    index = find_live(state, address)
    return peek(state, BLOCKS) + (index * BLOCK_ROW + B_STATE) * 8 if index != 0 else 0


@njit()
def _release(state, address):
    """Free what lives at an address."""
    slot = find_slot(state, address) if _in_arena(state, address) else 0
    if slot != 0:
        entry = peek(state, TAPE) + peek(slot, S_ENTRY) * TAPE_ROW * 8
        flip_cells(peek(state, CELLS), peek(entry, T_CELL_LOW), peek(entry, T_CELL_HIGH))
        poke(slot, S_ENTRY, -1)
        poke(slot, S_STATE, BLOCK_FREE)
        _add(state, ARENA_LIVE, -1)
        size, requested = peek(entry, T_KEY) >> STREAM_BITS, peek(slot, S_REQUESTED)
        stream = peek(entry, T_KEY) & (MAX_STREAMS - 1)
    else:
        index = find_live(state, address)
        size, requested = block(state, index, B_ROUNDED), block(state, index, B_REQUESTED)
        stream = peek(peek(state, POOLS), block(state, index, B_POOL) * POOL_ROW + P_STREAM)
        if block(state, index, B_BORN) >= 0 and peek(state, MODE) == MODE_REPLAY:
            note_death(state, index)
        heap_free(state, index)
    _add(state, ALLOCATED, -size)
    _add(state, REQUESTED, -requested)
    _add(state, NUM_FREES, 1)
    _add(state, NUM_LIVE, -1)
    if peek(state, RECORDING) == 1:
        record(state, ACTION_FREE_COMPLETED, stream, address, requested)


@njit()
def free_on(state, address):
    """Free a block, or, if other streams have used it, leave that to Python, which waits for them."""
    if address == 0:
        return
    lock(state)
    word = _state_word(state, address)
    held = peek(word, 0) if word != 0 else BLOCK_FREE
    if held == BLOCK_LIVE:
        _release(state, address)
    elif held == BLOCK_SHARED:
        poke(word, 0, BLOCK_DEFERRED)
        _add(state, NUM_DEFERRED, 1)
        if peek(state, RECORDING) == 1:
            record(state, ACTION_FREE_REQUESTED, 0, address, 0)
    else:
        _add(state, NUM_UNKNOWN_FREES, 1)
    unlock(state)
    if held == BLOCK_SHARED:
        call3(peek(state, SLOW_FUNCTION), peek(state, DEVICE), DEFER, address)


@njit()
def share(state, address):
    """Note that another stream uses a block: True if that is the first one; False too if nothing lives there."""
    lock(state)
    word = _state_word(state, address)
    first = word != 0 and peek(word, 0) == BLOCK_LIVE
    if first:
        poke(word, 0, BLOCK_SHARED)
    unlock(state)
    return first


@njit()
def finish_deferred(state, address):
    """Free a block whose other streams are done with it."""
    lock(state)
    word = _state_word(state, address)
    if word != 0 and peek(word, 0) == BLOCK_DEFERRED:
        _add(state, NUM_DEFERRED, -1)
        _release(state, address)
    unlock(state)


# --- entry points for Python, each under the lock ----------------------------------------------------------------


@njit()
def give_segment(state, pool, base, size):
    """Add a segment of `size` bytes to a pool; False if the tables are full."""
    lock(state)
    done = add_segment(state, pool, base, size) != 0
    if done:
        count_reserved(state, size)
        _add(state, NUM_SEGMENT_ALLOCS, 1)
        if peek(state, RECORDING) == 1:
            stream = peek(peek(state, POOLS), pool * POOL_ROW + P_STREAM)
            record(state, ACTION_SEGMENT_ALLOC, stream, base, size)
    unlock(state)
    return done


@njit()
def general_pool(state, stream):
    """The pool of a stream (index) whose segments are split; -1 if the table is full."""
    lock(state)
    pool = find_pool(state, stream, GENERAL_KIND, True)
    unlock(state)
    return pool


@njit()
def take_segments(state, bases, sizes, limit, idle_passes):
    """Take up to `limit` free segments back; writes bases and sizes (bytes) to two tables, returns how many.

    Only those of which nothing was taken in the last `idle_passes` passes.
    """
    lock(state)
    used_before = peek(state, STEPS_EVER) + 1 - idle_passes
    count = take_free_segments(state, bases, sizes, limit, used_before)
    for i in range(count):
        count_reserved(state, -peek(sizes, i))
        _add(state, NUM_SEGMENT_FREES, 1)
        if peek(state, RECORDING) == 1:
            record(state, ACTION_SEGMENT_FREE, 0, peek(bases, i), peek(sizes, i))
    unlock(state)
    return count


@njit()
def count_reserved(state, size):
    """Count bytes that came from the device (negative: went back). With the lock held."""
    reserved = peek(state, RESERVED) + size
    poke(state, RESERVED, reserved)
    _raise_to(state, RESERVED_PEAK, reserved)
    _raise_to(state, STEP_RESERVED_PEAK, reserved)


@njit()
def write_words(state, words, values):
    """Write several words of the state at once."""
    lock(state)
    for i in range(len(words)):
        poke(state, words[i], values[i])
    unlock(state)


@njit()
def serve_arena(state, arena, arena_bytes):
    """Serve the tape from an arena of `arena_bytes`; the counting of planned steps and their peaks begins."""
    lock(state)
    _serve(state, arena, arena_bytes)
    unlock(state)


@njit()
def _serve(state, arena, arena_bytes):
    poke(state, ARENA, arena)
    poke(state, ARENA_BYTES, arena_bytes)
    # what the arena has beyond the plan can be lent: it is one more cell
    count, info = peek(state, NUM_CELLS), peek(state, CELL_INFO)
    if cell(state, count, CI_OFFSET) < arena_bytes:
        poke(info, (count + 1) * CELL_ROW + CI_OFFSET, arena_bytes)
        poke(state, NUM_CELLS, count + 1)
    poke(state, MODE, MODE_REPLAY)
    for word in (
        HITS,
        MISSES,
        CONFLICTS,
        NUM_LENT,
        NUM_REVOKED,
        PASS_BASE,
        STEP_COUNT,
        STEP_HITS,
        STEP_MISSES,
        STEP_UNPLANNED,
        BAD_PASSES,
        SURPLUS_MISSES,
    ):
        poke(state, word, 0)
    poke(state, SPAN_ALLOCATED_PEAK, 0)
    poke(state, SPAN_RESERVED_PEAK, 0)
    poke(state, STEP_ALLOCATED_PEAK, peek(state, ALLOCATED))
    poke(state, STEP_RESERVED_PEAK, peek(state, RESERVED))


@njit()
def dissolve_arena(state, bases):
    """Make ordinary segments of an arena that is no longer served; writes their bases, returns how many.

    What lives there keeps its place, what is free can be used at once. The segments came from the device as one and go
    back as one. 0: the arena has to stay, since streams share a part of it, or the tables are full.
    """
    lock(state)
    regions = 0
    if peek(state, MODE) != MODE_REPLAY and peek(state, ARENA_BYTES) > 0:
        call_back_all(state)
        regions = can_dissolve(state)
        if regions > len(bases):
            regions = 0
    arena, first = peek(state, ARENA), 0
    for i in range(regions):
        end = region_end(state, first)
        bases[i] = arena + cell(state, first, CI_OFFSET)
        dissolve_region(state, first, end, arena if regions > 1 else 0)
        first = end
    if regions > 0:
        _forget(state)
    unlock(state)
    return regions


@njit()
def _forget(state):
    for word in (ARENA, ARENA_BYTES, ARENA_LIVE, NUM_CELLS, NUM_LEASES, BYTES_LEASED):
        poke(state, word, 0)


@njit()
def fence_segment(state, base, offsets):
    """Serve nothing more from a segment; writes where its blocks begin (bytes from its base), returns how many.

    -1 if there is no such segment, it is part of a group, or it holds more blocks than `offsets` has room for.
    """
    lock(state)
    chunk, count = find_chunk(state, base), -1
    row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
    if chunk != 0 and peek(row, C_GROUP) == 0:
        index, count = peek(row, C_FIRST), 0
        while index != 0:
            if count < len(offsets):
                offsets[count] = block(state, index, B_ADDRESS) - base
            count += 1
            index = block(state, index, B_NEXT)
        if count > len(offsets) or not relabel(state, chunk, FENCED_KIND):
            count = -1
    unlock(state)
    return count


@njit()
def unfence_segment(state, base):
    """Serve from a fenced segment again."""
    lock(state)
    chunk = find_chunk(state, base)
    if chunk != 0:
        relabel(state, chunk, GENERAL_KIND)
    unlock(state)


@njit()
def serve_segment(state, base, size):
    """Serve the tape from a fenced segment as the arena; False if what lives there does not fit between the cells."""
    lock(state)
    chunk = find_chunk(state, base)
    bound = peek(state, NUM_CELLS)
    done = chunk != 0
    if done:
        poke(state, ARENA, base)
        if cell(state, bound, CI_OFFSET) < size:  # as _serve does it
            poke(peek(state, CELL_INFO), (bound + 1) * CELL_ROW + CI_OFFSET, size)
            poke(state, NUM_CELLS, bound + 1)
        done = can_reclaim(state, chunk, base)
    if done:
        _serve(state, base, size)
        reclaim(state, chunk, base)
    else:
        poke(state, ARENA, 0)
    unlock(state)
    return done


@njit()
def begin_step(state, begin, end, position):
    """The program marks a step: follow the tape [begin, end) from a position on, whatever was followed before."""
    lock(state)
    if peek(state, MODE) != MODE_HEAP:
        if peek(state, CURSOR) != position or peek(state, RING_START) != begin:
            go_to(state, begin, end, position)
        poke(state, MISS_RUN, 0)
        poke(state, MATCH_RUN, max(peek(state, MATCH_RUN), _SURE))
    unlock(state)


@njit()
def reset_peaks(state):
    """Let the peaks that the program asks for begin anew."""
    lock(state)
    poke(state, ALLOCATED_PEAK, peek(state, ALLOCATED))
    poke(state, RESERVED_PEAK, peek(state, RESERVED))
    poke(state, REQUESTED_PEAK, peek(state, REQUESTED))
    unlock(state)


@njit()
def forget_arena(state):
    """Let go of an arena that is not served and in which nothing lives: its bytes, 0 if it must stay."""
    lock(state)
    arena_bytes = peek(state, ARENA_BYTES)
    if peek(state, ARENA_LIVE) != 0 or peek(state, MODE) == MODE_REPLAY or not call_back_all(state):
        arena_bytes = 0
    else:
        _forget(state)
        count_reserved(state, -arena_bytes)
    unlock(state)
    return arena_bytes


@njit()
def release_private(state, kind):
    """Unpin the pools of a private kind."""
    lock(state)
    unpin_pools(state, kind)
    unlock(state)


@njit()
def reserve(state, size):
    """Count an arena of `size` bytes that came from the device (negative: went back)."""
    lock(state)
    count_reserved(state, size)
    unlock(state)


@njit()
def largest_free(state):
    """The largest free block of the heap, bytes."""
    lock(state)
    largest, table = 0, peek(state, POOLS)
    for pool in range(peek(state, POOLS_MASK) + 1):
        if peek(table, pool * POOL_ROW + P_USED) == POOL_USED:
            current = peek(table, pool * POOL_ROW + P_ROOT)
            while current != 0:
                largest = max(largest, block(state, current, B_SIZE))
                current = block(state, current, B_RIGHT)
    unlock(state)
    return largest


@njit()
def copy_live(state, addresses, sizes):
    """Copy the heap's live blocks (address, requested bytes) as far as the columns go; how many there are."""
    lock(state)
    count, table = 0, peek(state, LIVE)
    for i in range(peek(state, LIVE_MASK) + 1):
        if peek(table, i * LIVE_ROW + L_ADDRESS) != 0:
            if count < len(addresses):
                addresses[count] = peek(table, i * LIVE_ROW + L_ADDRESS)
                sizes[count] = block(state, peek(table, i * LIVE_ROW + L_BLOCK), B_REQUESTED)
            count += 1
    unlock(state)
    return count


@njit()
def make_slots(slots, mask, offsets, rows):
    """Fill an empty slot table with distinct offsets (bytes); `rows[i]` becomes the row of `offsets[i]`."""
    for i in range(len(offsets)):
        row = home(offsets[i], mask)
        while slots[row, S_OFFSET] >= 0:
            row = (row + 1) & mask
        slots[row, S_OFFSET] = offsets[i]
        rows[i] = row


allocate_entry = cfunc("int64(int64, int64, int64)")(allocate_on.py_func)
free_entry = cfunc("void(int64, int64)")(free_on.py_func)
