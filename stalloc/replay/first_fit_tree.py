"""Free blocks in the order of their addresses, with the first one that fits found in O(log n): treaps that know maxima.

Contract: as for free_tree; in the row of a block, OTHER is the size of the largest block at or below it in its tree.
The recursion is as deep as the tree, some tens of levels.
"""

from stalloc.compiled import njit
from stalloc.replay.tables import ADDRESS, LEFT, OTHER, PRIORITY, RIGHT, SIZE, TREE, draw_priority


@njit()
def _update(t, block):
    largest = t.blocks[block, SIZE]
    left, right = t.blocks[block, LEFT], t.blocks[block, RIGHT]
    if left != 0 and t.blocks[left, OTHER] > largest:
        largest = t.blocks[left, OTHER]
    if right != 0 and t.blocks[right, OTHER] > largest:
        largest = t.blocks[right, OTHER]
    t.blocks[block, OTHER] = largest


@njit()
def _cut(t, root, address):
    """The blocks of a subtree before and behind an address, as two subtrees."""
    if root == 0:
        return 0, 0
    if t.blocks[root, ADDRESS] < address:
        low, high = _cut(t, t.blocks[root, RIGHT], address)
        t.blocks[root, RIGHT] = low
        _update(t, root)
        return root, high
    low, high = _cut(t, t.blocks[root, LEFT], address)
    t.blocks[root, LEFT] = high
    _update(t, root)
    return low, root


@njit()
def _join(t, low, high):
    """One subtree of two, all of the first before all of the second."""
    if low == 0:
        return high
    if high == 0:
        return low
    if t.blocks[low, PRIORITY] >= t.blocks[high, PRIORITY]:
        t.blocks[low, RIGHT] = _join(t, t.blocks[low, RIGHT], high)
        _update(t, low)
        return low
    t.blocks[high, LEFT] = _join(t, low, t.blocks[high, LEFT])
    _update(t, high)
    return high


@njit()
def _put(t, root, block):
    if root == 0 or t.blocks[block, PRIORITY] > t.blocks[root, PRIORITY]:
        low, high = _cut(t, root, t.blocks[block, ADDRESS])
        t.blocks[block, LEFT] = low
        t.blocks[block, RIGHT] = high
        _update(t, block)
        return block
    side = LEFT if t.blocks[block, ADDRESS] < t.blocks[root, ADDRESS] else RIGHT
    t.blocks[root, side] = _put(t, t.blocks[root, side], block)
    _update(t, root)
    return root


@njit()
def _take(t, root, block):
    if root == block:
        return _join(t, t.blocks[block, LEFT], t.blocks[block, RIGHT])
    side = LEFT if t.blocks[block, ADDRESS] < t.blocks[root, ADDRESS] else RIGHT
    t.blocks[root, side] = _take(t, t.blocks[root, side], block)
    _update(t, root)
    return root


@njit()
def insert(t, tree, block):
    """Put a block into a tree."""
    t.blocks[block, PRIORITY] = draw_priority(t)
    t.blocks[block, TREE] = tree
    t.roots[tree] = _put(t, t.roots[tree], block)


@njit()
def remove(t, block):
    """Take a block out of the tree that it is in."""
    tree = t.blocks[block, TREE]
    t.roots[tree] = _take(t, t.roots[tree], block)


@njit()
def first_fit(t, tree, size):
    """The block at the lowest address that has at least `size` bytes; 0 for none."""
    current = t.roots[tree]
    if current == 0 or t.blocks[current, OTHER] < size:
        return 0
    while True:
        left = t.blocks[current, LEFT]
        if left != 0 and t.blocks[left, OTHER] >= size:
            current = left
        elif t.blocks[current, SIZE] >= size:
            return current
        else:
            current = t.blocks[current, RIGHT]
