"""Compiled placement one by one, into holes among what is placed: lowest or tightest ones, or in order of birth.

Contract: offsets of a packing without overlap, above no floor.
"""

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import BORROWING, njit
from stalloc.planner.placement import FAR
from stalloc.planner.problem import Problem, Stays

#: hole filling looks at every placed request for each one it places: beyond so many it takes too long
HOLES_LIMIT = 20_000
#: holes that `by_birth` may look at for each request, on average
MAX_HOLES = 200


def fill_holes(
    stays: Stays,
    size: Column,
    order: Column,
    best_fit: bool = False,
    *,
    kept: Column | None = None,
    align: Column | None = None,
) -> tuple[Column, int]:
    """(offset, peak): the requests of `order` placed one by one into the lowest hole, or the tightest with `best_fit`.

    What has an offset (>= 0) in `kept` (n,) is in the way. Each goes to a multiple of its `align` (n,), a power of two.
    """
    offset = np.full(len(size), -1, np.int64) if kept is None else kept.copy()
    align = np.ones(len(size), np.int64) if align is None else align
    placed, by_offset = np.empty(len(size), np.int64), np.argsort(offset, kind="stable")
    peak = _fit((*stays[:4], size, align, offset), by_offset, order, placed, best_fit)
    return offset, int(peak)


@njit(nogil=True, **BORROWING)
def _fit(requests, by_offset, order, placed, best_fit):
    """`fill_holes` with its tables made: writes the offsets, gives the peak."""
    start, end, start2, end2, size, align, offset = requests
    num_placed = 0
    peak = np.int64(0)
    for i in by_offset:
        if offset[i] >= 0:
            placed[num_placed] = i
            num_placed += 1
            peak = max(peak, offset[i] + size[i])
    for i in order:
        a, b, c, d, need = start[i], end[i], start2[i], end2[i], size[i]
        free_from = np.int64(0)
        chosen, chosen_gap = np.int64(-1), FAR
        for k in range(num_placed):
            j = placed[k]
            together = start[j] < b and a < end[j]
            if start2[j] < end2[j]:
                together = together or (start2[j] < b and a < end2[j]) or (start2[j] < d and c < end2[j])
            if c < d:
                together = together or (start[j] < d and c < end[j])
            if not together:
                continue
            gap = offset[j] - free_from
            place = (free_from + align[i] - 1) & -align[i]
            if place + need <= offset[j] and gap < chosen_gap:
                chosen, chosen_gap = place, gap
                if not best_fit:
                    break
            free_from = max(free_from, offset[j] + size[j])
        if chosen < 0:
            chosen = (free_from + align[i] - 1) & -align[i]
        offset[i] = chosen
        peak = max(peak, chosen + need)
        low, high = 0, num_placed
        while low < high:
            middle = (low + high) >> 1
            if offset[placed[middle]] <= chosen:
                low = middle + 1
            else:
                high = middle
        for k in range(num_placed, low, -1):
            placed[k] = placed[k - 1]
        placed[low] = i
        num_placed += 1
    return peak


@njit(nogil=True)
def fill(requests, order):
    """(n,) offsets in one order, first fit, for compiled callers: `requests` are (start, end, start2, end2, size)."""
    start, end, start2, end2, size = requests
    count = len(start)
    offset, align = np.full(count, -1, np.int64), np.ones(count, np.int64)
    nothing, placed = np.empty(0, np.int64), np.empty(count, np.int64)
    _fit((start, end, start2, end2, size, align, offset), nothing, order, placed, False)
    return offset


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
