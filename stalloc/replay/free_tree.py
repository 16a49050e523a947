"""Ordered sets of free blocks: treaps whose nodes are rows of the block table.

Contract: a block is in at most one tree, the one that its TREE column names. A tree is ordered by size and then by
address (best fit) or by address alone. Every operation takes O(log n) steps on average (Seidel and Aragon,
"Randomized search trees", Algorithmica 1996); the priorities come from one seeded generator, so that equal input
gives equal trees.
"""

from stalloc.compiled import njit
from stalloc.replay.tables import (
    ADDRESS,
    FREE,
    LEFT,
    NEXT,
    PREVIOUS,
    PRIORITY,
    RIGHT,
    SIZE,
    STATE,
    TREE,
    absorb,
    draw_priority,
    drop_segment,
    is_whole,
)


@njit()
def _before(t, a, b):
    size_a, size_b = t.blocks[a, SIZE], t.blocks[b, SIZE]
    return size_a < size_b or (size_a == size_b and t.blocks[a, ADDRESS] < t.blocks[b, ADDRESS])


@njit()
def _set_link(t, tree, parent, side, block):
    """Let the link that leads from a parent (0: the root's) point to a block."""
    if parent == 0:
        t.roots[tree] = block
    else:
        t.blocks[parent, side] = block


@njit()
def insert(t, tree, block):
    """Put a block into a tree."""
    x = draw_priority(t)
    t.blocks[block, PRIORITY] = x
    t.blocks[block, TREE] = tree
    parent, side, current = 0, LEFT, t.roots[tree]
    while current != 0 and t.blocks[current, PRIORITY] >= x:
        parent, side = current, LEFT if _before(t, block, current) else RIGHT
        current = t.blocks[current, side]
    _set_link(t, tree, parent, side, block)
    # what was below is cut in two: what comes before the block and what comes after it
    low, low_side, high, high_side = block, LEFT, block, RIGHT
    while current != 0:
        if _before(t, current, block):
            t.blocks[low, low_side] = current
            low, low_side = current, RIGHT
            current = t.blocks[current, RIGHT]
        else:
            t.blocks[high, high_side] = current
            high, high_side = current, LEFT
            current = t.blocks[current, LEFT]
    t.blocks[low, low_side] = 0
    t.blocks[high, high_side] = 0


@njit()
def remove(t, block):
    """Take a block out of the tree that it is in."""
    tree = t.blocks[block, TREE]
    parent, side, current = 0, LEFT, t.roots[tree]
    while current != block:
        parent, side = current, LEFT if _before(t, block, current) else RIGHT
        current = t.blocks[current, side]
    a, b = t.blocks[block, LEFT], t.blocks[block, RIGHT]
    while a != 0 and b != 0:
        if t.blocks[a, PRIORITY] >= t.blocks[b, PRIORITY]:
            _set_link(t, tree, parent, side, a)
            parent, side, a = a, RIGHT, t.blocks[a, RIGHT]
        else:
            _set_link(t, tree, parent, side, b)
            parent, side, b = b, LEFT, t.blocks[b, LEFT]
    _set_link(t, tree, parent, side, a if a != 0 else b)


@njit()
def best_fit(t, tree, size):
    """The smallest block of at least `size` bytes, among equal ones the one at the lowest address; 0 for none."""
    best, current = 0, t.roots[tree]
    while current != 0:
        if t.blocks[current, SIZE] >= size:
            best, current = current, t.blocks[current, LEFT]
        else:
            current = t.blocks[current, RIGHT]
    return best


@njit()
def find(t, tree, size, address):
    """The block of exactly this size at exactly this address; 0 for none."""
    current = t.roots[tree]
    while current != 0:
        here = t.blocks[current, SIZE]
        if here == size and t.blocks[current, ADDRESS] == address:
            return current
        before = size < here or (size == here and address < t.blocks[current, ADDRESS])
        current = t.blocks[current, LEFT if before else RIGHT]
    return 0


@njit()
def after(t, tree, size, address):
    """The first block behind (size, address) in the order of a tree; 0 for none."""
    best, current = 0, t.roots[tree]
    while current != 0:
        here = t.blocks[current, SIZE]
        if here > size or (here == size and t.blocks[current, ADDRESS] > address):
            best, current = current, t.blocks[current, LEFT]
        else:
            current = t.blocks[current, RIGHT]
    return best


@njit()
def last(t, tree):
    """The largest block of a tree, at the highest address; 0 for none."""
    current = t.roots[tree]
    while current != 0 and t.blocks[current, RIGHT] != 0:
        current = t.blocks[current, RIGHT]
    return current


@njit()
def free_into(t, tree, block):
    """Put a free block into a tree, merged with the free neighbours that are in the same tree; the merged block."""
    following, previous = t.blocks[block, NEXT], t.blocks[block, PREVIOUS]
    if following != 0 and t.blocks[following, STATE] == FREE and t.blocks[following, TREE] == tree:
        remove(t, following)
        absorb(t, block, following)
    if previous != 0 and t.blocks[previous, STATE] == FREE and t.blocks[previous, TREE] == tree:
        remove(t, previous)
        absorb(t, previous, block)
        block = previous
    insert(t, tree, block)
    return block


@njit()
def release_whole(t, tree):
    """Give back every segment that is one free block of a tree."""
    block = after(t, tree, 0, 0)
    while block != 0:
        size, address = t.blocks[block, SIZE], t.blocks[block, ADDRESS]
        if is_whole(t, block):
            remove(t, block)
            drop_segment(t, block)
        block = after(t, tree, size, address)
