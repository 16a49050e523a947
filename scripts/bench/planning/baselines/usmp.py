"""TVM's unified static memory planner: greedy by size, greedy by conflicts, hill climb.

Source: the Apache TVM project, RFC 0009 (Unified Static Memory Planning) and the algorithms that its documentation
lists under tvm::tir::usmp::algo. The greedy ones put a buffer on top of the highest one it conflicts with. Hill climb
starts from the order by size, places at the lowest free offset, and 500 times swaps two of the buffers below one that
reaches the peak; a worse order is kept with a small probability that falls with the attempts.
Ours differs in two ways: the best layout of all attempts is returned, not the last one kept, and the second buffer of
a swap is drawn through one neighbour rather than from the list of all neighbours of neighbours.
"""

import numpy as np

from .placing import Column, fit_in_order, stack_in_order, ticks

ATTEMPTS = 500


def conflicts(start: Column, end: Column) -> Column:
    """(n,) how many others share time with each."""
    return np.searchsorted(np.sort(start), end) - np.searchsorted(np.sort(end), start, side="right") - 1


def by_size(start: Column, end: Column, size: Column) -> Column:
    """(n,) offsets, the largest placed first, among equals the one with the most conflicts."""
    return _stacked(start, end, size, np.lexsort([-conflicts(start, end), -size]))


def by_conflicts(start: Column, end: Column, size: Column) -> Column:
    """(n,) offsets, the one with the most conflicts placed first, among equals the largest."""
    return _stacked(start, end, size, np.lexsort([-size, -conflicts(start, end)]))


def _stacked(start: Column, end: Column, size: Column, order: Column) -> Column:
    first, last, num_ticks = ticks(start, end)
    return stack_in_order(first, last, size, order, num_ticks)


def hill_climb(start: Column, end: Column, size: Column, seed: int = 0) -> Column:
    """(n,) offsets, the best of 500 orders."""
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
