"""Random programs that change, on a device that has enough: what they hold at most, under torch's models and stalloc.

Contract: as random_programs.py, but from the sixth step on a program takes steps that are like those before and not the
same: some requests have another size, some are left out, some blocks stay.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from running.machine import Machine

from harm.fuzz import MODELS, as_events, kept_sources
from harm.random_programs import LEAST_LOAD_BYTES, MIB, Kind, RandomProgram, Source, Writer, order_of, scaled
from stalloc.replay import make
from stalloc.replay.offline import let_go

_FIRST_CHANGED = 5  # steps before are as they will be
_SHARES = (0.03, 0.1, 0.25, 0.4)  # of a step's requests that have another size
_LEFT_OUT = (0, 0.03, 0.1, 0.25)  # the same, that it does not make


@dataclass(frozen=True)
class Peaks:
    """What one program holds at most, in bytes."""

    seed: int
    source: str
    load_bytes: int
    better_bytes: int  #: under the better of torch's models
    stalloc_bytes: int

    @property
    def excess_bytes(self) -> int:
        """More than under the better by more than 4 MiB or 0.5 %; not positive where it is not."""
        return self.stalloc_bytes - self.better_bytes - max(4 * MIB, self.better_bytes // 200)


def peaks(num_programs: int, seed: int, folder: Path, jobs: int) -> Iterator[Peaks]:
    """Peaks of the programs with seeds from `seed` on."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(partial(peaks_of, str(folder)), range(seed, seed + num_programs), chunksize=4)


def peaks_of(folder: str, seed: int) -> Peaks:
    """Draw a program that changes, and run it. Raises AssertionError if a device without end runs out of memory."""
    program = draw_changing(seed, kept_sources(folder))
    reserved = []
    for name in MODELS:
        model = make(name)
        model.feed(as_events(program))
        reserved.append(int(model.counters().peak_reserved_bytes))
    machine = Machine()
    try:
        assert machine.follow(program.size, program.events, program.step_ends), "the device has no end"
        held = int(machine.state.record.reserved_peak.total)
    finally:
        let_go(machine.controller)
    return Peaks(seed, program.source, program.load_bytes, min(reserved), held)


def draw_changing(seed: int, drawn_from: list[Source]) -> RandomProgram:
    """The program of a seed: some steps are each another, or one of two others, or from the middle on all another."""
    rng = np.random.default_rng(seed)
    source = drawn_from[rng.integers(len(drawn_from))]
    kinds = [Kind(rng, source, int(rng.integers(40, 400))) for _ in range(rng.integers(1, 4))]
    order = order_of(rng, len(kinds), int(rng.integers(10, 24)))
    writer = Writer()
    for size in rng.choice(source.size, rng.integers(5, 60)).tolist():
        writer.allocate(size)
    way = rng.integers(3)
    step_ends, variants, lasting = [], dict[tuple[int, int], Kind](), list[tuple[int, int]]()
    for step, number in enumerate(order):
        kind = kinds[number]
        if step >= _FIRST_CHANGED and way == 0 and rng.random() < 0.3:
            kind = kind.changed(rng, rng.choice(_SHARES), rng.choice(_LEFT_OUT))
        elif step >= _FIRST_CHANGED and (rng.random() < 0.4 if way == 1 else way == 2 and 2 * step >= len(order)):
            which = number, int(rng.integers(2)) if way == 1 else 0
            if which not in variants:
                variants[which] = kind.changed(rng, rng.choice(_SHARES), rng.choice(_LEFT_OUT))
            kind = variants[which]
        writer.play(kind, 1.0)
        for row, until in [pair for pair in lasting if pair[1] <= step]:
            writer.free(row)
            lasting.remove((row, until))
        if rng.random() < 0.1:
            until = int(step + rng.integers(1, 12))
            lasting += [
                (writer.allocate(size), until) for size in rng.choice(source.size, rng.integers(1, 20)).tolist()
            ]
        step_ends.append(len(writer.events))
    size, events = np.array(writer.size, np.int64), np.array(writer.events, np.int64)
    wanted = LEAST_LOAD_BYTES * float(np.exp(rng.uniform(0, np.log(8))))
    return RandomProgram(seed, source.name, scaled(size, events, wanted), events, tuple(step_ends))
