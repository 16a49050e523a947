"""Offsets under constraints: alignments that differ, requests that are placed already, bytes that must not be used.

Contract: a packing that keeps every constraint, the maximum load as its lower bound, and a bound that counts what the
constraints waste for certain. Correct for any input that `check_places` admits; less thorough than plain placement.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from stalloc.columns import Column, distinct
from stalloc.planner.budget import Budget
from stalloc.planner.constraints import Constraints
from stalloc.planner.cycle import cycle_bound
from stalloc.planner.hole_filling import HOLES_LIMIT, fill_holes
from stalloc.planner.intervals import Layout
from stalloc.planner.packings import Packing
from stalloc.planner.placement import skyline
from stalloc.planner.portfolio import solve
from stalloc.planner.problem import Problem, Stays, compressed, epochs, load_curve
from stalloc.trace.record import MAX_BYTES

#: pairs of requests that restarts may compare
PAIRS = 40_000_000
#: epochs whose waste is looked at, and how many requests, in so many of them, at a time
EPOCHS_LOOKED_AT, CELLS = 64, 1 << 20


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


def place_constrained(
    start: Column, end: Column, size: Column, given: Constraints, cycle: tuple[int, int] | None, budget: Budget
) -> Layout:
    """Place n requests; sizes are multiples of the granule.

    What the constraints waste is looked for only if the first packing is above the bound, and above what is aimed at.
    """
    live = stays(start, end, cycle)
    bound = compressed(start, end, size).bound if cycle is None else cycle_bound(start, end, size, *cycle)
    proven, enough = bound, max(bound, budget.aim_bytes)
    count, blocked = len(size), _blocked(given)
    # a forbidden range is a request that lives for ever
    a, b, a2, b2 = (
        np.concatenate([column, np.full(len(blocked), value)])
        for column, value in zip(live[:4], (0, live.num_epochs, 0, 0), strict=True)
    )
    whole = Stays(a, b, a2, b2, live.num_epochs)
    sizes = np.concatenate([size, blocked[:, 1] - blocked[:, 0]])
    align = np.concatenate([given.alignment, np.full(len(blocked), given.granule)])
    free = np.flatnonzero(given.fixed < 0)
    fixed_top = int((given.fixed + size)[given.fixed >= 0].max(initial=0))

    def fitted(key: Column, method: str, best_fit: bool = False, kept: Column = given.fixed) -> Packing:
        """What is free in `kept` (n,) filled in, that with the largest key first."""
        rows = np.flatnonzero(kept < 0)
        order = rows[np.argsort(-key[rows], kind="stable")]
        offset, _ = fill_holes(whole, sizes, order, best_fit, kept=np.concatenate([kept, blocked[:, 0]]), align=align)
        return Packing(offset[:count], int((offset + sizes)[:count].max(initial=0)), method)

    best: Packing | None = None
    if not live.end2.any():
        best = _above(live, size, given, blocked, enough, budget)
        if best.peak_bytes > max(enough, fixed_top):
            proven = max(bound, _wasted(live, size, given))
            enough = max(enough, proven)
        high = free[(best.offset + size)[free] > enough]
        if len(high) * count <= PAIRS and len(high):
            kept = best.offset.copy()
            kept[high] = -1
            best = _lower(best, fitted(size, f"{best.method}, repaired", kept=kept))
    span = live.span
    keys = {
        "size": size,
        "alignment, then size": given.alignment.astype(np.float64) * 2.0**62 + size,
        "area": size * span.astype(np.float64),
        "lifetime": span,
    }
    for (name, key), best_fit in itertools.product(keys.items(), (False, True)):
        if best is not None and (best.peak_bytes <= max(enough, fixed_top) or count > HOLES_LIMIT or budget.over()):
            break
        found = fitted(key, f"{'best' if best_fit else 'first'} fit by {name} around what is fixed", best_fit)
        best = _lower(best, found)
    assert best is not None
    rng = np.random.default_rng(0)
    for _ in range(min(budget.num_restarts, PAIRS // max(count, 1) ** 2)):
        if best.peak_bytes <= max(enough, fixed_top) or budget.over():
            break
        noisy = size * np.sqrt(span)
        noisy[free] *= np.exp(rng.uniform(-0.5, 0.5, len(free)))
        best = _lower(best, fitted(noisy, "first fit with noise around what is fixed"))
    return Layout(best.offset, best.peak_bytes, bound, best.method, max(proven, fixed_top))


def _lower(best: Packing | None, found: Packing) -> Packing:
    return found if best is None or found.peak_bytes < best.peak_bytes else best


def _blocked(given: Constraints) -> Column:
    """(f, 2) the forbidden ranges, as whole granules."""
    blocked = given.forbidden.copy()
    blocked[:, 0] &= -given.granule
    blocked[:, 1] = (blocked[:, 1] + given.granule - 1) & -given.granule
    return blocked


def _above(live: Stays, size: Column, given: Constraints, blocked: Column, bound: int, budget: Budget) -> Packing:
    """Everything free above what is fixed or forbidden at that time, on the largest alignment.

    Forbidden ranges above the first packing's height stay out of the way; else they are part of the floor.
    """
    free, fixed = np.flatnonzero(given.fixed < 0), np.flatnonzero(given.fixed >= 0)
    offset = np.maximum(given.fixed, 0)
    if len(free) == 0:
        return Packing(offset, int((offset + size).max(initial=0)), "all fixed")
    grain = int(given.alignment[free].max())
    whole = Problem(live.start, live.end, size, np.zeros(live.num_epochs, np.int64))
    below = skyline(whole.part(fixed, whole.floor), given.fixed[fixed])
    lows, highs = blocked[:, 0], blocked[:, 1]
    for used in range(len(blocked) + 1):  # as few of the ranges below as will do
        floor = np.maximum(below, highs[used - 1] if used else 0)
        floor = (floor + (grain - 1)) & -grain
        rounded = (size[free] + (grain - 1)) & -grain
        packing = solve(Problem(live.start[free], live.end[free], rounded, floor), bound, budget, 0.25)
        if used == len(blocked) or packing.peak_bytes <= lows[used]:
            break
    offset[free] = packing.offset
    return Packing(offset, int((offset + size).max(initial=0)), packing.method)


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
