"""What to evict: one function for each published policy, of numbers that whoever evicts has at hand.

Contract: the candidate with the lowest score goes first. Scores compare candidates of one moment and have no unit.
Costs and ages may be in any unit, as long as all candidates use the same; sizes are bytes, above 0. The functions use
nothing but arithmetic, so that Python may call them, and compiled code (`stalloc.compiled.inner()(scores.dtr)`).

Sources: Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021 (DTR, with its appendix for LRU, largest first
and MSPS); Peng et al., "Capuchin", ASPLOS 2020 (MSPS: memory saving per second); Hu et al., "MegTaiChi", ICS 2022
(DTE); Zhang et al., "Coop: memory is not a commodity", NeurIPS 2023.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Candidate(NamedTuple):
    """What may be evicted, as floats: a storage of a replay, or a saved block of a running program."""

    cost: float  #: of making it again, without anything else that would have to be made for that
    around: float  #: cost of evicted storages that depend on it or that it depends on, as Around says; 0: none
    size: float  #: bytes
    age: float  #: since its last use, at least one tick of the clock
    free_beside: float = 0.0  #: free bytes right before and after it in memory; 0 where addresses are not known
    draw: float = 0.0  #: a random number from 0 to 1, for the policy that draws


class Around(enum.IntEnum):
    """Which evicted storages a policy counts into `Candidate.around`."""

    NOTHING = 0
    NEIGHBOURS = 1  #: e*: those that lead to it, or to which it leads, through evicted ones alone
    CLASSES = 2  #: the equivalence classes of its direct neighbours, which approximate e*
    SOURCES = 3  #: those it would have to be made from


def dtr(one: Candidate) -> float:
    """Cost with what is evicted around it, for each byte and each tick that nobody used it (h_DTR, h_DTR^eq)."""
    return (one.cost + one.around) / (one.size * one.age)


def local_cost(one: Candidate) -> float:
    """Cost without what is around it, for each byte and each tick that nobody used it (h_DTR^local)."""
    return one.cost / (one.size * one.age)


def least_recently_used(one: Candidate) -> float:
    """The one that nobody used for longest."""
    return 1.0 / one.age


def largest_first(one: Candidate) -> float:
    """The one that frees most bytes."""
    return 1.0 / one.size


def memory_saved_per_second(one: Candidate) -> float:
    """Cost, with that of its evicted sources, for each byte (MSPS)."""
    return (one.cost + one.around) / one.size


def random_choice(one: Candidate) -> float:
    """Any, with equal chances: what every policy should be better than."""
    return one.draw


def tensor_evicting(one: Candidate) -> float:
    """DTR's, where a byte that is free beside it in memory counts as one that it frees (DTE)."""
    return (one.cost + one.around) / ((one.size + one.free_beside) * one.age)


def window_cost(one: Candidate) -> float:
    """What one candidate adds to the cost of Coop's window; its size does not count, since the window's does."""
    return (one.cost + one.around) / one.age


def cheapest_window(
    begins: Sequence[int], ends: Sequence[int], costs: Sequence[float], needed_bytes: int
) -> tuple[int, int]:
    """The neighbours in memory that cost least together and make room for a request: rows `[first, last)`.

    Rows are parts of memory in the order of their addresses, each with its begin and end in bytes and its cost: 0 where
    it is free, infinite where it has to stay. Neighbours touch; a gap ends a window, as does what has to stay. (0, 0)
    if there is no room. It takes one pass: both ends of the window only move upward (Coop, algorithm 1).
    """
    first, total, best = 0, 0.0, float("inf")
    found_first, found_last = 0, 0
    for last in range(len(begins)):
        if costs[last] == float("inf"):
            first, total = last + 1, 0.0
            continue
        if first < last and begins[last] != ends[last - 1]:
            first, total = last, 0.0
        total += costs[last]
        while first < last and ends[last] - begins[first + 1] >= needed_bytes:
            total -= costs[first]
            first += 1
        if ends[last] - begins[first] >= needed_bytes and total < best:
            best, found_first, found_last = total, first, last + 1
    return found_first, found_last


def is_costly(cost: Any, num_bytes: Any, limit: float) -> Any:
    """Whether an operation is one of the costly ones, whose results Coop keeps at the other end of memory.

    By its cost for each byte that it makes, of one operation or of a column of them.
    """
    return cost > limit * num_bytes


@dataclass(frozen=True)
class Policy:
    """One way to choose, by the name that users type."""

    name: str
    title: str  #: as tables show it
    score: Callable[[Candidate], float]
    around: Around = Around.NOTHING
    by_place: bool = False  #: addresses decide, so that it needs a model of them
    by_window: bool = False  #: neighbours in memory go together (cheapest_window), by the sum of their scores


POLICIES: dict[str, Policy] = {
    one.name: one
    for one in (
        Policy("dtr", "DTR, e*", dtr, Around.NEIGHBOURS),
        Policy("dtr-eq", "DTR, equivalence classes", dtr, Around.CLASSES),
        Policy("dtr-local", "DTR, local cost", local_cost),
        Policy("lru", "least recently used", least_recently_used),
        Policy("size", "largest first", largest_first),
        Policy("msps", "MSPS", memory_saved_per_second, Around.SOURCES),
        Policy("random", "random", random_choice),
        Policy("dte", "MegTaiChi's DTE", tensor_evicting, Around.NEIGHBOURS, by_place=True),
        Policy("coop", "Coop", window_cost, Around.NEIGHBOURS, by_place=True, by_window=True),
    )
}
"""All policies, by name."""
