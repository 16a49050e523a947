"""Offsets under constraints: alignments that differ, requests that are placed already, bytes that must not be used.

Contract: a packing that keeps every constraint, the maximum load as its lower bound, and a bound that counts what the
constraints waste for certain. Correct for any input that `check_places` admits; less thorough than plain placement.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stalloc.columns import Column, distinct
from stalloc.planner.budget import Budget
from stalloc.planner.constraints import Constraints
from stalloc.planner.hole_filling import fit
from stalloc.planner.placement import skyline
from stalloc.planner.portfolio import HOLES_LIMIT, solve
from stalloc.planner.problem import Problem, epochs, load_curve
from stalloc.trace.record import MAX_BYTES

#: pairs of requests that restarts may compare
PAIRS = 40_000_000
#: epochs whose waste is looked at, and how many requests, in so many of them, at a time
EPOCHS_LOOKED_AT, CELLS = 64, 1 << 20


class Stays(NamedTuple):
    """When n requests are live: epochs [start, end) and, in a cycle, [start2, end2) as well (0, 0 if not)."""

    start: Column
    end: Column
    start2: Column
    end2: Column
    num_epochs: int


class Constrained(NamedTuple):
    """Offsets with what they come to."""

    offset: Column  #: (n,) bytes
    peak_bytes: int
    proven_bound_bytes: int
    method: str


def stays(start: Column, end: Column, cycle: tuple[int, int] | None) -> Stays:
    """Lifespans as epochs. In a cycle what wraps is taken to be live at its beginning from the first iteration on."""
    none = np.zeros(len(start), np.int64)
    if cycle is None:
        a, b, num_epochs = epochs(start, end)
        return Stays(a, b, none, none, num_epochs)
    cycle_start, cycle_end = cycle
    wraps = (start >= cycle_start) & (end > cycle_end)
    back = np.minimum(end - (cycle_end - cycle_start), start)  # no longer than once round
    both = np.flatnonzero(wraps & (back > cycle_start))
    a, b, num_epochs = epochs(
        np.concatenate([start, np.full(len(both), cycle_start)]),
        np.concatenate([np.minimum(end, cycle_end), back[both]]),
    )
    start2, end2 = none.copy(), none.copy()
    start2[both], end2[both] = a[len(start) :], b[len(start) :]
    return Stays(a[: len(start)], b[: len(start)], start2, end2, num_epochs)


def place_constrained(live: Stays, size: Column, given: Constraints, bound: int, budget: Budget) -> Constrained:
    """Place n requests; sizes are multiples of the granule. `bound` is the maximum load.

    What the constraints waste is looked for only if the first packing is above the bound, and above what is aimed at.
    """
    proven, enough = bound, max(bound, budget.aim_bytes)
    count, blocked = len(size), _blocked(given)
    # a forbidden range is a request that lives for ever
    whole = [
        np.concatenate([column, np.full(len(blocked), value)])
        for column, value in zip(live[:4], (0, live.num_epochs, 0, 0), strict=True)
    ]
    sizes = np.concatenate([size, blocked[:, 1] - blocked[:, 0]])
    align = np.concatenate([given.alignment, np.full(len(blocked), given.granule)])
    taken = np.concatenate([given.fixed, blocked[:, 0]])
    free = np.flatnonzero(given.fixed < 0)
    fixed_top = int((given.fixed + size)[given.fixed >= 0].max(initial=0))
    span = (live.end - live.start) + (live.end2 - live.start2)

    def fitted(order: Column, best_fit: bool, kept: Column = taken) -> tuple[int, Column]:
        offset = kept.copy()
        a, b, a2, b2 = whole
        fit(a, b, a2, b2, sizes, align, offset, order, best_fit)
        return int((offset + sizes)[:count].max(initial=0)), offset[:count]

    best: tuple[int, Column] | None = None
    method = ""
    if not live.end2.any():
        offset, method = _above(live, size, given, blocked, enough, budget)
        best = int((offset + size).max(initial=0)), offset
        if best[0] > max(enough, fixed_top):
            proven = max(bound, _wasted(live, size, given))
            enough = max(enough, proven)
        high = free[(offset + size)[free] > enough]
        if len(high) * count <= PAIRS and len(high):
            kept = np.concatenate([offset, blocked[:, 0]])
            kept[high] = -1
            repaired = fitted(high[np.argsort(-size[high], kind="stable")], False, kept)
            if repaired[0] < best[0]:
                best, method = repaired, f"{method}, repaired"
    keys = {
        "size": size,
        "alignment, then size": given.alignment.astype(np.float64) * 2.0**62 + size,
        "area": size * span.astype(np.float64),
        "lifetime": span,
    }
    for name, key in keys.items():
        for best_fit in (False, True):
            if best is not None and (best[0] <= max(enough, fixed_top) or count > HOLES_LIMIT or budget.over()):
                break
            found = fitted(free[np.argsort(-key[free], kind="stable")], best_fit)
            if best is None or found[0] < best[0]:
                best, method = found, f"{'best' if best_fit else 'first'} fit by {name} around what is fixed"
    assert best is not None
    rng = np.random.default_rng(0)
    for _ in range(min(budget.num_restarts, PAIRS // max(count, 1) ** 2)):
        if best[0] <= max(enough, fixed_top) or budget.over():
            break
        noise = np.exp(rng.uniform(-0.5, 0.5, len(free)))
        found = fitted(free[np.argsort(-(size[free] * np.sqrt(span[free]) * noise), kind="stable")], False)
        if found[0] < best[0]:
            best, method = found, "first fit with noise around what is fixed"
    return Constrained(best[1], best[0], max(proven, fixed_top), method)


def _blocked(given: Constraints) -> Column:
    """(f, 2) the forbidden ranges, as whole granules."""
    blocked = given.forbidden.copy()
    blocked[:, 0] &= -given.granule
    blocked[:, 1] = (blocked[:, 1] + given.granule - 1) & -given.granule
    return blocked


def _above(
    live: Stays, size: Column, given: Constraints, blocked: Column, bound: int, budget: Budget
) -> tuple[Column, str]:
    """(offset, method) with everything free above what is fixed or forbidden at that time, on the largest alignment.

    Forbidden ranges above the first packing's height stay out of the way; else they are part of the floor.
    """
    free, fixed = np.flatnonzero(given.fixed < 0), np.flatnonzero(given.fixed >= 0)
    offset = np.maximum(given.fixed, 0)
    if len(free) == 0:
        return offset, "all fixed"
    grain = int(given.alignment[free].max())
    rounded = (size[free] + (grain - 1)) & -grain
    top = given.fixed[fixed] + size[fixed]
    order = np.argsort(top, kind="stable")
    zero = np.zeros(live.num_epochs, np.int64)
    below = skyline(live.start[fixed][order], live.end[fixed][order], top[order], zero)
    lows, highs = blocked[:, 0], blocked[:, 1]
    packing = None
    for used in range(len(blocked) + 1):  # as few of the ranges below as will do
        floor = np.maximum(below, highs[used - 1] if used else 0)
        floor = (floor + (grain - 1)) & -grain
        packing = solve(Problem(live.start[free], live.end[free], rounded, floor), bound, budget, 0.25)
        if used == len(blocked) or packing.peak_bytes <= lows[used]:
            break
    assert packing is not None
    offset[free] = packing.offset
    return offset, packing.method


def _wasted(live: Stays, size: Column, given: Constraints) -> int:
    """A height that no packing is below, from what the constraints waste in the fullest epochs.

    Not for what wraps: that and what a prologue leaves are never live together, so their waste does not add up.
    """
    free, placed = np.flatnonzero(given.fixed < 0), np.flatnonzero(given.fixed >= 0)
    low, high = (given.forbidden[:, 0] + given.granule - 1) & -given.granule, given.forbidden[:, 1] & -given.granule
    always = np.flatnonzero(low < high)
    lows = np.concatenate([given.fixed[placed], low[always]])
    highs = np.concatenate([(given.fixed + size)[placed], high[always]])
    begins = np.concatenate([live.start[placed], np.zeros(len(always), np.int64)])
    ends = np.concatenate([live.end[placed], np.full(len(always), live.num_epochs)])
    order = np.argsort(lows, kind="stable")
    lows, highs, begins, ends, is_placed = lows[order], highs[order], begins[order], ends[order], order < len(placed)
    load = load_curve(live.start, live.end, size, live.num_epochs)
    fullest = np.argsort(-load, kind="stable")[:EPOCHS_LOOKED_AT, None]
    proven = 0
    for some in np.array_split(fullest, -(-fullest.size * len(size) // CELLS)):
        here = (live.start[free] <= some) & (some < live.end[free])
        taken = (begins <= some) & (some < ends)
        needed = here @ size[free]
        smallest = np.where(here, size[free], MAX_BYTES).min(axis=1, initial=MAX_BYTES)
        proven = max(proven, int(_heights(lows, highs, taken, needed, smallest).max(initial=0)))
        proven = max(proven, int(np.where(taken & is_placed, highs, 0).max(initial=0)))
        for grain in distinct(given.alignment[free]).tolist():
            # no two of these share a cell of that many bytes; only the topmost one's last cell may end beyond the peak
            cells = np.where(here & (given.alignment[free] >= grain), size[free], 0)
            rounded = (cells + (grain - 1)) & -grain
            proven = max(proven, int((rounded.sum(axis=1) - (rounded - cells).max(axis=1, initial=0)).max(initial=0)))
    return proven


def _heights(lows: Column, highs: Column, taken: NDArray[np.bool_], needed: Column, smallest: Column) -> Column:
    """(e,) how high the gaps between what is `taken` (e, t) reach until they hold the bytes `needed` (e,); 0 for none.

    `lows` and `highs` (t,) are ascending; a gap below `smallest` (e,) holds nothing.
    """
    above = np.maximum.accumulate(np.where(taken, highs, 0), axis=1)
    above = np.concatenate([np.zeros((len(needed), 1), np.int64), above], axis=1)  # from where each gap begins
    gap = np.where(taken, lows - above[:, :-1], 0)
    held = np.cumsum(np.where(gap >= smallest[:, None], gap, 0), axis=1)
    held = np.concatenate([np.zeros((len(needed), 1), np.int64), held], axis=1)  # by the gaps before each one
    last = (held[:, 1:] < needed[:, None]).sum(axis=1)  # the gap in which all is held; behind the others: the open end
    rows = np.arange(len(needed))
    return np.where(needed > 0, above[rows, last] + needed - held[rows, last], 0)
