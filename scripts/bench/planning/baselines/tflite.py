"""TensorFlow Lite's offset planners: greedy by size, and greedy by the breadth of operators.

Source: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", MLSys 2020, section 5 (offset
calculation). Both put each tensor into the smallest gap that holds it between the tensors already placed that it
shares time with, or above them. An operator here is a tick, at which something is allocated; its breadth is what is
live then.
"""

import numpy as np

from .placing import Column, fit_in_order, ticks


def by_size(start: Column, end: Column, size: Column) -> Column:
    """(n,) offsets, the largest placed first."""
    return fit_in_order(start, end, size, np.argsort(-size, kind="stable"), True)


def by_breadth(start: Column, end: Column, size: Column) -> Column:
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
