"""What PyTorch's CUDA caching allocator does with a program, event by event.

Contract: every choice is the one of torch 2.11's c10/cuda/CUDACachingAllocator.cpp: the block that a request gets,
whether it is split, when device memory is taken, and what goes back when the device has no more. A device fails only
when its capacity is exceeded. A request of no bytes gets no block.

A stream has four trees: free small blocks, unmapped small ranges, free large blocks, unmapped large ranges. Free blocks
are ordered by size, unmapped ranges by address. A pool is twice the stream, plus one for large blocks, and is half the
number of the tree that a block is in, or was in last. `extra` of a block is the start of the expandable segment that it
belongs to, 0 for none; `other` of a free one counts for the collection by age.

Expandable segments are address space for a stream's pool, to which memory is mapped page by page: an unmapped range
begins and ends at pages of its segment; a segment is a chain of blocks from its base to the end of its address space,
and goes when all of it is unmapped.
"""

import numpy as np

from stalloc.allocator_conf import NUM_INTERVALS, TorchSettings
from stalloc.compiled import inner, njit
from stalloc.core.record_types import row_of
from stalloc.core.records import Word
from stalloc.replay.blocks import (
    FREE,
    GRANULE,
    LIVE,
    SMALL_BYTES,
    UNMAPPED,
    WAITING,
    at,
    count_call,
    drop_block,
    fits,
    give_up,
    is_whole,
    log2,
    place_at,
    round_up,
    split,
    torch_segment_size,
    whole_block,
)
from stalloc.replay.driver import driver_of, note
from stalloc.replay.model import own_type
from stalloc.replay.protocol import Kind
from stalloc.replay.treap import best_fit, first, following, insert, insert_by, last, merge, remove

TREES = 4  # of a stream
_TABLES = ("searches", "divisions", "given", "num_given")
OWN = own_type(
    TorchSettings,
    *_TABLES,
    "given_used",
    "block_bytes",  # whole blocks that are not given up, which torch calls allocated
    "waiting_blocks",
    "out_of_memory",  # requests that ran out of memory
    "allowed",  # bytes that the process may reserve, -1 for no limit
    "collect_above",  # bytes reserved above which blocks go back by age, -1 for never
    "space_bytes",  # addresses of an expandable segment
)
_searches_at = row_of("searches", Word)  # (2,) looks into the free blocks of the small and of the large pools
_divisions_at = row_of("divisions", Word)  # (16,) of the rounding, for each power of two from 1 MiB on
_given_at = row_of("given", Word)  # (num_given,) device addresses to be handed out in order, before any are made up
_ALIGN = np.int64(0x1FFFFF)


@inner()
def pool_of(t, block):
    """The pool of a block."""
    return at(t, block).tree >> 1


@inner()
def _cut(t, block, size, state):
    """Split a block that is in no tree after `size` bytes; the rest is a new block with that state, in no tree."""
    rest = split(t, block, size)
    at(t, rest).extra, at(t, rest).state = at(t, block).extra, state
    return rest


@inner()
def add_free(t, m, block):
    """A mapped block joins the free ones of its pool."""
    pool, free = pool_of(t, block), at(t, block)
    free.state, free.request, free.other = FREE, -1, _searches_at(m, pool & 1).value
    insert(t, 2 * pool, block)


@inner()
def add_unmapped(t, block):
    """A range of addresses without memory joins the unmapped ones of its pool."""
    at(t, block).state, at(t, block).request = UNMAPPED, -1
    insert_by(t, 2 * pool_of(t, block) + 1, block, 0)


@inner()
def _free_and_merge(t, m, block):
    block = merge(t, 2 * pool_of(t, block), FREE, block)
    add_free(t, m, block)
    return block


@inner()
def add_segment(t, pool, address, size, base):
    """A new block that spans a segment, in no tree."""
    block = whole_block(t, address, size)
    at(t, block).tree, at(t, block).stream, at(t, block).extra = 2 * pool, pool >> 1, base
    return block


@inner()
def _is_taken(t, begin, end):
    for row in range(1, t.blocks_used):
        block = at(t, row)
        is_mapped = block.state in (FREE, LIVE, WAITING)
        if is_mapped and block.address < end and begin < block.address + block.size:
            return True
    return False


@inner()
def raise_next_address(t, end):
    """Place later segments behind `end`."""
    t.next_address = max(t.next_address, (end + _ALIGN) & ~_ALIGN)


@inner()
def _device_address(t, m, size, mapped):
    """Where the device puts the next segment of `size` bytes, of which `mapped` are used soon: as given, or above all
    others.

    A model that does something else than the run whose addresses were given may meet one that is taken: from there on
    they are its own.
    """
    address = t.next_address
    if m.given_used < m.num_given:
        told = _given_at(m, m.given_used).value
        if _is_taken(t, told, told + mapped):
            m.given_used = m.num_given
        else:
            m.given_used += 1
            address = told
    raise_next_address(t, address + size)
    return address


@inner()
def _page_bytes(m, pool):
    return m.large_segment_bytes if pool & 1 else GRANULE


@inner()
def _can_grow_to(t, block, size):
    found = 0
    while block != 0 and found < size and (at(t, block).state == FREE or at(t, block).state == UNMAPPED):
        found += at(t, block).size
        block = at(t, block).next
    return found >= size


@inner()
def _find_room(t, m, pool, size):
    """Where `size` bytes can be had by mapping, lowest address first; a new segment if nowhere."""
    block = first(t, 2 * pool + 1)
    while block != 0:
        start, before = block, at(t, block).previous
        if before != 0 and at(t, before).state == FREE:
            start = before
        if _can_grow_to(t, start, size):
            return start
        block = following(t, block)
    page = _page_bytes(m, pool)
    space = round_up(m.space_bytes, page)
    address = _device_address(t, m, space, page)
    block = add_segment(t, pool, address, space, address)
    add_unmapped(t, block)
    return block


@inner()
def _map(t, m, block, size):
    """Map at least `size` bytes from the start of an unmapped range; the free block that they belong to then, 0 if the
    device has not as many."""
    page = _page_bytes(m, pool_of(t, block))
    mapped = round_up(size, page)
    if not fits(t, mapped):
        return 0
    remove(t, block)
    if mapped < at(t, block).size:
        add_unmapped(t, _cut(t, block, mapped, UNMAPPED))
    count_call(t, mapped)
    return _free_and_merge(t, m, block)


@inner()
def _grow(t, m, pool, size):
    """A block of at least `size` bytes made by mapping, in no tree; 0 if the device has not as much.

    What was mapped before the device ran out stays in the pool.
    """
    block = _find_room(t, m, pool, size)
    if at(t, block).state == UNMAPPED:
        block = _map(t, m, block, min(at(t, block).size, size))
    while block != 0 and at(t, block).size < size:
        after = at(t, block).next
        block = _map(t, m, after, min(size - at(t, block).size, at(t, after).size))
    if block != 0:
        remove(t, block)
    return block


@inner()
def _unmap_pages(t, m, block):
    """Give the whole pages of a free block back to the device, and the segment if nothing of it is left."""
    page, start = _page_bytes(m, pool_of(t, block)), at(t, block).address - at(t, block).extra
    end = start + at(t, block).size
    begin, beyond = round_up(start, page), end // page * page
    if begin >= beyond:
        return
    remove(t, block)
    if beyond < end:
        add_free(t, m, _cut(t, block, beyond - start, FREE))
    if begin > start:
        rest = _cut(t, block, begin - start, UNMAPPED)
        add_free(t, m, block)
        block = rest
    block = merge(t, 2 * pool_of(t, block) + 1, UNMAPPED, block)
    add_unmapped(t, block)
    count_call(t, begin - beyond)
    if is_whole(t, block):
        remove(t, block)
        drop_block(t, block)


RELEASE = len(Kind)
"""A kind of event beyond those of all models, for recordings: the segment whose address stands in the place of the
request goes back to the device, if it is free as a whole."""


@njit()
def interval_of(size):
    """The power of two, counted from 1 MiB on, that says in how many divisions a size is rounded."""
    return min(max(log2(size) - 20, 0), NUM_INTERVALS - 1)


@njit()
def round_size(parts, size):
    """Bytes of the block that a request of `size` bytes is looked for with; `parts`: divisions of its interval."""
    if size < 512:
        return 512
    if parts > 1 and size > 512 * parts:
        power = log2(size)
        if size == 1 << power:
            return size
        step = (1 << power) // parts
        return 2 << power if step == 0 else round_up(size, step)
    return (size + 511) // 512 * 512


@inner()
def _growing_size(t, block):
    after = at(t, block).next
    return at(t, block).size + (at(t, after).size if after != 0 and at(t, after).state == UNMAPPED else 0)


@inner()
def _find_cached(t, m, pool, size):
    """Take a free block that serves the request out of its tree; 0 if there is none."""
    if m.collect_above >= 0:
        _searches_at(m, pool & 1).value += 1
    block = best_fit(t, 2 * pool, size)
    if block == 0:
        return 0
    if m.expandable_segments:
        # the block that grows least far is the best, not the smallest
        after = following(t, block)
        while after != 0 and at(t, block).extra != 0 and _growing_size(t, after) < _growing_size(t, block):
            block = after
            after = following(t, block)
    limit = m.max_split_bytes
    if limit > 0 and size < limit <= at(t, block).size:
        return 0
    if 0 < limit <= size and at(t, block).size >= size + m.max_non_split_rounding_bytes:
        return 0
    remove(t, block)
    return block


@inner()
def _take_from_device(t, m, pool, size):
    """A block of a new segment, in no tree; 0 if the device or the process's share has no more."""
    wanted = torch_segment_size(size, m.large_segment_bytes)
    if m.allowed >= 0 and t.reserved + wanted > m.allowed:
        return 0
    if m.expandable_segments:
        return _grow(t, m, pool, size)
    if not fits(t, wanted):
        return 0
    block = add_segment(t, pool, _device_address(t, m, wanted, wanted), wanted, 0)
    count_call(t, wanted)
    return block


@inner()
def _release(t, block):
    remove(t, block)
    count_call(t, -at(t, block).size)
    drop_block(t, block)


@inner()
def _is_free_segment(t, block):
    return at(t, block).state == FREE and is_whole(t, block)


@inner()
def _collect(t, m):
    """Give back the large segments that were free for longer than the mean, until enough is free."""
    if m.collect_above < 0 or t.reserved <= m.collect_above:
        return
    target = t.reserved - m.collect_above
    now, total_age, count = _searches_at(m, 1).value, 0, 0
    for block in range(1, t.blocks_used):
        if _is_free_segment(t, block) and pool_of(t, block) & 1:
            total_age += now - at(t, block).other
            count += 1
    went_on = True
    while target > 0 and went_on and count > 0:
        threshold = total_age / count
        went_on = False
        for block in range(1, t.blocks_used):
            age = now - at(t, block).other
            if age >= threshold and _is_free_segment(t, block) and pool_of(t, block) & 1:
                went_on = True
                target -= at(t, block).size
                total_age -= age
                count -= 1
                _release(t, block)


@inner()
def _release_oversize(t, m, pool, size):
    """Give back unsplittable blocks of the stream, enough for the request if there are; whether it was enough.

    Expandable segments have no blocks of their own to give back: they wait until the cache is emptied.
    """
    limit = m.max_split_bytes
    if limit == 0 or m.expandable_segments:
        return False
    wanted = max(size, limit)
    block = best_fit(t, 2 * pool, wanted)
    if block != 0:
        _release(t, block)
        return True
    while wanted > 0:
        block = last(t, 2 * pool)
        if block == 0 or at(t, block).size < limit:
            return False
        wanted -= at(t, block).size
        _release(t, block)
    return True


@inner()
def _empty_cache(t, m):
    """Wait for all streams, then give back every segment and page without a live block."""
    end = t.blocks_used
    if m.waiting_blocks > 0:
        for block in range(1, end):
            if at(t, block).state == WAITING:
                place_at(t, at(t, block).request).value = 0
                _free_and_merge(t, m, block)
        m.waiting_blocks = 0
    for block in range(1, end):
        if at(t, block).state == FREE:
            if at(t, block).extra != 0:
                _unmap_pages(t, m, block)
            elif is_whole(t, block):
                _release(t, block)


@inner()
def _empty(t, m, kind, address):
    if kind == Kind.EMPTY_CACHE:
        _empty_cache(t, m)
        return
    for block in range(1, t.blocks_used):
        if at(t, block).address == address and _is_free_segment(t, block):
            _release(t, block)
            return


@inner()
def _take(t, m, pool, size):
    """A block of at least `size` bytes, in no tree, from the cache or from the device; 0 when memory runs out."""
    block = _find_cached(t, m, pool, size)
    if block == 0:
        _collect(t, m)
        block = _take_from_device(t, m, pool, size)
        if block == 0 and _release_oversize(t, m, pool, size):
            block = _take_from_device(t, m, pool, size)
        if block == 0:
            _empty_cache(t, m)
            t.retries += 1
            block = _take_from_device(t, m, pool, size)
    return block


@inner()
def _allocate(t, m, request, size, stream):
    rounded = round_size(_divisions_at(m, interval_of(size)).value, size)
    pool = 2 * stream + (1 if rounded > SMALL_BYTES else 0)
    block = _take(t, m, pool, rounded)
    if block == 0:
        m.out_of_memory += 1
        return -1
    rest = at(t, block).size - rounded
    if pool & 1 == 0 or m.expandable_segments:
        splits = rest >= 512
    else:
        splits = (m.max_split_bytes == 0 or rounded < m.max_split_bytes) and rest > SMALL_BYTES
    if splits:
        add_free(t, m, _cut(t, block, rounded, FREE))
    m.block_bytes += at(t, block).size
    return block


@inner()
def _give_up(t, m, request, kind):
    held = place_at(t, request).value
    if held != 0 and at(t, held).state == LIVE:
        m.block_bytes -= at(t, held).size
        m.waiting_blocks += 1
    block = give_up(t, request, kind)
    if block != 0:
        m.waiting_blocks -= 1
    return block


@inner()
def _has_room(t, m, size):
    """Whether the tables have room: unmapping may cut every free block in three."""
    used = t.blocks_used - t.num_spare
    return t.num_blocks - used >= 16 + (2 * used if m.expandable_segments else 0)


@inner()
def _note(t, m, at_event, columns):
    note(t, m, at_event, columns)
    columns[2, at_event] = m.block_bytes


run = driver_of(
    "torch",
    OWN,
    allocate=_allocate,
    free=_free_and_merge,
    has_room=_has_room,
    empty=_empty,
    give_up=_give_up,
    note=_note,
)
