"""A window of layers that moves over a step: the smallest that is never waited for, and what it makes of the step.

Source: Sun et al., "STRONGHOLD: Fast and Affordable Billion-Scale Deep Learning Model Training", SC 2022, section 4.2:
the smallest window of layers in which copies hide behind computing.
Contract: layers come in the order in which they compute, each as soon as one has left and the link is free; at the
begin of a pass the window of the pass before is there, whose last layers are the first of this one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stalloc.cost.queues import Queue, Task, schedule
from stalloc.cost.swapping.layers import LayerCost, LinkCost

_Turn = tuple[int, float]  # the bytes of a layer, and the seconds that it computes
_ROUNDING = 1e-9  #: of all seconds, which is no stall


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
    passes = _pass_turns(layers)
    moved = sum(num_bytes for turns in passes for num_bytes, _ in turns[count:])
    seconds = sum(taken for turns in passes for _, taken in turns) + stall_seconds(layers, count, link)
    return Window(count, len(layers), at_once, moved, seconds)


def smallest_window(layers: Sequence[LayerCost], link: LinkCost) -> int:
    """The least number of layers at once with which the model knows no stall; all of them, where each smaller has."""
    return next((one for one in range(1, len(layers)) if stall_seconds(layers, one, link) == 0.0), len(layers))


def stall_seconds(layers: Sequence[LayerCost], window: int, link: LinkCost) -> float:
    """How long a forward and a backward pass wait for layers in a window of so many."""
    return sum(_stall(turns, window, link) for turns in _pass_turns(layers))


def _pass_turns(layers: Sequence[LayerCost]) -> tuple[list[_Turn], list[_Turn]]:
    """The forward pass, and the backward pass, which computes each layer again."""
    backward = [(layer.parameter_bytes, layer.forward_seconds + layer.backward_seconds) for layer in reversed(layers)]
    return [(layer.parameter_bytes, layer.forward_seconds) for layer in layers], backward


def _stall(turns: Sequence[_Turn], window: int, link: LinkCost) -> float:
    tasks: list[Task] = []
    computed: list[int] = []
    for place, (num_bytes, seconds) in enumerate(turns):
        arrived: tuple[int, ...] = ()
        if place >= window:
            arrived = (len(tasks),)
            tasks.append(Task("load", Queue.TO_DEVICE, link.seconds(num_bytes), (computed[place - window],)))
        computed.append(len(tasks))
        tasks.append(Task("compute", Queue.COMPUTE, seconds, arrived))
    made = schedule(tasks)
    stall = made.seconds - made.busy[Queue.COMPUTE]
    return stall if stall > _ROUNDING * made.seconds else 0.0
