"""Random programs that change, on a device that has enough: what they hold at most, under torch's models and stalloc.

Contract: as random_programs.py, but from the sixth step on a program takes steps that are like those before and not the
same: some requests have another size, some are left out, some blocks stay.
"""

from dataclasses import dataclass

import numpy as np

from harm.fuzz import MODELS, held_bytes, kept_sources, reserved_bytes
from harm.random_programs import MIB, Kind, RandomProgram, Source, Writer, order_of

_FIRST_CHANGED = 5  # steps before are as they will be


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
