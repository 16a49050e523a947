"""Compiled placement: one pass over the requests of a problem in a given rank, above a given floor.

Contract: every function returns offsets of a packing without overlap above the floor, or says that it gave up.
Times are epochs in [0, T), T = len(floor); sizes are positive; ranks are a permutation, smaller first.
"""

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import BORROWING, inner, njit
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


def _counts_below(times: Column, num_epochs: int) -> Column:
    """(T + 2,) how many of `times` are below each epoch."""
    below = np.zeros(num_epochs + 2, np.int64)
    np.cumsum(np.bincount(times, minlength=num_epochs + 1), out=below[1:])
    return below


@inner(nogil=True, **BORROWING)
def _split(right, left, height, lowest, run, at):
    """Split a run of the skyline in two of equal height."""
    right[at], left[at], height[at] = right[run], run, height[run]
    right[run] = at
    if right[at] < len(height):
        left[right[at]] = at
    set_minimum(lowest, at, height[at])


@inner(nogil=True, **BORROWING)
def _merge(right, left, height, lowest, run):
    """Join a run with the one on its right if they are equally high."""
    other = right[run]
    if other < len(height) and height[other] == height[run]:
        right[run] = right[other]
        if right[run] < len(height):
            left[right[run]] = run
        set_minimum(lowest, other, FAR)


def _skyline(floor: Column) -> tuple[Column, Column, Column, Column]:
    """(right, left, height, lowest): a run begins at `a`, ends at right[a], the one before it begins at left[a]."""
    num_epochs = len(floor)
    right = np.full(num_epochs, num_epochs, np.int64)
    left = np.full(num_epochs, -1, np.int64)
    heads = np.full(num_epochs, FAR, np.int64)
    runs = np.flatnonzero(np.diff(floor, prepend=floor[0] - 1))
    right[runs[:-1]], left[runs[1:]] = runs[1:], runs[:-1]
    heads[runs] = floor[runs]
    return right, left, floor.copy(), build_minima(heads)


@inner(nogil=True, **BORROWING)
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


def sweep(
    start: Column, end: Column, size: Column, rank: Column, floor: Column, target: int, guided: bool
) -> tuple[Column, int]:
    """Offset sweep: fill the lowest run of the skyline with the best request that fits inside it.

    If nothing fits, the run rises to its lower neighbour (best fit of Burke, Kendall and Whitwell, 2004; used for
    lifespans by Sekiyama et al., 2018). With `guided`, only requests that cover the epoch of the run with the most
    unplaced bytes are considered, and only the empty part around that epoch rises.

    Returns (offset, peak); peak -1: given up because the target height cannot be kept.
    """
    num_epochs = len(floor)
    by_start = np.argsort(start, kind="stable")
    # for the empty part to the left of an epoch: the latest end first, the starts negated, make it a tree of minima
    by_end = np.argsort(-end, kind="stable")
    place_by_end = np.empty_like(by_end)
    place_by_end[by_end] = np.arange(len(by_end))
    offset = np.zeros(len(start), np.int64)
    peak = _sweep(
        (start, end, size, offset),
        (by_start, _counts_below(start, num_epochs)),
        build_requests(end[by_start], rank[by_start]),
        (by_end, place_by_end, _counts_below(end, num_epochs), build_minima(-start[by_end])),
        build_load(start, end, size, num_epochs),
        _skyline(floor),
        np.empty((96, 3), np.int64),
        target,
        guided,
    )
    return offset, peak


@njit(nogil=True, **BORROWING)
def _sweep(requests, starts, tree, ends, loads, runs, stack, target, guided):
    """`sweep` with its tables made: the peak, or -1."""
    start, end, size, offset = requests
    by_start, starts_below = starts
    first_end, last_end, best_rank = tree
    by_end, place_by_end, ends_below, start_by_end = ends
    load, pending = loads
    right, left, height, lowest = runs
    count, num_epochs = len(start), len(height)
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
                return np.int64(-1)
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
                    return np.int64(-1)
                before = first_at_most(start_by_end, count - ends_below[epoch + 1], count, -run)
                if before >= 0:
                    begin = max(begin, end[by_end[before]])
                behind = first_at_most(first_end, starts_below[epoch + 1], starts_below[stop], stop)
                if behind >= 0:
                    stop = start[by_start[behind]]
        _raise_run(right, left, height, lowest, run, begin, stop, new)
    return peak


def pack(
    start: Column,
    end: Column,
    start2: Column,
    end2: Column,
    size: Column,
    rank: Column,
    floor: Column,
    target: int,
) -> tuple[Column, int]:
    """Slack-guided placement at a target height: the epoch with the most unplaced bytes is served first.

    There, the best request whose lifespan lies between the walls (epochs with a higher floor) goes on the floor; if
    none does, walls as high as the epoch's slack, target - unplaced bytes, may be stepped over, which wastes what is
    below. Floor + unplaced bytes never exceeds the target anywhere, so a finished packing keeps it. The order follows
    the idea of tightest sections first in MiniMalloc (Moffitt, ASPLOS 2023).

    A request is live during [start, end) and, if it wraps round, during [start2, end2), which is empty for most.

    Returns (offset, peak); peak -1: some epoch has no request that keeps the target.
    """
    num_epochs = len(floor)
    once = np.flatnonzero(start2 >= end2)
    twice = np.flatnonzero(start2 < end2)  # few: looked at one by one
    by_start = once[np.argsort(start[once], kind="stable")]
    begin, stop = np.concatenate([start, start2[twice]]), np.concatenate([end, end2[twice]])
    offset = np.zeros(len(start), np.int64)
    peak = _pack(
        (start, end, start2, end2, size, rank, offset),
        (by_start, _counts_below(start[once], num_epochs)),
        build_requests(end[by_start], rank[by_start]),
        build_load(begin, stop, np.concatenate([size, size[twice]]), num_epochs),
        build_floor(floor),
        twice,
        np.empty((96, 3), np.int64),
        num_epochs,
        target,
    )
    return offset, peak


@njit(nogil=True, **BORROWING)
def _pack(requests, starts, tree, loads, floors, twice, stack, num_epochs, target):
    """`pack` with its tables made: the peak, or -1."""
    start, end, start2, end2, size, rank, offset = requests
    by_start, starts_below = starts
    first_end, last_end, best_rank = tree
    load, pending = loads
    cover, top = floors
    num_twice = len(twice)
    peak = np.int64(0)
    for _ in range(len(start)):
        most, epoch = highest_load(load, pending, 0, num_epochs)
        level = highest_floor(cover, top, epoch, epoch + 1)
        if level + most > target:
            return np.int64(-1)
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
            return np.int64(-1)
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
    return peak
