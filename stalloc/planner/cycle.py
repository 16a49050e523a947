"""Offsets for a prologue that runs once and a cycle that repeats for ever.

Contract: no two requests share a byte in the prologue, in the first iteration of the cycle or in any later one, where
those that wrap round from the iteration before are live as well. The bound is the maximum load over all of these.
"""

from collections.abc import Callable

import numpy as np

from stalloc.columns import Column
from stalloc.planner.budget import Budget
from stalloc.planner.hole_filling import fill_holes
from stalloc.planner.intervals import Layout, place_line, told
from stalloc.planner.packings import GUIDED, Packing, ranks
from stalloc.planner.placement import pack
from stalloc.planner.portfolio import EFFORT, FRACTIONS, HOLES_LIMIT, solve
from stalloc.planner.problem import Problem, epochs, load_curve, split_at_cuts

#: its name, and the ranks that it gives in one direction of time
Order = tuple[str, Callable[[Problem], Column]]


def place_cycle(start: Column, end: Column, size: Column, cycle: tuple[int, int], budget: Budget) -> Layout:
    """Prologue and cycle on one axis [.., cycle_end): what wraps round is live at its end and at its beginning.

    A request that wraps is not yet there in the first iteration; what the prologue left may be there instead. So the
    two share a place in pairs, as the iterations of the cycle do among themselves. Without a partner, the place of the
    wrapped part is kept free in the first iteration too.
    """
    cycle_start, cycle_end = cycle
    period = cycle_end - cycle_start
    bound = cycle_bound(start, end, size, cycle_start, cycle_end)
    wraps = np.flatnonzero((start >= cycle_start) & (end > cycle_end))
    dies = np.flatnonzero((start < cycle_start) & (end > cycle_start) & (end <= cycle_end))
    first, last = start.copy(), np.minimum(end, cycle_end)
    first2, last2 = np.zeros(len(size), np.int64), np.zeros(len(size), np.int64)
    first2[wraps], last2[wraps] = start[wraps], cycle_end
    first[wraps], last[wraps] = cycle_start, end[wraps] - period
    pairs = np.array(_partners(start, end, size, period, wraps, dies), np.int64).reshape(-1, 2)
    follower, leader = pairs[:, 0], pairs[:, 1]
    first[follower] = start[leader]
    last[follower] = np.maximum(last[follower], end[leader])
    size = size.copy()
    size[follower] = np.maximum(size[follower], size[leader])
    leads = np.ones(len(size), bool)
    leads[leader] = False  # placed by the request that follows it
    whole = wraps[first2[wraps] == last[wraps]]  # live without a break
    last[whole], first2[whole], last2[whole] = cycle_end, 0, 0

    rows = np.flatnonzero(leads)
    wrapping = last2[rows] > 0
    both = rows[wrapping]
    offset = np.zeros(len(size), np.int64)
    if len(both) == 0:
        layout = place_line(first[rows], last[rows], size[rows], budget)
        offset[rows], peak, method = layout.offset, layout.peak_bytes, layout.method
    else:
        a, b, num_epochs = epochs(
            np.concatenate([first[rows], first2[both]]), np.concatenate([last[rows], last2[both]])
        )
        a2, b2 = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        a2[wrapping], b2[wrapping] = a[len(rows) :], b[len(rows) :]
        offset[rows], peak, method = _above_wrapping(
            a[: len(rows)], b[: len(rows)], a2, b2, size[rows], num_epochs, bound, budget
        )
    offset[leader] = offset[follower]
    return Layout(offset, peak, bound, method)


def _partners(
    start: Column, end: Column, size: Column, period: int, wraps: Column, dies: Column
) -> list[tuple[int, int]]:
    """Pairs of a request that wraps and one of the prologue that is dead when it starts, each at most once.

    Same size and same end first, then same size, then by size: a pair costs the larger of the two.
    """
    pairs: list[tuple[int, int]] = []
    followers, leaders = wraps.tolist(), dies.tolist()
    for key in (
        lambda row, shift: (int(size[row]), int(end[row]) - shift),
        lambda row, shift: (int(size[row]),),
        lambda row, shift: (),
    ):
        waiting: dict[tuple[int, ...], list[int]] = {}
        for row in sorted(leaders, key=lambda row: (int(size[row]), -int(end[row]), -row)):
            waiting.setdefault(key(row, 0), []).append(row)
        for row in sorted(followers, key=lambda row: (-int(size[row]), int(end[row]), row)):
            candidates = waiting.get(key(row, period))
            if candidates and end[candidates[-1]] <= start[row]:
                pairs.append((row, candidates.pop()))
        followers = sorted(set(followers) - {row for row, _ in pairs})
        leaders = sorted(set(leaders) - {row for _, row in pairs})
    return pairs


def cycle_bound(start: Column, end: Column, size: Column, cycle_start: int, cycle_end: int) -> int:
    """The maximum load of prologue, first iteration and second iteration; all later iterations are like the second."""
    period = cycle_end - cycle_start
    again = start >= cycle_start
    horizon = cycle_end + period
    a, b, num_epochs = epochs(
        np.concatenate([start, start[again] + period]), np.concatenate([end, np.minimum(end[again] + period, horizon)])
    )
    return int(load_curve(a, b, np.concatenate([size, size[again]]), num_epochs).max(initial=0))


#: shares of the bound up to which a request that wraps is kept in place all round instead of being stacked
KEPT_SHARES = (0.0, 0.001, 0.02, 1.0)


def _above_wrapping(
    a: Column, b: Column, a2: Column, b2: Column, size: Column, num_epochs: int, bound: int, budget: Budget
) -> tuple[Column, int, str]:
    """(offset, peak, method) of intervals [a, b) and, for what wraps, [a2, b2) as well.

    First all together at the bound; failing that, what wraps is stacked at the bottom, the shortest absence lowest, and
    the rest is placed above it or in its holes; last, all together at targets between the bound and the best so far.
    """
    wraps = b2 > 0
    # what wraps without a partner is counted in the first iteration too: the target may have to be above the bound
    load = load_curve(a, b, size, num_epochs) + load_curve(a2, b2, size, num_epochs)
    bound = max(bound, int(load.max()))
    if budget.method == "annealing":
        from stalloc.planner.annealing import anneal_cycle

        return anneal_cycle(a, b, a2, b2, size, num_epochs, bound, budget)
    orders = _orders(a, b, a2, b2, size, num_epochs, budget)
    whole = _whole(a, b, a2, b2, size, num_epochs, bound, orders, 1.0)
    if whole is not None:
        return whole
    tried: set[bytes] = set()
    found: list[tuple[int, Column, str]] = []
    for share in KEPT_SHARES:
        kept = wraps & (size <= share * bound)
        lasts = np.where(kept, num_epochs, b)
        lasting = np.flatnonzero((lasts == num_epochs) & (kept | ~wraps))
        lasting = lasting[np.lexsort((-size[lasting], a[lasting]))]  # by birth: then no hole lies below them
        wrapping = np.flatnonzero(wraps & ~kept)
        by_absence = wrapping[np.lexsort((-size[wrapping], (a2 - b)[wrapping]))]
        stack = np.concatenate([lasting, by_absence])
        if stack.tobytes() in tried:
            continue
        tried.add(stack.tobytes())
        offset, floor = _stacked(stack, a, lasts, a2, b2, size, num_epochs)
        rest = np.setdiff1d(np.arange(len(size)), stack)
        method = _place_rest(rest, a, b, size, offset, floor, bound, budget)
        found.append((int((offset + size).max()), offset, f"cycle stacked, {method}"))
        if found[-1][0] <= bound:
            break
        if len(size) <= HOLES_LIMIT:
            repaired = offset.copy()
            high = np.flatnonzero(offset + size > bound)
            repaired[high] = -1
            peak = fill_holes(a, b, a2, b2, size, repaired, high[np.argsort(-size[high], kind="stable")], False)
            found.append((int(peak), repaired, f"cycle stacked, {method}, repaired"))
    if min(peak for peak, _, _ in found) > bound and len(size) <= HOLES_LIMIT:
        span = (b - a) + (b2 - a2)
        for name, key in (("size", size), ("area", size * span.astype(np.float64)), ("lifetime", span)):
            offset = np.full(len(size), -1, np.int64)
            peak = fill_holes(a, b, a2, b2, size, offset, np.argsort(-key, kind="stable"), False)
            found.append((int(peak), offset, f"cycle first fit by {name}"))
    peak, offset, method = min(found, key=lambda entry: entry[0])
    if peak > bound:
        noisy = _orders(a, b, a2, b2, size, num_epochs, budget, 0.1)
        for fraction in FRACTIONS[1:]:
            aim = bound + int((peak - bound) * fraction)
            whole = _whole(a, b, a2, b2, size, num_epochs, aim, noisy, 1 / len(FRACTIONS))
            if whole is not None and whole[1] < peak:
                return whole
    return offset, peak, method


def _orders(
    a: Column, b: Column, a2: Column, b2: Column, size: Column, num_epochs: int, budget: Budget, noise: float = 0.0
) -> list[Order]:
    """The orders in which all requests are placed together: those of the portfolio, or of the colours."""
    if budget.method == "colouring":
        from stalloc.planner.colouring import by_colour

        return by_colour(Problem(a, np.maximum(b, b2), size, np.zeros(num_epochs, np.int64)))
    span = (b - a) + (b2 - a2)
    return [(keys, lambda problem, keys=keys: ranks(problem, keys, noise, 0, span)) for keys in GUIDED]  # type: ignore[misc]


def _whole(
    a: Column,
    b: Column,
    a2: Column,
    b2: Column,
    size: Column,
    num_epochs: int,
    target: int,
    orders: list[Order],
    share: float,
) -> tuple[Column, int, str] | None:
    """(offset, peak, method) of all requests placed together, those that wrap among them, or None.

    Tries every order in both directions of time, as far as `share` of the usual effort goes, but at least one.
    """
    wraps = b2 > 0
    cost = len(size) * (8 + int(wraps.sum())) // 64  # each placement looks at everything that wraps
    floor = np.zeros(num_epochs, np.int64)
    back = num_epochs - np.where(wraps, b2, b), num_epochs - np.where(wraps, a2, a)
    back2 = np.where(wraps, num_epochs - b, 0), np.where(wraps, num_epochs - a, 0)
    effort = share * EFFORT
    for order, rank_in in orders:
        for first, last, first2, last2 in ((a, b, a2, b2), (*back, *back2)):
            rank = rank_in(Problem(first, np.maximum(last, last2), size, floor))
            offset, peak = pack(first, last, first2, last2, size, rank, floor, target)
            if peak >= 0:
                return offset, int(peak), f"cycle tightest first, {order}{' backwards' if first is back[0] else ''}"
            effort -= cost
            if effort <= 0:
                return None
    return None


def _stacked(
    stack: Column, a: Column, b: Column, a2: Column, b2: Column, size: Column, num_epochs: int
) -> tuple[Column, Column]:
    """Offsets of the rows of `stack`, each on the highest one below it, and the floor that they make."""
    floor = np.zeros(num_epochs, np.int64)
    offset = np.zeros(len(size), np.int64)
    for row in stack.tolist():
        one, two = floor[a[row] : b[row]], floor[a2[row] : b2[row]]
        offset[row] = max(one.max(), two.max(initial=0))
        one[:] = two[:] = offset[row] + size[row]
    return offset, floor


def _place_rest(
    rest: Column, a: Column, b: Column, size: Column, offset: Column, floor: Column, bound: int, budget: Budget
) -> str:
    """Place the rows of `rest` above the floor, one piece between cuts at a time. Writes `offset`."""
    if len(rest) == 0:
        return "stacked"
    pieces = []
    for piece in split_at_cuts(a[rest], b[rest]):
        rows = rest[piece]
        first, last = int(a[rows].min()), int(b[rows].max())
        pieces.append((rows, Problem(a[rows] - first, b[rows] - first, size[rows], floor[first:last])))
    target, methods = bound, []
    known: dict[tuple[bytes, ...], Packing] = {}
    for rows, problem in sorted(pieces, key=lambda entry: -entry[1].bound):
        key = tuple(column.tobytes() for column in (problem.start, problem.end, problem.size, problem.floor))
        if key not in known:
            known[key] = _solved(problem, target, budget)
            methods.append((len(rows), known[key].method))
        offset[rows] = known[key].offset
        target = max(target, known[key].peak_bytes)
    return told(methods)


def _solved(problem: Problem, target: int, budget: Budget) -> Packing:
    """A packing of what does not wrap round, by the method asked for."""
    share = 1 / (4 * len(KEPT_SHARES))
    if budget.method == "colouring":
        from stalloc.planner.colouring import coloured

        return coloured(problem, target, budget, share)
    return solve(problem, target, budget, share)
