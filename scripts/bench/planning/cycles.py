"""Made-up cycles, and the naive judge of how they are placed.

Contract: `overlaps` shares no code with any planner: it compares all pairs over the first passes, one by one.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.planner import plan_arrays
from stalloc.planner.budget import Budget

from .baselines.placing import Column
from .targets import Row, at_least

NUM_CYCLES = 50
_ITERATIONS = 3


@dataclass(frozen=True, eq=False)
class Cycle:
    """Requests that live [start, end), each (n,): those born before `cycle_start` once, the others in each period."""

    start: Column
    end: Column
    size: Column
    cycle_start: int = 20
    cycle_end: int = 100

    def place(self, method: str) -> tuple[Column, int, int]:
        """(offsets, peak in bytes, lower bound in bytes) by a method of the planner."""
        bounds = self.cycle_start, self.cycle_end
        made = plan_arrays(self.start, self.end, self.size, cycle=bounds, budget=Budget(method=method))
        return made.offset, made.peak_bytes, made.lower_bound_bytes

    def overlaps(self, offset: Column) -> list[tuple[int, int]]:
        """Pairs of rows that share a byte at some moment of the prologue or the first passes."""
        period = self.cycle_end - self.cycle_start
        lives = [
            (begin + shift * period, stop + shift * period, low, low + need, row)
            for row, (begin, stop, need, low) in enumerate(zip(self.start, self.end, self.size, offset, strict=True))
            for shift in range(_ITERATIONS if begin >= self.cycle_start else 1)
        ]
        return [
            (one[4], other[4])
            for i, one in enumerate(lives)
            for other in lives[:i]
            if one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]
        ]


def random_cycle(seed: int, count: int = 60) -> Cycle:
    """Lifespans of all kinds: in the prologue, from there into the cycle, within a pass, and over its end."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, Cycle.cycle_end, count)
    in_prologue = np.minimum(start + rng.integers(1, count, count), Cycle.cycle_end)
    period = Cycle.cycle_end - Cycle.cycle_start
    end = np.where(start < Cycle.cycle_start, in_prologue, start + rng.integers(1, period, count))
    return Cycle(start, end, rng.integers(1, 50, count) * 512)


def of_cycles() -> list[Row]:
    """Made-up cycles by annealing: all valid, and how many at the load."""
    valid = at_bound = 0
    for seed in range(NUM_CYCLES):
        cycle = random_cycle(seed)
        offset, peak, bound = cycle.place("annealing")
        valid += not cycle.overlaps(offset)
        at_bound += peak == bound
    return [
        at_least("annealing: valid of 50 made-up cycles", valid, NUM_CYCLES),
        Row("annealing: of these at the load", at_bound),
    ]
