"""Simulated annealing over the order in which requests are placed, for lines and for cycles.

Contract: a packing without overlap whatever happens; the same for the same seed, unless a clock or a request to stop
ends it; never worse than the best of the orders that it begins with.

Source: Imanishi and Xu, "A Heuristic for Periodic Memory Allocation with Little Fragmentation to Train Neural
Networks", ISMM 2024, which joins a heuristic that places with annealing. Their paper was read as far as its abstract,
so the rest is ours. On a line the first order is that of the quickest packing of the portfolio. An order is decoded by
filling the lowest hole, lifespans as they are, so that what wraps round a cycle is placed like the rest; a move shifts
one request, mostly one that reaches the top, to an earlier place; the temperature falls from 1 % of the peak by a
number of moves that is less the more requests there are.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import njit
from stalloc.planner.budget import Budget
from stalloc.planner.hole_filling import HOLES_LIMIT, fill, fill_holes
from stalloc.planner.packings import GUIDED, Packing, ranks
from stalloc.planner.portfolio import quick
from stalloc.planner.problem import Problem, Stays

#: pairs of requests that all decodings together, and those between two looks at the clock, may look at
EFFORT, EFFORT_BETWEEN = 2_000_000_000, 100_000_000
MOVES = 4_000
FIRST_TEMPERATURE, LAST_TEMPERATURE = 0.01, 0.00001
#: orders to begin with, before those of the portfolio; beyond HOLES_LIMIT requests only the first of all
PLAIN = ("Z", "A", "W")


def anneal(problem: Problem, target: int, budget: Budget) -> Packing:
    """A packing of lifespans of one interval each, above no floor; ends at a peak of `target`."""
    first = quick(problem, target)
    if first.peak_bytes <= target or budget.over():
        return Packing(first.offset, first.peak_bytes, f"annealing, from {first.method}")
    # filled in the order of its offsets a packing becomes no higher
    by_offset = np.argsort(first.offset, kind="stable")
    return Packing(*_place_annealed(problem.stays, problem.size, [by_offset], target, budget), "annealing")


def anneal_cycle(stays: Stays, size: Column, target: int, budget: Budget) -> tuple[Column, int, str]:
    """(offset, peak, method) of requests in a cycle."""
    return *_place_annealed(stays, size, [], target, budget), "cycle, annealing"


def _place_annealed(
    stays: Stays, size: Column, orders: list[Column], target: int, budget: Budget
) -> tuple[Column, int]:
    """(offset, peak): the best of what all orders give, those given first, and of annealing from the best of them."""
    whole = Problem(stays.start, stays.last_end, size, np.zeros(stays.num_epochs, np.int64))
    orders = orders + [np.argsort(ranks(whole, keys, span=stays.span), kind="stable") for keys in (*PLAIN, *GUIDED)]
    count = len(size)
    best_offset, best_peak, best_order = np.zeros(count, np.int64), -1, orders[0]
    for order, best_fit in itertools.product(orders[: None if count <= HOLES_LIMIT else 1], (False, True)):
        offset, peak = fill_holes(stays, size, order, best_fit)
        if best_peak < 0 or peak < best_peak:
            best_offset, best_peak, best_order = offset, peak, order
        if best_peak <= target or budget.over():
            return best_offset, best_peak
    for offset, peak in _annealed((*stays[:4], size), best_order, best_peak, target, budget):
        if peak < best_peak:
            best_offset, best_peak = offset, peak
            budget.tell(count, best_peak, target, "annealing")
        if best_peak <= target or budget.over():
            break
    return best_offset, best_peak


def _annealed(
    requests: tuple[Column, ...], order: Column, peak: int, target: int, budget: Budget
) -> Iterator[tuple[Column, int]]:
    """The best after each stretch of moves; with a time budget it begins anew, for ever, from the order it came to."""
    count = len(order)
    moves = min(MOVES, EFFORT // count**2)
    stretch = max(1, EFFORT_BETWEEN // count**2)
    order, rerun = order.copy(), 0
    while moves and (rerun == 0 or budget.patient):
        now = peak
        for first in range(0, moves, stretch):
            last = min(first + stretch, moves)
            seed = (budget.seed * 1_000_003 + rerun * 1009 + first) % (1 << 31)
            offset, best_peak, now = _anneal(requests, order, now, target, first, last, moves, seed)
            yield offset, int(best_peak)
        rerun += 1


@njit(nogil=True)
def _anneal(requests, order, now_peak, target, first, last, moves, seed):
    """(offset, peak) of the best of the moves [first, last), and the peak of the order that they end with."""
    np.random.seed(seed)
    size, count = requests[4], len(order)
    now = fill(requests, order)
    best, best_peak = now, (now + size).max()
    now_peak = best_peak
    for move in range(first, last):
        if best_peak <= target:
            break
        temperature = FIRST_TEMPERATURE * (LAST_TEMPERATURE / FIRST_TEMPERATURE) ** (move / moves)
        source = np.random.randint(count)
        if np.random.randint(4):  # one that ends in the highest twentieth, if a few draws meet one
            for _ in range(200):
                if now[order[source]] + size[order[source]] > now_peak - now_peak // 20:
                    break
                source = np.random.randint(count)
        place = np.random.randint(source + 1)
        row = order[source]
        for k in range(source, place, -1):
            order[k] = order[k - 1]
        order[place] = row
        tried = fill(requests, order)
        peak = (tried + size).max()
        if peak <= now_peak or np.random.random() < np.exp((now_peak - peak) / (temperature * now_peak)):
            now, now_peak = tried, peak
            if peak < best_peak:
                best, best_peak = tried, peak
        else:
            for k in range(place, source):
                order[k] = order[k + 1]
            order[source] = row
    return best, best_peak, now_peak
