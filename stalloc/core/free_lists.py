"""The free blocks of a pool: the smallest that is large enough, in a few steps.

Contract: the lock is held. Free blocks sit in bins of near-equal sizes, one for each multiple of 512 bytes below 64 KiB
and 64 an octave from there on, with a bit for each bin that holds any (Masmano, Ripoll, Crespo and Real, "TLSF: a new
dynamic memory allocator for real-time systems", ECRTS 2004), so that the best fit is found exactly:
- a bin of one size is a list; a block enters it before the first if its address is lower, else after it, so that
  low addresses come up sooner without a search;
- a bin of several sizes is a treap ordered by (size, address), of which the lowest fit is taken (Seidel and Aragon,
  "Randomized search trees", Algorithmica 1996). A pool that serves one size is a single treap.

A link is the word that holds the row of a block: a root, or a field of the block before it.
"""

from stalloc.compiled import inner, njit
from stalloc.core.intrinsics import first_bit, last_bit
from stalloc.core.records import (
    bins_at,
    block_at,
    filled_at,
    left_of,
    pool_at,
    right_of,
    root_at,
    root_of,
    segment_at,
    unused_bins_at,
)

_FINE = 128  # sizes in units of ALIGNMENT below this have a bin each, which is a list
_PARTS_BITS = 6  # an octave above has 2 ** this bins
_FIRST_OCTAVE = 7  # 2 ** this is _FINE


@inner(forceinline=True)
def pool_of(state, row):
    """The pool of a block: that of its segment."""
    return segment_at(state, block_at(state, row).segment).pool


@inner(forceinline=True)
def is_before(state, a, b):
    """Whether a block is smaller than another, or as large and at a lower address."""
    block, other = block_at(state, a), block_at(state, b)
    return block.size_bytes < other.size_bytes or (
        block.size_bytes == other.size_bytes and block.address < other.address
    )


@inner(forceinline=True)
def _bin(size):
    """The bin of blocks of `size` bytes."""
    units = size >> 9
    if units < _FINE:
        return units
    octave = last_bit(units)
    return _FINE + ((octave - _FIRST_OCTAVE) << _PARTS_BITS) + ((units >> (octave - _PARTS_BITS)) & 63)


@inner(forceinline=True)
def _mark_bin(bins, nth, filled):
    """Note whether a bin holds any blocks."""
    word = filled_at(bins, nth >> 6)
    bit, summary_bit = 1 << (nth & 63), 1 << (nth >> 6)
    bits = word.value | bit if filled else word.value & ~bit
    word.value = bits
    bins.summary = bins.summary | summary_bit if bits != 0 else bins.summary & ~summary_bit


@inner(forceinline=True)
def _next_bin(bins, after):
    """The first bin beyond `after` that holds any blocks; -1 if none does."""
    word = (after + 1) >> 6
    bits = filled_at(bins, word).value & (-1 << ((after + 1) & 63))
    if bits == 0:
        words = bins.summary & (-2 << word)
        if words == 0:
            return -1
        word = first_bit(words)
        bits = filled_at(bins, word).value
    return (word << 6) + first_bit(bits)


@inner()
def allocate_bins(state, pool):
    """Let a new pool keep its blocks in bins, if there are any left."""
    used = state.heap.bins_used
    if used < state.heap.bins_capacity:
        state.heap.bins_used = used + 1
        pool_at(state, pool).bins = unused_bins_at(state, used)


@inner(forceinline=True)
def _enter_list(state, link, row):
    """Add a block to the list that begins at `link`."""
    block = block_at(state, row)
    previous, following = 0, link.value
    if following != 0 and block_at(state, following).address < block.address:
        previous, link = following, right_of(block_at(state, following))
        following = link.value
    link.value = row
    block.left = previous
    block.right = following
    if following != 0:
        block_at(state, following).left = row


@inner(forceinline=True)
def _leave_list(state, first, row):
    """Take a block out of the list that begins at the link `first`."""
    previous, following = block_at(state, row).left, block_at(state, row).right
    if previous == 0:
        first.value = following
    else:
        block_at(state, previous).right = following
    if following != 0:
        block_at(state, following).left = previous


@inner(forceinline=True)
def _priority(row):
    """The priority of a block in its treap: its row, mixed, is as good as random and need not be kept."""
    row *= 0x1E3779B97F4A7C15
    return (row ^ (row >> 29)) * 0x3F58476D1CE4E5B9


@njit(inline="always")
def _towards(state, current, row):
    """The link below a block on the way to another in its treap."""
    block = block_at(state, current)
    return left_of(block) if is_before(state, row, current) else right_of(block)


@inner()
def _enter_tree(state, link, row):
    """Add a block to the treap whose root is at `link`: those of lower priority on its way come below it."""
    priority, current = _priority(row), link.value
    while current != 0 and _priority(current) >= priority:
        link = _towards(state, current, row)
        current = link.value
    link.value = row
    left, right = left_of(block_at(state, row)), right_of(block_at(state, row))
    while current != 0:
        if is_before(state, current, row):
            left.value = current
            left = right_of(block_at(state, current))
            current = left.value
        else:
            right.value = current
            right = left_of(block_at(state, current))
            current = right.value
    left.value = 0
    right.value = 0


@inner()
def _leave_tree(state, link, row):
    """Take a block out of the treap whose root is at `link`: the two below it are joined in its place."""
    current = link.value
    while current != row:
        link = _towards(state, current, row)
        current = link.value
    a, b = block_at(state, row).left, block_at(state, row).right
    while a != 0 and b != 0:
        if _priority(a) >= _priority(b):
            link.value = a
            link = right_of(block_at(state, a))
            a = link.value
        else:
            link.value = b
            link = left_of(block_at(state, b))
            b = link.value
    link.value = a if a != 0 else b


@inner()
def insert_free(state, row):
    """Add a free block to those of its pool."""
    pool = pool_at(state, pool_of(state, row))
    if pool.bins == 0:
        _enter_tree(state, root_of(pool), row)
        return
    bins, nth = bins_at(pool.bins), _bin(block_at(state, row).size_bytes)
    root = root_at(bins, nth)
    if root.value == 0:
        _mark_bin(bins, nth, True)
    if nth < _FINE:
        _enter_list(state, root, row)
    else:
        _enter_tree(state, root, row)


@inner()
def remove_free(state, row):
    """Take a free block out of those of its pool."""
    pool = pool_at(state, pool_of(state, row))
    if pool.bins == 0:
        _leave_tree(state, root_of(pool), row)
        return
    bins, nth = bins_at(pool.bins), _bin(block_at(state, row).size_bytes)
    root = root_at(bins, nth)
    if nth < _FINE:
        _leave_list(state, root, row)
    else:
        _leave_tree(state, root, row)
    if root.value == 0:
        _mark_bin(bins, nth, False)


@inner(forceinline=True)
def _fit_under(state, root, size):
    """The best fit in the treap below a block; 0 if there is none."""
    best, current = 0, root
    while current != 0:
        block = block_at(state, current)
        if block.size_bytes >= size:
            best, current = current, block.left
        else:
            current = block.right
    return best


@inner()
def best_fit(state, pool, size):
    """The smallest free block of a pool with `size` bytes; 0 if there is none."""
    if pool_at(state, pool).bins == 0:
        return _fit_under(state, pool_at(state, pool).root, size)
    bins, nth = bins_at(pool_at(state, pool).bins), _bin(size)
    root = root_at(bins, nth).value
    best = root if nth < _FINE else _fit_under(state, root, size)
    if best == 0:
        nth = _next_bin(bins, nth)
        if nth >= 0:  # each of its blocks is large enough
            root = root_at(bins, nth).value
            best = root if nth < _FINE else _fit_under(state, root, size)
    return best


@inner()
def largest_block(state, pool):
    """The size (bytes) of the largest free block of a pool; 0 if there is none."""
    current = pool_at(state, pool).root
    if pool_at(state, pool).bins != 0:
        bins = bins_at(pool_at(state, pool).bins)
        if bins.summary == 0:
            return 0
        word = last_bit(bins.summary)
        nth = (word << 6) + last_bit(filled_at(bins, word).value)
        current = root_at(bins, nth).value
        if nth < _FINE:
            return block_at(state, current).size_bytes
    largest = 0
    while current != 0:
        largest, current = block_at(state, current).size_bytes, block_at(state, current).right
    return largest
