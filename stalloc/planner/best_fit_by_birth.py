"""Placement in order of birth: each request into the tightest hole there is, as best-fit allocators do.

Contract: offsets of a packing without overlap below a given height, or nothing. Unlike a program that runs, a plan may
let time run backwards: what is freed last first then comes in the order in which a stack grows, and the holes that a
long pipeline leaves stay few. Costs about as much as the allocator itself would.
"""

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import BORROWING, njit
from stalloc.planner.problem import Problem

#: holes that may be looked at for each request, on average
MAX_HOLES = 200


def by_birth(problem: Problem, height: int, *, high: bool = False) -> Column | None:
    """(n,) offsets of a packing of at most `height` bytes, or None; `high`: the upper end of a hole.

    Of requests born in the same epoch the largest comes first, then the one that lives longest. Needs no floor.
    """
    if problem.floor.any():
        return None
    order = np.lexsort([problem.start - problem.end, -problem.size, problem.start])
    by_end = np.argsort(problem.end, kind="stable")
    offset = np.empty(len(order), np.int64)
    holes = np.empty((2, len(order) + 2), np.int64)
    done = best_fit(problem.start, problem.end, problem.size, order, by_end, offset, holes, height, high)
    return offset if done else None


@njit(nogil=True, **BORROWING)
def best_fit(start, end, size, order, by_end, offset, scratch, height, high):
    """Whether all of `order` fit below the height; writes `offset`. Of equally tight holes the lowest is taken."""
    count = len(order)
    low, top = scratch[0], scratch[1]  # holes, from the bottom up
    low[0], top[0], holes = 0, height, 1
    looks = MAX_HOLES * count
    num_dead = 0
    for i in order:
        while end[by_end[num_dead]] <= start[i]:
            begin = offset[by_end[num_dead]]
            stop = begin + size[by_end[num_dead]]
            num_dead += 1
            h, behind = 0, holes
            while h < behind:
                middle = (h + behind) >> 1
                if low[middle] < begin:
                    h = middle + 1
                else:
                    behind = middle
            below = h > 0 and top[h - 1] == begin
            above = h < holes and low[h] == stop
            if below and above:
                top[h - 1] = top[h]
                holes -= 1
                for k in range(h, holes):
                    low[k], top[k] = low[k + 1], top[k + 1]
            elif below:
                top[h - 1] = stop
            elif above:
                low[h] = begin
            else:
                for k in range(holes, h, -1):
                    low[k], top[k] = low[k - 1], top[k - 1]
                low[h], top[h] = begin, stop
                holes += 1
        looks -= holes
        chosen, least = -1, np.int64(1) << 62
        for h in range(holes):
            left = top[h] - low[h] - size[i]
            if 0 <= left < least:
                chosen, least = h, left
        if chosen < 0 or looks < 0:
            return False
        if high:
            top[chosen] -= size[i]
            offset[i] = top[chosen]
        else:
            offset[i] = low[chosen]
            low[chosen] += size[i]
        if least == 0:
            holes -= 1
            for k in range(chosen, holes):
                low[k], top[k] = low[k + 1], top[k + 1]
    return True
