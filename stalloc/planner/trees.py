"""Three segment trees that placement asks: load over time, requests by start, floor over time.

Contract: plain int64 arrays in heap order (children of node k are 2k and 2k+1). Epochs are indices [0, T); every range
is half open. NumPy makes the trees, compiled code asks and changes them.
"""

from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import BORROWING, inner
from stalloc.planner.problem import load_curve

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
