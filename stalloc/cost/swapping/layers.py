"""Layers and the link to the host; layers in a row that are cut into stretches: what these need, which cost least."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stalloc.cost.gpu_rates import LINK_SHARE, LINK_START


@dataclass(frozen=True)
class LayerCost:
    """One layer, or several in a row."""

    parameter_bytes: int
    saved_bytes: int  #: activations that its forward pass leaves for its backward pass
    boundary_bytes: int  #: what it hands to the next layer
    forward_seconds: float
    backward_seconds: float
    forward_work_bytes: int = 0  #: the most that its forward pass has at once of what it makes, beyond what it saves
    backward_work_bytes: int = 0  #: the same of its backward pass, beyond the gradients of its parameters


@dataclass(frozen=True)
class LinkCost:
    """Copies over one link."""

    bytes_per_second: float

    @property
    def rate(self) -> float:
        """Bytes a second of a copy that is under way."""
        return LINK_SHARE * self.bytes_per_second

    def seconds(self, num_bytes: int) -> float:
        """Seconds of one copy of `num_bytes`; 0 for no bytes."""
        return LINK_START + num_bytes / self.rate if num_bytes else 0.0


Stretch = tuple[int, int]
"""Layers [begin, end)."""
Cost = tuple[float, int]
"""Seconds, and bytes that are moved."""
ALL_TRIED = 14  # layers: 8,192 ways to cut them, 0.6 s of processor time (2026-11-29); each layer more doubles both


def together(layers: Sequence[LayerCost]) -> LayerCost:
    """Several layers in a row as one."""
    return LayerCost(
        sum(one.parameter_bytes for one in layers),
        sum(one.saved_bytes for one in layers),
        layers[-1].boundary_bytes,
        sum(one.forward_seconds for one in layers),
        sum(one.backward_seconds for one in layers),
        max(one.forward_work_bytes for one in layers),
        max(one.backward_work_bytes for one in layers),
    )


def forward_bytes(layers: Sequence[LayerCost], begin: int, end: int) -> int:
    """What the forward pass of layers [begin, end) needs, one computing at a time and nothing kept for backward."""
    works = (_handed(layers, at) + layers[at].saved_bytes + layers[at].forward_work_bytes for at in range(begin, end))
    return sum(one.parameter_bytes for one in layers[begin:end]) + max(works)


def backward_bytes(layers: Sequence[LayerCost], begin: int, end: int) -> int:
    """What the backward pass of layers [begin, end) needs, which computes forward again from what they were handed."""
    one = together(layers[begin:end])
    gradients = one.parameter_bytes
    work = max(one.forward_work_bytes, gradients + one.backward_work_bytes)
    return one.parameter_bytes + _handed(layers, begin) + one.saved_bytes + work


def least_budget(layers: Sequence[LayerCost]) -> tuple[int, int, str]:
    """(bytes, layer, pass) of the layer that needs most: from there on stretches of one layer each fit."""
    ways = (("forward", forward_bytes), ("backward", backward_bytes))
    return max((needed(layers, row, row + 1), row, name) for name, needed in ways for row in range(len(layers)))


def _handed(layers: Sequence[LayerCost], row: int) -> int:
    return layers[row - 1].boundary_bytes if row else 0


def cut_best(
    num: int, cost: Callable[[Sequence[Stretch]], Cost | None]
) -> tuple[Cost, tuple[Stretch, ...], bool] | None:
    """(cost, stretches, whether no others cost less) of `num` layers; None if none fit, of which `cost` is None.

    Up to ALL_TRIED layers all are tried. Of more those are taken from which no cut more, no cut less and no cut that is
    moved by a layer leads to a lower cost, beginning with the best of stretches of equal length.
    """

    def best(ways: Iterable[Iterable[int]]) -> tuple[Cost, tuple[Stretch, ...]] | None:
        made = (tuple(itertools.pairwise((0, *sorted(cuts), num))) for cuts in ways)
        return min(((found, one) for one in made if (found := cost(one)) is not None), default=None)

    if num <= ALL_TRIED:
        found = best(cuts for count in range(num) for cuts in itertools.combinations(range(1, num), count))
        return (*found, True) if found else None
    found = best([num * row // count for row in range(1, count)] for count in range(1, num + 1))
    while found:
        before, cuts = found, {begin for begin, _ in found[1]} - {0}
        moved = [cuts - {cut} | {to} for cut in cuts for to in (cut - 1, cut + 1) if 0 < to < num]
        found = best([*(cuts ^ {cut} for cut in range(1, num)), *moved])
        if found is None or found[0] >= before[0]:
            return (*before, False)
    return None
