"""What a rank receives from others in a step, by kind of collective, and how long the links take for it.

Contract: bytes are counted as they arrive at one rank: an all-gather over S ranks brings (S - 1) / S of what is whole
afterwards, a reduce-scatter as much of what was whole before, an all-reduce both. Ranks of a group are neighbours;
those that hold the same part are as far apart as a group is large. Sources: the papers of ZeRO (section 7) and ZeRO++
(section 3), whose 3M and 0.75M between nodes are these sums for parameters of M bytes.
"""

from dataclasses import dataclass

from stalloc.sharding.step_marks import StepMarks
from stalloc.techniques.technique_settings import Layout

NETWORK_BYTES_PER_SECOND = 50e9
"""Each GPU's rate to other machines: 400 Gbit/s, as in NVIDIA's DGX H100 (its user guide: a ConnectX-7 a GPU)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank receives in a step."""

    all_gather: int
    reduce_scatter: int
    all_reduce: int
    broadcast: int
    between: int  #: of them all, from other nodes

    @property
    def total(self) -> int:
        """Bytes of all kinds of collectives together."""
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.broadcast

    def seconds(self, within_rate: float, between_rate: float) -> float:
        """On links of so many bytes a second, one collective after the other."""
        return (self.total - self.between) / within_rate + self.between / between_rate


@dataclass(frozen=True)
class _Group:
    """Ranks `stride` apart."""

    size: int
    stride: int
    per_node: int

    def received(self, whole: float) -> tuple[float, float]:
        """How much of `whole` bytes each rank gets from the others, and from those of other nodes."""
        near = min(self.size, max(1, self.per_node // self.stride))
        return whole * (self.size - 1) / self.size, whole * (self.size - near) / self.size


def traffic(step: StepMarks, layout: Layout, num_ranks: int, per_node: int) -> Traffic:
    """The traffic of one step with as many forward passes as were recorded."""
    weights = sum(one.size_bytes for one in step.parameters)
    gradients = sum(one.size_bytes for one in step.parameters if one.is_trained)
    stored = layout.stored
    counted = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0, "broadcast": 0.0}
    between = 0.0

    def add(kind: str, whole: float, size: int, stride: int = 1) -> None:
        nonlocal between
        total, far = _Group(size, stride, per_node).received(whole)
        counted[kind] += total
        between += far

    for _ in range(step.num_passes):
        add("all_gather", weights, stored)
        add("all_gather", weights - _of_root(step), layout.parameters)  # for backward; the root stays whole
        add("reduce_scatter", gradients, layout.gradients)
        others = num_ranks // layout.gradients
        for _ in range(2):
            add("all_reduce", gradients / layout.gradients, others, layout.gradients)
    if stored < layout.state:  # once updated, parameters go to those that have other parts of the state
        kind = "broadcast" if layout.executor else "all_gather"
        add(kind, weights / stored, layout.state // stored, stored)
    return Traffic(**{kind: round(value) for kind, value in counted.items()}, between=round(between))


def _of_root(step: StepMarks) -> int:
    return sum(one.size_bytes for one in step.parameters if one.unit == len(step.units) - 1)
