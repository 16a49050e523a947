"""How a problem falls apart: a forest of stacks and pieces that can each be placed by themselves.

Contract: every row is in exactly one node. A packing of each piece at its base, and the rows of each stack one on the
other at its base, are a packing of the whole; if each piece is packed as well as can be, so is the whole.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike

from stalloc.columns import Column
from stalloc.planner.problem import epochs, load_curve, split_at_cuts


def decomposition(start: ArrayLike, end: ArrayLike, size: ArrayLike) -> nx.DiGraph:
    """The forest of the lifespans [start, end), none of them empty, with sizes in bytes, each (n,) of integers.

    What lives through all of a range goes to its bottom (a node of kind "stack"); what is left falls apart at the
    moments that no lifespan crosses, and each part is looked at again. What neither peels nor splits is a node of kind
    "piece". Edges lead from a stack to what stands on it. Attributes: `kind`, `rows` (m,), `base_bytes`, `load_bytes`
    (the most that is live at once) and, for pieces, `twin`: the first piece whose lifespans and sizes are the same but
    for when they happen, itself if there is none before. A plan of one is a plan of its twins.
    """
    start, end, size = (np.asarray(column, np.int64) for column in (start, end, size))
    graph = nx.DiGraph()
    seen: dict[bytes, int] = {}  # what a piece looks like -> the first that looks so
    waiting: list[tuple[Column, int, int | None]] = [(np.arange(len(start)), 0, None)] if len(start) else []
    while waiting:
        rows, base, below = waiting.pop()
        a, b = start[rows], end[rows]
        through = (a == a.min()) & (b == b.max())
        if through.any():
            stack = rows[through]
            below = _add(graph, below, kind="stack", rows=stack, base_bytes=base, load_bytes=int(size[stack].sum()))
            base += graph.nodes[below]["load_bytes"]
            rows = rows[~through]
        pieces = split_at_cuts(start[rows], end[rows]) if len(rows) else []
        if len(pieces) == 1 and not through.any():
            first, last, num_epochs = epochs(a, b)
            load = int(load_curve(first, last, size[rows], num_epochs).max())
            node = _add(graph, below, kind="piece", rows=rows, base_bytes=base, load_bytes=load)
            look = hashlib.blake2b(np.stack([first, last, size[rows]]).tobytes(), digest_size=32).digest()
            graph.nodes[node]["twin"] = seen.setdefault(look, node)
        else:
            waiting.extend((rows[piece], base, below) for piece in reversed(pieces))
    return graph


def _add(graph: nx.DiGraph, below: int | None, **attributes: object) -> int:
    node = len(graph)
    graph.add_node(node, **attributes)
    if below is not None:
        graph.add_edge(below, node)
    return node


@dataclass(frozen=True, eq=False)
class Piece:
    """A node that remains to be placed."""

    rows: Column  #: (m,)
    base_bytes: int
    load_bytes: int  #: the maximum load of the rows
    twin: int  #: equal for pieces that look alike


def pieces_of(graph: nx.DiGraph) -> Iterator[Piece]:
    """The pieces, the ones that reach highest first."""
    nodes = [data for _, data in graph.nodes(data=True) if data["kind"] == "piece"]
    for data in sorted(nodes, key=lambda data: -data["base_bytes"] - data["load_bytes"]):
        yield Piece(data["rows"], data["base_bytes"], data["load_bytes"], data["twin"])


def place_stacks(graph: nx.DiGraph, size: Column, offset: Column) -> None:
    """Write the offsets of all rows that are in stacks."""
    for _, data in graph.nodes(data=True):
        if data["kind"] == "stack":
            rows = data["rows"]
            offset[rows] = data["base_bytes"] + np.cumsum(size[rows]) - size[rows]
