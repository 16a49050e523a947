"""The free blocks of a pool: the smallest that is large enough, in a few steps.

Contract: every function runs with the state's lock held. Free blocks sit in bins of near-equal sizes, one for each
multiple of 512 bytes below 64 KiB and 64 an octave from there on, with a bit for each bin that holds any (Masmano,
Ripoll, Crespo and Real, "TLSF: a new dynamic memory allocator for real-time systems", ECRTS 2004), so that the best
fit is found exactly:
- a bin of one size is a list; a block enters it before the first if its address is lower, else after it, so that
  low addresses come up sooner without a search;
- a bin of several sizes is a treap ordered by (size, address), of which the lowest fit is taken (Seidel and Aragon,
  "Randomized search trees", Algorithmica 1996). A pool that serves one size is a single treap.
"""

# ruff: noqa: F403, F405  (the names of layout are constants to the compiler)

from stalloc.compiled import njit
from stalloc.runtime.layout import *
from stalloc.runtime.words import first_bit, last_bit, peek, poke

_FINE = 128  # sizes in units of ALIGNMENT below this have a bin each
_PARTS_BITS = 6  # an octave above has 2 ** this bins
_FIRST_OCTAVE = 7  # 2 ** this is _FINE


@njit(inline="always")
def block(state, index, field):
    """A field of a block."""
    return peek(peek(state, BLOCKS), index * BLOCK_ROW + field)


@njit(inline="always")
def set_block(state, index, field, value):
    """Write a field of a block."""
    poke(peek(state, BLOCKS), index * BLOCK_ROW + field, value)


@njit(inline="always")
def pool_of(state, index):
    """The pool of a block: that of its chunk."""
    return peek(peek(state, CHUNKS), block(state, index, B_CHUNK) * CHUNK_ROW + C_POOL)


@njit(inline="always")
def _link(state, index, field):
    return peek(state, BLOCKS) + (index * BLOCK_ROW + field) * 8


@njit(inline="always")
def before(state, a, b):
    size_a, size_b = block(state, a, B_SIZE), block(state, b, B_SIZE)
    return size_a < size_b or (size_a == size_b and block(state, a, B_ADDRESS) < block(state, b, B_ADDRESS))


@njit(inline="always")
def _priority(index):
    """The priority of a block in its treap: its row, mixed, is as good as random and need not be kept."""
    index *= 0x1E3779B97F4A7C15
    return (index ^ (index >> 29)) * 0x3F58476D1CE4E5B9


# --- bins ----------------------------------------------------------------------------------------------------------


@njit(inline="always")
def _bin(size):
    """The bin of blocks of `size` bytes."""
    units = size >> 9
    if units < _FINE:
        return units
    octave = last_bit(units)
    return _FINE + ((octave - _FIRST_OCTAVE) << _PARTS_BITS) + ((units >> (octave - _PARTS_BITS)) & 63)


@njit(inline="always")
def _bins(state, pool):
    return peek(peek(state, POOLS), pool * POOL_ROW + P_BINS)


@njit(inline="always")
def _mark_bin(bins, nth, filled):
    """Note whether a bin holds any blocks."""
    word = nth >> 6
    bits = peek(bins, BN_BITS + word)
    bits = bits | (1 << (nth & 63)) if filled else bits & ~(1 << (nth & 63))
    poke(bins, BN_BITS + word, bits)
    summary = peek(bins, BN_SUMMARY)
    poke(bins, BN_SUMMARY, summary | (1 << word) if bits != 0 else summary & ~(1 << word))


@njit(inline="always")
def _next_bin(bins, after):
    """The first bin beyond `after` that holds any blocks; -1 if none does."""
    word = (after + 1) >> 6
    bits = peek(bins, BN_BITS + word) & (-1 << ((after + 1) & 63))
    if bits == 0:
        words = peek(bins, BN_SUMMARY) & (-2 << word)
        if words == 0:
            return -1
        word = first_bit(words)
        bits = peek(bins, BN_BITS + word)
    return (word << 6) + first_bit(bits)


@njit()
def give_bins(state, pool):
    """Let a new pool keep its blocks in bins, if there are any left."""
    used = peek(state, BINS_USED)
    if used < peek(state, BINS_CAPACITY):
        poke(state, BINS_USED, used + 1)
        poke(peek(state, POOLS), pool * POOL_ROW + P_BINS, peek(state, BINS) + used * BINS_ROW * 8)


# --- a bin of one size: a list ---------------------------------------------------------------------------------------


@njit(inline="always")
def _is_list(nth):
    return nth < _FINE


@njit(inline="always")
def _enter_list(state, link, index):
    """Add a block to the list that begins at `link`."""
    previous, following = 0, peek(link, 0)
    if following != 0 and block(state, following, B_ADDRESS) < block(state, index, B_ADDRESS):
        previous, link = following, _link(state, following, B_RIGHT)
        following = peek(link, 0)
    poke(link, 0, index)
    set_block(state, index, B_LEFT, previous)
    set_block(state, index, B_RIGHT, following)
    if following != 0:
        set_block(state, following, B_LEFT, index)


@njit(inline="always")
def _leave_list(state, first, index):
    """Take a block out of the list whose first block is at the address `first`."""
    previous, following = block(state, index, B_LEFT), block(state, index, B_RIGHT)
    poke(first if previous == 0 else _link(state, previous, B_RIGHT), 0, following)
    if following != 0:
        set_block(state, following, B_LEFT, previous)


# --- a bin of several sizes: a treap ---------------------------------------------------------------------------------


@njit()
def _enter_tree(state, link, index):
    """Add a block to the treap whose root is at `link`."""
    x = _priority(index)
    current = peek(link, 0)
    while current != 0 and _priority(current) >= x:
        link = _link(state, current, B_LEFT if before(state, index, current) else B_RIGHT)
        current = peek(link, 0)
    poke(link, 0, index)
    left, right = _link(state, index, B_LEFT), _link(state, index, B_RIGHT)
    while current != 0:
        if before(state, current, index):
            poke(left, 0, current)
            left = _link(state, current, B_RIGHT)
            current = peek(left, 0)
        else:
            poke(right, 0, current)
            right = _link(state, current, B_LEFT)
            current = peek(right, 0)
    poke(left, 0, 0)
    poke(right, 0, 0)


@njit()
def _leave_tree(state, link, index):
    """Take a block out of the treap whose root is at `link`."""
    current = peek(link, 0)
    while current != index:
        link = _link(state, current, B_LEFT if before(state, index, current) else B_RIGHT)
        current = peek(link, 0)
    a, b = block(state, index, B_LEFT), block(state, index, B_RIGHT)
    while a != 0 and b != 0:
        if _priority(a) >= _priority(b):
            poke(link, 0, a)
            link = _link(state, a, B_RIGHT)
            a = peek(link, 0)
        else:
            poke(link, 0, b)
            link = _link(state, b, B_LEFT)
            b = peek(link, 0)
    poke(link, 0, a if a != 0 else b)


# --- the free blocks of a pool ---------------------------------------------------------------------------------------


@njit(inline="always")
def _home(state, index):
    """Where a free block belongs: the address of the first or the root, the bins (0: none), and which of them."""
    pool = pool_of(state, index)
    bins = _bins(state, pool)
    if bins == 0:
        return peek(state, POOLS) + (pool * POOL_ROW + P_ROOT) * 8, bins, _FINE
    nth = _bin(block(state, index, B_SIZE))
    return bins + nth * 8, bins, nth


@njit()
def insert_free(state, index):
    """Add a free block to those of its pool."""
    root, bins, nth = _home(state, index)
    if bins != 0 and peek(root, 0) == 0:
        _mark_bin(bins, nth, True)
    if _is_list(nth):
        _enter_list(state, root, index)
    else:
        _enter_tree(state, root, index)


@njit()
def remove_free(state, index):
    """Take a free block out of those of its pool."""
    root, bins, nth = _home(state, index)
    if _is_list(nth):
        _leave_list(state, root, index)
    else:
        _leave_tree(state, root, index)
    if bins != 0 and peek(root, 0) == 0:
        _mark_bin(bins, nth, False)


@njit(inline="always")
def _fit_under(state, root, size):
    """The best fit in one treap; 0 if there is none."""
    best, current = 0, root
    while current != 0:
        if block(state, current, B_SIZE) >= size:
            best, current = current, block(state, current, B_LEFT)
        else:
            current = block(state, current, B_RIGHT)
    return best


@njit(inline="always")
def _fit_in_bin(state, bins, nth, size):
    """The best fit in a bin; 0 if there is none."""
    return peek(bins, nth) if _is_list(nth) else _fit_under(state, peek(bins, nth), size)


@njit()
def best_fit(state, pool, size):
    """The smallest free block of a pool with `size` bytes; 0 if there is none."""
    bins = _bins(state, pool)
    if bins == 0:
        return _fit_under(state, peek(peek(state, POOLS), pool * POOL_ROW + P_ROOT), size)
    nth = _bin(size)
    best = _fit_in_bin(state, bins, nth, size)
    if best == 0:
        nth = _next_bin(bins, nth)
        best = _fit_in_bin(state, bins, nth, size) if nth >= 0 else 0
    return best


@njit()
def largest_block(state, pool):
    """The size (bytes) of the largest free block of a pool; 0 if there is none."""
    bins = _bins(state, pool)
    current = peek(peek(state, POOLS), pool * POOL_ROW + P_ROOT)
    if bins != 0:
        words = peek(bins, BN_SUMMARY)
        if words == 0:
            return 0
        word = last_bit(words)
        nth = (word << 6) + last_bit(peek(bins, BN_BITS + word))
        current = peek(bins, nth)
        if _is_list(nth):
            return block(state, current, B_SIZE)
    largest = 0
    while current != 0:
        largest, current = block(state, current, B_SIZE), block(state, current, B_RIGHT)
    return largest
