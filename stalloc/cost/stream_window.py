"""How many layers have to be on the device at once so that none is waited for.

Source: Sun et al., "STRONGHOLD: Fast and Affordable Billion-Scale Deep Learning Model Training", SC 2022, section 4.2:
the smallest window of layers in which copies hide behind computing.
Contract: layers come in the order in which they compute, each as soon as one has left and the link is free; at the
begin of a pass the window of the pass before is there, whose last layers are the first of this one.
"""

from collections.abc import Sequence

from stalloc.cost.layer_costs import LayerCost, LinkCost
from stalloc.cost.queues import Queue, Schedule, Task, schedule

Turn = tuple[int, float]
"""The bytes of a layer, and the seconds that it computes."""
_ROUNDING = 1e-9  #: of all seconds, which is no stall


def smallest_window(layers: Sequence[LayerCost], link: LinkCost) -> int:
    """The least number of layers at once with which the model knows no stall; all of them, where each smaller has."""
    for window in range(1, len(layers)):
        if stall_seconds(layers, window, link) == 0.0:
            return window
    return len(layers)


def stall_seconds(layers: Sequence[LayerCost], window: int, link: LinkCost) -> float:
    """How long a forward and a backward pass wait for layers in a window of so many."""
    return sum(_stall(turns, window, link) for turns in pass_turns(layers))


def pass_turns(layers: Sequence[LayerCost]) -> tuple[list[Turn], list[Turn]]:
    """The forward pass, and the backward pass, which computes each layer again."""
    backward = [(layer.parameter_bytes, layer.forward_seconds + layer.backward_seconds) for layer in reversed(layers)]
    return [(layer.parameter_bytes, layer.forward_seconds) for layer in layers], backward


def _stall(turns: Sequence[Turn], window: int, link: LinkCost) -> float:
    made = schedule_of(turns, window, link)
    stall = made.seconds - made.busy[Queue.COMPUTE]
    return stall if stall > _ROUNDING * made.seconds else 0.0


def schedule_of(turns: Sequence[Turn], window: int, link: LinkCost) -> Schedule:
    """The schedule of one pass over streamed layers, on queues for computing and copies."""
    tasks: list[Task] = []
    computed: list[int] = []
    for place, (num_bytes, seconds) in enumerate(turns):
        arrived: tuple[int, ...] = ()
        if place >= window:
            after = (computed[place - window],)
            tasks.append(Task("load", Queue.TO_DEVICE, link.seconds(num_bytes), after))
            arrived = (len(tasks) - 1,)
        tasks.append(Task("compute", Queue.COMPUTE, seconds, arrived))
        computed.append(len(tasks) - 1)
    return schedule(tasks)
