"""Blocks of the caching allocator's model: rows of integers, and ordered trees of the free ones.

Contract: a block's name is the position of its row in `cells`, so `cells[block + SIZE]` is a field; 0 is no block.
Free blocks of a stream and pool form a treap ordered by (size, address), unmapped ranges one ordered by address
(Seidel and Aragon, "Randomized search trees", Algorithmica 1996), so the best fit costs O(log n). KEY is the size
while a block is in a tree of free blocks and 0 in a tree of unmapped ranges; neither it nor the address may change
while the block is in a tree.
"""

from typing import NamedTuple

from stalloc.compiled import njit
from stalloc.trace.record import Column

ROW = 16
ADDRESS, SIZE, KEY, PRIORITY, LEFT, RIGHT, PREVIOUS, NEXT, POOL, STATUS, REQUEST, REQUESTED, AGE, BASE = range(14)
"""BASE is the start of the expandable segment that a block belongs to, 0 for none; AGE counts for the collection."""

UNUSED, FREE, LIVE, WAITING, UNMAPPED, HEADER = range(6)

SEED = 0x2545F4914F6CDD1D

(
    ROWS_END,  #: end of the rows ever used
    SPARE,  #: list of rows given back
    NUM_SPARE,
    RESERVED,
    PEAK_RESERVED,
    ALLOCATED,  #: requested bytes in blocks not given up
    PEAK_ALLOCATED,
    BLOCK_BYTES,  #: the same in whole blocks, which torch calls allocated
    NUM_WAITING,
    DEVICE_ALLOCS,
    DEVICE_FREES,
    RETRIES,
    OUT_OF_MEMORY,
    SMALL_SEARCHES,  #: looks into the free blocks of the small pools; the large ones' count comes next
    LARGE_SEARCHES,
    NUM_GIVEN,  #: device addresses used up
    NEXT_ADDRESS,
    CAPACITY,
    ALLOWED,
    COLLECT_ABOVE,
    MAX_SPLIT,
    MAX_ROUNDING,
    LARGE_SEGMENT,
    EXPANDABLE,
    SPACE_BYTES,  #: address space of an expandable segment
    NUM_NUMBERS,
) = range(26)


class State(NamedTuple):
    """All that a model remembers; columns are int64."""

    cells: Column  #: rows of blocks
    holder: Column  #: block of each request, 0 if it has none
    roots: Column  #: (4 a stream) header rows: free small, unmapped small, free large, unmapped large
    numbers: Column  #: counters and settings
    divisions: Column  #: of the rounding, for each power of two from 1 MiB on
    given: Column  #: device addresses to be handed out in order, before any are made up


@njit()
def take_row(state):
    """A row for a block; there has to be room."""
    numbers = state.numbers
    row = numbers[SPARE]
    if row != 0:
        numbers[SPARE] = state.cells[row + NEXT]
        numbers[NUM_SPARE] -= 1
    else:
        row = numbers[ROWS_END]
        numbers[ROWS_END] = row + ROW
    return row


@njit()
def give_row(state, block):
    """The block is no more."""
    state.cells[block + STATUS] = UNUSED
    state.cells[block + NEXT] = state.numbers[SPARE]
    state.numbers[SPARE] = block
    state.numbers[NUM_SPARE] += 1


@njit()
def free_tree(state, pool):
    """Header of a pool's free blocks. A pool is twice the stream, plus one for the large blocks."""
    return state.roots[2 * pool]


@njit()
def unmapped_tree(state, pool):
    """Header of a pool's unmapped ranges."""
    return state.roots[2 * pool + 1]


@njit()
def insert(cells, header, block):
    """Put a block into a tree."""
    x = cells[header + PRIORITY]  # a header's is the state of the tree's random numbers
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    cells[header + PRIORITY] = x
    key, address = cells[block + KEY], cells[block + ADDRESS]
    cells[block + PRIORITY] = x
    link = header + LEFT
    current = cells[link]
    while current != 0 and cells[current + PRIORITY] >= x:
        other = cells[current + KEY]
        before = key < other or (key == other and address < cells[current + ADDRESS])
        link = current + (LEFT if before else RIGHT)
        current = cells[link]
    cells[link] = block
    left, right = block + LEFT, block + RIGHT
    while current != 0:
        other = cells[current + KEY]
        if key < other or (key == other and address < cells[current + ADDRESS]):
            cells[right] = current
            right = current + LEFT
            current = cells[right]
        else:
            cells[left] = current
            left = current + RIGHT
            current = cells[left]
    cells[left] = 0
    cells[right] = 0


@njit()
def remove(cells, header, block):
    """Take a block out of the tree that it is in."""
    key, address = cells[block + KEY], cells[block + ADDRESS]
    link = header + LEFT
    current = cells[link]
    while current != block:
        other = cells[current + KEY]
        before = key < other or (key == other and address < cells[current + ADDRESS])
        link = current + (LEFT if before else RIGHT)
        current = cells[link]
    a, b = cells[block + LEFT], cells[block + RIGHT]
    while a != 0 and b != 0:
        if cells[a + PRIORITY] >= cells[b + PRIORITY]:
            cells[link] = a
            link = a + RIGHT
            a = cells[link]
        else:
            cells[link] = b
            link = b + LEFT
            b = cells[link]
    cells[link] = a if a != 0 else b


@njit()
def best_fit(cells, header, size):
    """The smallest block of at least `size` bytes, the lowest of equals; 0 if none."""
    best, current = 0, cells[header + LEFT]
    while current != 0:
        if cells[current + KEY] >= size:
            best, current = current, cells[current + LEFT]
        else:
            current = cells[current + RIGHT]
    return best


@njit()
def following(cells, header, block):
    """The next block in the tree's order, 0 at the end."""
    key, address = cells[block + KEY], cells[block + ADDRESS]
    found, current = 0, cells[header + LEFT]
    while current != 0:
        other = cells[current + KEY]
        if key < other or (key == other and address < cells[current + ADDRESS]):
            found, current = current, cells[current + LEFT]
        else:
            current = cells[current + RIGHT]
    return found


@njit()
def first(cells, header):
    """The smallest block of a tree, 0 if it is empty."""
    found, current = 0, cells[header + LEFT]
    while current != 0:
        found, current = current, cells[current + LEFT]
    return found


@njit()
def last(cells, header):
    """The largest block of a tree, 0 if it is empty."""
    found, current = 0, cells[header + LEFT]
    while current != 0:
        found, current = current, cells[current + RIGHT]
    return found


@njit()
def join(state, block, other):
    """Merge a neighbour, which has left its tree, into a block that is in no tree."""
    cells = state.cells
    if cells[block + PREVIOUS] == other:
        before = cells[other + PREVIOUS]
        cells[block + ADDRESS] = cells[other + ADDRESS]
        cells[block + PREVIOUS] = before
        if before != 0:
            cells[before + NEXT] = block
    else:
        after = cells[other + NEXT]
        cells[block + NEXT] = after
        if after != 0:
            cells[after + PREVIOUS] = block
    cells[block + SIZE] += cells[other + SIZE]
    give_row(state, other)


@njit()
def cut(state, block, size, status):
    """Split a block that is in no tree after `size` bytes; the rest is a new block with that status, in no tree."""
    cells = state.cells
    rest, after = take_row(state), cells[block + NEXT]
    cells[rest + ADDRESS] = cells[block + ADDRESS] + size
    cells[rest + SIZE] = cells[block + SIZE] - size
    cells[rest + PREVIOUS] = block
    cells[rest + NEXT] = after
    cells[rest + POOL] = cells[block + POOL]
    cells[rest + BASE] = cells[block + BASE]
    cells[rest + STATUS] = status
    cells[rest + REQUEST] = -1
    if after != 0:
        cells[after + PREVIOUS] = rest
    cells[block + NEXT] = rest
    cells[block + SIZE] = size
    return rest


@njit()
def add_free(state, block):
    """A mapped block joins the free ones of its pool."""
    cells = state.cells
    cells[block + STATUS] = FREE
    cells[block + REQUEST] = -1
    cells[block + KEY] = cells[block + SIZE]
    cells[block + AGE] = state.numbers[SMALL_SEARCHES + (cells[block + POOL] & 1)]
    insert(cells, free_tree(state, cells[block + POOL]), block)


@njit()
def add_unmapped(state, block):
    """A range of addresses without memory joins the unmapped ones of its pool."""
    cells = state.cells
    cells[block + STATUS] = UNMAPPED
    cells[block + REQUEST] = -1
    cells[block + KEY] = 0
    insert(cells, unmapped_tree(state, cells[block + POOL]), block)


@njit()
def merge_neighbours(state, block, status, is_free):
    """Merge a block that is in no tree with its neighbours of that status."""
    cells = state.cells
    pool = cells[block + POOL]
    header = free_tree(state, pool) if is_free else unmapped_tree(state, pool)
    for side in (PREVIOUS, NEXT):
        other = cells[block + side]
        if other != 0 and cells[other + STATUS] == status:
            remove(cells, header, other)
            join(state, block, other)


@njit()
def add_segment(state, pool, address, size, base):
    """A new block that spans a segment, in no tree."""
    cells, block = state.cells, take_row(state)
    cells[block + ADDRESS] = address
    cells[block + SIZE] = size
    cells[block + PREVIOUS] = 0
    cells[block + NEXT] = 0
    cells[block + POOL] = pool
    cells[block + BASE] = base
    cells[block + REQUEST] = -1
    cells[block + STATUS] = LIVE
    return block


@njit()
def _is_taken(state, begin, end):
    cells = state.cells
    for block in range(ROW, state.numbers[ROWS_END], ROW):
        status, address = cells[block + STATUS], cells[block + ADDRESS]
        is_mapped = status in (FREE, LIVE, WAITING)
        if is_mapped and address < end and begin < address + cells[block + SIZE]:
            return True
    return False


@njit()
def device_address(state, size, mapped):
    """Where the device puts the next segment of `size` bytes, of which `mapped` are used soon: as given, or above all
    others.

    A model that does something else than the run whose addresses were given may meet one that is taken: from there on
    they are its own.
    """
    numbers = state.numbers
    address = numbers[NEXT_ADDRESS]
    if numbers[NUM_GIVEN] < len(state.given):
        told = state.given[numbers[NUM_GIVEN]]
        if _is_taken(state, told, told + mapped):
            numbers[NUM_GIVEN] = len(state.given)
        else:
            numbers[NUM_GIVEN] += 1
            address = told
    numbers[NEXT_ADDRESS] = max(numbers[NEXT_ADDRESS], (address + size + 0x1FFFFF) & ~0x1FFFFF)
    return address


@njit()
def count_reserved(state, change):
    """Memory was taken from the device, or given back where `change` is negative."""
    numbers = state.numbers
    numbers[RESERVED] += change
    if change > 0:
        numbers[DEVICE_ALLOCS] += 1
        numbers[PEAK_RESERVED] = max(numbers[PEAK_RESERVED], numbers[RESERVED])
    else:
        numbers[DEVICE_FREES] += 1
