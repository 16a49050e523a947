"""Expandable segments: address space for a stream's pool, to which memory is mapped page by page.

Upheld: an unmapped range begins and ends at pages of its segment; a segment is a chain of blocks from its base to the
end of its address space, and goes when all of it is unmapped. The steps are those of torch's
c10/cuda/CUDACachingAllocator.cpp, "Expandable Segments".
"""

from stalloc.compiled import inner
from stalloc.replay.blocks import FREE, UNMAPPED, at, count_call, drop_block, fits, is_whole
from stalloc.replay.rounding import GRANULE, round_up
from stalloc.replay.torch_blocks import (
    add_free,
    add_segment,
    add_unmapped,
    cut,
    device_address,
    free_and_merge,
    pool_of,
)
from stalloc.replay.treap import first, following, merge, remove


@inner()
def _page_bytes(m, pool):
    return m.large_segment_bytes if pool & 1 else GRANULE


@inner()
def _has_room(t, block, size):
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
        if _has_room(t, start, size):
            return start
        block = following(t, block)
    page = _page_bytes(m, pool)
    space = round_up(m.space_bytes, page)
    address = device_address(t, m, space, page)
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
        add_unmapped(t, cut(t, block, mapped, UNMAPPED))
    count_call(t, mapped)
    return free_and_merge(t, m, block)


@inner()
def grow(t, m, pool, size):
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
def unmap_pages(t, m, block):
    """Give the whole pages of a free block back to the device, and the segment if nothing of it is left."""
    page, start = _page_bytes(m, pool_of(t, block)), at(t, block).address - at(t, block).extra
    end = start + at(t, block).size
    begin, beyond = round_up(start, page), end // page * page
    if begin >= beyond:
        return
    remove(t, block)
    if beyond < end:
        add_free(t, m, cut(t, block, beyond - start, FREE))
    if begin > start:
        rest = cut(t, block, begin - start, UNMAPPED)
        add_free(t, m, block)
        block = rest
    block = merge(t, 2 * pool_of(t, block) + 1, UNMAPPED, block)
    add_unmapped(t, block)
    count_call(t, begin - beyond)
    if is_whole(t, block):
        remove(t, block)
        drop_block(t, block)
