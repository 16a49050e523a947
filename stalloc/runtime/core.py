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
from stalloc.runtime.counting import (
    begin_peaks,
    count_alloc,
    count_deferred,
    count_free,
    count_joined,
    count_parted,
    count_resized,
    count_segment,
)
from stalloc.runtime.free_blocks import block, largest_block, pool_of
from stalloc.runtime.handing import note_giver, part_streams, planned_entry, record_free, wait_for_givers
from stalloc.runtime.heap import (
    add_segment,
    curtail_segment,
    extend_segment,
    find_live,
    find_pool,
    heap_allocate,
    heap_desperate,
    heap_free,
    home,
    last_block,
    pool_kind,
    rounded_bytes,
    take_free_segments,
    unpin_pools,
)
from stalloc.runtime.layout import *  # its names are constants to the compiler
from stalloc.runtime.lending import (
    call_back,
    call_back_all,
    can_dissolve,
    cell,
    cell_at,
    cells_empty,
    dissolve_region,
    find_chunk,
    find_slot,
    flip_cells,
    go_to,
    group_size,
    lend,
    lifespan_row,
    note_birth,
    note_death,
    reclaim,
    region_end,
    relabel,
    runs_to_keep,
)
from stalloc.runtime.matching import SURE, at_boundary, follow
from stalloc.runtime.words import add, call3, lock, now_ns, peek, poke, unlock

# --- streams and the record --------------------------------------------------------------------------------------


_SPARE_SHIFT = 5  # reserved may exceed what was allocated at most by a thirty-second before all that is idle is lent


@njit()
def _new_stream(state, stream):
    table, count = peek(state, STREAMS), peek(state, NUM_STREAMS)
    index, spare = -1, count
    for i in range(count):
        handle = peek(table, i)
        if handle == stream:
            index = i
            break
        if handle == NO_HANDLE and spare == count:
            spare = i
    if index < 0:
        if spare == MAX_STREAMS:
            return -1
        index = spare
        poke(table, index, stream)
        poke(state, NUM_STREAMS, max(count, index + 1))
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


@njit(inline="always")
def _in_arena(state, address):
    base = peek(state, ARENA)
    return base <= address < base + peek(state, ARENA_BYTES)


# --- allocate and free -------------------------------------------------------------------------------------------


@njit(inline="always")
def _count_alloc(state, stream, address, size, requested):
    count_alloc(state, size, requested)
    if peek(state, RECORDING) == 1:
        record(state, ACTION_ALLOC, stream, address, requested)
        if size > TINY:
            add(state, NUM_SIZABLE, 1)


@njit()
def _too_much(state, size):
    """Whether a segment of so many bytes lets reserved exceed by much what was ever allocated at a time."""
    expected = peek(state, EXPECTED_PEAK)
    most = max(expected, peek(state, SPAN_ALLOCATED_PEAK), peek(state, STEP_ALLOCATED_PEAK))
    return expected > 0 and peek(state, HEALING) == 0 and peek(state, RESERVED) + size > most + (most >> _SPARE_SHIFT)


@njit()
def _serve_unplanned(state, stream, size, requested):
    row = lifespan_row(state, size)
    address = lend(state, stream, size, requested, row, False)
    if address != 0:
        add(state, NUM_LENT, 1)
        return address
    address = heap_allocate(state, stream, size, requested, WAY_FIRST)
    if address < 0 and _too_much(state, size):
        # what the plan needs again soon comes before more than the program ever used: it costs this step some hits
        other = lend(state, stream, size, requested, row, True)
        if other != 0:
            add(state, NUM_LENT, 1)
            return other
    if address > 0:
        note_birth(state, find_live(state, address), row)
    return address


@njit()
def _is_asked_for(state, key):
    """Whether Python wants to be entered before this request is served."""
    return peek(state, ASK_AT_BOUNDARY) == AT_ANY_REQUEST or at_boundary(state, key)


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
            if way == WAY_FIRST and peek(state, ASK_AT_BOUNDARY) != 0 and _is_asked_for(state, key):
                poke(state, ASK_AT_BOUNDARY, 0)
                return -AT_BOUNDARY
            address = follow(state, key, requested)
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
    return heap_allocate(state, stream, size, requested, way)


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
        if stream >= 0:
            address = _try_allocate(state, stream, size, requested, way)
        else:
            address = -(REFUSED | FULL_STREAMS << REASON_BITS)
        if address > 0:
            _count_alloc(state, stream, address, size, requested)
            unlock(state)
            if peek(state, HANDING) == 0 or _secure(state, address):
                return address
            way = WAY_HEAP
            continue
        unlock(state)
        reason = -address & ((1 << REASON_BITS) - 1)
        helped = False
        if address < 0:
            helped = call3(peek(state, SLOW_FUNCTION), peek(state, DEVICE), -address, size) == 1
        if reason in (AT_BOUNDARY, POLL, CHECK):
            way = WAY_AFTER_ASKING  # the tape has not moved yet
        elif reason == STALE or (helped and (reason != REFUSED or way != WAY_HEAP)):
            way = WAY_HEAP  # the tape has moved past this request
        else:
            return _last_resort(state, stream, size, requested)


@njit()
def _secure(state, address):
    """Let the stream wait for those that used a planned address before; False: it was given up again."""
    slot = find_slot(state, address) if _in_arena(state, address) else 0
    waits = wait_for_givers(state, planned_entry(state, slot)) if slot != 0 else 0
    if waits == 0:
        return True
    lock(state)
    if waits > 0:
        add(state, NUM_WAITS, waits)
    else:
        add(state, CONFLICTS, 1)
        slot, index = _find(state, address)
        _release(state, address, slot, index)
    unlock(state)
    return waits > 0


@njit()
def _refuse(state, requested):
    """Python explains a request that no device can serve."""
    call3(peek(state, SLOW_FUNCTION), peek(state, DEVICE), REFUSED, requested)
    lock(state)
    add(state, NUM_OOMS, 1)
    unlock(state)
    return 0


@njit()
def _last_resort(state, stream, size, requested):
    lock(state)
    address = 0
    if stream >= 0 and peek(state, MODE) == MODE_REPLAY and peek(state, PRIVATE) == 0:
        address = lend(state, stream, size, requested, lifespan_row(state, size), True)
    if stream >= 0 and address == 0:
        address = heap_desperate(state, stream, size, requested)
    if address > 0:
        _count_alloc(state, stream, address, size, requested)
    else:
        add(state, NUM_OOMS, 1)
        if peek(state, RECORDING) == 1:
            record(state, ACTION_OOM, max(stream, 0), 0, requested)
    unlock(state)
    return address


@njit(inline="always")
def _find(state, address):
    """What lives at an address: its slot of the plan, or its block; 0 and 0 if nothing does."""
    slot = find_slot(state, address) if _in_arena(state, address) else 0
    return slot, find_live(state, address) if slot == 0 else 0


@njit(inline="always")
def _state_word(state, slot, index):
    """The address of the word that holds the BLOCK_ state of a slot or a block; 0 if there is none."""
    if slot != 0:
        return slot + S_STATE * 8
    return peek(state, BLOCKS) + (index * BLOCK_ROW + B_STATE) * 8 if index != 0 else 0


@njit()
def _size(state, slot, index):
    """The bytes of what lives in a slot or a block, rounded up."""
    if slot != 0:
        return peek(planned_entry(state, slot), T_KEY) >> STREAM_BITS
    return rounded_bytes(state, index)


@njit()
def _release(state, address, slot, index):
    """Free the slot or the block that lives at an address."""
    if slot != 0:
        entry = peek(state, TAPE) + peek(slot, S_ENTRY) * TAPE_ROW * 8
        flip_cells(peek(state, CELLS), peek(entry, T_CELL_LOW), peek(entry, T_CELL_HIGH))
        poke(slot, S_ENTRY, -1)
        poke(slot, S_STATE, BLOCK_FREE)
        add(state, ARENA_LIVE, -1)
        size, requested = peek(entry, T_KEY) >> STREAM_BITS, peek(slot, S_REQUESTED)
        stream = peek(entry, T_KEY) & (MAX_STREAMS - 1)
    else:
        size, requested = rounded_bytes(state, index), block(state, index, B_REQUESTED)
        stream = peek(peek(state, POOLS), pool_of(state, index) * POOL_ROW + P_STREAM)
        if block(state, index, B_BORN) >= 0 and peek(state, MODE) == MODE_REPLAY:
            note_death(state, index)
        heap_free(state, index)
    count_free(state, size, requested)
    if peek(state, RECORDING) == 1:
        record(state, ACTION_FREE_COMPLETED, stream, address, requested)


@njit()
def free_on(state, address):
    """Free a block, or, if other streams have used it, leave that to Python, which waits for them."""
    if address == 0:
        return
    lock(state)
    slot, index = _find(state, address)
    word = _state_word(state, slot, index)
    held = peek(word, 0) if word != 0 else BLOCK_FREE
    if held == BLOCK_LIVE and peek(state, HANDING) == 1:
        _hand_over(state, address, slot, index)
    elif held == BLOCK_LIVE:
        _release(state, address, slot, index)
    elif held == BLOCK_SHARED:
        poke(word, 0, BLOCK_DEFERRED)
        count_deferred(state, _size(state, slot, index), 1)
        if peek(state, RECORDING) == 1:
            record(state, ACTION_FREE_REQUESTED, 0, address, 0)
    else:
        add(state, NUM_UNKNOWN_FREES, 1)
    unlock(state)
    if held == BLOCK_SHARED:
        call3(peek(state, SLOW_FUNCTION), peek(state, DEVICE), DEFER, address)


@njit()
def _hand_over(state, address, slot, index):
    """Free a block; if another stream takes its memory on the plan, with an event that says when it may be used.

    The lock is given up while the event is recorded: the block is nobody's then, but its cells stay taken.
    """
    entry = planned_entry(state, slot) if slot != 0 else 0
    recorded = False
    if entry != 0 and peek(entry, T_GIVES) == 1 and peek(state, PRIVATE) == 0:
        poke(slot, S_STATE, BLOCK_HANDED)
        unlock(state)
        recorded = record_free(state, entry)
        lock(state)
        slot, index = _find(state, address)  # a segment may have been made of the arena meanwhile
    if slot != 0:
        note_giver(state, planned_entry(state, slot), recorded)
    _release(state, address, slot, index)


@njit()
def share(state, address):
    """Note that another stream uses a block: True if that is the first one; False too if nothing lives there."""
    lock(state)
    slot, index = _find(state, address)
    word = _state_word(state, slot, index)
    first = word != 0 and peek(word, 0) == BLOCK_LIVE
    if first:
        poke(word, 0, BLOCK_SHARED)
    unlock(state)
    return first


@njit()
def finish_deferred(state, address):
    """Free a block whose other streams are done with it."""
    lock(state)
    slot, index = _find(state, address)
    word = _state_word(state, slot, index)
    if word != 0 and peek(word, 0) == BLOCK_DEFERRED:
        count_deferred(state, _size(state, slot, index), -1)
        if slot != 0 and peek(state, HANDING) == 1:
            note_giver(state, planned_entry(state, slot), False)
        _release(state, address, slot, index)
    unlock(state)


# --- entry points for Python, each under the lock ----------------------------------------------------------------


@njit()
def give_segment(state, pool, base, size):
    """Add a segment of `size` bytes to a pool; False if the tables are full."""
    lock(state)
    done = add_segment(state, pool, base, size) != 0
    if done:
        count_segment(state, peek(peek(state, POOLS), pool * POOL_ROW + P_KIND), size)
        add(state, NUM_SEGMENT_ALLOCS, 1)
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
def forget_streams(state, kept):
    """Forget streams that hold no segment and are not marked in `kept`, a word for each; how many."""
    lock(state)
    for chunk in range(1, peek(state, CHUNKS_USED)):
        row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
        if peek(row, C_BASE) != 0:
            kept[peek(peek(state, POOLS), peek(row, C_POOL) * POOL_ROW + P_STREAM)] = 1
    table, count = peek(state, STREAMS), 0
    for index in range(1, peek(state, NUM_STREAMS)):
        if kept[index] == 0 and peek(table, index) != NO_HANDLE:
            poke(table, index, NO_HANDLE)
            count += 1
    poke(state, LAST_STREAM, 0)
    poke(state, LAST_STREAM_INDEX, 0)
    unlock(state)
    return count


@njit()
def take_segments(state, bases, sizes, limit, idle_passes):
    """Take up to `limit` free segments back; writes bases and sizes (bytes) to two tables, returns how many.

    Only those of which nothing was taken in the last `idle_passes` passes.
    """
    lock(state)
    used_before = peek(state, STEPS_EVER) + 1 - idle_passes
    count = take_free_segments(state, bases, sizes, limit, used_before)
    for i in range(count):
        add(state, NUM_SEGMENT_FREES, 1)
        if peek(state, RECORDING) == 1:
            record(state, ACTION_SEGMENT_FREE, 0, peek(bases, i), peek(sizes, i))
    unlock(state)
    return count


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
        HITS_BEFORE,
        CONFLICTS_BEFORE,
        HEALING,
        HEAL_AFTER,
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
def end_sharing(state, stream):
    """Part the cells that streams share, once no tape is served; what is empty goes to `stream` (index).

    It may be used when the device has done all that it was given before; `dissolve_arena` then finds regions.
    """
    lock(state)
    if peek(state, MODE) != MODE_REPLAY and peek(state, HANDING) == 1:
        part_streams(state, stream)
    unlock(state)


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
        count_parted(state, regions)
        _forget(state)
    unlock(state)
    return regions


@njit()
def _forget(state):
    for word in (ARENA, ARENA_BYTES, ARENA_LIVE, NUM_CELLS, NUM_LEASES, BYTES_LEASED, HANDING):
        poke(state, word, 0)


@njit()
def fence_segments(state, bases, offsets):
    """Serve nothing more from segments, which came from the device as one; `bases` (n,) are in order.

    Writes where their blocks begin (bytes from the first base), returns how many. -1 if there are no such segments,
    they are not the whole of what came, or they hold more blocks than `offsets` has room for; some may be fenced then.
    """
    lock(state)
    count = 0
    for i in range(len(bases)):
        chunk = find_chunk(state, bases[i])
        row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
        group, end = peek(row, C_GROUP), bases[i] + peek(row, C_SIZE)
        whole = group_size(state, group) == len(bases) if group != 0 else len(bases) == 1
        if chunk == 0 or not whole or (i + 1 < len(bases) and end != bases[i + 1]):
            count = -1
        else:
            index = peek(row, C_FIRST)
            while index != 0:
                if count < len(offsets):
                    offsets[count] = block(state, index, B_ADDRESS) - bases[0]
                count += 1
                index = block(state, index, B_NEXT)
            if count > len(offsets) or not relabel(state, chunk, FENCED_KIND):
                count = -1
        if count < 0:
            break
    unlock(state)
    return count


@njit()
def unfence_segment(state, base):
    """Serve from a segment again, if it is fenced."""
    lock(state)
    chunk = find_chunk(state, base)
    if chunk != 0:
        pool = peek(peek(state, CHUNKS), chunk * CHUNK_ROW + C_POOL)
        if peek(peek(state, POOLS), pool * POOL_ROW + P_KIND) == FENCED_KIND:
            relabel(state, chunk, GENERAL_KIND)
    unlock(state)


@njit()
def serve_segments(state, bases, size):
    """Serve the tape from fenced segments as the arena; False if what lives there does not fit between the cells."""
    lock(state)
    bound, base = peek(state, NUM_CELLS), bases[0]
    poke(state, ARENA, base)
    if cell(state, bound, CI_OFFSET) < size:  # as _serve does it
        poke(peek(state, CELL_INFO), (bound + 1) * CELL_ROW + CI_OFFSET, size)
        poke(state, NUM_CELLS, bound + 1)
    runs = 0
    for i in range(len(bases)):
        chunk = find_chunk(state, bases[i])
        more = runs_to_keep(state, chunk, base) if chunk != 0 else -1
        runs = runs + more if runs >= 0 and more >= 0 else -1
    done = runs >= 0 and peek(state, CHUNKS_CAPACITY) - peek(state, CHUNKS_USED) > runs
    if done:
        _serve(state, base, size)
        for i in range(len(bases)):
            reclaim(state, find_chunk(state, bases[i]), base)
        count_joined(state, len(bases))
    else:
        poke(state, ARENA, 0)
    unlock(state)
    return done


@njit()
def arena_is_idle(state):
    """Whether nothing lives in the arena."""
    lock(state)
    idle = call_back_all(state) and peek(state, ARENA_LIVE) == 0
    unlock(state)
    return idle


@njit()
def resize_segment(state, base, size):
    """Let a segment end elsewhere, `size` bytes from its base; False if what it would lose is not free."""
    lock(state)
    chunk, done = find_chunk(state, base), False
    row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
    if chunk != 0 and peek(row, C_GROUP) == 0 and size > 0:
        more = size - peek(row, C_SIZE)
        done = more == 0
        if more > 0:
            done = extend_segment(state, chunk, more)
        elif more < 0:
            done = curtail_segment(state, chunk, -more)
        if done and more != 0:
            count_resized(state, pool_kind(state, peek(row, C_POOL)), more)
    unlock(state)
    return done


@njit()
def segment_needs(state, base):
    """Where the last block that is not free ends in a segment, bytes from its base; 0 if there is none."""
    lock(state)
    chunk, needs = find_chunk(state, base), 0
    if chunk != 0:
        index = last_block(state, chunk)
        if block(state, index, B_STATE) == BLOCK_FREE:
            index = block(state, index, B_PREVIOUS)
        if index != 0:
            needs = block(state, index, B_ADDRESS) + block(state, index, B_SIZE) - base
    unlock(state)
    return needs


@njit()
def cut_arena(state, size):
    """Let the arena end after `size` bytes, beyond which the plan places nothing; False if somebody is there."""
    lock(state)
    first, count, done = cell_at(state, size), peek(state, NUM_CELLS), False
    if peek(state, ARENA_BYTES) > size and 0 <= first < count:
        call_back(state, first, count)
        done = cells_empty(peek(state, CELLS), first, count)
        if done:
            poke(state, NUM_CELLS, first)
            count_resized(state, GENERAL_KIND, size - peek(state, ARENA_BYTES))
            poke(state, ARENA_BYTES, size)
            add(state, CELLS_FREED, 1)
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
        poke(state, LAST_MISS, min(peek(state, LAST_MISS), peek(state, HISTORY_COUNT) - SURE))
    unlock(state)


@njit()
def reset_peaks(state):
    """Let the peaks that the program asks for begin anew."""
    lock(state)
    begin_peaks(state)
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
        count_segment(state, GENERAL_KIND, -arena_bytes)
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
    count_segment(state, GENERAL_KIND, size)
    unlock(state)


@njit()
def largest_free(state):
    """The largest free block of the heap, bytes."""
    lock(state)
    largest, table = 0, peek(state, POOLS)
    for pool in range(peek(state, POOLS_MASK) + 1):
        if peek(table, pool * POOL_ROW + P_USED) == POOL_USED:
            largest = max(largest, largest_block(state, pool))
    unlock(state)
    return largest


@njit()
def count_inactive(state):
    """Free ranges beside live blocks, in segments and the arena: bytes, how many, and both in small pools alone."""
    lock(state)
    size = number = small_size = small_number = 0
    for chunk in range(1, peek(state, CHUNKS_USED)):
        row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
        if peek(row, C_BASE) == 0 or (peek(row, C_LIVE) == 0 and peek(row, C_HIGH) == 0):
            continue
        index = peek(row, C_FIRST)
        small = peek(peek(state, POOLS), peek(row, C_POOL) * POOL_ROW + P_KIND) == SMALL_KIND
        while index != 0:
            if block(state, index, B_STATE) == BLOCK_FREE:
                size, number = size + block(state, index, B_SIZE), number + 1
                small_size += small * block(state, index, B_SIZE)
                small_number += small
            index = block(state, index, B_NEXT)
    idle = False
    for i in range(peek(state, NUM_CELLS) if peek(state, ARENA_BYTES) > 0 else 0):
        empty = cells_empty(peek(state, CELLS), i, i + 1)
        if empty:
            size += cell(state, i + 1, CI_OFFSET) - cell(state, i, CI_OFFSET)
            number += not idle
        idle = empty
    unlock(state)
    return size, number, small_size, small_number


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
