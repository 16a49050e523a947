"""The ways to shard a program, each with what is foreseen of it, and the choice among them.

Contract: all valid triples of the factors are there; the cheapest is that of the fewest estimated seconds among those
within the budget, then of the fewest bytes. What a rank receives from others is counted as it arrives: an all-gather
over S ranks brings (S - 1) / S of what is whole afterwards, a reduce-scatter as much of what was whole before, an
all-reduce both. Ranks of a group are neighbours; those that hold the same part are as far apart as a group is large.
Sources: PaRO (Wu et al. 2023) for factors 1, a node, and all ranks; AMSP (Chen et al. 2023) for the search of the least
communication under a cap on memory; the papers of ZeRO (section 7) and ZeRO++ (section 3), whose 3M and 0.75M between
nodes are these sums for parameters of M bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stalloc.sharding.foreseen_ranks import Foreseen, foresee
from stalloc.sharding.step_marks import StepMarks
from stalloc.techniques.shard_settings import Layout, valid_layouts

NETWORK_BYTES_PER_SECOND = 50e9
"""Each GPU's rate to other machines: 400 Gbit/s, as in NVIDIA's DGX H100 (its user guide: a ConnectX-7 a GPU)."""


@dataclass(frozen=True)
class Traffic:
    all_gather: int
    reduce_scatter: int
    all_reduce: int
    broadcast: int
    between: int  #: of them all, from other nodes

    @property
    def total(self) -> int:
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.broadcast

    def seconds(self, within_rate: float, between_rate: float) -> float:
        """On links of so many bytes a second, one collective after the other."""
        return (self.total - self.between) / within_rate + self.between / between_rate


@dataclass(frozen=True)
class Links:
    within: float
    between: float
    per_node: int


@dataclass(frozen=True)
class Recorded:
    """A step, whether its blocks are recomputed, and how long it is estimated to compute."""

    marks: StepMarks
    is_recomputed: bool
    seconds: float


@dataclass(frozen=True)
class Way:
    layout: Layout
    is_recomputed: bool
    foreseen: Foreseen
    traffic: Traffic
    seconds: float  #: estimated: computing and communication, one after the other

    @property
    def can_run(self) -> bool:
        """Whether PyTorch has something that does it."""
        return self.layout.executor is not None


def traffic(step: StepMarks, layout: Layout, num_ranks: int, per_node: int) -> Traffic:
    """The traffic of one step with as many forward passes as were recorded."""
    weights = sum(one.size_bytes for one in step.parameters)
    gradients = sum(one.size_bytes for one in step.parameters if one.is_trained)
    of_root = sum(one.size_bytes for one in step.parameters if one.unit == len(step.units) - 1)
    stored = layout.stored
    counted = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "broadcast"), 0.0)
    between = 0.0

    def add(kind: str, whole: float, size: int, stride: int = 1) -> None:
        nonlocal between
        near = min(size, max(1, per_node // stride))  # ranks of a node among `size` that are `stride` apart
        counted[kind] += whole * (size - 1) / size
        between += whole * (size - near) / size

    for _ in range(step.num_passes):
        add("all_gather", weights, stored)
        add("all_gather", weights - of_root, layout.parameters)  # for backward; the root stays whole
        add("reduce_scatter", gradients, layout.gradients)
        others = num_ranks // layout.gradients
        for _ in range(2):
            add("all_reduce", gradients / layout.gradients, others, layout.gradients)
    if stored < layout.state:  # once updated, parameters go to those that have other parts of the state
        kind = "broadcast" if layout.executor else "all_gather"
        add(kind, weights / stored, layout.state // stored, stored)
    return Traffic(**{kind: round(value) for kind, value in counted.items()}, between=round(between))


def factors_of(num_ranks: int, per_node: int, *, every: bool = False) -> tuple[int, ...]:
    """1, the ranks of a node and all ranks; or `every` divisor of the number of ranks."""
    if every:
        return tuple(one for one in range(1, num_ranks + 1) if num_ranks % one == 0)
    return tuple(sorted({1, per_node, num_ranks} if num_ranks % per_node == 0 else {1, num_ranks}))


def all_ways(
    recorded: Sequence[Recorded], num_ranks: int, links: Links, *, every: bool = False, only: Layout | None = None
) -> list[Way]:
    """Every valid triple, or `only` one, with every recorded step, the cheapest first."""
    found = []
    valid = list(valid_layouts(factors_of(num_ranks, links.per_node, every=every), num_ranks))
    for step in recorded:
        for layout in valid if only is None else [only]:
            sent = traffic(step.marks, layout, num_ranks, links.per_node)
            seconds = step.seconds + sent.seconds(links.within, links.between)
            found.append(Way(layout, step.is_recomputed, foresee(step.marks, layout), sent, seconds))
    return sorted(found, key=_cost)


def _cost(way: Way) -> tuple[float, int, Layout]:
    return way.seconds, way.foreseen.needed_bytes, way.layout


def cheapest(ways: Sequence[Way], budget_bytes: int, *, can_run: bool = False) -> Way | None:
    """The cheapest way within the budget, with `can_run` of those that can be run; None: there is none."""
    within = [one for one in ways if one.foreseen.needed_bytes <= budget_bytes and (one.can_run or not can_run)]
    return min(within, key=_cost, default=None)


def undominated(ways: Sequence[Way]) -> list[Way]:
    """Those than which no other is as quick and needs less, or needs as little and is quicker; the cheapest first."""
    found: list[Way] = []
    for one in sorted(ways, key=_cost):
        if not found or one.foreseen.needed_bytes < found[-1].foreseen.needed_bytes:
            found.append(one)
    return found
