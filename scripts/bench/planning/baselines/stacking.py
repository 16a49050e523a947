"""Placing in a given order, each request on top of all that it shares time with: gaps below are never filled.

Contract: offsets of a packing without overlap, whatever the order; O(log T) a request by a tree of heights over time.
"""

import numpy as np
from numpy.typing import NDArray

from stalloc.compiled import njit

Column = NDArray[np.int64]


def ticks(start: Column, end: Column) -> tuple[Column, Column, int]:
    """Lifespans in ticks, one for each distinct start: (first, last, T), half open. What meets still meets."""
    starts = np.unique(start)
    return np.searchsorted(starts, start), np.searchsorted(starts, end), len(starts)


@njit(nogil=True)
def stack_in_order(first, last, size, order, num_ticks):
    """(n,) offsets for lifespans [first, last) in ticks."""
    leaves = 1
    while leaves < num_ticks:
        leaves *= 2
    whole = np.zeros(2 * leaves, np.int64)  # height over all of a node: every tick in it is at least that high
    top = np.zeros(2 * leaves, np.int64)  # the highest tick in a node
    offset = np.zeros(len(first), np.int64)
    for i in order:
        left, right = leaves + first[i], leaves + last[i]
        highest = np.int64(0)
        node = left
        while node > 0:
            highest = max(highest, whole[node])
            node >>= 1
        node = right - 1
        while node > 0:
            highest = max(highest, whole[node])
            node >>= 1
        a, b = left, right
        while a < b:
            if a & 1:
                highest = max(highest, top[a])
                a += 1
            if b & 1:
                b -= 1
                highest = max(highest, top[b])
            a >>= 1
            b >>= 1
        offset[i] = highest
        raised = highest + size[i]
        a, b = left, right
        while a < b:
            if a & 1:
                whole[a] = raised
                top[a] = raised
                a += 1
            if b & 1:
                b -= 1
                whole[b] = raised
                top[b] = raised
            a >>= 1
            b >>= 1
        for end in (left, right - 1):
            node = end >> 1
            while node > 0:
                top[node] = max(top[node], top[2 * node], top[2 * node + 1])
                node >>= 1
    return offset
