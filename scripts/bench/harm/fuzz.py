"""Random programs in exactly the least memory that torch needs for them.

Contract: the least memory comes from the exact models of torch's allocator (stalloc.replay), the better of the default
and of expandable segments; stalloc then runs once with it, on a device of numbers, the steps that are watched included.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from running.machine import Machine

from harm.random_programs import MIB, RandomProgram, Source, draw, sources
from stalloc.replay import Events, Kind, make
from stalloc.replay.offline import let_go

T = TypeVar("T")
GRANULE = 2 * MIB
MODELS = ("torch", "expandable")
ENOUGH = 0.99
"""The share of programs that have to complete in exactly the least memory."""


@dataclass(frozen=True)
class Trial:
    """One program in the least memory."""

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
    """The recordings of a folder, read once."""
    return sources(Path(folder))


def try_one(folder: str, seed: int) -> Trial:
    """Draw a program, find the least memory for it, and run it with that."""
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
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        if make(model, "", middle * GRANULE).feed(events).failed < 0:
            enough = middle
        else:
            too_little = middle
    return enough * GRANULE


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
    count = len(program.events)
    return Events(
        kind=np.where(program.events > 0, int(Kind.ALLOC), int(Kind.FREE_COMPLETED)).astype(np.int8),
        request=np.abs(program.events) - 1,
        event=np.arange(count),
        size=program.size,
        stream=np.zeros(len(program.size), np.int64),
    )
