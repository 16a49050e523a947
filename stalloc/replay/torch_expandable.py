"""Expandable segments: address space for a stream's pool, to which memory is mapped page by page.

Upheld: an unmapped range begins and ends at pages of its segment; a segment is a chain of blocks from its base to the
end of its address space, and goes when all of it is unmapped. The steps are those of torch's
c10/cuda/CUDACachingAllocator.cpp, "Expandable Segments".
"""

from stalloc.compiled import njit
from stalloc.replay.torch_blocks import (
    ADDRESS,
    BASE,
    CAPACITY,
    FREE,
    LARGE_SEGMENT,
    NEXT,
    POOL,
    PREVIOUS,
    RESERVED,
    SIZE,
    SPACE_BYTES,
    STATUS,
    UNMAPPED,
    add_free,
    add_segment,
    add_unmapped,
    count_reserved,
    cut,
    device_address,
    first,
    following,
    free_tree,
    give_row,
    merge_neighbours,
    remove,
    unmapped_tree,
)

_SMALL_PAGE = 2 << 20


@njit()
def _page_bytes(state, pool):
    return state.numbers[LARGE_SEGMENT] if pool & 1 else _SMALL_PAGE


@njit()
def _has_room(state, block, size):
    cells, found = state.cells, 0
    while block != 0 and found < size and (cells[block + STATUS] == FREE or cells[block + STATUS] == UNMAPPED):
        found += cells[block + SIZE]
        block = cells[block + NEXT]
    return found >= size


@njit()
def _find_room(state, pool, size):
    """Where `size` bytes can be had by mapping, lowest address first; a new segment if nowhere."""
    cells, header = state.cells, unmapped_tree(state, pool)
    block = first(cells, header)
    while block != 0:
        start, before = block, cells[block + PREVIOUS]
        if before != 0 and cells[before + STATUS] == FREE:
            start = before
        if _has_room(state, start, size):
            return start
        block = following(cells, header, block)
    page = _page_bytes(state, pool)
    space = (state.numbers[SPACE_BYTES] + page - 1) // page * page
    address = device_address(state, space, page)
    block = add_segment(state, pool, address, space, address)
    add_unmapped(state, block)
    return block


@njit()
def _map(state, block, size):
    """Map at least `size` bytes from the start of an unmapped range; False if the device has not as many."""
    cells, numbers = state.cells, state.numbers
    pool = cells[block + POOL]
    page = _page_bytes(state, pool)
    mapped = (size + page - 1) // page * page
    if numbers[CAPACITY] > 0 and numbers[RESERVED] + mapped > numbers[CAPACITY]:
        return False
    remove(cells, unmapped_tree(state, pool), block)
    if mapped < cells[block + SIZE]:
        add_unmapped(state, cut(state, block, mapped, UNMAPPED))
    merge_neighbours(state, block, FREE, True)
    add_free(state, block)
    count_reserved(state, mapped)
    return True


@njit()
def grow(state, pool, size):
    """A block of at least `size` bytes made by mapping, in no tree; 0 if the device has not as much.

    What was mapped before the device ran out stays in the pool.
    """
    cells = state.cells
    block = _find_room(state, pool, size)
    if cells[block + STATUS] == UNMAPPED and not _map(state, block, min(cells[block + SIZE], size)):
        return 0
    while cells[block + SIZE] < size:
        missing, after = size - cells[block + SIZE], cells[block + NEXT]
        if not _map(state, after, min(missing, cells[after + SIZE])):
            return 0
        block = after  # it has taken up the free block before it
    remove(cells, free_tree(state, pool), block)
    return block


@njit()
def unmap_pages(state, block):
    """Give the whole pages of a free block back to the device, and the segment if nothing of it is left."""
    cells = state.cells
    pool, base = cells[block + POOL], cells[block + BASE]
    page = _page_bytes(state, pool)
    start, end = cells[block + ADDRESS] - base, cells[block + ADDRESS] + cells[block + SIZE] - base
    begin, beyond = (start + page - 1) // page * page, end // page * page
    if begin >= beyond:
        return
    remove(cells, free_tree(state, pool), block)
    if beyond < end:
        add_free(state, cut(state, block, beyond - start, FREE))
    if begin > start:
        rest = cut(state, block, begin - start, UNMAPPED)
        add_free(state, block)
        block = rest
    merge_neighbours(state, block, UNMAPPED, False)
    add_unmapped(state, block)
    count_reserved(state, begin - beyond)
    if cells[block + PREVIOUS] == 0 and cells[block + NEXT] == 0:
        remove(cells, unmapped_tree(state, pool), block)
        give_row(state, block)
