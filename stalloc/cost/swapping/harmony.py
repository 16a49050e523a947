"""Packs of layers that come to the device one after the other: which layers go together.

Source: Li et al., "Harmony", VLDB 2022: layers are packed for the forward and for the backward pass apart; a pack
computes while the next one comes; backward computes a pack again from what it was handed, which lay in the host.
Contract: that of `cut_best`, by seconds and then by bytes moved. A pack fits with what it needs itself; what of the
next one has no room beside it comes after it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stalloc.cost.swapping.layers import LayerCost, LinkCost, Stretch, backward_bytes, cut_best, forward_bytes, together


@dataclass(frozen=True)
class PackPlan:
    """How a step is packed."""

    forward: tuple[Stretch, ...]
    backward: tuple[Stretch, ...]  #: in the order in which backward has them
    seconds: float  #: estimated, without the optimizer
    moved_bytes: int  #: both ways
    is_optimal: bool  #: no others take less


def pack_layers(layers: Sequence[LayerCost], budget_bytes: int, link: LinkCost) -> PackPlan | None:
    """The best packs within so much memory of the device; None if not even single layers fit."""
    num = len(layers)
    there, back = (cut_best(num, _pass_cost(layers, budget_bytes, link, is_backward)) for is_backward in (False, True))
    if there is None or back is None:
        return None
    (seconds, moved), forward, is_best = there
    (more_seconds, more_moved), backward, is_best_too = back
    in_order = tuple((num - end, num - begin) for begin, end in backward)
    return PackPlan(forward, in_order, seconds + more_seconds, moved + more_moved, is_best and is_best_too)


def pass_cost(
    layers: Sequence[LayerCost], packs: Sequence[Stretch], budget_bytes: int, link: LinkCost, *, is_backward: bool
) -> tuple[float, int] | None:
    """(seconds, bytes moved) of a pass in these packs, in its own order of layers; None if there is none that fits."""
    return _pass_cost(layers, budget_bytes, link, is_backward)(packs) if packs else None


def _pass_cost(
    layers: Sequence[LayerCost], budget_bytes: int, link: LinkCost, is_backward: bool
) -> Callable[[Sequence[Stretch]], tuple[float, int] | None]:
    @functools.cache
    def turn(begin: int, end: int) -> tuple[float, int, int, int]:
        """What a pack does: seconds of computing, bytes that come, bytes that leave, bytes that it needs meanwhile."""
        low, high = (len(layers) - end, len(layers) - begin) if is_backward else (begin, end)
        one = together(layers[low:high])
        if is_backward:
            coming = one.parameter_bytes + (layers[low - 1].boundary_bytes if low else 0)
            gradients = one.parameter_bytes
            return one.forward_seconds + one.backward_seconds, coming, gradients, backward_bytes(layers, low, high)
        leaving = one.boundary_bytes if end < len(layers) else 0  # to the host too, from where backward begins with it
        return one.forward_seconds, one.parameter_bytes, leaving, forward_bytes(layers, low, high)

    def cost(packs: Sequence[Stretch]) -> tuple[float, int] | None:
        """While a pack computes, what has room of the next comes and what it makes leaves; then the rest comes."""
        computing, coming, leaving, needed = zip(*(turn(*pack) for pack in packs), strict=True)
        if max(needed) > budget_bytes:
            return None
        total = link.seconds(coming[0])
        for seconds, following, out, here in zip(computing, (*coming[1:], 0), leaving, needed, strict=True):
            beside = min(following, budget_bytes - here)
            total += max(seconds, link.seconds(beside), link.seconds(out)) + link.seconds(following - beside)
        return total, sum(coming) + sum(leaving)

    return cost
