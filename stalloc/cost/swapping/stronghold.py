"""A window of layers that moves over a step: the smallest that is never waited for, and what it makes of the step.

Source and contract: those of `stream_window`, which finds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stalloc.cost.layer_costs import LayerCost, LinkCost
from stalloc.cost.stream_window import pass_turns, smallest_window, stall_seconds


@dataclass(frozen=True)
class Window:
    """Layers that are streamed."""

    layers: int  #: on the device at once
    num_layers: int
    num_bytes: int  #: of their parameters, at the most
    moved_bytes: int
    seconds: float  #: estimated


def stream_layers(layers: Sequence[LayerCost], link: LinkCost) -> Window:
    """A step in the smallest window without a modelled stall."""
    count = smallest_window(layers, link)
    sizes = [one.parameter_bytes for one in layers]
    at_once = max(sum(sizes[first : first + count]) for first in range(len(sizes) - count + 1))
    passes = pass_turns(layers)
    moved = sum(num_bytes for turns in passes for num_bytes, _ in turns[count:])
    seconds = sum(taken for turns in passes for _, taken in turns) + stall_seconds(layers, count, link)
    return Window(count, len(layers), at_once, moved, seconds)
