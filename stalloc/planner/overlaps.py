"""A walk through what a plan places, in order of time: two stays that share bytes, and how much is live at most.

Contract: as of validator.py, of which this is a part: no cleverness beyond keeping what is live sorted by address.
What is asked to be at fixed places goes through it, too, before anything is placed.
"""

from typing import NamedTuple

import numpy as np

from stalloc.compiled import BORROWING, njit
from stalloc.planner.verdict import Uses


class Walk(NamedTuple):
    """What was met."""

    pair: tuple[int, int] | None  #: two stays, by their place in the columns, that are live together and share bytes
    load_bytes: int  #: the most that is live at once, sizes rounded up to the alignment, until then


def walk(uses: Uses, alignment: int) -> Walk:
    """Begin and end each of `uses`, all of some bytes and some time: those that end at an event before its begins."""
    if not len(uses.row):
        return Walk(None, 0)
    numbers = np.arange(len(uses.row))
    changes = np.concatenate([~numbers, numbers])[np.argsort(np.concatenate([uses.end, uses.start]), kind="stable")]
    one, two, load_bytes = _walk(changes, uses.low, uses.high, np.int64(alignment), np.empty_like(numbers))
    return Walk((int(one), int(two)) if one >= 0 else None, int(load_bytes))


@njit(nogil=True, **BORROWING)
def _walk(changes, low, high, alignment, live):
    """`walk` over changes: the number of a stay that begins, its complement where it ends.

    As long as no two overlap, a newcomer can only clash with its neighbours in `live` (m,), which is sorted by address.
    """
    num_live = 0
    load = highest = np.int64(0)
    for change in changes:
        stay = change if change >= 0 else ~change
        at, beyond = 0, num_live  # the first that lies no lower is looked for
        while at < beyond:
            middle = (at + beyond) // 2
            if low[live[middle]] < low[stay]:
                at = middle + 1
            else:
                beyond = middle
        rounded = (high[stay] - low[stay] + alignment - 1) // alignment * alignment
        if change < 0:
            num_live -= 1
            for i in range(at, num_live):
                live[i] = live[i + 1]
            load -= rounded
            continue
        if at > 0 and high[live[at - 1]] > low[stay]:
            return live[at - 1], stay, highest
        if at < num_live and low[live[at]] < high[stay]:
            return live[at], stay, highest
        for i in range(num_live, at, -1):
            live[i] = live[i - 1]
        live[at] = stay
        num_live += 1
        load += rounded
        highest = max(highest, load)
    return np.int64(-1), np.int64(-1), highest
