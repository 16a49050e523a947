"""PyTorch Inductor's memory planning pools.

Source: the PyTorch project, torch/_inductor/codegen/memory_planning.py as its docstrings describe it (one pool,
`memory_pool = "intermediates"`). Blocks come by decreasing size, then by the length of their live range. A pool is a
tree: a temporal split holds children that are never live together, a spatial split holds two temporal splits side by
side. A block that fits a split and meets none of its children becomes a child, beside an empty rest if it is smaller;
one that meets a single child is passed down to it; if it finds no place the pool grows at its end.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass, field

import numpy as np

from .placing import Column


@dataclass(eq=False)
class _Side:
    left: "_Split"
    right: "_Split"
    parent: "_Split"
    index: int  #: among the children of its parent

    @property
    def size(self) -> int:
        return self.left.size + self.right.size


@dataclass(eq=False)
class _Split:
    """Children that are never live together: rows, or splits in space."""

    size: int
    parent: _Side | None = None
    busy: list[tuple[int, int, int]] = field(default_factory=list)  #: (start, end, child), sorted, apart
    children: list[int | _Side] = field(default_factory=list)

    def meets(self, start: int, end: int) -> list[int]:
        """The children that are live during [start, end), found no further than the second."""
        found: list[int] = []
        at = max(bisect_right(self.busy, (start,)) - 1, 0)
        while at < len(self.busy) and self.busy[at][0] < end and len(found) < 2:
            _, stop, child = self.busy[at]
            if stop > start and child not in found:
                found.append(child)
            at += 1
        return found

    def occupy(self, start: int, end: int, child: int) -> None:
        """The child is live during [start, end) too; what it was live in before may overlap that."""
        at = max(bisect_right(self.busy, (start,)) - 1, 0)
        while at < len(self.busy) and self.busy[at][0] <= end:
            begin, stop, owner = self.busy[at]
            if owner == child and stop >= start:
                start, end = min(start, begin), max(end, stop)
                del self.busy[at]
            else:
                at += 1
        insort(self.busy, (start, end, child))


def place(start: Column, end: Column, size: Column) -> Column:
    offset = np.zeros(len(size), np.int64)
    rows = np.lexsort([start - end, -size]).tolist()
    if not rows:
        return offset
    starts, ends, sizes = start.tolist(), end.tolist(), size.tolist()
    root = _Split(sizes[rows[0]])
    for row in rows:
        if not _allocate(root, row, starts[row], ends[row], sizes[row]):
            root = _grow(root, row, starts[row], ends[row], sizes[row])
    waiting = [(root, 0)]
    while waiting:
        split, base = waiting.pop()
        for child in split.children:
            if isinstance(child, _Side):
                waiting += [(child.left, base), (child.right, base + child.left.size)]
            else:
                offset[child] = base
    return offset


def _allocate(root: _Split, row: int, start: int, end: int, size: int) -> bool:
    """Put the row into the first split that takes it, the left side before the right one."""
    waiting = [(root, True)]
    while waiting:
        split, is_last = waiting.pop()
        if size > split.size and not is_last:
            continue
        met = split.meets(start, end)
        if len(met) == 0:
            _put(split, row, start, end, size)
            return True
        child = split.children[met[0]]
        if len(met) == 1 and isinstance(child, _Side):
            waiting += [(child.right, is_last), (child.left, False)]
    return False


def _put(split: _Split, row: int, start: int, end: int, size: int) -> None:
    index = len(split.children)
    if size > split.size:
        for at, child in enumerate(split.children):
            taken = [(a, b, 0) for a, b, owner in split.busy if owner == at]
            split.children[at] = _beside(split, at, child, split.size, size - split.size, taken)
    if size < split.size:
        split.children.append(_beside(split, index, row, size, split.size - size, [(start, end, 0)]))
    else:
        split.children.append(row)
    split.size = max(split.size, size)
    split.occupy(start, end, index)
    side = split.parent
    while side is not None:
        above = side.parent
        above.size = max(above.size, side.size)
        above.occupy(start, end, side.index)
        side = above.parent


def _beside(
    split: _Split, index: int, child: int | _Side, size: int, rest: int, busy: list[tuple[int, int, int]]
) -> _Side:
    """A split in space: the child of `size` bytes, live as `busy` says, with `rest` empty bytes beside it."""
    left = _Split(size, busy=busy, children=[child])
    side = _Side(left, _Split(rest), split, index)
    if isinstance(child, _Side):
        child.parent, child.index = left, 0
    left.parent = side.right.parent = side
    return side


def _grow(root: _Split, row: int, start: int, end: int, size: int) -> _Split:
    new = _Split(root.size + size)
    last = _Split(size, busy=[(start, end, 0)], children=[row])
    side = _Side(root, last, new, 0)
    root.parent = last.parent = side
    new.children = [side]
    for a, b, _ in root.busy:
        new.occupy(a, b, 0)
    new.occupy(start, end, 0)
    return new
