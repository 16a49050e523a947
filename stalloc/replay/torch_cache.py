"""What PyTorch's CUDA caching allocator does with a program, event by event.

Contract: every choice is the one of torch 2.11's c10/cuda/CUDACachingAllocator.cpp: the block that a request gets,
whether it is split, when device memory is taken, and what goes back when the device has no more. A device fails only
when its capacity is exceeded. A request of no bytes gets no block.
"""

from stalloc.allocator_conf import NUM_INTERVALS
from stalloc.compiled import inner, njit
from stalloc.replay.blocks import (
    FREE,
    LIVE,
    UNMAPPED,
    WAITING,
    at,
    count_call,
    drop_block,
    fits,
    give_up,
    is_whole,
    place_at,
)
from stalloc.replay.driver import driver_of, note
from stalloc.replay.protocol import Kind
from stalloc.replay.rounding import SMALL_BYTES, log2, round_up, torch_segment_size
from stalloc.replay.torch_blocks import (
    OWN,
    add_free,
    add_segment,
    cut,
    device_address,
    divisions_at,
    free_and_merge,
    pool_of,
    searches_at,
)
from stalloc.replay.torch_expandable import grow, unmap_pages
from stalloc.replay.treap import best_fit, following, last, remove

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
    """The size that a block can reach by mapping more memory."""
    after = at(t, block).next
    return at(t, block).size + (at(t, after).size if after != 0 and at(t, after).state == UNMAPPED else 0)


@inner()
def _find_cached(t, m, pool, size):
    """Take a free block that serves the request out of its tree; 0 if there is none."""
    if m.collect_above >= 0:
        searches_at(m, pool & 1).value += 1
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
        return grow(t, m, pool, size)
    if not fits(t, wanted):
        return 0
    block = add_segment(t, pool, device_address(t, m, wanted, wanted), wanted, 0)
    count_call(t, wanted)
    return block


@inner()
def _release(t, block):
    """Give a segment that is one free block back to the device."""
    remove(t, block)
    count_call(t, -at(t, block).size)
    drop_block(t, block)


@inner()
def _is_free_segment(t, block):
    """Whether a row is a free block that spans a segment of its own."""
    return at(t, block).state == FREE and is_whole(t, block)


@inner()
def _collect(t, m):
    """Give back the large segments that were free for longer than the mean, until enough is free."""
    if m.collect_above < 0 or t.reserved <= m.collect_above:
        return
    target = t.reserved - m.collect_above
    now, total_age, count = searches_at(m, 1).value, 0, 0
    for block in range(1, t.blocks_used):
        if _is_free_segment(t, block) and pool_of(t, block) & 1:
            total_age += now - at(t, block).other
            count += 1
    reclaimed, went_on = 0, True
    while reclaimed < target and went_on and count > 0:
        threshold = total_age / count
        went_on = False
        for block in range(1, t.blocks_used):
            if not (_is_free_segment(t, block) and pool_of(t, block) & 1):
                continue
            age = now - at(t, block).other
            if age >= threshold:
                went_on = True
                reclaimed += at(t, block).size
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
    released = 0
    while released < wanted:
        block = last(t, 2 * pool)
        if block == 0 or at(t, block).size < limit:
            return False
        released += at(t, block).size
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
                free_and_merge(t, m, block)
        m.waiting_blocks = 0
    for block in range(1, end):
        if at(t, block).state == FREE:
            if at(t, block).extra != 0:
                unmap_pages(t, m, block)
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
    rounded = round_size(divisions_at(m, interval_of(size)).value, size)
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
        add_free(t, m, cut(t, block, rounded, FREE))
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
    free=free_and_merge,
    has_room=_has_room,
    empty=_empty,
    give_up=_give_up,
    note=_note,
)
