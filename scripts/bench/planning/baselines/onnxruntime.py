"""ONNX Runtime's memory pattern planner: best fit as the program runs, nothing known of what comes.

Source: the ONNX Runtime project, onnxruntime/core/framework, MemPatternPlanner as its comments and the documentation
of memory patterns describe it: in the order of the trace, each allocation goes to the smallest gap between the blocks
that are live which holds it, or behind the last one.
"""

import numpy as np

from stalloc.compiled import njit

from .placing import Column


def place(start: Column, end: Column, size: Column) -> Column:
    """(n,) offsets; at equal times frees come first."""
    count = len(start)
    times = np.concatenate([end, start])
    is_start = np.repeat([0, 1], count)
    order = np.lexsort([is_start, times])
    return _run(order, size)


@njit(nogil=True)
def _run(order, size):
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
