"""Ordered sets of blocks: treaps whose nodes are rows of the block table.

Contract: a block is in at most one tree, the one that its field `tree` names. A tree is ordered by key and then by
address: the key is the size, or 0 in a tree by address. Neither may change while the block is in the tree. Every
operation takes O(log n) steps on average (Seidel and Aragon, "Randomized search trees", Algorithmica 1996); priorities
come from a generator that each tree has for itself, so that equal input gives equal trees.

A tree by address can tell the first block that fits: then the field `other` of a block is the size of the largest one
at or below it, and blocks come and go by insert_fit and remove_fit only.
"""

from stalloc.compiled import inner, njit
from stalloc.core.record_types import offset_of
from stalloc.replay.blocks import (
    FREE,
    HEADER,
    ROW,
    Block,
    absorb,
    at,
    cell_at,
    drop_segment,
    header_at,
    is_whole,
    new_block,
    split,
    store_at,
)

_LEFT, _RIGHT = (offset_of(Block, side) // 8 for side in ("left", "right"))  # words
_SEED = 0x2545F4914F6CDD1D


@njit()
def new_tree(store, tree):
    """Make an empty tree in the store at an address."""
    t = store_at(store)
    row = new_block(t)
    header_at(t, tree).value = row
    header = at(t, row)
    header.state, header.left, header.priority = HEADER, 0, _SEED + tree


@inner()
def root(t, tree):
    """Some block of a tree; 0 if it is empty."""
    return at(t, header_at(t, tree).value).left


@inner()
def insert(t, tree, block):
    """Put a block into a tree by size."""
    insert_by(t, tree, block, at(t, block).size)


@inner()
def insert_by(t, tree, block, key):
    """Put a block into a tree by a key; 0 for one by address."""
    node, header = at(t, block), header_at(t, tree).value
    x = at(t, header).priority
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    at(t, header).priority = x
    address = node.address
    node.tree, node.key, node.priority = tree, key, x
    link = header * ROW + _LEFT
    current = cell_at(t, link).value
    while current != 0 and at(t, current).priority >= x:
        other = at(t, current)
        before = key < other.key or (key == other.key and address < other.address)
        link = current * ROW + (_LEFT if before else _RIGHT)
        current = cell_at(t, link).value
    cell_at(t, link).value = block
    # what was below is cut in two: what comes before the block and what comes after it
    low, high = block * ROW + _LEFT, block * ROW + _RIGHT
    while current != 0:
        other = at(t, current)
        if key < other.key or (key == other.key and address < other.address):
            cell_at(t, high).value = current
            high = current * ROW + _LEFT
            current = cell_at(t, high).value
        else:
            cell_at(t, low).value = current
            low = current * ROW + _RIGHT
            current = cell_at(t, low).value
    cell_at(t, low).value = cell_at(t, high).value = 0


@inner()
def remove(t, block):
    """Take a block out of the tree that it is in."""
    node = at(t, block)
    key, address = node.key, node.address
    link = header_at(t, node.tree).value * ROW + _LEFT
    current = cell_at(t, link).value
    while current != block:
        other = at(t, current)
        before = key < other.key or (key == other.key and address < other.address)
        link = current * ROW + (_LEFT if before else _RIGHT)
        current = cell_at(t, link).value
    a, b = node.left, node.right
    while a != 0 and b != 0:
        if at(t, a).priority >= at(t, b).priority:
            cell_at(t, link).value = a
            link = a * ROW + _RIGHT
            a = cell_at(t, link).value
        else:
            cell_at(t, link).value = b
            link = b * ROW + _LEFT
            b = cell_at(t, link).value
    cell_at(t, link).value = a if a != 0 else b


@inner()
def best_fit(t, tree, size):
    """The smallest block of at least `size` bytes, among equal ones the one at the lowest address; 0 for none."""
    return after(t, tree, size, -1)


@inner()
def take_best(t, tree, size):
    """The block that fits best, out of its tree; 0 for none."""
    block = best_fit(t, tree, size)
    if block != 0:
        remove(t, block)
    return block


@inner()
def cut_off(t, tree, block, size):
    """Put what a block in no tree has beyond `size` bytes into a tree by size."""
    if at(t, block).size > size:
        insert(t, tree, split(t, block, size))


@inner()
def after(t, tree, key, address):
    """The first block behind (key, address) in the order of a tree; 0 for none."""
    best, current = 0, root(t, tree)
    while current != 0:
        node = at(t, current)
        if node.key > key or (node.key == key and node.address > address):
            best, current = current, node.left
        else:
            current = node.right
    return best


@inner()
def following(t, block):
    """The next block in the order of the tree that a block is in; 0 at the end."""
    node = at(t, block)
    return after(t, node.tree, node.key, node.address)


@inner()
def find(t, tree, size, address):
    """The block of exactly this size at exactly this address; 0 for none."""
    block = after(t, tree, size, address - 1)
    return block if block != 0 and at(t, block).size == size and at(t, block).address == address else 0


@inner()
def first(t, tree):
    """The first block of a tree; 0 for none."""
    return after(t, tree, -1, 0)


@inner()
def last(t, tree):
    """The last block of a tree: of one by size, the largest at the highest address; 0 for none."""
    current = root(t, tree)
    while current != 0 and at(t, current).right != 0:
        current = at(t, current).right
    return current


@inner()
def merge(t, tree, state, block):
    """Merge a block in no tree with the neighbours that are in a tree and have `state`; the merged block."""
    behind, ahead = at(t, block).next, at(t, block).previous
    if behind != 0 and at(t, behind).state == state and at(t, behind).tree == tree:
        remove(t, behind)
        absorb(t, block, behind)
    if ahead != 0 and at(t, ahead).state == state and at(t, ahead).tree == tree:
        remove(t, ahead)
        absorb(t, ahead, block)
        block = ahead
    return block


@inner()
def free_into(t, tree, block):
    """Put a free block into a tree by size, merged with the free neighbours that are in it; the merged block."""
    block = merge(t, tree, FREE, block)
    insert(t, tree, block)
    return block


@inner()
def release_whole(t, tree, keep):
    """Give back segments that are one free block of a tree, in its order, while more than `keep` bytes are held."""
    block = first(t, tree)
    while block != 0 and t.reserved > keep:
        key, address = at(t, block).key, at(t, block).address
        if is_whole(t, block):
            remove(t, block)
            drop_segment(t, block)
        block = after(t, tree, key, address)


@inner()
def insert_fit(t, tree, block):
    """Put a block into a tree by address that can tell the first fit."""
    insert_by(t, tree, block, 0)
    _update_towards(t, root(t, tree), at(t, block).address)


@inner()
def remove_fit(t, block):
    """Take a block out of a tree that can tell the first fit."""
    remove(t, block)
    _update_towards(t, root(t, at(t, block).tree), at(t, block).address)


@inner()
def _update_towards(t, block, address):
    """Correct the largest size at or below every block between this one and an address. As deep as the tree."""
    if block == 0:
        return
    node = at(t, block)
    if address <= node.address:
        _update_towards(t, node.left, address)
    if address >= node.address:
        _update_towards(t, node.right, address)
    largest = node.size
    if node.left != 0:
        largest = max(largest, at(t, node.left).other)
    if node.right != 0:
        largest = max(largest, at(t, node.right).other)
    node.other = largest


@inner()
def first_fit(t, tree, size):
    """The block at the lowest address that has at least `size` bytes; 0 for none."""
    current = root(t, tree)
    if current == 0 or at(t, current).other < size:
        return 0
    while True:
        node = at(t, current)
        if node.left != 0 and at(t, node.left).other >= size:
            current = node.left
        elif node.size >= size:
            return current
        else:
            current = node.right
