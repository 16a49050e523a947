"""Compiled placement: one pass over the requests of a problem in a given rank, above a given floor.

Contract: every function returns offsets of a packing without overlap above the floor, or says that it gave up.
Times are epochs in [0, T), T = len(floor); sizes are positive; ranks are a permutation, smaller first.
"""

import numpy as np

from stalloc.compiled import BORROWING, njit
from stalloc.planner.trees import (
    FAR,
    add_load,
    best_request,
    build_floor,
    build_load,
    build_minima,
    build_requests,
    first_at_most,
    first_lowest,
    highest_floor,
    highest_load,
    nearest_wall,
    raise_floor,
    remove_request,
    set_minimum,
)


@njit(nogil=True)
def _counts_below(times, num_epochs):
    """(T + 2,) how many of `times` are below each epoch."""
    below = np.zeros(num_epochs + 2, np.int64)
    for t in times:
        below[t + 1] += 1
    for t in range(1, num_epochs + 2):
        below[t] += below[t - 1]
    return below


@njit(nogil=True, **BORROWING)
def _split(right, left, height, lowest, run, at):
    """Split a run of the skyline in two of equal height."""
    right[at], left[at], height[at] = right[run], run, height[run]
    right[run] = at
    if right[at] < len(height):
        left[right[at]] = at
    set_minimum(lowest, at, height[at])


@njit(nogil=True, **BORROWING)
def _merge(right, left, height, lowest, run):
    """Join a run with the one on its right if they are equally high."""
    other = right[run]
    if other < len(height) and height[other] == height[run]:
        right[run] = right[other]
        if right[run] < len(height):
            left[right[run]] = run
        set_minimum(lowest, other, FAR)


@njit(nogil=True)
def _skyline(floor):
    """(right, left, height, lowest): a run begins at `a`, ends at right[a], the one before it begins at left[a]."""
    num_epochs = len(floor)
    right = np.full(num_epochs, num_epochs, np.int64)
    left = np.full(num_epochs, -1, np.int64)
    height = floor.copy()
    heads = np.full(num_epochs, FAR, np.int64)
    run = 0
    heads[0] = height[0]
    for t in range(1, num_epochs):
        if height[t] != height[run]:
            right[run], left[t] = t, run
            run = t
            heads[t] = height[t]
    return right, left, height, build_minima(heads)


@njit(nogil=True, **BORROWING)
def _raise_run(right, left, height, lowest, run, begin, stop, level):
    """Raise the part [begin, stop) of a run to a level, and join it with neighbours of that level."""
    if begin > run:
        _split(right, left, height, lowest, run, begin)
        run = begin
    if stop < right[run]:
        _split(right, left, height, lowest, run, stop)
    height[run] = level
    set_minimum(lowest, run, level)
    _merge(right, left, height, lowest, run)
    if left[run] >= 0:
        _merge(right, left, height, lowest, left[run])


@njit(nogil=True)
def sweep(start, end, size, rank, floor, target, guided):
    """Offset sweep: fill the lowest run of the skyline with the best request that fits inside it.

    If nothing fits, the run rises to its lower neighbour (best fit of Burke, Kendall and Whitwell, 2004; used for
    lifespans by Sekiyama et al., 2018). With `guided`, only requests that cover the epoch of the run with the most
    unplaced bytes are considered, and only the empty part around that epoch rises.

    Returns (offset, peak); peak -1: given up because the target height cannot be kept.
    """
    count, num_epochs = len(start), len(floor)
    by_start = np.argsort(start, kind="mergesort")
    starts_below = _counts_below(start, num_epochs)
    first_end, last_end, best_rank = build_requests(end[by_start], rank[by_start])
    # for the empty part to the left of an epoch: the latest end first, the starts negated, make it a tree of minima
    by_end = np.argsort(-end, kind="mergesort")
    place_by_end = np.argsort(by_end, kind="mergesort")
    ends_below = _counts_below(end, num_epochs)
    start_by_end = build_minima(-start[by_end])
    load, pending = build_load(start, end, size, num_epochs)
    stack = np.empty((96, 3), np.int64)

    right, left, height, lowest = _skyline(floor)
    offset = np.zeros(count, np.int64)
    peak = np.int64(0)
    unplaced = count
    while unplaced > 0:
        level = lowest[1]
        run = first_lowest(lowest)
        stop = right[run]
        epoch, most = run, np.int64(0)
        latest_start = stop
        if guided:
            most, epoch = highest_load(load, pending, run, stop)
            if most <= 0:  # nothing will come here any more: a wall
                height[run] = FAR
                set_minimum(lowest, run, FAR)
                continue
            latest_start = epoch + 1
        found = best_request(
            first_end, last_end, best_rank, starts_below[run], starts_below[latest_start], epoch, stop, stack
        )
        if found >= 0:
            i = by_start[found]
            offset[i] = level
            unplaced -= 1
            begin, stop, new = start[i], end[i], level + size[i]
            peak = max(peak, new)
            if peak > target:
                return offset, np.int64(-1)
            remove_request(first_end, last_end, best_rank, found)
            if guided:
                add_load(load, pending, begin, stop, -size[i])
                set_minimum(start_by_end, place_by_end[i], FAR)
        else:
            begin, new = run, height[left[run]] if left[run] >= 0 else FAR
            if stop < num_epochs:
                new = min(new, height[stop])
            if guided:
                if most + new > target:
                    return offset, np.int64(-1)
                before = first_at_most(start_by_end, count - ends_below[epoch + 1], count, -run)
                if before >= 0:
                    begin = max(begin, end[by_end[before]])
                behind = first_at_most(first_end, starts_below[epoch + 1], starts_below[stop], stop)
                if behind >= 0:
                    stop = start[by_start[behind]]
        _raise_run(right, left, height, lowest, run, begin, stop, new)
    return offset, peak


@njit(nogil=True)
def pack(start, end, start2, end2, size, rank, floor, target):
    """Slack-guided placement at a target height: the epoch with the most unplaced bytes is served first.

    There, the best request whose lifespan lies between the walls (epochs with a higher floor) goes on the floor; if
    none does, walls as high as the epoch's slack, target - unplaced bytes, may be stepped over, which wastes what is
    below. Floor + unplaced bytes never exceeds the target anywhere, so a finished packing keeps it. The order follows
    the idea of tightest sections first in MiniMalloc (Moffitt, ASPLOS 2023).

    A request is live during [start, end) and, if it wraps round, during [start2, end2), which is empty for most.

    Returns (offset, peak); peak -1: some epoch has no request that keeps the target.
    """
    count, num_epochs = len(start), len(floor)
    once = np.flatnonzero(start2 >= end2)
    twice = np.flatnonzero(start2 < end2)  # few: looked at one by one
    num_twice = len(twice)
    by_start = once[np.argsort(start[once], kind="mergesort")]
    starts_below = _counts_below(start[once], num_epochs)
    first_end, last_end, best_rank = build_requests(end[by_start], rank[by_start])
    load, pending = build_load(start, end, size, num_epochs)
    for i in twice:
        add_load(load, pending, start2[i], end2[i], size[i])
    cover, top = build_floor(floor)
    stack = np.empty((96, 3), np.int64)
    offset = np.zeros(count, np.int64)
    peak = np.int64(0)
    for _ in range(count):
        most, epoch = highest_load(load, pending, 0, num_epochs)
        level = highest_floor(cover, top, epoch, epoch + 1)
        if level + most > target:
            return offset, np.int64(-1)
        chosen, position, place = np.int64(-1), np.int64(-1), np.int64(-1)
        for reach in (level, target - most):
            begin = nearest_wall(cover, top, epoch, reach, 0) + 1
            stop = nearest_wall(cover, top, epoch, reach, 1)
            if stop < 0:
                stop = num_epochs
            position = best_request(
                first_end, last_end, best_rank, starts_below[begin], starts_below[epoch + 1], epoch, stop, stack
            )
            if position >= 0:
                chosen = by_start[position]
            for k in range(num_twice):
                i = twice[k]
                if chosen >= 0 and rank[i] > rank[chosen]:
                    continue
                if not (start[i] <= epoch < end[i] or start2[i] <= epoch < end2[i]):
                    continue
                under = highest_floor(cover, top, start[i], end[i])
                if max(under, highest_floor(cover, top, start2[i], end2[i])) <= reach:
                    chosen, place = i, np.int64(k)
            if chosen >= 0:
                break
        if chosen < 0:
            return offset, np.int64(-1)
        offset[chosen] = highest_floor(cover, top, start[chosen], end[chosen])
        if place >= 0:
            offset[chosen] = max(offset[chosen], highest_floor(cover, top, start2[chosen], end2[chosen]))
            num_twice -= 1
            twice[place] = twice[num_twice]
        else:
            remove_request(first_end, last_end, best_rank, position)
        new = offset[chosen] + size[chosen]
        peak = max(peak, new)
        add_load(load, pending, start[chosen], end[chosen], -size[chosen])
        raise_floor(cover, top, start[chosen], end[chosen], new)
        if place >= 0:
            add_load(load, pending, start2[chosen], end2[chosen], -size[chosen])
            raise_floor(cover, top, start2[chosen], end2[chosen], new)
    return offset, peak


@njit(nogil=True)
def fit(start, end, start2, end2, size, align, offset, order, best_fit):
    """Place the requests of `order` one by one into the lowest hole, or the smallest with `best_fit`, that they fit.

    Each goes to a multiple of its `align`, a power of two. A request is live during [start, end) and [start2, end2),
    which is empty for most. Requests that have an offset (>= 0) already are in the way. Writes `offset` and returns the
    peak of all. Needs no floor.
    """
    count = len(start)
    placed = np.empty(count, np.int64)
    num_placed = 0
    peak = np.int64(0)
    for i in np.argsort(offset, kind="mergesort"):
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
def fill_holes(start, end, start2, end2, size, offset, order, best_fit):
    """`fit` for requests that may lie anywhere, as when all sizes are multiples of the one alignment."""
    return fit(start, end, start2, end2, size, np.ones(len(size), np.int64), offset, order, best_fit)
