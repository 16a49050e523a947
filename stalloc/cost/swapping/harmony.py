"""Packs of layers that come to the device one after the other: which layers go together.

Source: Li et al., "Harmony: Overcoming the Hurdles of GPU Memory Capacity to Train Massive DNN Models on Commodity
Servers", VLDB 2022: layers are packed for the forward and for the backward pass apart; a pack computes while the next
one comes; backward computes a pack again from what it was handed, which lay in the host.
Contract: of all ways to pack layers in a row that fit, the one with the fewest estimated seconds, and of those the one
that moves least. A pack fits with what it needs itself; what of the next one has no room beside it comes after it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stalloc.cost.layer_costs import LayerCost, LinkCost
from stalloc.cost.swapping.recorded_layers import backward_bytes, forward_bytes, together

Pack = tuple[int, int]
"""Layers [begin, end)."""


@dataclass(frozen=True)
class PackPlan:
    """How a step is packed."""

    forward: tuple[Pack, ...]
    backward: tuple[Pack, ...]  #: in the order in which backward has them
    seconds: float  #: estimated, without the optimizer
    moved_bytes: int  #: both ways


@dataclass(frozen=True)
class _Turn:
    """What one pack does in a pass."""

    compute_seconds: float
    in_bytes: int
    out_bytes: int
    here_bytes: int  #: while it computes


def pack_layers(layers: Sequence[LayerCost], budget_bytes: int, link: LinkCost) -> PackPlan | None:
    """The best packs within so much memory of the device; None if not even single layers fit."""
    forward, backward = (_best(layers, budget_bytes, link, is_backward=back) for back in (False, True))
    there = pass_cost(layers, forward, budget_bytes, link, is_backward=False)
    back = pass_cost(layers, backward, budget_bytes, link, is_backward=True)
    if there is None or back is None:
        return None
    in_order = tuple((len(layers) - end, len(layers) - begin) for begin, end in backward)
    return PackPlan(forward, in_order, there[0] + back[0], there[1] + back[1])


def pass_cost(
    layers: Sequence[LayerCost], packs: Sequence[Pack], budget_bytes: int, link: LinkCost, *, is_backward: bool
) -> tuple[float, int] | None:
    """(seconds, bytes moved) of a pass in these packs, in its own order of layers; None if there is none that fits."""
    turns = [_turn(layers, pack, is_backward=is_backward) for pack in packs]
    if not turns or any(turn.here_bytes > budget_bytes for turn in turns):
        return None
    seconds = 0.0
    for turn, following in zip([_first(budget_bytes), *turns][::-1], [None, *turns[::-1]], strict=True):
        seconds += _seconds(turn, following, budget_bytes, link)
    return seconds, sum(turn.in_bytes + turn.out_bytes for turn in turns)


def _first(budget_bytes: int) -> _Turn:
    """What comes before the first pack: nothing computes, and no part of the pack can come earlier."""
    return _Turn(0.0, 0, 0, budget_bytes)


def _turn(layers: Sequence[LayerCost], pack: Pack, *, is_backward: bool) -> _Turn:
    """A pack of the forward pass is handed on with its boundary to the host too, from where backward begins with it.

    `pack` counts layers in the order of the pass.
    """
    begin, end = pack
    if not is_backward:
        one = together(layers[begin:end])
        out = 0 if end == len(layers) else one.boundary_bytes
        return _Turn(one.forward_seconds, one.parameter_bytes, out, forward_bytes(layers, begin, end))
    low, high = len(layers) - end, len(layers) - begin
    one = together(layers[low:high])
    handed = layers[low - 1].boundary_bytes if low else 0
    seconds, gradients = one.forward_seconds + one.backward_seconds, one.parameter_bytes
    return _Turn(seconds, one.parameter_bytes + handed, gradients, backward_bytes(layers, low, high))


def _seconds(turn: _Turn, following: _Turn | None, budget_bytes: int, link: LinkCost) -> float:
    """Computing, while what has room of the next pack comes and what this one makes leaves; then the rest comes."""
    coming = following.in_bytes if following else 0
    beside = min(coming, budget_bytes - turn.here_bytes)
    meanwhile = max(turn.compute_seconds, link.seconds(beside), link.seconds(turn.out_bytes))
    return meanwhile + link.seconds(coming - beside)


def _best(layers: Sequence[LayerCost], budget_bytes: int, link: LinkCost, *, is_backward: bool) -> tuple[Pack, ...]:
    """The best packs by dynamic programming over the pack at hand: the rest depends on nothing else. () if none fit."""
    num = len(layers)
    possible = itertools.combinations(range(num + 1), 2)
    turns = {pack: _turn(layers, pack, is_backward=is_backward) for pack in possible}
    rest: dict[Pack, tuple[float, int, tuple[Pack, ...]]] = {}  # seconds, bytes and packs from this pack on

    def then(turn: _Turn, begin: int) -> tuple[float, int, tuple[Pack, ...]] | None:
        """A turn, and the best that can follow it from a layer on."""
        moved = turn.in_bytes + turn.out_bytes
        if begin == num:
            return _seconds(turn, None, budget_bytes, link), moved, ()
        ways = [
            (_seconds(turn, turns[one], budget_bytes, link) + rest[one][0], moved + rest[one][1], one)
            for one in ((begin, end) for end in range(begin + 1, num + 1))
            if one in rest
        ]
        if not ways:
            return None
        seconds, moved, pack = min(ways, key=lambda way: way[:2])
        return seconds, moved, (pack, *rest[pack][2])

    for pack in reversed(turns):
        found = then(turns[pack], pack[1]) if turns[pack].here_bytes <= budget_bytes else None
        if found:
            rest[pack] = found
    found = then(_first(budget_bytes), 0)
    return found[2] if found else ()
