"""Packs of layers that come to the device one after the other: which layers go together.

Source: Li et al., "Harmony: Overcoming the Hurdles of GPU Memory Capacity to Train Massive DNN Models on Commodity
Servers", VLDB 2022: layers are packed for the forward and for the backward pass apart; a pack computes while the next
one comes; backward computes a pack again from what it was handed, which lay in the host.
Contract: of all ways to pack layers in a row that fit, the one with the fewest estimated seconds, and of those the one
that moves least. A pack fits with what it needs itself; what of the next one has no room beside it comes after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stalloc.cost.layer_costs import LayerCost, LinkCost, backward_bytes, forward_bytes, together

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
    forward = _best(layers, budget_bytes, link, is_backward=False)
    backward = _best(layers, budget_bytes, link, is_backward=True)
    if forward is None or backward is None:
        return None
    last = len(layers)
    return PackPlan(
        forward[0],
        tuple((last - end, last - begin) for begin, end in backward[0]),
        forward[1] + backward[1],
        forward[2] + backward[2],
    )


def pass_cost(
    layers: Sequence[LayerCost], packs: Sequence[Pack], budget_bytes: int, link: LinkCost, *, is_backward: bool
) -> tuple[float, int] | None:
    """(seconds, bytes moved) of a pass in these packs, in its own order of layers; None if it does not fit."""
    turns = [_turn(layers, pack, is_backward=is_backward) for pack in packs]
    seconds = link.seconds(turns[0].in_bytes)
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        if turn.here_bytes > budget_bytes:
            return None
        seconds += _seconds(turn, following, budget_bytes, link)
    return seconds, sum(turn.in_bytes + turn.out_bytes for turn in turns)


def _turn(layers: Sequence[LayerCost], pack: Pack, *, is_backward: bool) -> _Turn:
    """A pack of the forward pass is handed on with its boundary to the host too, from where backward begins with it.

    `pack` counts layers in the order of the pass.
    """
    begin, end = pack
    if not is_backward:
        one = together(layers[begin:end])
        is_last = end == len(layers)
        out = 0 if is_last else one.boundary_bytes
        return _Turn(one.forward_seconds, one.parameter_bytes, out, forward_bytes(layers, begin, end))
    low, high = len(layers) - end, len(layers) - begin
    one = together(layers[low:high])
    handed = layers[low - 1].boundary_bytes if low else 0
    gradients = one.parameter_bytes
    return _Turn(
        one.forward_seconds + one.backward_seconds,
        one.parameter_bytes + handed,
        gradients,
        backward_bytes(layers, low, high),
    )


def _seconds(turn: _Turn, following: _Turn | None, budget_bytes: int, link: LinkCost) -> float:
    """Computing, while what has room of the next pack comes and what this one makes leaves; then the rest comes."""
    coming = following.in_bytes if following else 0
    beside = min(coming, budget_bytes - turn.here_bytes)
    meanwhile = max(turn.compute_seconds, link.seconds(beside), link.seconds(turn.out_bytes))
    return meanwhile + link.seconds(coming - beside)


def _best(
    layers: Sequence[LayerCost], budget_bytes: int, link: LinkCost, *, is_backward: bool
) -> tuple[tuple[Pack, ...], float, int] | None:
    """(packs, seconds, bytes) by dynamic programming over the pack at hand: the rest depends on nothing else."""
    num = len(layers)
    turns = {
        (begin, end): _turn(layers, (begin, end), is_backward=is_backward)
        for begin in range(num)
        for end in range(begin + 1, num + 1)
    }
    rest: dict[Pack, tuple[float, int, Pack | None]] = {}  # from the begin of this pack on
    for begin in range(num - 1, -1, -1):
        for end in range(begin + 1, num + 1):
            turn = turns[begin, end]
            moved = turn.in_bytes + turn.out_bytes
            following: list[Pack | None] = [(end, after) for after in range(end + 1, num + 1) if (end, after) in rest]
            found = []
            for one in following if end < num else [None]:
                after = turns[one] if one else None
                if turn.here_bytes <= budget_bytes:
                    later = rest[one] if one else (0.0, 0, None)
                    found.append((_seconds(turn, after, budget_bytes, link) + later[0], moved + later[1], one))
            if found:
                rest[begin, end] = min(found, key=lambda one: one[:2])
    first = [(0, end) for end in range(1, num + 1) if (0, end) in rest]
    if not first:
        return None
    pack: Pack | None = min(first, key=lambda one: (link.seconds(turns[one].in_bytes) + rest[one][0], rest[one][1]))
    assert pack is not None
    seconds, moved = link.seconds(turns[pack].in_bytes) + rest[pack][0], rest[pack][1]
    packs = []
    while pack is not None:
        packs.append(pack)
        pack = rest[pack][2]
    return tuple(packs), seconds, moved
