"""What a placement problem is, and how it falls into smaller ones without losing an optimum.

Contract: a packing of the parts, each at its base and the rows of each stack one on the other, is a packing of the
whole, and the best packings of the parts make a best packing of the whole above every common target height.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from stalloc.columns import Column, Sizes, Times

if TYPE_CHECKING:
    import networkx as nx


class Stays(NamedTuple):
    """When n requests are live: epochs [start, end) and, in a cycle, [start2, end2) as well (0, 0 if not)."""

    start: Times
    end: Times
    start2: Times
    end2: Times
    num_epochs: int

    @property
    def span(self) -> Column:
        """(n,) epochs in which each is live."""
        return (self.end - self.start) + (self.end2 - self.start2)

    @property
    def last_end(self) -> Column:
        """(n,) the last epoch's end: what wraps ends there."""
        return np.maximum(self.end, self.end2)


@dataclass(frozen=True, eq=False)
class Problem:
    """Requests to be placed above a floor. Times are epochs in [0, T), every lifespan holds at least one epoch."""

    start: Times  #: (n,) epoch
    end: Times  #: (n,) epoch, > start
    size: Sizes  #: (n,) bytes, positive
    floor: Sizes  #: (T,) bytes that are taken already, from the bottom

    @property
    def load(self) -> Column:
        """(T,) bytes live in each epoch, the floor not counted."""
        return load_curve(self.start, self.end, self.size, len(self.floor))

    @property
    def bound(self) -> int:
        """No packing is lower: the maximum of floor and load together (0 without epochs)."""
        return int((self.floor + self.load).max(initial=0))

    @property
    def stays(self) -> Stays:
        """When the requests are live."""
        none = np.zeros(len(self.size), np.int64)
        return Stays(self.start, self.end, none, none, len(self.floor))

    def reversed(self) -> "Problem":
        """This problem with time running backwards; every packing of it is a packing of this one."""
        num_epochs = len(self.floor)
        return Problem(num_epochs - self.end, num_epochs - self.start, self.size, self.floor[::-1].copy())

    def part(self, rows: Column, floor: Column) -> "Problem":
        """The problem of placing these rows above that floor."""
        return Problem(self.start[rows], self.end[rows], self.size[rows], floor)


def compressed(start: Column, end: Column, size: Column) -> Problem:
    """The problem of these lifespans with nothing below it, its times compressed to epochs."""
    a, b, num_epochs = epochs(start, end)
    return Problem(a, b, size, np.zeros(num_epochs, np.int64))


def load_curve(start: Column, end: Column, size: Column, num_epochs: int) -> Column:
    """(T,) bytes live in each epoch."""
    change = np.zeros(num_epochs + 1, np.int64)
    np.add.at(change, start, size)
    np.subtract.at(change, end, size)
    return np.cumsum(change[:-1])


def epochs(start: Column, end: Column) -> tuple[Column, Column, int]:
    """Times as epochs: (start, end, T). A new epoch begins only where a start follows an end.

    These are the maximal cliques of the interval graph, so that two lifespans (none empty) share an epoch exactly if
    they share a moment, and the load of an epoch is the highest load of its events.
    """
    count = len(start)
    if count == 0:
        return start, end, 0
    times = np.concatenate([start, end])
    is_start = np.zeros(2 * count, bool)
    is_start[:count] = True
    order = np.lexsort((is_start, times))  # at equal times ends first: lifespans are half open
    sorted_start = is_start[order]
    begins = np.zeros(2 * count, np.int64)
    begins[1:] = sorted_start[1:] & ~sorted_start[:-1]
    epoch = np.empty(2 * count, np.int64)
    epoch[order] = np.cumsum(begins)
    return epoch[:count], epoch[count:] + 1, int(epoch.max()) + 1


def split_at_cuts(start: Column, end: Column) -> list[Column]:
    """Groups of rows between which there is a moment that no lifespan crosses, in order of time."""
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(end[order])
    cuts = np.flatnonzero(start[order][1:] >= reach[:-1]) + 1
    return np.split(order, cuts)


@dataclass(frozen=True, eq=False)
class Part:
    """A node of the forest: unless it is a piece, a stack, whose rows lie one on the other at its base."""

    rows: Column  #: (m,)
    base_bytes: int
    load_bytes: int  #: the most that is live at once
    below: int | None  #: the number of the stack that it stands on


@dataclass(frozen=True, eq=False)
class Piece(Part):
    """Rows that remain to be placed."""

    twin: int  #: the number of the first that looks like it: its own if there is none before


def parts_of(start: ArrayLike, end: ArrayLike, size: ArrayLike) -> list[Part]:
    """The forest of the lifespans [start, end), none of them empty, with sizes in bytes, each (n,) of integers.

    What lives through all of a range goes to its bottom, as a stack; what is left falls apart at the moments that no
    lifespan crosses, and each part is looked at again. What neither peels nor splits is a piece. Pieces are twins if
    their lifespans and sizes are the same but for when they happen: a plan of one is a plan of the others.
    """
    start, end, size = (np.asarray(column, np.int64) for column in (start, end, size))
    parts: list[Part] = []
    seen: dict[bytes, int] = {}  # what a piece looks like -> the first that looks so
    waiting: list[tuple[Column, int, int | None]] = [(np.arange(len(start)), 0, None)] if len(start) else []
    while waiting:
        rows, base, below = waiting.pop()
        a, b = start[rows], end[rows]
        through = (a == a.min()) & (b == b.max())
        if through.any():
            stack = rows[through]
            load = int(size[stack].sum())
            parts.append(Part(stack, base, load, below))
            below = len(parts) - 1
            base += load
            rows = rows[~through]
        pieces = split_at_cuts(start[rows], end[rows]) if len(rows) else []
        if len(pieces) == 1 and not through.any():
            first, last, num_epochs = epochs(a, b)
            load = int(load_curve(first, last, size[rows], num_epochs).max())
            look = hashlib.blake2b(np.stack([first, last, size[rows]]).tobytes(), digest_size=32).digest()
            parts.append(Piece(rows, base, load, below, seen.setdefault(look, len(parts))))
        else:
            waiting.extend((rows[piece], base, below) for piece in reversed(pieces))
    return parts


def decomposition(start: ArrayLike, end: ArrayLike, size: ArrayLike) -> "nx.DiGraph":
    """The forest that `parts_of` finds, as a graph: edges lead from a stack to what stands on it.

    Attributes of nodes: `kind`, "stack" or "piece", `rows` (m,), `base_bytes`, `load_bytes` and, for pieces, `twin`.
    """
    import networkx as nx  # takes long, and whoever only plans does without

    graph = nx.DiGraph()
    for node, part in enumerate(parts_of(start, end, size)):
        graph.add_node(node, kind="stack", rows=part.rows, base_bytes=part.base_bytes, load_bytes=part.load_bytes)
        if isinstance(part, Piece):
            graph.nodes[node].update(kind="piece", twin=part.twin)
        if part.below is not None:
            graph.add_edge(part.below, node)
    return graph


def pieces_of(parts: list[Part]) -> list[Piece]:
    """The pieces, the ones that reach highest first."""
    pieces = [part for part in parts if isinstance(part, Piece)]
    return sorted(pieces, key=lambda piece: -piece.base_bytes - piece.load_bytes)


def place_stacks(parts: list[Part], size: Column, offset: Column) -> None:
    """Write the offsets of all rows that are in stacks."""
    for part in parts:
        if not isinstance(part, Piece):
            offset[part.rows] = part.base_bytes + np.cumsum(size[part.rows]) - size[part.rows]
