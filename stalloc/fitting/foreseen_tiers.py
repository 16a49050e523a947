"""A run with the state of its optimizers elsewhere, and its layers streamed, foreseen from a run without that.

Contract: what is not state is left as it is, but for what the optimizer makes and frees within its step, which it makes
for a part of its parameters at a time. The order in which parts come and go is that of the executed step; when a block
comes and goes is what the executed passes do at the same events: forward passes, the moments at which backward reaches
a block, and those at which its gradients are there.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.techniques import parts as of_update
from stalloc.techniques.parts import Part, Place, aligned, in_pages
from stalloc.techniques.tier_settings import TierSettings

Lifespans = tuple[Column, Column, Column]
"""Begin, end and bytes of requests, (n,) each."""


@dataclass(frozen=True)
class UpdateRecorded:
    """One step of an optimizer that can be divided, in events [begin, end) of the record."""

    begin: int
    end: int
    parameter_bytes: list[int]  #: of each parameter, in the order of its groups
    is_updated: list[bool]  #: whether it has a gradient
    states: list[list[int]]  #: requests that hold the large tensors of its state; -1: of nothing that was requested
    parameters: list[int]  #: requests that hold the parameters themselves

    def parts(
        self, tiers: TierSettings, layer_of: Mapping[int, int], on_disk: Set[int], *, reads_for_processor: bool
    ) -> tuple[list[Part], int]:
        """The updated parts of `arranged_with_copies`, and its bytes for copies; `layer_of`: the layer of a request."""
        layers = [layer_of.get(row, -1) for row in self.parameters]
        options = tiers.paged_window_bytes, tiers.shares
        parts, copied_bytes = of_update.arranged_with_copies(
            self.parameter_bytes, layers, on_disk, *options, reads_for_processor=reads_for_processor
        )
        updated = [Part(tuple(at for at in part.members if self.is_updated[at]), part.place) for part in parts]
        return [part for part in updated if part.members], copied_bytes


@dataclass(frozen=True)
class Paged:
    """A run with a part of its memory elsewhere: its lifespans, and the most bytes in the host and in files."""

    lifespans: Lifespans
    host_bytes: int
    disk_bytes: int
    disk_streamed_bytes: int = 0  #: of layers on disk


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


class Stay(NamedTuple):
    """The parameters of a layer are on the device from one event to another."""

    layer: int
    begin: int
    end: int


class Homes(NamedTuple):
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


class _Room:
    """The room in host memory and files. `away` has the requests whose state lies there."""

    def __init__(self, tiers: TierSettings, size: Column) -> None:
        self._tiers, self._size = tiers, size
        chunk_bytes = of_update.disk_chunk_bytes(tiers.host_bytes)
        self.host_bytes = of_update.disk_buffers_bytes(chunk_bytes) if tiers.disk_bytes else 0
        self.disk_bytes = self._staged_bytes = 0
        self.away: set[int] = set()

    def stage(self, staging: int) -> bool:
        """Reserve so many bytes of host memory for the processor's copies; whether there is room."""
        more = max(0, staging - self._staged_bytes)
        if self.host_bytes + more > self._tiers.host_bytes:
            return False
        self.host_bytes += more
        self._staged_bytes += more
        return True

    def place(self, rows: list[int], place: Place) -> bool:
        """Give the state of a part room, all of it or none; whether there is room."""
        new = [row for row in rows if row not in self.away]
        needed = sum(aligned(int(self._size[row])) for row in new)
        pages = sum(in_pages(int(self._size[row])) for row in new)
        if self.host_bytes + needed <= self._tiers.host_bytes:
            self.host_bytes += needed
        elif place is Place.PAGED and self.disk_bytes + pages <= self._tiers.disk_bytes:
            self.disk_bytes += pages
        else:
            return False
        self.away.update(new)
        return True


def paged(
    run: Lifespans,
    updates: Sequence[UpdateRecorded],
    tiers: TierSettings,
    layers: Sequence[LayerRecorded] = (),
    passes: Sequence[Pass] = (),
) -> Paged:
    """The run with the state of its optimizers elsewhere and its layers streamed, as far as there is room."""
    start, end, size = run
    fine = 4 * max((len(one.parameter_bytes) for one in updates), default=0) + 8  # moments between two events
    gone = np.zeros(len(start), bool)
    added: list[tuple[int, int, int]] = []
    room = _Room(tiers, size)
    found = homes(layers if tiers.streamed_window else (), size, tiers.host_bytes - room.host_bytes, tiers.disk_bytes)
    room.host_bytes += found.host_bytes
    room.disk_bytes += found.disk_bytes
    layers = [layers[place] for place in found.chosen]
    on_disk = {number for number, place in enumerate(found.chosen) if place in found.on_disk}
    layer_of = {row: place for place, layer in enumerate(layers) for row in layer.requests}
    layer_bytes = [sum(int(size[row]) for row in layer.requests) for layer in layers]
    for layer in layers:
        gone[layer.requests] = True
        added += [(int(start[row]) * fine, layer.appeared * fine, int(size[row])) for row in layer.requests]
    for stay in stays(layers, passes, [one.begin for one in updates], tiers.streamed_window):
        added.append((stay.begin * fine, stay.end * fine, layer_bytes[stay.layer]))
    for update in updates:
        for reads in (True, False):  # layers on disk are left out first
            parts, staging = update.parts(tiers, layer_of, on_disk, reads_for_processor=reads)
            has_room = room.stage(staging)  # for what the processor copies
            if has_room:
                break
        members = [list(part.members) for part in parts]
        held = [[row for at in part for row in update.states[at] if row >= 0] for part in members]
        made = _made_for_parts(run, update, members, {row for rows in held for row in rows})
        for rows in (*made, *held):
            gone[[row for row in rows if start[row] >= update.begin]] = True  # its part makes it
        brought = [{layer_of[row] for at in part if (row := update.parameters[at]) in layer_of} for part in members]
        weights = [sum(layer_bytes[place] for place in places) for places in brought]
        places = [part.place for part in parts]
        for number, place in enumerate(places):  # the processor's state is there before the step begins
            if place is not Place.PROCESSOR:
                continue
            if has_room and room.place(held[number], place):
                held[number], made[number], weights[number] = [], [], 0
            else:
                places[number] = Place.PAGED if brought[number] & on_disk else Place.DEVICE
        for number, place in enumerate(places):
            if place is Place.PAGED:
                room.place(held[number], place)
        added += _flight(update, held, made, weights, run, room.away, tiers.paged_window_bytes, fine)
    gone[list(room.away)] = True
    kept = ~gone
    more = np.array(added, np.int64).reshape(-1, 3)
    spans = (
        np.append(start[kept] * fine, more[:, 0]),
        np.append(end[kept] * fine, more[:, 1]),
        np.append(size[kept], more[:, 2]),
    )
    return Paged(spans, room.host_bytes, room.disk_bytes, found.disk_bytes)


def peak_bytes(run: Lifespans) -> int:
    start, end, size = run
    moments = np.concatenate([np.maximum(start, 0), end])
    change = np.concatenate([size, -size])
    order = np.lexsort((change, moments))  # what ends at a moment is gone before what begins there
    return int(np.cumsum(change[order]).max(initial=0))


def _made_for_parts(run: Lifespans, update: UpdateRecorded, parts: list[list[int]], state: set[int]) -> list[list[int]]:
    """The tensors that the optimizer makes and frees within its step, by the part of its parameters that they serve. It
    goes through its parameters in their order, once or several times, and makes tensors of their sizes."""
    start, end, size = run
    inside = np.flatnonzero((start >= update.begin) & (end <= update.end))
    part_of = {place: number for number, part in enumerate(parts) for place in part}
    places = _places(size[inside].tolist(), sorted(part_of), [aligned(one) for one in update.parameter_bytes])
    made: list[list[int]] = [[] for _ in parts]
    for row, place in zip(inside.tolist(), places, strict=True):
        if place >= 0 and row not in state:
            made[part_of[place]].append(row)
    return made


def _places(sizes: list[int], updated: list[int], parameters: list[int]) -> Iterator[int]:
    """The place of the parameter that each tensor serves, found by size; -1 for none."""
    at, count = 0, len(updated)
    known = {parameters[place] for place in updated}
    for size in sizes:
        around = range(at, at + count) if size in known else ()
        found = next((i for i in around if parameters[updated[i % count]] == size), -1)
        at = (found + 1) % count if found >= 0 else at
        yield updated[found % count] if found >= 0 else -1


def _flight(
    update: UpdateRecorded,
    held: list[list[int]],
    made: list[list[int]],
    weights: list[int],
    run: Lifespans,
    away: set[int],
    window_bytes: int,
    fine: int,
) -> Iterator[tuple[int, int, int]]:
    """What is on the device for a part of one step: begin, end and bytes of each."""
    start, end, size = run
    tick = (update.begin - 1) * fine
    is_new = [[row for row in rows if start[row] >= update.begin and row in away] for rows in held]
    bytes_of = [
        more + sum(int(size[row]) for row in rows if row in away) for rows, more in zip(held, weights, strict=True)
    ]
    waiting = [total - sum(int(size[row]) for row in new) for total, new in zip(bytes_of, is_new, strict=True)]
    begun: dict[int, int] = {}
    leaving: deque[tuple[int, int, int]] = deque()  # begin, begin of what was made, number
    in_flight = 0

    def let_go() -> Iterator[tuple[int, int, int]]:
        nonlocal in_flight
        begin, begin_new, number = leaving.popleft()
        in_flight -= bytes_of[number]
        yield begin, tick, waiting[number]
        yield begin_new, tick, bytes_of[number] - waiting[number]

    for number in range(len(held)):
        tick += 1
        needed = 0 if number in begun else waiting[number]
        while leaving and in_flight + needed > window_bytes:
            yield from let_go()
        in_flight += needed
        begun.setdefault(number, tick)
        following = number + 1
        if following < len(held):
            while len(leaving) > 1 and in_flight + waiting[following] > window_bytes:
                yield from let_go()
            if in_flight + waiting[following] <= window_bytes:
                begun[following] = tick
                in_flight += waiting[following]
        tick += 1
        own = np.array(made[number], np.int64)
        yield tick, tick + 1, peak_bytes((start[own], end[own], size[own]))
        for row in held[number]:
            if start[row] >= update.begin and row not in away:
                yield tick, int(end[row]) * fine, int(size[row])
        in_flight += bytes_of[number] - waiting[number]
        leaving.append((begun[number], tick, number))
    tick += 1
    while leaving:
        yield from let_go()
