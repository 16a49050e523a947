"""Random programs: in exactly the least memory that torch needs for them, and what those that change hold at most.

Contract: the least memory comes from the exact models of torch's allocator (stalloc.replay), the better of the default
and of expandable segments; stalloc then runs once with it, on a device of numbers, the steps that are watched included.
Programs that change take from the sixth step on steps that are like those before and not the same: some requests have
another size, some are left out, some blocks stay.
"""

import multiprocessing
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from running.machine import Machine

from harm.random_programs import MIB, Kind, RandomProgram, Source, Writer, draw, order_of, sources
from stalloc.replay import Events, make
from stalloc.replay import Kind as EventKind
from stalloc.replay.offline import let_go

T = TypeVar("T")
GRANULE = 2 * MIB
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
    enough = -(-reserved_bytes(program, model) // GRANULE)
    too_little = program.load_bytes // GRANULE - 1

    def completes(granules: int) -> bool:
        return make(model, "", granules * GRANULE).feed(events).failed < 0

    return bisect_left(range(enough), True, lo=too_little + 1, key=completes) * GRANULE


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
