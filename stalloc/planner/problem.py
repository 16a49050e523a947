"""What a placement problem is, and how it falls into smaller ones without losing an optimum.

Contract: a packing of the parts, each at its base, is a packing of the whole, and the best packings of the parts make
a best packing of the whole above every common target height.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column, Sizes, Times


@dataclass(frozen=True, eq=False)
class Problem:
    """Requests to be placed above a floor. Times are epochs in [0, T), every lifespan holds at least one epoch."""

    start: Times  #: (n,) epoch
    end: Times  #: (n,) epoch, > start
    size: Sizes  #: (n,) bytes, positive
    floor: Sizes  #: (T,) bytes that are taken already, from the bottom

    @property
    def load(self) -> Column:
        """(T,) bytes live in each epoch, the floor not counted."""
        return load_curve(self.start, self.end, self.size, len(self.floor))

    @property
    def bound(self) -> int:
        """No packing is lower: the maximum of floor and load together (0 without epochs)."""
        return int((self.floor + self.load).max(initial=0))

    def reversed(self) -> "Problem":
        """This problem with time running backwards; every packing of it is a packing of this one."""
        num_epochs = len(self.floor)
        return Problem(num_epochs - self.end, num_epochs - self.start, self.size, self.floor[::-1].copy())


def load_curve(start: Column, end: Column, size: Column, num_epochs: int) -> Column:
    """(T,) bytes live in each epoch."""
    change = np.zeros(num_epochs + 1, np.int64)
    np.add.at(change, start, size)
    np.subtract.at(change, end, size)
    return np.cumsum(change[:-1])


def epochs(start: Column, end: Column) -> tuple[Column, Column, int]:
    """Times as epochs: (start, end, T). A new epoch begins only where a start follows an end.

    These are the maximal cliques of the interval graph, so that two lifespans (none empty) share an epoch exactly if
    they share a moment, and the load of an epoch is the highest load of its events.
    """
    count = len(start)
    if count == 0:
        return start, end, 0
    times = np.concatenate([start, end])
    is_start = np.zeros(2 * count, bool)
    is_start[:count] = True
    order = np.lexsort((is_start, times))  # at equal times ends first: lifespans are half open
    sorted_start = is_start[order]
    begins = np.zeros(2 * count, np.int64)
    begins[1:] = sorted_start[1:] & ~sorted_start[:-1]
    epoch = np.empty(2 * count, np.int64)
    epoch[order] = np.cumsum(begins)
    return epoch[:count], epoch[count:] + 1, int(epoch.max()) + 1


def split_at_cuts(start: Column, end: Column) -> list[Column]:
    """Groups of rows between which there is a moment that no lifespan crosses, in order of time."""
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(end[order])
    cuts = np.flatnonzero(start[order][1:] >= reach[:-1]) + 1
    return np.split(order, cuts)
