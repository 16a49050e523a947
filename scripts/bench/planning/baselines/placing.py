"""Placing in a given order, each request into a gap between those that it shares time with, or on top of all of them.

Contract: offsets of a packing without overlap, whatever the order. What is placed into gaps is kept sorted by offset,
in short chunks that know the time they span, so that a request costs a scan of what is placed and an insertion into one
chunk; stacking takes O(log T) a request by a tree of heights over time.
"""

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import njit
from stalloc.planner.placement import build_floor, highest_floor, raise_floor

CHUNK = 256


@njit(nogil=True)
def fit_in_order(start, end, size, order, best_fit):
    """(n,) offsets: the smallest gap that holds a request (`best_fit`), or the lowest; else above all in its way.

    The gap between the highest of its neighbours and nothing is no gap: it is used only if there is no other.
    """
    count = len(order)
    most = 2 * count // CHUNK + 3
    low = np.empty((most, CHUNK), np.int64)
    high = np.empty((most, CHUNK), np.int64)
    begin = np.empty((most, CHUNK), np.int64)
    stop = np.empty((most, CHUNK), np.int64)
    held = np.zeros(most, np.int64)
    earliest = np.empty(most, np.int64)
    latest = np.empty(most, np.int64)
    chunks = np.zeros(most, np.int64)  # in order of offset
    num_chunks = 1
    earliest[0] = np.int64(1) << 62
    latest[0] = -(np.int64(1) << 62)
    offset = np.zeros(len(start), np.int64)
    for k in range(count):
        i = order[k]
        a, b, wanted = start[i], end[i], size[i]
        reach = np.int64(0)
        found, smallest = np.int64(-1), np.int64(1) << 62
        for position in range(num_chunks):
            c = chunks[position]
            if earliest[c] >= b or latest[c] <= a:
                continue
            for j in range(held[c]):
                if begin[c, j] < b and stop[c, j] > a:
                    gap = low[c, j] - reach
                    if gap >= wanted and gap < smallest:
                        found, smallest = reach, gap
                        if not best_fit:
                            break
                    reach = max(reach, high[c, j])
            if found >= 0 and not best_fit:
                break
        if found < 0:
            found = reach
        offset[i] = found

        # the last chunk that begins at or below the offset takes it
        left, right = 0, num_chunks - 1
        while left < right:
            middle = (left + right + 1) // 2
            if low[chunks[middle], 0] <= found:
                left = middle
            else:
                right = middle - 1
        c = chunks[left]
        if held[c] == CHUNK:
            new, half = num_chunks, CHUNK // 2
            for table in (low, high, begin, stop):
                table[new, : CHUNK - half] = table[c, half:]
            held[c], held[new] = half, CHUNK - half
            for part in (c, new):
                earliest[part] = begin[part, : held[part]].min()
                latest[part] = stop[part, : held[part]].max()
            chunks[left + 2 : num_chunks + 1] = chunks[left + 1 : num_chunks].copy()
            chunks[left + 1] = new
            num_chunks += 1
            if low[new, 0] <= found:
                c = new
        at = held[c]
        while at > 0 and low[c, at - 1] > found:
            low[c, at], high[c, at] = low[c, at - 1], high[c, at - 1]
            begin[c, at], stop[c, at] = begin[c, at - 1], stop[c, at - 1]
            at -= 1
        low[c, at], high[c, at], begin[c, at], stop[c, at] = found, found + wanted, a, b
        held[c] += 1
        earliest[c], latest[c] = min(earliest[c], a), max(latest[c], b)
    return offset


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
