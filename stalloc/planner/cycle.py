"""Offsets for a prologue that runs once and a cycle that repeats for ever.

Contract: no two requests share a byte in the prologue, in the first iteration of the cycle or in any later one, where
those that wrap round from the iteration before are live as well. The bound is the maximum load over all of these.
"""

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np

from stalloc.columns import Column
from stalloc.planner.budget import Budget
from stalloc.planner.hole_filling import HOLES_LIMIT, fill_holes
from stalloc.planner.intervals import Layout, place_line, told
from stalloc.planner.packings import GUIDED, Packing, ranks
from stalloc.planner.placement import pack
from stalloc.planner.portfolio import EFFORT, FRACTIONS, solve
from stalloc.planner.problem import Problem, Stays, compressed, epochs, load_curve, split_at_cuts

#: its name, and the ranks that it gives in one direction of time
Order = tuple[str, Callable[[Problem], Column]]
#: shares of the bound up to which a request that wraps is kept in place all round instead of being stacked
KEPT_SHARES = (0.0, 0.001, 0.02, 1.0)


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
    wrapping = np.flatnonzero(last2[rows] > 0)
    offset = np.zeros(len(size), np.int64)
    if len(wrapping) == 0:
        layout = place_line(first[rows], last[rows], size[rows], budget)
        offset[rows], peak, method = layout.offset, layout.peak_bytes, layout.method
    else:
        both = rows[wrapping]
        a, b, num_epochs = epochs(
            np.concatenate([first[rows], first2[both]]), np.concatenate([last[rows], last2[both]])
        )
        a2, b2 = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        a2[wrapping], b2[wrapping] = a[len(rows) :], b[len(rows) :]
        live = Stays(a[: len(rows)], b[: len(rows)], a2, b2, num_epochs)
        offset[rows], peak, method = _above_wrapping(live, size[rows], bound, budget)
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
    period, again = cycle_end - cycle_start, start >= cycle_start
    ends = np.concatenate([end, np.minimum(end[again], cycle_end) + period])
    return compressed(np.concatenate([start, start[again] + period]), ends, np.concatenate([size, size[again]])).bound


def _above_wrapping(live: Stays, size: Column, bound: int, budget: Budget) -> tuple[Column, int, str]:
    """(offset, peak, method) of requests of which some wrap round.

    First all together at the bound; failing that, what wraps is stacked at the bottom, the shortest absence lowest, and
    the rest is placed above it or in its holes; last, all together at targets between the bound and the best so far.
    """
    # what wraps without a partner is counted in the first iteration too: the target may have to be above the bound
    load = load_curve(live.start, live.end, size, live.num_epochs)
    bound = max(bound, int((load + load_curve(live.start2, live.end2, size, live.num_epochs)).max()))
    if budget.method == "annealing":
        from stalloc.planner.annealing import anneal_cycle

        return anneal_cycle(live, size, bound, budget)
    whole = _whole(live, size, bound, _orders(live, size, budget), 1.0)
    if whole is not None:
        return whole
    found = _stacks_and_rests(live, size, bound, budget)
    if min(peak for _, peak, _ in found) > bound and len(size) <= HOLES_LIMIT:
        for name, key in (("size", size), ("area", size * live.span.astype(np.float64)), ("lifetime", live.span)):
            order = np.argsort(-key, kind="stable")
            found.append((*fill_holes(live, size, order), f"cycle first fit by {name}"))
    best = min(found, key=lambda entry: entry[1])
    if best[1] > bound:
        noisy = _orders(live, size, budget, 0.1)
        for fraction in FRACTIONS[1:]:
            aim = bound + int((best[1] - bound) * fraction)
            whole = _whole(live, size, aim, noisy, 1 / len(FRACTIONS))
            if whole is not None and whole[1] < best[1]:
                return whole
    return best


def _stacks_and_rests(live: Stays, size: Column, bound: int, budget: Budget) -> list[tuple[Column, int, str]]:
    """(offset, peak, method) with more and more of what wraps kept in place all round; ends at the bound."""
    (a, b, a2, b2, num_epochs), wraps = live, live.end2 > 0
    tried: set[bytes] = set()
    found: list[tuple[Column, int, str]] = []
    for share in KEPT_SHARES:
        kept = wraps & (size <= share * bound)
        lasts = np.where(kept, num_epochs, b)
        lasting = np.flatnonzero((lasts == num_epochs) & (kept | ~wraps))
        lasting = lasting[np.lexsort((-size[lasting], a[lasting]))]  # by birth: then no hole lies below them
        wrapping = np.flatnonzero(wraps & ~kept)
        stack = np.concatenate([lasting, wrapping[np.lexsort((-size[wrapping], (a2 - b)[wrapping]))]])
        if stack.tobytes() in tried:
            continue
        tried.add(stack.tobytes())
        floor, offset = np.zeros(num_epochs, np.int64), np.zeros(len(size), np.int64)
        for row in stack.tolist():  # each on the highest one below it
            one, two = floor[a[row] : lasts[row]], floor[a2[row] : b2[row]]
            offset[row] = max(one.max(), two.max(initial=0))
            one[:] = two[:] = offset[row] + size[row]
        rest = np.setdiff1d(np.arange(len(size)), stack)
        method = f"cycle stacked, {_place_rest(rest, Problem(a, b, size, floor), offset, bound, budget)}"
        found.append((offset, int((offset + size).max()), method))
        if found[-1][1] <= bound:
            break
        if len(size) <= HOLES_LIMIT:
            high, below = np.flatnonzero(offset + size > bound), offset.copy()
            below[high] = -1
            order = high[np.argsort(-size[high], kind="stable")]
            found.append((*fill_holes(live, size, order, kept=below), f"{method}, repaired"))
    return found


def _orders(live: Stays, size: Column, budget: Budget, noise: float = 0.0) -> list[Order]:
    """The orders in which all requests are placed together: those of the portfolio, or of the colours."""
    if budget.method == "colouring":
        from stalloc.planner.colouring import by_colour

        return by_colour(Problem(live.start, live.last_end, size, np.zeros(live.num_epochs, np.int64)))
    return [(keys, partial(ranks, order=keys, noise=noise, span=live.span)) for keys in GUIDED]


def _whole(live: Stays, size: Column, target: int, orders: list[Order], share: float) -> tuple[Column, int, str] | None:
    """(offset, peak, method) of all requests placed together, those that wrap among them, or None.

    Tries every order in both directions of time, as far as `share` of the usual effort goes, but at least one.
    """
    (a, b, a2, b2, last), wraps = live, live.end2 > 0
    back = Stays(
        last - np.where(wraps, b2, b),
        last - np.where(wraps, a2, a),
        np.where(wraps, last - b, 0),
        np.where(wraps, last - a, 0),
        last,
    )
    cost = len(size) * (8 + int(wraps.sum())) // 64  # each placement looks at everything that wraps
    floor, effort = np.zeros(last, np.int64), share * EFFORT
    for (order, rank_in), turned in itertools.product(orders, (live, back)):
        rank = rank_in(Problem(turned.start, turned.last_end, size, floor))
        offset, peak = pack(turned, size, rank, floor, target)
        if peak >= 0:
            return offset, int(peak), f"cycle tightest first, {order}{' backwards' * (turned is back)}"
        effort -= cost
        if effort <= 0:
            return None
    return None


def _place_rest(rest: Column, whole: Problem, offset: Column, bound: int, budget: Budget) -> str:
    """Place the rows of `rest` above the floor, one piece between cuts at a time. Writes `offset`."""
    if len(rest) == 0:
        return "stacked"
    pieces = []
    for piece in split_at_cuts(whole.start[rest], whole.end[rest]):
        rows = rest[piece]
        start, end = whole.start[rows], whole.end[rows]
        first, last = int(start.min()), int(end.max())
        pieces.append((rows, Problem(start - first, end - first, whole.size[rows], whole.floor[first:last])))
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
    share = 1 / (4 * len(KEPT_SHARES))
    if budget.method == "colouring":
        from stalloc.planner.colouring import coloured

        return coloured(problem, target, budget, share)
    return solve(problem, target, budget, share)
