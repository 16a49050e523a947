"""Greedy planners of TensorFlow Lite, XLA, TVM and ONNX Runtime.

TensorFlow Lite by size, and by the breadth of operators. Source: Pisarchyk and Lee, "Efficient Memory Management for
Deep Neural Net Inference", MLSys 2020, section 5 (offset calculation). Both put each tensor into the smallest gap that
holds it between the tensors already placed that it shares time with, or above them. An operator here is a tick, at
which something is allocated; its breadth is what is live then.

XLA's global decreasing size, best fit. Source: the XLA project, xla/service/heap_simulator,
GlobalDecreasingSizeBestFitHeap as its comments describe it, and the choice of the better of the two orders in buffer
assignment: buffers by size, or by the length of their live range; each into the smallest free chunk that holds it
during its whole live range, else at the end.

TVM's unified static memory planner by size, by conflicts, and by hill climb. Source: the Apache TVM project, RFC 0009
(Unified Static Memory Planning) and the algorithms that its documentation lists under tvm::tir::usmp::algo. The greedy
ones put a buffer on top of the highest one it conflicts with. Hill climb starts from the order by size, places at the
lowest free offset, and 500 times swaps two of the buffers below one that reaches the peak; a worse order is kept with a
small probability that falls with the attempts. Ours differs in two ways: the best layout of all attempts is returned,
not the last one kept, and the second buffer of a swap is drawn through one neighbour rather than from the list of all
neighbours of neighbours.

ONNX Runtime's memory pattern planner: best fit as the program runs, nothing known of what comes. Source: the ONNX
Runtime project, onnxruntime/core/framework, MemPatternPlanner as its comments and the documentation of memory patterns
describe it: in the order of the trace, each allocation goes to the smallest gap between the blocks that are live which
holds it, or behind the last one.
"""

import numpy as np

from stalloc.compiled import njit

from .placing import Column, fit_in_order, stack_in_order, ticks


def gaps_by_size(start: Column, end: Column, size: Column) -> Column:
    return fit_in_order(start, end, size, np.argsort(-size, kind="stable"), True)


def gaps_by_breadth(start: Column, end: Column, size: Column) -> Column:
    """(n,) offsets, the tensors of the widest operator placed first, among them the largest first."""
    first, last, num_ticks = ticks(start, end)
    change = np.zeros(num_ticks + 1, np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, last, size)
    breadth = np.cumsum(change[:-1])
    turn = np.empty(num_ticks, np.int64)
    turn[np.argsort(-breadth, kind="stable")] = np.arange(num_ticks)
    return fit_in_order(start, end, size, np.lexsort([-size, lowest_between(turn, first, last)]), True)


def lowest_between(values: Column, first: Column, last: Column) -> Column:
    """(n,) the lowest of the values in each [first, last), by a table of powers of two."""
    table = [values]
    while 2 << (len(table) - 1) <= len(values):
        half = 1 << (len(table) - 1)
        table.append(np.minimum(table[-1][:-half], table[-1][half:]))
    level = np.int64(np.log2(last - first))
    result = np.empty(len(first), np.int64)
    for k, row in enumerate(table):
        mine = level == k
        result[mine] = np.minimum(row[first[mine]], row[last[mine] - (1 << k)])
    return result


def better_of_two_orders(start: Column, end: Column, size: Column) -> Column:
    spatial = fit_in_order(start, end, size, np.lexsort([start - end, -size]), True)
    temporal = fit_in_order(start, end, size, np.lexsort([-size, start - end]), True)
    return min((spatial, temporal), key=lambda offset: int((offset + size).max(initial=0)))


ATTEMPTS = 500


def conflicts(start: Column, end: Column) -> Column:
    return np.searchsorted(np.sort(start), end) - np.searchsorted(np.sort(end), start, side="right") - 1


def stacked_by_size(start: Column, end: Column, size: Column) -> Column:
    """(n,) offsets, the largest placed first, among equals the one with the most conflicts."""
    return _stacked(start, end, size, np.lexsort([-conflicts(start, end), -size]))


def stacked_by_conflicts(start: Column, end: Column, size: Column) -> Column:
    """(n,) offsets, the one with the most conflicts placed first, among equals the largest."""
    return _stacked(start, end, size, np.lexsort([-size, -conflicts(start, end)]))


def _stacked(start: Column, end: Column, size: Column, order: Column) -> Column:
    first, last, num_ticks = ticks(start, end)
    return stack_in_order(first, last, size, order, num_ticks)


def hill_climb(start: Column, end: Column, size: Column, seed: int = 0) -> Column:
    rng = np.random.default_rng(seed)
    order = np.lexsort([-conflicts(start, end), -size])
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    best, best_peak = np.zeros(len(size), np.int64), -1
    kept, kept_peak, swapped = best, -1, (0, 0)
    for attempt in range(ATTEMPTS):
        offset = fit_in_order(start, end, size, order, False)
        peak = int((offset + size).max(initial=0))
        if best_peak < 0 or peak < best_peak:
            best, best_peak = offset, peak
        worse = 50 * (peak - kept_peak) // max(peak, 1) // max(attempt, 1)
        if kept_peak < 0 or peak < kept_peak or rng.integers(100) < worse:
            kept, kept_peak = offset, peak
        else:
            _swap(order, position, *swapped)
        highest = np.flatnonzero(kept + size == kept_peak)
        if len(highest) == 0:
            break
        pair = _pair(rng, start, end, position, int(rng.choice(highest)))
        swapped = (0, 0) if pair is None else (int(position[pair[0]]), int(position[pair[1]]))
        _swap(order, position, *swapped)
    return best


def _swap(order: Column, position: Column, one: int, other: int) -> None:
    order[[one, other]] = order[[other, one]]
    position[order[[one, other]]] = one, other


def _pair(rng: np.random.Generator, start: Column, end: Column, position: Column, row: int) -> tuple[int, int] | None:
    """A neighbour of the row that is placed before it, and another one or a neighbour of a neighbour."""

    def earlier(other: int) -> Column:
        meets = (start < end[other]) & (start[other] < end)
        return np.flatnonzero(meets & (position < position[other]))

    near = earlier(row)
    if len(near) == 0:
        return None
    one = int(rng.choice(near))
    far = earlier(int(rng.choice(near))) if rng.integers(100) > 25 else near
    other = int(rng.choice(far)) if len(far) else one
    return None if one == other else (one, other)


def as_it_runs(start: Column, end: Column, size: Column) -> Column:
    """(n,) offsets; at equal times frees come first."""
    count = len(start)
    times = np.concatenate([end, start])
    is_start = np.repeat([0, 1], count)
    order = np.lexsort([is_start, times])
    return _follow(order, size)


@njit(nogil=True)
def _follow(order, size):
    """`order` holds the row of each free, and n + the row of each allocation."""
    count = len(size)
    live = np.empty(count + 1, np.int64)  # rows by offset
    num_live = 0
    offset = np.zeros(count, np.int64)
    for event in order:
        if event < count:
            left, right = 0, num_live - 1
            while left < right:
                middle = (left + right) // 2
                if offset[live[middle]] < offset[event]:
                    left = middle + 1
                else:
                    right = middle
            for k in range(left, num_live - 1):
                live[k] = live[k + 1]
            num_live -= 1
            continue
        row = event - count
        reach, at = np.int64(0), num_live
        found, smallest = np.int64(-1), np.int64(1) << 62
        for k in range(num_live):
            gap = offset[live[k]] - reach
            if gap >= size[row] and gap < smallest:
                found, smallest, at = reach, gap, k
            reach = offset[live[k]] + size[live[k]]
        offset[row] = reach if found < 0 else found
        for k in range(num_live, at, -1):
            live[k] = live[k - 1]
        live[at] = row
        num_live += 1
    return offset
