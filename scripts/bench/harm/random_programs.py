"""Random programs whose sizes and lifespans are drawn from recordings of real ones, and what memory they need.

Contract: a program is the same for the same seed and the same recordings; at some moment at least 256 MiB are live. The
least memory comes from the exact models of torch's allocator (stalloc.replay), the better of the default and of
expandable segments; stalloc then runs once with it, on a device of numbers, the steps that are watched included.
Programs that change take from the sixth step on steps that are like those before and not the same: some requests have
another size, some are left out, some blocks stay.
"""

import multiprocessing
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from running.machine import Machine

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.replay import Events, make
from stalloc.replay import Kind as EventKind
from stalloc.replay.offline import let_go
from stalloc.trace import load_traces

GRANULE, MIB = 512, 1 << 20
LEAST_LOAD_BYTES = 256 * MIB
_SCALED_BYTES = 64 << 10  #: smaller requests keep their size when a program is scaled to its load
_MOST_REQUESTS = 20_000  #: of a recording
_CHANGED = (0.03, 0.1, 0.25, 0.4)  #: shares of a changed step's requests that have another size
_LEFT_OUT = (0, 0.03, 0.1, 0.25)  #: the same, that it does not make


@dataclass(frozen=True, eq=False)
class Source:
    """What a program is drawn from: sizes in bytes and lifespans in events, each (n,)."""

    name: str
    size: Column
    lifespan: Column


@dataclass(frozen=True, eq=False)
class RandomProgram:
    """Requests of `size` (n,) bytes; events in order: row + 1 an allocation, -(row + 1) its free."""

    seed: int
    source: str
    size: Column
    events: Column
    step_ends: tuple[int, ...]  #: positions in `events`, ascending

    @property
    def load_bytes(self) -> int:
        return int(np.cumsum(np.sign(self.events) * self.size[np.abs(self.events) - 1]).max())


def sources(folder: Path) -> list[Source]:
    """The recordings of a folder that can be read, or one that is made up where there are none."""
    found = []
    for path in sorted(folder.glob("*.gz")) if folder.is_dir() else []:
        try:
            traces = load_traces(path)
        except BadInputError:
            continue
        for trace in traces:
            size, lifespan = trace.size, trace.end - np.maximum(trace.start, 0)
            kept = (size > 0) & (lifespan > 0)
            size, lifespan = size[kept][:_MOST_REQUESTS], lifespan[kept][:_MOST_REQUESTS]
            if len(size) >= 100 and size.max() < 8 << 30:
                found.append(Source(f"{path.name} {trace.device}", size, lifespan))
    if not found:
        rng = np.random.default_rng(0)
        size = np.exp(rng.normal(14, 2.5, 4000)).astype(np.int64) + 1
        found.append(Source("made up", size, np.exp(rng.normal(3, 1.5, 4000)).astype(np.int64) + 1))
    return found


def draw(seed: int, drawn_from: list[Source]) -> RandomProgram:
    """The program of a seed: what stands, then steps of a few kinds in an order of some kind, and what lasts."""
    rng = np.random.default_rng(seed)
    source = drawn_from[rng.integers(len(drawn_from))]
    kinds = [Kind(rng, source, int(rng.integers(40, 300))) for _ in range(rng.integers(1, 5))]
    order = order_of(rng, len(kinds), int(rng.integers(8, 25)))
    lasts_often = rng.random() < 0.4
    varies = rng.random() < 0.15
    writer = Writer(rng, source, most_standing=40)
    for step, number in enumerate(order):
        writer.play(kinds[number], rng.uniform(0.5, 1.0) if varies else 1.0)
        writer.end_step(step, keeps=0.25 if lasts_often else 0, most=6)
    return writer.program(seed)


class Kind:
    """A step: sizes, and its events in order."""

    def __init__(self, rng: np.random.Generator, source: Source, num_requests: int) -> None:
        rows = rng.integers(len(source.size), size=num_requests)
        self.size = source.size[rows]
        begin = np.sort(rng.uniform(0, 2 * num_requests, num_requests))
        # a lifespan longer than the step ends with it, as that of an activation does
        end = np.minimum(begin + source.lifespan[rows], 2 * num_requests + rng.uniform(0, 1, num_requests))
        time = np.concatenate([begin, end])
        event = np.concatenate([np.arange(num_requests) + 1, -np.arange(num_requests) - 1])
        self.events = event[np.lexsort((event > 0, time))].tolist()

    def changed(self, rng: np.random.Generator) -> "Kind":
        """The same step with some of its requests of another size, and some left out."""
        share, left_out = rng.choice(_CHANGED), rng.choice(_LEFT_OUT)
        other = copy(self)
        other.size = self.size.copy()
        differs = rng.random(len(self.size)) < share
        factor = rng.uniform(0.7, 1.3, int(differs.sum()))
        other.size[differs] = np.maximum(1, (self.size[differs] * factor).astype(np.int64))
        absent = set((np.flatnonzero(rng.random(len(self.size)) < left_out) + 1).tolist())
        other.events = [event for event in self.events if abs(event) not in absent]
        return other


class Writer:
    def __init__(self, rng: np.random.Generator, source: Source, *, most_standing: int) -> None:
        """Fewer than `most_standing` blocks stand from the begin on."""
        self._rng, self._source = rng, source
        self._size: list[int] = []
        self._events: list[int] = []
        self._step_ends: list[int] = []
        self._lasting: list[tuple[int, int]] = []  # row, and the step with which it ends
        for size in self._draw(5, most_standing):
            self._allocate(size)

    def _draw(self, least: int, most: int) -> list[int]:
        sizes: list[int] = self._rng.choice(self._source.size, self._rng.integers(least, most)).tolist()
        return sizes

    def _allocate(self, size_bytes: int) -> int:
        self._size.append(size_bytes)
        self._events.append(len(self._size))
        return len(self._size) - 1

    def _free(self, row: int) -> None:
        self._events.append(-row - 1)

    def play(self, kind: Kind, factor: float) -> None:
        rows: dict[int, int] = {}
        for event in kind.events:
            if event > 0:
                rows[event] = self._allocate(max(1, int(kind.size[event - 1] * factor)))
            else:
                self._free(rows[-event])

    def end_step(self, step: int, *, keeps: float, most: int) -> None:
        """What lasted until this step ends; with a probability of `keeps` up to `most` - 1 others last longer."""
        for row, until in [pair for pair in self._lasting if pair[1] <= step]:
            self._free(row)
            self._lasting.remove((row, until))
        if keeps and self._rng.random() < keeps:
            until = int(step + self._rng.integers(1, 12))
            self._lasting += [(self._allocate(size), until) for size in self._draw(1, most)]
        self._step_ends.append(len(self._events))

    def program(self, seed: int) -> RandomProgram:
        size, events = np.array(self._size, np.int64), np.array(self._events, np.int64)
        wanted = LEAST_LOAD_BYTES * float(np.exp(self._rng.uniform(0, np.log(8))))
        return RandomProgram(seed, self._source.name, _scaled(size, events, wanted), events, tuple(self._step_ends))


def order_of(rng: np.random.Generator, num_kinds: int, num_steps: int) -> list[int]:
    """Which kind each step has: one after the other, the first with others now and then, in phases, or at random."""
    way = rng.integers(4)
    if way == 0:
        return [step % num_kinds for step in range(num_steps)]
    if way == 1:
        return [int(rng.integers(num_kinds)) if rng.random() < 0.2 else 0 for _ in range(num_steps)]
    if way == 2:
        return [step * num_kinds // num_steps for step in range(num_steps)]
    return rng.integers(num_kinds, size=num_steps).tolist()


def _scaled(size: Column, events: Column, wanted_bytes: float) -> Column:
    """Sizes in granules, the larger ones times what brings the load to what is wanted."""

    def in_granules(factor: float) -> Column:
        scaled = np.where(size > _SCALED_BYTES, np.maximum(size * factor, _SCALED_BYTES), size)
        return -(-scaled.astype(np.int64) // GRANULE) * GRANULE

    row = np.abs(events) - 1
    live = np.cumsum(np.sign(events) * np.where(size > _SCALED_BYTES, size, 0)[row])
    result = in_granules(wanted_bytes / max(1, int(live.max())))
    load = int(np.cumsum(np.sign(events) * result[row]).max())
    return result if load >= LEAST_LOAD_BYTES else in_granules(2 * wanted_bytes / max(1, int(live.max())))


T = TypeVar("T")
DEVICE_GRANULE = 2 * MIB
MODELS = ("torch", "expandable")
ENOUGH = 0.99
"""The share of programs that have to complete in exactly the least memory."""


@dataclass(frozen=True)
class Trial:
    seed: int
    source: str
    load_bytes: int
    least_bytes: int
    completes: bool
    completes_with_more: bool  #: with 2 % or 8 MiB more


def over_seeds(trial: Callable[[str, int], T], num_programs: int, seed: int, folder: Path, jobs: int) -> Iterator[T]:
    """What a trial says of the programs with seeds from `seed` on, drawn from the recordings of a folder."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(partial(trial, str(folder)), range(seed, seed + num_programs), chunksize=4)


@cache
def kept_sources(folder: str) -> list[Source]:
    return sources(Path(folder))


def try_one(folder: str, seed: int) -> Trial:
    program = draw(seed, kept_sources(folder))
    least = min(least_capacity(program, name) for name in MODELS)
    done = held_bytes(program, least) is not None
    more = done or held_bytes(program, least + max(least // 50, 8 * MIB)) is not None
    return Trial(seed, program.source, program.load_bytes, least, done, more)


def least_capacity(program: RandomProgram, model: str) -> int:
    """The least memory, in granules of the device, with which a model completes a program."""
    events = _as_events(program)
    enough = -(-reserved_bytes(program, model) // DEVICE_GRANULE)
    too_little = program.load_bytes // DEVICE_GRANULE - 1

    def completes(granules: int) -> bool:
        return make(model, "", granules * DEVICE_GRANULE).feed(events).failed < 0

    return bisect_left(range(enough), True, lo=too_little + 1, key=completes) * DEVICE_GRANULE


def reserved_bytes(program: RandomProgram, model: str) -> int:
    """The most that a model reserves for a program on a device without end."""
    unlimited = make(model)
    unlimited.feed(_as_events(program))
    return int(unlimited.counters().peak_reserved_bytes)


def held_bytes(program: RandomProgram, capacity_bytes: int = 0) -> int | None:
    """The most that stalloc holds for a program on a device of this size, 0: without end; None if it runs out."""
    machine = Machine(capacity_bytes=capacity_bytes)
    try:
        if not machine.follow(program.size, program.events, program.step_ends):
            return None
        return int(machine.state.record.statistics.reserved_peak.total)
    finally:
        let_go(machine.controller)


def _as_events(program: RandomProgram) -> Events:
    kind = np.where(program.events > 0, int(EventKind.ALLOC), int(EventKind.FREE_COMPLETED)).astype(np.int8)
    stream, request = np.zeros(len(program.size), np.int64), np.abs(program.events) - 1
    return Events(kind=kind, request=request, event=np.arange(len(request)), size=program.size, stream=stream)


_FIRST_CHANGED = 5  # steps before are as they will be


@dataclass(frozen=True)
class Peaks:
    seed: int
    source: str
    load_bytes: int
    better_bytes: int  #: under the better of torch's models
    stalloc_bytes: int

    @property
    def excess_bytes(self) -> int:
        """More than under the better by more than 4 MiB or 0.5 %; not positive where it is not."""
        return self.stalloc_bytes - self.better_bytes - max(4 * MIB, self.better_bytes // 200)


def peaks_of(folder: str, seed: int) -> Peaks:
    """Draw a program that changes, and run it. Raises AssertionError if a device without end runs out of memory."""
    program = draw_changing(seed, kept_sources(folder))
    held = held_bytes(program)
    assert held is not None, "the device has no end"
    better = min(reserved_bytes(program, name) for name in MODELS)
    return Peaks(seed, program.source, program.load_bytes, better, held)


def draw_changing(seed: int, drawn_from: list[Source]) -> RandomProgram:
    """The program of a seed: some steps are each another, or one of two others, or from the middle on all another."""
    rng = np.random.default_rng(seed)
    source = drawn_from[rng.integers(len(drawn_from))]
    kinds = [Kind(rng, source, int(rng.integers(40, 400))) for _ in range(rng.integers(1, 4))]
    order = order_of(rng, len(kinds), int(rng.integers(10, 24)))
    writer = Writer(rng, source, most_standing=60)
    way = rng.integers(3)
    variants: dict[tuple[int, int], Kind] = {}
    for step, number in enumerate(order):
        kind = kinds[number]
        if step >= _FIRST_CHANGED and way == 0 and rng.random() < 0.3:
            kind = kind.changed(rng)
        elif step >= _FIRST_CHANGED and (rng.random() < 0.4 if way == 1 else way == 2 and 2 * step >= len(order)):
            which = number, int(rng.integers(2)) if way == 1 else 0
            if which not in variants:
                variants[which] = kind.changed(rng)
            kind = variants[which]
        writer.play(kind, 1.0)
        writer.end_step(step, keeps=0.1, most=20)
    return writer.program(seed)
