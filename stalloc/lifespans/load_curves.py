"""Load: bytes live at an event. Its maximum is the lower bound of every plan.

All functions take half-open lifespans [start, end); at an event where one ends and another starts only one is live.
"""

import numpy as np

from stalloc.columns import Sizes, Times
from stalloc.trace import Trace


def load_curve(start: Times, end: Times, size: Sizes) -> tuple[Times, Sizes]:
    """Bytes live from each event on at which something changes.

    Takes (n,) lifespans and bytes; returns (k,) increasing events and (k,) bytes live in [events[i], events[i+1]).
    """
    at = np.concatenate([start, end]).astype(np.int64)
    change = np.concatenate([size, -np.asarray(size)]).astype(np.int64)
    order = np.argsort(at, kind="stable")
    at, level = at[order], np.cumsum(change[order])
    last = np.concatenate([at[1:] != at[:-1], [True]]) if len(at) else np.empty(0, bool)
    return at[last], level[last]


def peak_load(start: Times, end: Times, size: Sizes, cycle: tuple[int, int] | None = None) -> int:
    """The most bytes ever live.

    With `cycle` = (cycle_start, cycle_end), lifespans that start in the cycle repeat with it for ever, and what reaches
    beyond cycle_end occupies the beginning of the next iteration; the others are a prologue that runs once, of which
    what ends beyond cycle_end lives for ever. The result then covers the prologue, the first iteration and every later
    one.
    """
    if cycle is None:
        return int(load_curve(start, end, size)[1].max(initial=0))
    cycle_start, cycle_end = cycle
    length = cycle_end - cycle_start
    start, end, size = np.asarray(start), np.asarray(end), np.asarray(size)
    in_cycle = start >= cycle_start
    lasting = ~in_cycle & (end > cycle_end)
    once = peak_load(start, np.minimum(end, cycle_end), size)  # the prologue and the first iteration
    wraps = in_cycle & (end > cycle_end)
    steady = peak_load(
        np.concatenate([start[in_cycle], np.full(int(wraps.sum()), cycle_start)]),
        np.concatenate([np.minimum(end[in_cycle], cycle_end), np.minimum(end[wraps] - length, cycle_end)]),
        np.concatenate([size[in_cycle], size[wraps]]),
    )
    return max(once, steady + int(size[lasting].sum()))


def fullest(reserved: Sizes, allocated: Sizes) -> int:
    """The index of the moment with most reserved and, among those, most allocated; the first of equals. (k,) bytes."""
    return int(np.argmax(np.where(reserved == reserved.max(), allocated, -1)))


def lower_bound(trace: Trace, alignment: int = 512) -> int:
    """Bytes that no plan of the trace can go below: the peak load with sizes rounded up to `alignment` bytes."""
    return peak_load(trace.start, trace.end, trace.aligned_size(alignment))
