"""One try at a packing: to a target or not at all, in one order and one direction of time, and what it cost.

Contract: deterministic, effort is counted in placements, not in seconds; a failure costs a small part of a pass. The
same problem, order and seed give the same ranks; ties are broken by row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.planner.placement import pack, sweep
from stalloc.planner.problem import Problem

#: orders by their keys, largest first: E latest end, S earliest start, W longest lifespan, A largest area, Z largest
#: size
GUIDED = ("EW", "SW", "WA", "AW", "ZW", "ZE")
#: orders that can be asked for by name
SINGLE = {"size": "ZW", "area": "A", "lifetime": "WZ", "birth": "SW", "death": "EW"}


def ranks(problem: Problem, order: str, noise: float = 0.0, seed: int = 0, span: Column | None = None) -> Column:
    """(n,) rank of each request, 0 first. `noise` stretches W, A and Z by random factors up to e**noise.

    `span` is (n,) how long each is live, if that is not end - start.
    """
    span = (problem.end - problem.start if span is None else span).astype(np.float64)
    factor = np.exp(np.random.default_rng(seed).uniform(-noise, noise, len(span))) if noise else np.ones(len(span))
    keys = {
        "E": lambda: problem.end.astype(np.float64),
        "S": lambda: -problem.start.astype(np.float64),
        "W": lambda: span * factor,
        "A": lambda: span * problem.size * factor,
        "Z": lambda: problem.size * factor,
    }
    return rank_of(np.lexsort([-keys[letter]() for letter in reversed(order)]))


def rank_of(by_rank: Column) -> Column:
    """(n,) the place of each row in an order of all rows."""
    rank = np.empty(len(by_rank), np.int64)
    rank[by_rank] = np.arange(len(by_rank))
    return rank


@dataclass(frozen=True, eq=False)
class Packing:
    """Offsets for the rows of a problem."""

    offset: Column  #: (n,) bytes
    peak_bytes: int
    method: str


#: a packing if the try came to one, and what it cost in placements
Try = tuple[Packing | None, int]
Tries = Iterator[Try]


class Ranked(NamedTuple):
    """A problem in one direction of time, with the ranks of its requests."""

    problem: Problem
    rank: Column
    method: str

    def packed(self, target: int) -> Try:
        """The tightest epoch first, to the target or not at all."""
        problem = self.problem
        return self._tried("tightest first", *pack(problem.stays, problem.size, self.rank, problem.floor, target))

    def swept(self, target: int, guided: bool = True) -> Try:
        """The lowest run first, with `guided` its tightest epoch, to the target or not at all."""
        how = "lowest and tightest" if guided else "sweep"
        return self._tried(how, *sweep(self.problem, self.rank, target, guided))

    def _tried(self, how: str, offset: Column, peak: int) -> Try:
        """A try that may have been given up costs the placements that show, and the trees it built."""
        cost = int(np.count_nonzero(offset)) + len(offset) // 16 + 100
        return (Packing(offset, int(peak), f"{how}, {self.method}") if peak >= 0 else None), cost


def ranked(problem: Problem, order: str, backwards: bool, noise: float = 0.0, seed: int = 0) -> Ranked:
    """The problem with the ranks of one of the orders."""
    turned = problem.reversed() if backwards else problem
    method = f"{order}{' backwards' if backwards else ''}{f' noise {noise}' if noise else ''}"
    return Ranked(turned, ranks(turned, order, noise, seed), method)
