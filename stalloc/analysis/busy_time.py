"""How long something was at work inside of stretches of time, and how many bytes it moved there.

Contract: times are whole nanoseconds, intervals half open. Bytes of a copy that reaches over a boundary are divided by
time; those of all stretches that lie side by side add up to all bytes, to the byte.
"""

import numpy as np

from stalloc.columns import Column, Sizes, Times


class Busy:
    """The times at which at least one of some intervals is open."""

    def __init__(self, start: Times, end: Times) -> None:
        order = np.argsort(start, kind="stable")
        start, end = start[order], np.maximum.accumulate(end[order]) if len(order) else end[order]
        first = np.append(True, start[1:] > end[:-1])[: len(start)]
        self.start = start[first]
        self.end = end[np.append(first[1:], True)[: len(end)]]
        self._before = np.concatenate([[0], np.cumsum(self.end - self.start)])

    def until(self, moments: Times) -> Times:
        """Nanoseconds of work before each of (k,) moments."""
        if not len(self.start):
            return np.zeros(len(moments), np.int64)
        row = np.searchsorted(self.start, moments, side="right") - 1
        inside = np.clip(np.minimum(self.end[row], moments) - self.start[row], 0, None)
        return np.where(row < 0, 0, self._before[row] + inside)

    def within(self, begin: Times, end: Times) -> Times:
        """Nanoseconds of work inside of each of the (k,) stretches [begin, end)."""
        return self.until(end) - self.until(begin)


def bytes_within(start: Times, end: Times, size: Sizes, bounds: Times) -> Sizes:
    """(k,) bytes that copies moved in each stretch between (k + 1,) ascending bounds, within which all copies lie."""
    moved = np.zeros(len(bounds) - 1, np.int64)
    if not len(moved):
        return moved
    last_row = len(moved) - 1
    first = np.clip(np.searchsorted(bounds, start, side="right") - 1, 0, last_row)
    last = np.clip(np.searchsorted(bounds, end, side="left") - 1, first, last_row)
    whole = first == last
    np.add.at(moved, first[whole], size[whole])
    for row in np.flatnonzero(~whole).tolist():
        cuts = np.minimum(bounds[first[row] + 1 : last[row] + 2], end[row]) - start[row]
        shares = [int(size[row]) * int(cut) // int(end[row] - start[row]) for cut in cuts]
        moved[first[row] : last[row] + 1] += np.diff([0, *shares[:-1], int(size[row])])
    return moved


def highest_within(time: Times, level: Column, begin: Times, end: Times) -> Column:
    """(k,) the highest level in each stretch [begin, end), -1 if unknown; `level` (n,) is valid from `time` (n,) on."""
    first = np.searchsorted(time, begin, side="right") - 1  # what held when it began
    last = np.searchsorted(time, end, side="left")
    rows = [level[max(low, 0) : high] for low, high in zip(first.tolist(), last.tolist(), strict=True)]
    return np.array([int(row.max()) if len(row) else -1 for row in rows], np.int64)
