"""Compiled placement: one pass over the requests of a problem in a given rank, above a given floor.

Contract: every function returns offsets of a packing without overlap above the floor, or says that it gave up.
Times are epochs in [0, T), T = len(floor); sizes are positive; ranks are a permutation, smaller first.
"""

from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import BORROWING, inner, njit
from stalloc.planner.problem import Problem, Stays, load_curve

FAR = 1 << 62


def leaves_for(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def _tree(leaves: int, first: int, values: Column, empty: int, higher: Any) -> Column:
    """A tree whose leaves from `first` on are the values, all others `empty`; each node is the higher of its two."""
    tree = np.full(2 * leaves, empty, np.int64)
    tree[leaves + first : leaves + first + len(values)] = values
    while leaves > 1:
        higher(tree[leaves : 2 * leaves : 2], tree[leaves + 1 : 2 * leaves : 2], out=tree[leaves >> 1 : leaves])
        leaves >>= 1
    return tree


# Load: add over a range, ask for the highest epoch. `pending` holds what was added to a whole node and never moves
# down; two spare leaves, one on each side, let the climb treat both ends alike.


def build_load(start: Column, end: Column, size: Column, num_epochs: int) -> tuple[Column, Column]:
    """(top, pending) of the load of the requests given."""
    leaves = leaves_for(num_epochs + 2)
    top = _tree(leaves, 1, load_curve(start, end, size, num_epochs), -FAR, np.maximum)
    return top, np.zeros(2 * leaves, np.int64)


@inner(nogil=True, **BORROWING)
def add_load(top, pending, begin, stop, amount):
    """Add `amount` to the load of the epochs [begin, stop)."""
    leaves = len(top) // 2
    left = leaves + begin
    right = leaves + 1 + stop
    while left ^ right ^ 1:
        if not left & 1:
            top[left ^ 1] += amount
            pending[left ^ 1] += amount
        if right & 1:
            top[right ^ 1] += amount
            pending[right ^ 1] += amount
        left >>= 1
        right >>= 1
        top[left] = max(top[2 * left], top[2 * left + 1]) + pending[left]
        top[right] = max(top[2 * right], top[2 * right + 1]) + pending[right]
    while left > 1:
        left >>= 1
        top[left] = max(top[2 * left], top[2 * left + 1]) + pending[left]


@inner(nogil=True, **BORROWING)
def highest_load(top, pending, begin, stop):
    """(load, epoch) of the highest epoch in [begin, stop), the first of equals."""
    leaves = len(top) // 2
    left = leaves + begin
    right = leaves + 1 + stop
    left_load, left_node = -FAR, 0
    right_load, right_node = -FAR, 0
    while left ^ right ^ 1:
        if not left & 1 and top[left ^ 1] > left_load:
            left_load, left_node = top[left ^ 1], left ^ 1
        if right & 1 and top[right ^ 1] >= right_load:
            right_load, right_node = top[right ^ 1], right ^ 1
        left >>= 1
        right >>= 1
        if left_node:
            left_load += pending[left]
        if right_node:
            right_load += pending[right]
    load, node = left_load, left_node
    if not left_node or right_load > left_load:
        load, node = right_load, right_node
    while left > 1:
        left >>= 1
        load += pending[left]
    while node < leaves:
        node *= 2
        if top[node + 1] > top[node]:
            node += 1
    return load, node - leaves - 1


# Requests, sorted by start: the best rank among those that start in a range and end in a range.


def build_minima(values: Column) -> Column:
    """A tree of minima over `values`."""
    return _tree(leaves_for(len(values)), 0, values, FAR, np.minimum)


def build_requests(end_by_start: Column, rank_by_start: Column) -> tuple[Column, Column, Column]:
    """(first end, last end, best rank) of the requests below each node."""
    last = _tree(leaves_for(len(end_by_start)), 0, end_by_start, -FAR, np.maximum)
    return build_minima(end_by_start), last, build_minima(rank_by_start)


@inner(nogil=True, **BORROWING)
def remove_request(first_end, last_end, best_rank, position):
    """Take the request at `position` out."""
    node = len(first_end) // 2 + position
    first_end[node], last_end[node], best_rank[node] = FAR, -FAR, FAR
    while node > 1:
        node >>= 1
        first = min(first_end[2 * node], first_end[2 * node + 1])
        last = max(last_end[2 * node], last_end[2 * node + 1])
        best = min(best_rank[2 * node], best_rank[2 * node + 1])
        if first == first_end[node] and last == last_end[node] and best == best_rank[node]:
            break  # nor does anything change further up
        first_end[node], last_end[node], best_rank[node] = first, last, best


@inner(nogil=True, **BORROWING)
def best_request(first_end, last_end, best_rank, low, high, after, until, stack):
    """The position in [low, high) of best rank whose end is in (after, until]; -1 if there is none.

    `stack` is (96, 3) of scratch space.
    """
    leaves = len(first_end) // 2
    found, found_rank = -1, FAR
    stack[0, 0], stack[0, 1], stack[0, 2] = 1, 0, leaves
    depth = 1
    while depth > 0:
        depth -= 1
        node, begin, stop = stack[depth, 0], stack[depth, 1], stack[depth, 2]
        if stop <= low or begin >= high or best_rank[node] >= found_rank:
            continue
        if first_end[node] > until or last_end[node] <= after:
            continue
        if node >= leaves:
            found, found_rank = node - leaves, best_rank[node]
            continue
        middle = (begin + stop) >> 1
        child = 2 * node
        if best_rank[child] <= best_rank[child + 1]:  # the better child on top of the stack: it prunes the other
            stack[depth, 0], stack[depth, 1], stack[depth, 2] = child + 1, middle, stop
            stack[depth + 1, 0], stack[depth + 1, 1], stack[depth + 1, 2] = child, begin, middle
        else:
            stack[depth, 0], stack[depth, 1], stack[depth, 2] = child, begin, middle
            stack[depth + 1, 0], stack[depth + 1, 1], stack[depth + 1, 2] = child + 1, middle, stop
        depth += 2
    return found


@inner(nogil=True, **BORROWING)
def first_at_most(lowest, low, high, limit):
    """The first position in [low, high) whose value is at most `limit`, in a tree of minima; -1 if there is none."""
    leaves = len(lowest) // 2
    if low >= high:
        return -1
    node = leaves + low
    while lowest[node] > limit:  # what is below it ends; on to the right, as far up as that begins there
        while node & 1:
            node >>= 1
        if node == 0:
            return -1
        node += 1
    while node < leaves:
        node *= 2
        if lowest[node] > limit:
            node += 1
    return node - leaves if node - leaves < high else -1


@inner(nogil=True, **BORROWING)
def set_minimum(lowest, position, value):
    """Set one value of a tree of minima."""
    node = len(lowest) // 2 + position
    lowest[node] = value
    while node > 1:
        node >>= 1
        least = min(lowest[2 * node], lowest[2 * node + 1])
        if least == lowest[node]:
            break  # nor does anything change further up
        lowest[node] = least


@inner(nogil=True, **BORROWING)
def first_lowest(lowest):
    """The first position of the least value of a tree of minima."""
    leaves = len(lowest) // 2
    node = 1
    while node < leaves:
        node *= 2
        if lowest[node] > lowest[node + 1]:
            node += 1
    return node - leaves


# Floor: it only ever rises, so what covers a whole node can stay there (`cover`) and the highest wins.


def build_floor(floor: Column) -> tuple[Column, Column]:
    """(cover, top) of a floor given for each epoch."""
    leaves = leaves_for(len(floor))
    cover = np.zeros(2 * leaves, np.int64)
    cover[leaves : leaves + len(floor)] = floor
    return cover, _tree(leaves, 0, floor, 0, np.maximum)


@inner(nogil=True, **BORROWING)
def highest_floor(cover, top, begin, stop):
    """The highest floor over the epochs [begin, stop), which are at least one."""
    leaves = len(cover) // 2
    left, right = leaves + begin, leaves + stop
    first, last = left, right - 1
    highest = np.int64(0)
    while left < right:
        if left & 1:
            highest = max(highest, top[left])
            left += 1
        if right & 1:
            right -= 1
            highest = max(highest, top[right])
        left >>= 1
        right >>= 1
    while first > 0:
        highest = max(highest, cover[first], cover[last])
        first >>= 1
        last >>= 1
    return highest


@inner(nogil=True, **BORROWING)
def raise_floor(cover, top, begin, stop, level):
    """Raise the floor of the epochs [begin, stop) to `level`, which is above all of it."""
    leaves = len(cover) // 2
    left, right = leaves + begin, leaves + stop
    first, last = left, right - 1
    while left < right:
        if left & 1:
            cover[left] = level
            top[left] = level
            left += 1
        if right & 1:
            right -= 1
            cover[right] = level
            top[right] = level
        left >>= 1
        right >>= 1
    while first > 1:
        first >>= 1
        last >>= 1
        top[first] = max(top[first], level)
        top[last] = max(top[last], level)


@inner(nogil=True, **BORROWING)
def nearest_wall(cover, top, epoch, level, side):
    """The nearest epoch whose floor is above `level` on the right (side 1) or left (side 0); -1 if there is none.

    The floor at `epoch` itself is at most `level`, so no node above it covers more than that.
    """
    leaves = len(cover) // 2
    node = leaves + epoch
    while node > 1:
        if node & 1 != side and top[node ^ 1] > level:
            node ^= 1
            covered = False
            while node < leaves:
                covered = covered or cover[node] > level
                node = 2 * node + 1 - side  # the near child
                if not covered and top[node] <= level:
                    node ^= 1
            return node - leaves
        node >>= 1
    return -1


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


def sweep(problem: Problem, rank: Column, target: int, guided: bool) -> tuple[Column, int]:
    """Offset sweep: fill the lowest run of the skyline with the best request that fits inside it.

    If nothing fits, the run rises to its lower neighbour (best fit of Burke, Kendall and Whitwell, 2004; used for
    lifespans by Sekiyama et al., 2018). With `guided`, only requests that cover the epoch of the run with the most
    unplaced bytes are considered, and only the empty part around that epoch rises.

    Returns (offset, peak); peak -1: given up because the target height cannot be kept.
    """
    start, end, size, num_epochs = problem.start, problem.end, problem.size, len(problem.floor)
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
        _skyline(problem.floor),
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


def pack(stays: Stays, size: Column, rank: Column, floor: Column, target: int) -> tuple[Column, int]:
    """Slack-guided placement at a target height: the epoch with the most unplaced bytes is served first.

    There, the best request whose lifespan lies between the walls (epochs with a higher floor) goes on the floor; if
    none does, walls as high as the epoch's slack, target - unplaced bytes, may be stepped over, which wastes what is
    below. Floor + unplaced bytes never exceeds the target anywhere, so a finished packing keeps it. The order follows
    the idea of tightest sections first in MiniMalloc (Moffitt, ASPLOS 2023).

    Returns (offset, peak); peak -1: some epoch has no request that keeps the target.
    """
    start, end, start2, end2, num_epochs = stays
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


def skyline(problem: Problem, offset: Column) -> Column:
    """(T,) the floor that the problem's requests make when they are placed, on top of its own."""
    top, num_epochs = offset + problem.size, len(problem.floor)
    order = np.argsort(top, kind="stable")
    cover, highest = build_floor(np.zeros(num_epochs, np.int64))
    _raise_each(cover, highest, problem.start[order], problem.end[order], top[order])
    level = 2
    while level < len(cover):  # what covers a node covers its children
        children = cover[level : 2 * level]
        np.maximum(children, np.repeat(cover[level // 2 : level], 2), out=children)
        level *= 2
    return np.maximum(cover[len(cover) // 2 :][:num_epochs], problem.floor)


@njit(nogil=True, **BORROWING)
def _raise_each(cover, highest, start, end, top):
    for i in range(len(start)):
        raise_floor(cover, highest, start[i], end[i], top[i])
