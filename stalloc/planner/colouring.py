"""Plans from the lifespan graph: groups are coloured, and what they hold is placed in the order of the colours.

Contract: packings without overlap; deterministic; `coloured` never ends without one.

Addresses are the colours of an interval graph whose vertices have weights: each request takes as many as it has bytes,
and no two that are live together share one (weighted interval colouring, or dynamic storage allocation; Gergov, SODA
1999). Where weights are equal a greedy colouring in order of birth needs no more than the load; where they are not, the
problem is NP-hard, and the order decides. Here:

- Vertices of the graph (lifespans/classes.py) are the HomoPhase groups of STAlloc (EuroSys 2026, section 5), of
  requests that are born in one phase and die in one, as they are and divided by size. So few vertices are coloured by
  networkx in an instant, the groups that meet most others, or are live with most bytes, first.
- Requests are fused to rows and blocks (groups) as far as that takes half of what the load leaves, or nothing.
- A block takes the lowest colour of its members. Those of the lowest colours are placed first wherever there is a
  choice, by the two sweeps that all orders go through (packings).
- Where that misses the target, groups whose members end above it move forward in the order, and all is placed again:
  local repair in the space of orders ("Squeaky wheel" optimization, Joslin and Clements, JAIR 10, 1999).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.planner.budget import Budget
from stalloc.planner.groups import Fused, in_blocks, in_rows, phase_edges, phases_of, single
from stalloc.planner.packings import Packing, Ranked, Tries, rank_of
from stalloc.planner.placement import FAR
from stalloc.planner.problem import Problem

#: vertices of a graph: the edges are at most half of its square
MAX_GROUPS = 512
#: placements that repair may cost, and those for each request beyond
EFFORT, EFFORT_EACH = 600_000, 40
#: of the order, how far a group moves forward that ends above the target; from 0.1 to 0.5, and from a quarter to all of
#: what may lie idle in blocks, the mean peak on MiniMalloc's instances differs by 0.3 %, and no recorded trace's does
FORWARD = 0.25


class _Colouring(NamedTuple):
    """Groups of requests with their colours."""

    group: Column  #: (n,) of each request
    colour: Column  #: (g,) of each group
    name: str


class _Start(NamedTuple):
    """Blocks that come in the order of their groups' turns."""

    fused: Fused
    group: Column  #: (m,) of each block
    turn: Column  #: (g,) of each group, lower ones first
    method: str

    def ranked(self, backwards: bool) -> Ranked:
        """The blocks by the turns of their groups."""
        blocks = self.fused.problem.reversed() if backwards else self.fused.problem
        return Ranked(blocks, _ranks(blocks, self.turn[self.group]), f"{self.method}{' backwards' * backwards}")

    def members(self, blocks: Packing, method: str) -> Packing:
        """The packing of the requests for that of the blocks."""
        return Packing(self.fused.offsets(blocks.offset), blocks.peak_bytes, method)


def coloured(problem: Problem, target: int, budget: Budget, share: float = 1.0) -> Packing:
    """The best packing found, above the problem's floor; looks no further once its peak is at most the target.

    `share` of the usual effort is spent, for callers that solve several variants of one problem.
    """
    target = max(target, problem.bound)
    starts = list(_starts(problem, target))
    effort = int(share * (EFFORT + EFFORT_EACH * len(problem.size)))
    best: Packing | None = None
    for packing, cost in itertools.chain(_placed(starts, target), _repaired(starts, target)):
        effort -= cost
        if packing is not None and (best is None or packing.peak_bytes < best.peak_bytes):
            best = packing
            budget.tell(len(problem.size), best.peak_bytes, problem.bound, best.method)
        if best is not None and (best.peak_bytes <= target or budget.over() or (effort <= 0 and not budget.patient)):
            return best
    raise AssertionError("unreachable")


def tries(problem: Problem, target: int) -> Tries:
    """What the groups by phases, the fewest, come to without repair: to the target or not at all."""
    return _placed(_starts(problem, target, 1), target)


def by_colour(problem: Problem) -> list[tuple[str, Callable[[Problem], Column]]]:
    """Orders by name: each gives (n,) ranks of the requests in one direction of time, those of one colour by end."""
    edges = phase_edges(problem)
    return [
        (f"coloured {name}", lambda turned, turn=colour[group]: _ranks(turned, turn))  # type: ignore[misc]
        for group, colour, name in _colourings(problem, edges)
    ]


def _starts(problem: Problem, target: int, num_colourings: int | None = None) -> Iterator[_Start]:
    """The blocks of each way to fuse, in the order of all or the first colourings; the fewest blocks first."""
    edges = phase_edges(problem)
    colourings = list(itertools.islice(_colourings(problem, edges), num_colourings))
    load = problem.floor + problem.load
    half = load + (target - load) // 2
    for fused, kind in (
        (in_blocks(in_rows(problem, half), half, edges), "blocks"),
        (in_rows(problem, load), "rows"),
        (single(problem), "requests"),
    ):
        for group, colour, name in colourings:
            first = np.full(len(fused.problem.size), FAR)
            np.minimum.at(first, fused.block, colour[group] * len(colour) + group)
            yield _Start(fused, first % len(colour), colour, f"coloured {kind}, {name}")


def _colourings(problem: Problem, edges: Column) -> Iterator[_Colouring]:
    """The groups by phases, coloured by how many others they meet; those by size as well, by that and by their area."""
    import networkx as nx  # takes long, and a plan is mostly found without

    from stalloc.lifespans.classes import few_keys, group_graph

    start, end, size = problem.start, problem.end, problem.size
    born, dies = phases_of(problem, edges)
    none = np.zeros(len(size), np.int64)
    for sizes, strategies in ((none, ("degree", "area")), (size, ("area", "degree"))):
        graph = group_graph(start, end, size, few_keys(born, dies, sizes, none, MAX_GROUPS))
        group, area = none.copy(), np.zeros(len(graph), np.float64)
        for number, rows in enumerate(graph.nodes[node]["rows"] for node in graph):
            group[rows], area[number] = number, ((end - start)[rows] * size[rows].astype(np.float64)).sum()
        number_of = {node: number for number, node in enumerate(graph)}
        for strategy in strategies:
            key = area if strategy == "area" else np.array([degree for _, degree in graph.degree])
            order = [node for _, node in sorted(zip((-key).tolist(), graph, strict=True))]
            colour_of = nx.greedy_color(graph, lambda graph, colours, order=order: order)
            colour = np.array([colour_of[node] for node in number_of], np.int64)
            yield _Colouring(group, colour, f"{'sizes' if sizes is size else 'phases'} by {strategy}")


def _placed(starts: Iterable[_Start], target: int) -> Tries:
    """Each start in both directions of time, to the target or not at all."""
    for start, backwards in itertools.product(starts, (False, True)):
        blocks = start.ranked(backwards)
        for tried in (blocks.packed, blocks.swept):
            packing, cost = tried(target)
            yield (None if packing is None else start.members(packing, packing.method)), cost


def _repaired(starts: list[_Start], target: int) -> Iterator[tuple[Packing, int]]:
    """Packings for ever, of each start in turn: after each its groups that end above the target move forward."""
    turns = [start.turn.astype(np.float64) for start in starts]
    for round_ in itertools.count():
        for number, start in enumerate(starts):
            blocks = start._replace(turn=turns[number]).ranked(round_ % 2 == 1)
            packing, cost = blocks.swept(FAR // 2)
            assert packing is not None
            high = distinct(start.group[packing.offset + start.fused.problem.size > target])
            turns[number][high] -= max(1.0, FORWARD * len(start.turn))
            turns[number] = rank_of(np.argsort(turns[number], kind="stable")).astype(np.float64)
            yield start.members(packing, f"{blocks.method}, repaired"), cost


def _ranks(problem: Problem, turn: Column) -> Column:
    """(n,) ranks by turn, among equals what ends last, then what lives longest."""
    return rank_of(np.lexsort((problem.start - problem.end, -problem.end, turn)))
