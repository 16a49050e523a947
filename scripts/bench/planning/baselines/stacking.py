"""Placing in a given order, each request on top of all that it shares time with: gaps below are never filled.

Contract: offsets of a packing without overlap, whatever the order; O(log T) a request by a tree of heights over time.
"""

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import njit
from stalloc.planner.placement import build_floor, highest_floor, raise_floor


def ticks(start: Column, end: Column) -> tuple[Column, Column, int]:
    """Lifespans in ticks, one for each distinct start: (first, last, T), half open. What meets still meets."""
    starts = np.unique(start)
    return np.searchsorted(starts, start), np.searchsorted(starts, end), len(starts)


@njit(nogil=True)
def _stack(first, last, size, order, cover, top):
    offset = np.zeros(len(first), np.int64)
    for i in order:
        offset[i] = highest_floor(cover, top, first[i], last[i])
        raise_floor(cover, top, first[i], last[i], offset[i] + size[i])
    return offset


def stack_in_order(first: Column, last: Column, size: Column, order: Column, num_ticks: int) -> Column:
    """(n,) offsets for lifespans [first, last) in ticks."""
    return _stack(first, last, size, order, *build_floor(np.zeros(num_ticks, np.int64)))
