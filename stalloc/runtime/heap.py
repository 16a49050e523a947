"""The fallback heap: best fit with splitting and merging inside segments, for what no plan serves.

Contract: every function runs with the state's lock held; no two live blocks overlap; a block that is freed merges
with its free neighbours at once, so a segment without live blocks is one free block.

A pool is a stream and a kind: small requests share segments; large requests split general segments, as a caching
allocator does, except what is expected to last (the state of an optimizer): it has segments that hold nothing else, so
that it does not pin what is transient. While a CUDA graph is captured everything comes from a private pool, whose
memory nobody else gets as long as the graph can be replayed.
"""

from stalloc.compiled import njit
from stalloc.runtime.counting import count_segment
from stalloc.runtime.free_blocks import before, best_fit, block, give_bins, insert_free, pool_of, remove_free, set_block
from stalloc.runtime.layout import *  # its names are constants to the compiler
from stalloc.runtime.words import peek, poke

_HASH = 0x1E3779B97F4A7C15
_SPLIT_LIMIT = 1 << 20  # bytes; a general block keeps a smaller remainder of a large request, or it would crumble


# --- live blocks: address -> block, linear probing ---------------------------------------------------------------


@njit(inline="always")
def home(address, mask):
    return ((address >> 9) * _HASH >> 24) & mask


@njit()
def find_live(state, address):
    """The live or deferred block at an address, 0 if there is none."""
    table, mask = peek(state, LIVE), peek(state, LIVE_MASK)
    i = home(address, mask)
    while True:
        key = peek(table, i * LIVE_ROW + L_ADDRESS)
        if key == address:
            return peek(table, i * LIVE_ROW + L_BLOCK)
        if key == 0:
            return 0
        i = (i + 1) & mask


@njit()
def add_live(state, address, index):
    table, mask = peek(state, LIVE), peek(state, LIVE_MASK)
    i = home(address, mask)
    while peek(table, i * LIVE_ROW + L_ADDRESS) != 0:
        i = (i + 1) & mask
    poke(table, i * LIVE_ROW + L_ADDRESS, address)
    poke(table, i * LIVE_ROW + L_BLOCK, index)
    poke(state, LIVE_COUNT, peek(state, LIVE_COUNT) + 1)
    if 2 * peek(state, LIVE_COUNT) > mask and mask < peek(state, MOST_LIVE):
        _grow_live(state)


@njit()
def _grow_live(state):
    """Go over to a table of twice as many rows, which lies behind the one in use: a small table stays in the caches."""
    old, rows = peek(state, LIVE), peek(state, LIVE_MASK) + 1
    new, mask = old + rows * LIVE_ROW * 8, 2 * rows - 1
    for row in range(rows):
        address = peek(old, row * LIVE_ROW + L_ADDRESS)
        if address != 0:
            i = home(address, mask)
            while peek(new, i * LIVE_ROW + L_ADDRESS) != 0:
                i = (i + 1) & mask
            poke(new, i * LIVE_ROW + L_ADDRESS, address)
            poke(new, i * LIVE_ROW + L_BLOCK, peek(old, row * LIVE_ROW + L_BLOCK))
    poke(state, LIVE, new)
    poke(state, LIVE_MASK, mask)


@njit()
def _drop_live(state, address):
    table, mask = peek(state, LIVE), peek(state, LIVE_MASK)
    i = home(address, mask)
    while peek(table, i * LIVE_ROW + L_ADDRESS) != address:
        i = (i + 1) & mask
    # close the gap: whatever probed past the hole moves back into it
    hole, j = i, (i + 1) & mask
    while True:
        key = peek(table, j * LIVE_ROW + L_ADDRESS)
        if key == 0:
            break
        if ((j - home(key, mask)) & mask) >= ((j - hole) & mask):
            poke(table, hole * LIVE_ROW + L_ADDRESS, key)
            poke(table, hole * LIVE_ROW + L_BLOCK, peek(table, j * LIVE_ROW + L_BLOCK))
            hole = j
        j = (j + 1) & mask
    poke(table, hole * LIVE_ROW + L_ADDRESS, 0)
    poke(state, LIVE_COUNT, peek(state, LIVE_COUNT) - 1)


# --- blocks, pools and segments ----------------------------------------------------------------------------------


@njit()
def take_row(state):
    spare = peek(state, BLOCKS_SPARE)
    if spare != 0:
        poke(state, BLOCKS_SPARE, block(state, spare, B_NEXT))
        return spare
    used = peek(state, BLOCKS_USED)
    if used >= peek(state, BLOCKS_CAPACITY):
        return 0
    poke(state, BLOCKS_USED, used + 1)
    return used


@njit()
def give_row(state, index):
    set_block(state, index, B_NEXT, peek(state, BLOCKS_SPARE))
    poke(state, BLOCKS_SPARE, index)


@njit()
def find_pool(state, stream, kind, create):
    """The row of the pool for a stream and a kind; -1 if there is none and none is made."""
    table, mask = peek(state, POOLS), peek(state, POOLS_MASK)
    i = ((kind >> 9) * 31 + kind + stream * 7919) & mask
    while True:
        if peek(table, i * POOL_ROW + P_USED) == 0:
            used = peek(state, POOLS_USED)
            # one in eight rows is kept for small and general pools, so that a program of many sizes still gets those
            if not create or used >= mask or (kind > GENERAL_KIND and used >= mask - (mask >> 3)):
                return -1
            poke(state, POOLS_USED, used + 1)
            used = POOL_PINNED if kind >= PRIVATE_KINDS else POOL_FENCED if kind == FENCED_KIND else POOL_USED
            poke(table, i * POOL_ROW + P_USED, used)
            poke(table, i * POOL_ROW + P_STREAM, stream)
            poke(table, i * POOL_ROW + P_KIND, kind)
            if kind <= FENCED_KIND or kind >= PRIVATE_KINDS:
                give_bins(state, i)
            return i
        if peek(table, i * POOL_ROW + P_STREAM) == stream and peek(table, i * POOL_ROW + P_KIND) == kind:
            return i
        i = (i + 1) & mask


@njit()
def pool_kind(state, pool):
    """The kind of a pool, SMALL_KIND and so on."""
    return peek(peek(state, POOLS), pool * POOL_ROW + P_KIND)


@njit(inline="always")
def rounded_bytes(state, index):
    """The bytes that a block which is not free was asked for, rounded up."""
    return (block(state, index, B_REQUESTED) + (ALIGNMENT - 1)) & -ALIGNMENT


@njit()
def new_chunk(state, pool, base, size, first):
    """A row for a chunk of a pool whose first block is `first`; 0 if the table is full."""
    spare, table = peek(state, CHUNKS_FREE), peek(state, CHUNKS)
    if spare != 0:
        chunk = spare
        poke(state, CHUNKS_FREE, peek(table, chunk * CHUNK_ROW + C_FIRST))
    else:
        chunk = peek(state, CHUNKS_USED)
        if chunk >= peek(state, CHUNKS_CAPACITY):
            return 0
        poke(state, CHUNKS_USED, chunk + 1)
    row = table + chunk * CHUNK_ROW * 8
    poke(row, C_BASE, base)
    poke(row, C_POOL, pool)
    poke(row, C_SIZE, size)
    poke(row, C_LIVE, 0)
    poke(row, C_FIRST, first)
    poke(row, C_LOW, 0)
    poke(row, C_HIGH, 0)
    poke(row, C_UNTIL, 0)
    poke(row, C_GROUP, 0)
    poke(row, C_USED, peek(state, STEPS_EVER))
    return chunk


@njit()
def drop_chunk(state, chunk):
    """Give the row of a chunk back."""
    row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
    poke(row, C_BASE, 0)
    poke(row, C_HIGH, 0)
    poke(row, C_FIRST, peek(state, CHUNKS_FREE))
    poke(state, CHUNKS_FREE, chunk)


@njit()
def set_up_block(state, index, address, size, chunk, held):
    """Fill the row of a block without neighbours."""
    set_block(state, index, B_ADDRESS, address)
    set_block(state, index, B_SIZE, size)
    set_block(state, index, B_PREVIOUS, 0)
    set_block(state, index, B_NEXT, 0)
    set_block(state, index, B_CHUNK, chunk)
    set_block(state, index, B_STATE, held)
    set_block(state, index, B_BORN, -1)


@njit()
def add_segment(state, pool, base, size):
    """Give a pool a segment, one free block; its chunk, 0 if the tables are full."""
    index = take_row(state)
    if index == 0:
        return 0
    chunk = new_chunk(state, pool, base, size, index)
    if chunk == 0:
        give_row(state, index)
        return 0
    set_up_block(state, index, base, size, chunk, BLOCK_FREE)
    insert_free(state, index)
    return chunk


@njit()
def last_block(state, chunk):
    """The block at the end of a chunk."""
    index = peek(peek(state, CHUNKS), chunk * CHUNK_ROW + C_FIRST)
    while block(state, index, B_NEXT) != 0:
        index = block(state, index, B_NEXT)
    return index


@njit()
def extend_segment(state, chunk, size):
    """Add `size` free bytes to the end of a segment; False if the tables are full."""
    last = last_block(state, chunk)
    if block(state, last, B_STATE) == BLOCK_FREE:
        remove_free(state, last)
        set_block(state, last, B_SIZE, block(state, last, B_SIZE) + size)
    else:
        index = take_row(state)
        if index == 0:
            return False
        set_up_block(state, index, block(state, last, B_ADDRESS) + block(state, last, B_SIZE), size, chunk, BLOCK_FREE)
        set_block(state, index, B_PREVIOUS, last)
        set_block(state, last, B_NEXT, index)
        last = index
    insert_free(state, last)
    row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
    poke(row, C_SIZE, peek(row, C_SIZE) + size)
    return True


@njit()
def curtail_segment(state, chunk, size):
    """Take `size` bytes off the end of a segment, of which some are left; False if they are not free."""
    last = last_block(state, chunk)
    if block(state, last, B_STATE) != BLOCK_FREE or block(state, last, B_SIZE) < size:
        return False
    remove_free(state, last)
    if block(state, last, B_SIZE) > size:
        set_block(state, last, B_SIZE, block(state, last, B_SIZE) - size)
        insert_free(state, last)
    else:
        set_block(state, block(state, last, B_PREVIOUS), B_NEXT, 0)
        give_row(state, last)
    row = peek(state, CHUNKS) + chunk * CHUNK_ROW * 8
    poke(row, C_SIZE, peek(row, C_SIZE) - size)
    return True


@njit()
def _choose(state, stream, size, way):
    """The pool that serves a request and its best block; block 0 if the pool needs a segment.

    Where memory is short, all holes are used, and a free segment that is much too large is left to go back to the
    device, unless Python was asked already.
    """
    private = peek(state, PRIVATE)
    if private != 0:
        pool = find_pool(state, stream, private, True)
        if pool >= 0:  # the kind may have served graphs before that are gone
            poke(peek(state, POOLS), pool * POOL_ROW + P_USED, POOL_PINNED)
        return pool, best_fit(state, pool, size) if pool >= 0 else 0
    lasts, tight = peek(state, LASTING) == 1, peek(state, TIGHT) == 1 and way != WAY_HEAP
    if size <= SMALL_LIMIT:
        pool = find_pool(state, stream, SMALL_KIND, True)
        found = best_fit(state, pool, size) if pool >= 0 else 0
        if found == 0 and pool >= 0 and tight:
            return _sliver(state, stream, pool, size)
        return pool, found
    lasting = find_pool(state, stream, LASTING_KIND, lasts)
    lasts = lasts and lasting >= 0
    pool = find_pool(state, stream, GENERAL_KIND, not lasts)
    found = best_fit(state, pool, size) if pool >= 0 and (tight or not lasts) else 0
    if tight and found != 0 and _is_cut_for_more(state, found, size):
        found = 0
    # holes among what lasts are in segments that stay anyhow
    hole = best_fit(state, lasting, size) if lasting >= 0 else 0
    if hole != 0 and (found == 0 or before(state, hole, found)):
        return lasting, hole
    return lasting if lasts and found == 0 else pool, found


@njit()
def _sliver(state, stream, pool, size):
    """What is left over in segments of large requests and too small for those, with its pool; else `pool` and 0."""
    for kind in (LASTING_KIND, GENERAL_KIND):
        other = find_pool(state, stream, kind, False)
        found = best_fit(state, other, size) if other >= 0 else 0
        if found != 0 and block(state, found, B_SIZE) < GRANULE:
            return other, found
    return pool, 0


@njit()
def _is_cut_for_more(state, index, size):
    """Whether a free block is a whole segment, and one that is cut for requests of `size` bytes would be smaller."""
    if block(state, index, B_PREVIOUS) != 0 or block(state, index, B_NEXT) != 0:
        return False
    alone = (size + (GRANULE - 1)) & -GRANULE
    if (alone - size) << WASTE_SHIFT > alone:
        return block(state, index, B_SIZE) > MOST_FOR_SEVERAL
    return block(state, index, B_SIZE) > alone + (alone >> 3)


@njit()
def take(state, index, size, requested):
    """Make a free block live, giving back what it has too much; its address."""
    remove_free(state, index)
    kind = pool_kind(state, pool_of(state, index))
    rest = block(state, index, B_SIZE) - size
    if rest > (_SPLIT_LIMIT if kind == GENERAL_KIND and size > SMALL_LIMIT else 0):
        other = take_row(state)
        if other != 0:
            following = block(state, index, B_NEXT)
            set_block(state, other, B_ADDRESS, block(state, index, B_ADDRESS) + size)
            set_block(state, other, B_SIZE, rest)
            set_block(state, other, B_PREVIOUS, index)
            set_block(state, other, B_NEXT, following)
            set_block(state, other, B_CHUNK, block(state, index, B_CHUNK))
            set_block(state, other, B_STATE, BLOCK_FREE)
            if following != 0:
                set_block(state, following, B_PREVIOUS, other)
            set_block(state, index, B_NEXT, other)
            set_block(state, index, B_SIZE, size)
            insert_free(state, other)
    set_block(state, index, B_STATE, BLOCK_LIVE)
    set_block(state, index, B_REQUESTED, requested)
    set_block(state, index, B_BORN, -1)
    address = block(state, index, B_ADDRESS)
    add_live(state, address, index)
    row = peek(state, CHUNKS) + block(state, index, B_CHUNK) * CHUNK_ROW * 8
    poke(row, C_LIVE, peek(row, C_LIVE) + 1)
    poke(row, C_USED, peek(state, STEPS_EVER))
    return address


@njit()
def heap_allocate(state, stream, size, requested, way):
    """Serve a request of `size` (rounded) bytes: its address, -(reason | pool or table << REASON_BITS) for help."""
    pool, index = _choose(state, stream, size, way)
    if pool < 0:
        return -(REFUSED | FULL_POOLS << REASON_BITS)
    if live_is_full(state):
        return -(REFUSED | FULL_LIVE << REASON_BITS)
    if index == 0:
        return -(NEED_SEGMENT | pool << REASON_BITS)
    return take(state, index, size, requested)


@njit(inline="always")
def live_is_full(state):
    """Whether the largest table of live blocks is half full: beyond that looking things up takes long."""
    return 2 * peek(state, LIVE_COUNT) > peek(state, LIVE_MASK)


@njit()
def heap_desperate(state, stream, size, requested):
    """The last resort before an out-of-memory error: any free block of the stream, whatever its pool; 0 if none.

    A capture gets only what is private to it: others would reuse a block that its graph goes on writing to.
    """
    if live_is_full(state):
        return 0
    private = peek(state, PRIVATE)
    if private != 0:
        pool = find_pool(state, stream, private, False)
        found = best_fit(state, pool, size) if pool >= 0 else 0
        return take(state, found, size, requested) if found != 0 else 0
    table = peek(state, POOLS)
    best = 0
    for pool in range(peek(state, POOLS_MASK) + 1):
        if peek(table, pool * POOL_ROW + P_USED) == POOL_USED and peek(table, pool * POOL_ROW + P_STREAM) == stream:
            found = best_fit(state, pool, size)
            if found != 0 and (best == 0 or before(state, found, best)):
                best = found
    return take(state, best, size, requested) if best != 0 else 0


@njit()
def heap_free(state, index):
    """Free a live block and merge it with its free neighbours."""
    _drop_live(state, block(state, index, B_ADDRESS))
    counter = peek(state, CHUNKS) + (block(state, index, B_CHUNK) * CHUNK_ROW + C_LIVE) * 8
    poke(counter, 0, peek(counter, 0) - 1)
    set_block(state, index, B_STATE, BLOCK_FREE)
    following = block(state, index, B_NEXT)
    if following != 0 and block(state, following, B_STATE) == BLOCK_FREE:
        remove_free(state, following)
        _absorb(state, index, following)
    previous = block(state, index, B_PREVIOUS)
    if previous != 0 and block(state, previous, B_STATE) == BLOCK_FREE:
        remove_free(state, previous)
        _absorb(state, previous, index)
        index = previous
    insert_free(state, index)


@njit()
def _absorb(state, index, following):
    after = block(state, following, B_NEXT)
    set_block(state, index, B_SIZE, block(state, index, B_SIZE) + block(state, following, B_SIZE))
    set_block(state, index, B_NEXT, after)
    if after != 0:
        set_block(state, after, B_PREVIOUS, index)
    give_row(state, following)


@njit()
def unpin_pools(state, kind):
    """The graphs that a private kind of pool served are gone: its free segments may go back to the device."""
    table = peek(state, POOLS)
    for pool in range(peek(state, POOLS_MASK) + 1):
        if peek(table, pool * POOL_ROW + P_USED) == POOL_PINNED and peek(table, pool * POOL_ROW + P_KIND) == kind:
            poke(table, pool * POOL_ROW + P_USED, POOL_USED)


@njit()
def _group_in_use(state, group):
    table = peek(state, CHUNKS)
    for chunk in range(1, peek(state, CHUNKS_USED)):
        row = table + chunk * CHUNK_ROW * 8
        if peek(row, C_BASE) != 0 and peek(row, C_GROUP) == group and peek(row, C_LIVE) != 0:
            return True
    return False


@njit()
def take_free_segments(state, bases, sizes, limit, used_before):
    """Take segments without live blocks out of the heap; writes their bases and sizes (bytes), returns how many.

    Only those that were last used before `used_before` passes had ended. Of several chunks that came from the device as
    one piece all are taken, or none. Leases are left alone.
    """
    table, count = peek(state, CHUNKS), 0
    for chunk in range(1, peek(state, CHUNKS_USED)):
        row = table + chunk * CHUNK_ROW * 8
        if peek(row, C_BASE) == 0 or peek(row, C_LIVE) != 0 or peek(row, C_HIGH) != 0 or count >= limit:
            continue
        if peek(row, C_GROUP) != 0 and _group_in_use(state, peek(row, C_GROUP)):
            continue
        if peek(row, C_USED) >= used_before:
            continue
        index = peek(row, C_FIRST)
        pool = peek(state, POOLS) + peek(row, C_POOL) * POOL_ROW * 8
        if peek(pool, P_USED) in (POOL_PINNED, POOL_FENCED):
            continue
        count_segment(state, peek(pool, P_KIND), -peek(row, C_SIZE))
        remove_free(state, index)
        give_row(state, index)
        poke(bases, count, peek(row, C_BASE))
        poke(sizes, count, peek(row, C_SIZE))
        count += 1
        drop_chunk(state, chunk)
    return count
