"""A run whose repeated blocks have parameters on the device only while they compute, foreseen from an ordinary run.

Contract: when a block comes and goes is what the executed passes do at the same events: forward passes, the moments at
which backward reaches a block, and those at which its gradients are there.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from stalloc.columns import Column
from stalloc.techniques.parts import aligned, in_pages


@dataclass(frozen=True)
class LayerRecorded:
    """The parameters of one block that could be streamed."""

    block: int  #: row of the blocks
    appeared: int  #: event at which its model was called first
    requests: list[int]  #: that hold them
    accumulated: list[int]  #: events at which one of them had its gradient


@dataclass(frozen=True)
class Pass:
    """One call of a block: events at which its forward pass begins and ends, and at which backward reaches it."""

    block: int
    begin: int
    end: int
    again: int  #: -1: not


@dataclass(frozen=True)
class Stay:
    """The parameters of a layer are on the device from one event to another."""

    layer: int
    begin: int
    end: int


@dataclass(frozen=True)
class Homes:
    """The layers that find room elsewhere, by place, which of them are on disk, and the bytes that they take."""

    chosen: list[int]
    on_disk: set[int]
    host_bytes: int
    disk_bytes: int


def homes(layers: Sequence[LayerRecorded], size: Column, host_bytes: int, disk_bytes: int) -> Homes:
    """Where layers lie, given the bytes of room in the host, and on disk once that is full."""
    chosen: list[int] = []
    on_disk: set[int] = set()
    in_host = in_files = 0
    for place, layer in enumerate(layers):
        needed = sum(aligned(int(size[row])) for row in layer.requests)
        pages = sum(in_pages(int(size[row])) for row in layer.requests)
        if not layer.requests:
            continue
        if in_host + needed <= host_bytes:
            in_host += needed
        elif in_files + pages <= disk_bytes:
            in_files += pages
            on_disk.add(place)
        else:
            continue
        chosen.append(place)
    return Homes(chosen, on_disk, in_host, in_files)


def stays(layers: Sequence[LayerRecorded], passes: Sequence[Pass], ends: Sequence[int], window: int) -> list[Stay]:
    """When each layer is on the device to compute; by the events `ends` backward passes are over at the latest."""
    place_of = {layer.block: place for place, layer in enumerate(layers)}
    actions: list[tuple[int, int, int, int]] = []  # event, order at it, place, direction to look ahead in; 0: let go
    known = [one for one in passes if one.block in place_of]
    reached = sorted((one.again, place_of[one.block]) for one in known if one.again >= 0)
    for one in known:
        place = place_of[one.block]
        actions += [(one.begin, 1, place, 1), (one.end, 0, place, 0)]
    for (again, place), following in zip(reached, [*reached[1:], (1 << 62, -1)], strict=False):
        over = ends[min(bisect_left(ends, again), len(ends) - 1)] if ends else again
        gradients = [at for at in layers[place].accumulated if again <= at <= over]
        if following[0] <= over:  # what it was given has its gradient, which a frozen layer waits for alone
            done = max([following[0], *gradients])
        else:
            done = max(gradients, default=over)
        actions += [(again, 1, place, -1), (done, 0, place, 0)]
    actions += [(at, 2, place, 0) for at in ends for place in range(len(layers))]
    here: dict[int, int] = {}
    found: list[Stay] = []
    for event, _, place, direction in sorted(actions):
        if direction:
            for at in range(place, place + direction * window, direction):
                if 0 <= at < len(layers):
                    here.setdefault(at, event)
        elif place in here:
            found.append(Stay(place, here.pop(place), event))
    return found
