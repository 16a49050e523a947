"""Packs of layers that come to the device one after the other: which layers go together.

Source: Li et al., "Harmony", VLDB 2022: layers are packed for the forward and for the backward pass apart; a pack
computes while the next one comes; backward computes a pack again from what it was handed, which lay in the host.
Contract: that of `cut_best`, by seconds and then by bytes moved. A pack fits with what it needs itself; what of the
next one has no room beside it comes after it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from stalloc.cost.layer_costs import LayerCost, LinkCost
from stalloc.cost.swapping.layers_in_a_row import Stretch, backward_bytes, cut_best, forward_bytes, together


@dataclass(frozen=True)
class PackPlan:
    """How a step is packed."""

    forward: tuple[Stretch, ...]
    backward: tuple[Stretch, ...]  #: in the order in which backward has them
    seconds: float  #: estimated, without the optimizer
    moved_bytes: int  #: both ways
    is_optimal: bool  #: no others take less


@dataclass(frozen=True)
class _Turn:
    """What one pack does in a pass."""

    compute_seconds: float
    in_bytes: int
    out_bytes: int
    here_bytes: int  #: while it computes


def pack_layers(layers: Sequence[LayerCost], budget_bytes: int, link: LinkCost) -> PackPlan | None:
    """The best packs within so much memory of the device; None if not even single layers fit."""
    costs = [_Pass(layers, budget_bytes, link, is_backward).cost for is_backward in (False, True)]
    there, back = (cut_best(len(layers), cost) for cost in costs)
    if there is None or back is None:
        return None
    in_order = tuple((len(layers) - end, len(layers) - begin) for begin, end in back[1])
    return PackPlan(there[1], in_order, there[0][0] + back[0][0], there[0][1] + back[0][1], there[2] and back[2])


def pass_cost(
    layers: Sequence[LayerCost], packs: Sequence[Stretch], budget_bytes: int, link: LinkCost, *, is_backward: bool
) -> tuple[float, int] | None:
    """(seconds, bytes moved) of a pass in these packs, in its own order of layers; None if there is none that fits."""
    return _Pass(layers, budget_bytes, link, is_backward).cost(packs) if packs else None


class _Pass:
    """A pass over layers, which packs count in the order of the pass."""

    def __init__(self, layers: Sequence[LayerCost], budget_bytes: int, link: LinkCost, is_backward: bool) -> None:
        self._budget_bytes, self._link = budget_bytes, link
        self._turn = functools.cache(functools.partial(_back if is_backward else _there, layers))

    def cost(self, packs: Sequence[Stretch]) -> tuple[float, int] | None:
        """While a pack computes, what has room of the next comes and what it makes leaves; then the rest comes."""
        turns, seconds = [self._turn(*pack) for pack in packs], self._link.seconds
        if any(turn.here_bytes > self._budget_bytes for turn in turns):
            return None
        total = seconds(turns[0].in_bytes)
        for turn, coming in zip(turns, [*(one.in_bytes for one in turns[1:]), 0], strict=True):
            beside = min(coming, self._budget_bytes - turn.here_bytes)
            total += max(turn.compute_seconds, seconds(beside), seconds(turn.out_bytes)) + seconds(coming - beside)
        return total, sum(turn.in_bytes + turn.out_bytes for turn in turns)


def _there(layers: Sequence[LayerCost], begin: int, end: int) -> _Turn:
    """A pack of the forward pass hands its boundary on to the host too, from where backward begins with it."""
    one = together(layers[begin:end])
    out = 0 if end == len(layers) else one.boundary_bytes
    return _Turn(one.forward_seconds, one.parameter_bytes, out, forward_bytes(layers, begin, end))


def _back(layers: Sequence[LayerCost], begin: int, end: int) -> _Turn:
    low, high = len(layers) - end, len(layers) - begin
    one = together(layers[low:high])
    coming = one.parameter_bytes + (layers[low - 1].boundary_bytes if low else 0)
    seconds, gradients = one.forward_seconds + one.backward_seconds, one.parameter_bytes
    return _Turn(seconds, coming, gradients, backward_bytes(layers, low, high))
