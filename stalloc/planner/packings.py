"""One try at a packing: to a target or not at all, in one order and one direction of time, and what it cost.

Contract: deterministic, effort is counted in placements, not in seconds; a failure costs a small part of a pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.planner.placement import pack, sweep
from stalloc.planner.problem import Problem, epochs

#: keys by letter: E latest end, S earliest start, W longest lifespan, A largest area, Z largest size
GUIDED = ("EW", "SW", "WA", "AW", "ZW", "ZE")
PLAIN = ("Z", "A", "W")
#: orders that can be asked for by name
SINGLE = {"size": "ZW", "area": "A", "lifetime": "WZ", "birth": "SW", "death": "EW"}


def ranks(problem: Problem, order: str, noise: float = 0.0, seed: int = 0, span: Column | None = None) -> Column:
    """(n,) rank of each request, 0 first. `noise` stretches W, A and Z by random factors up to e**noise.

    `span` is (n,) how long each is live, if that is not end - start.
    """
    span = (problem.end - problem.start if span is None else span).astype(np.float64)
    if noise:
        factor = np.exp(np.random.default_rng(seed).uniform(-noise, noise, len(span)))
    else:
        factor = np.ones(len(span))
    keys = {
        "E": lambda: problem.end.astype(np.float64),
        "S": lambda: -problem.start.astype(np.float64),
        "W": lambda: span * factor,
        "A": lambda: span * problem.size * factor,
        "Z": lambda: problem.size * factor,
    }
    by_rank = np.lexsort([-keys[letter]() for letter in reversed(order)])
    rank = np.empty(len(span), np.int64)
    rank[by_rank] = np.arange(len(span))
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


def ranked(problem: Problem, order: str, backwards: bool, noise: float = 0.0, seed: int = 0) -> Ranked:
    """The problem with the ranks of one of the orders; see `orders.ranks`."""
    turned = problem.reversed() if backwards else problem
    method = f"{order}{' backwards' if backwards else ''}{f' noise {noise}' if noise else ''}"
    return Ranked(turned, ranks(turned, order, noise, seed), method)


def packed(turned: Ranked, target: int) -> Try:
    """The tightest epoch first, to the target or not at all."""
    problem, none = turned.problem, np.zeros(len(turned.rank), np.int64)
    offset, peak = pack(problem.start, problem.end, none, none, problem.size, turned.rank, problem.floor, target)
    return (Packing(offset, int(peak), f"tightest first, {turned.method}") if peak >= 0 else None), effort_of(offset)


def swept(turned: Ranked, target: int) -> Try:
    """The lowest run first and there the tightest epoch, to the target or not at all."""
    problem = turned.problem
    offset, peak = sweep(problem.start, problem.end, problem.size, turned.rank, problem.floor, target, True)
    return (Packing(offset, int(peak), f"lowest and tightest, {turned.method}") if peak >= 0 else None), effort_of(
        offset
    )


def effort_of(offset: Column) -> int:
    """What a try that may have been given up cost: the placements that show, and the trees it built."""
    return int(np.count_nonzero(offset)) + len(offset) // 16 + 100


def compressed(start: Column, end: Column, size: Column) -> Problem:
    """The problem of these lifespans with nothing below it, its times compressed to epochs."""
    a, b, num_epochs = epochs(start, end)
    return Problem(a, b, size, np.zeros(num_epochs, np.int64))
