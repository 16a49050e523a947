"""A run with state, layers or activations elsewhere, foreseen from a run without that.

Contract: what is not state is left as it is, but for what the optimizer makes and frees within its step, which it makes
for a part of its parameters at a time. The order in which parts come and go is that of the executed step; when a block
comes and goes is what the executed passes do at the same events: forward passes, the moments at which backward reaches
a block, and those at which its gradients are there.

Where saved activations go to the host in part, that is foreseen from a run in which all of them do, each at once. There
memory leaves as soon as it is saved, unless somebody else holds it, and comes back when it is needed; so the run shows
how long others hold what is saved, and how long backward does. All else that a ratio and a window change is decided by
the code that runs use (`OffloadOrder`).
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.cost.queues import Queue, Task, schedule
from stalloc.techniques import parts as of_update
from stalloc.techniques.activation_settings import ActivationSettings
from stalloc.techniques.offload_order import OffloadOrder
from stalloc.techniques.parts import Part, Place, aligned, in_pages
from stalloc.techniques.tier_settings import TierSettings

Kind = IntEnum("Kind", "SAVED NEEDED GONE", start=0)  #: what became of an activation
_Does = IntEnum("_Does", "COPY_OUT LET_GO BRING USE FORGET")  # what is done with one
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
        # what it was given has its gradient, which a frozen layer waits for alone
        done = max([following[0], *gradients]) if following[0] <= over else max(gradients, default=over)
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


@dataclass(frozen=True)
class ActivationsRecorded:
    """What a run saved: events (moment, kind, number), and the facts of each activation, by its number."""

    events: list[tuple[float, int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  #: bytes
    requests: list[int] = field(default_factory=list)  #: that held each; -1: no request did
    returns: list[int] = field(default_factory=list)  #: requests that held each once it was back; -1: it never left


def _actions(recorded: ActivationsRecorded, settings: ActivationSettings) -> Iterator[tuple[float, _Does, int]]:
    """What a run with these settings does with its activations, in order: moment, what, and number."""
    order = OffloadOrder(settings.ratio, settings.window_bytes)
    away: set[int] = set()
    for moment, kind, number in recorded.events:
        if kind == Kind.SAVED:
            if order.is_wanted(recorded.sizes[number]):
                yield moment, _Does.COPY_OUT, number
                for one in order.leaves(number, recorded.sizes[number]):
                    away.add(one)
                    yield moment, _Does.LET_GO, one
        elif kind == Kind.NEEDED:
            for one in order.needed(number):
                if one in away:
                    away.remove(one)
                    yield moment, _Does.BRING, one
            yield moment, _Does.USE, number
        else:
            order.gone(number)
            yield moment, _Does.FORGET, number


@dataclass(frozen=True)
class Offloaded:
    """A run that offloads activations: the lifespans of its requests, and the most bytes in the host at once."""

    lifespans: Lifespans
    host_bytes: int


def offloaded(run: Lifespans, recorded: ActivationsRecorded, settings: ActivationSettings) -> Offloaded:
    """The requests of the recorded run as they would have been; requests that would not be made have size 0."""
    let_go: dict[int, int] = {}
    brought: dict[int, int] = {}
    copied: set[int] = set()
    held: Counter[int] = Counter()  # places in the host by size, and those of them that are in use
    used: Counter[int] = Counter()
    for moment, does, number in _actions(recorded, settings):
        place_bytes = aligned(recorded.sizes[number])
        if does == _Does.COPY_OUT:
            copied.add(number)
            used[place_bytes] += 1
            held[place_bytes] = max(held[place_bytes], used[place_bytes])
        elif does == _Does.LET_GO:
            let_go[number] = int(moment)
        elif does == _Does.BRING:
            brought[number] = int(moment)
        elif does == _Does.FORGET and number in copied:
            used[place_bytes] -= 1
    start, end, size = (column.copy() for column in run)
    gone = {number: int(moment) for moment, kind, number in recorded.events if kind == Kind.GONE}
    for number, (row, back) in enumerate(zip(recorded.requests, recorded.returns, strict=True)):
        if row < 0:
            continue
        held_until = int(run[1][row])  # by others
        needed_until = int(end[back]) if back >= 0 else max(gone.get(number, 0), held_until)
        stays = number not in let_go or (number in brought and held_until > brought[number])
        end[row] = max(end[row], needed_until if stays else let_go[number])
        if back >= 0 and (stays or number not in brought):
            size[back] = 0
        elif back >= 0:
            start[back] = min(start[back], brought[number])
    return Offloaded((start, end, size), sum(place_bytes * count for place_bytes, count in held.items()))


def added_seconds(
    recorded: ActivationsRecorded,
    settings: ActivationSettings,
    step_seconds: float,
    bytes_per_second: float,
    start_seconds: float,
) -> float:
    """The seconds by which waiting for copies lengthens a step, whose moments in `recorded` are in seconds."""
    tasks = [Task("compute", Queue.COMPUTE, 0.0)]
    computed, now = 0, 0.0
    waits: set[int] = set()
    copy_out: dict[int, int] = {}
    copy_back: dict[int, int] = {}

    def compute(moment: float) -> None:
        nonlocal computed, now
        if moment > now or waits:
            computed = len(tasks)
            tasks.append(Task("compute", Queue.COMPUTE, max(0.0, moment - now), tuple(waits)))
            now = max(now, moment)
            waits.clear()

    for moment, does, number in _actions(recorded, settings):
        compute(moment)
        seconds = recorded.sizes[number] / bytes_per_second + start_seconds
        if does == _Does.COPY_OUT:
            copy_out[number] = len(tasks)
            tasks.append(Task("save", Queue.TO_HOST, seconds, (computed,)))
        elif does == _Does.LET_GO:
            waits.add(copy_out[number])
        elif does == _Does.BRING:
            copy_back[number] = len(tasks)
            tasks.append(Task("bring", Queue.TO_DEVICE, seconds, (computed, copy_out[number])))
        elif does == _Does.USE and number in copy_back:
            waits.add(copy_back[number])
    compute(max(now, step_seconds))
    return max(0.0, schedule(tasks).seconds - step_seconds)
