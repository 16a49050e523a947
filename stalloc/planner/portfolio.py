"""Many quick packings of one problem, the best kept: stop at the bound, otherwise ratchet the target down.

Contract: deterministic (effort is counted in placements, not in seconds), and never worse than the plain orders alone.
"""

import itertools
from collections.abc import Callable

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.planner.budget import Budget
from stalloc.planner.hole_filling import by_birth, fill_holes
from stalloc.planner.packings import GUIDED, PLAIN, Packing, Tries, compressed, packed, ranked, ranks, swept
from stalloc.planner.placement import FAR, skyline, sweep
from stalloc.planner.problem import Problem, load_curve

#: sizes at which a problem may be divided, and how many of those that are good enough are tried
MAX_CUTS, MAX_TRIED = 16, 3


def cuts(problem: Problem, highest: int) -> list[int]:
    """Sizes at which to divide, the largest first: those whose layers' bounds together are at most `highest`."""
    sizes = distinct(problem.size)[1:]
    if len(sizes) > MAX_CUTS:
        steps = np.geomspace(float(sizes[0]), float(sizes[-1]), MAX_CUTS)
        sizes = distinct(sizes[np.minimum(np.searchsorted(sizes, steps), len(sizes) - 1)])
    load, found = problem.load, []
    for size in sizes[::-1].tolist():
        rows = problem.size >= size
        upper = load_curve(problem.start[rows], problem.end[rows], problem.size[rows], len(problem.floor))
        if int((problem.floor + upper).max()) + int((load - upper).max()) <= highest:
            found.append(int(size))
    return found if len(found) <= MAX_TRIED else [found[i * len(found) // MAX_TRIED] for i in range(MAX_TRIED)]


def divided(problem: Problem, size: int) -> tuple[Column, Column]:
    """(large, small): the rows of at least `size` bytes, and the others."""
    large = problem.size >= size
    return np.flatnonzero(large), np.flatnonzero(~large)


def part_of(problem: Problem, rows: Column, floor: Column) -> Problem:
    """The problem of placing these rows above that floor."""
    return Problem(problem.start[rows], problem.end[rows], problem.size[rows], floor)


def raised(problem: Problem, rows: Column, offset: Column) -> Column:
    """(T,) the floor that the rows make when they are placed, on top of the problem's own."""
    top = offset + problem.size[rows]
    order = np.argsort(top, kind="stable")
    return skyline(problem.start[rows][order], problem.end[rows][order], top[order], problem.floor)


#: placements that a problem may cost beyond the first round of every order
EFFORT = 600_000
#: the same for many parts together, and a pass more, where a peak that is close enough will do
HURRIED_EFFORT = 1_200_000
#: where between the bound and the best peak a target is tried
FRACTIONS = (0.0, 0.02, 0.1, 0.3, 0.6, 0.9)
NOISES = (0.05, 0.3, 0.1)
#: hole filling looks at every placed request for each one it places
HOLES_LIMIT = 20_000
#: with fewer requests than this two layers are not tried: the small ones are worth finer search
LAYERS_FROM = 2_000
#: with more requests than exact search takes, noise helps soonest
SHAKEN_FROM = 2_000
#: with more requests the graph of their groups takes longer than other tries
COLOURED_LIMIT = 50_000


def solve(problem: Problem, target: int, budget: Budget, share: float = 1.0, enough: int = 0) -> Packing:
    """The best packing found; looks no further once the peak is at most `target` or the problem's bound.

    `share` of the usual effort is spent, for callers that solve several variants of one problem. A peak of at most
    `enough`, if that is more, will do once the quick tries at the target have failed.
    """
    if len(problem.size) == 0:
        return Packing(np.empty(0, np.int64), int(problem.floor.max(initial=0)), "nothing to place")
    target = max(target, problem.bound)
    best: Packing | None = None
    count = len(problem.size)
    alone = share > 0.5
    if enough > target:
        effort = int(share * ((EFFORT if alone else HURRIED_EFFORT) + count))
    else:
        effort = int(share * (EFFORT + 40 * count))
    for packing, cost in _attempts(problem, target, max(target, enough), alone, budget):
        effort -= cost
        if packing is not None and (best is None or packing.peak_bytes < best.peak_bytes):
            best = packing
            budget.tell(count, best.peak_bytes, problem.bound, best.method)
            if best.peak_bytes <= max(target, enough):
                return best
        if budget.over():
            return best if best is not None else _plain(problem, "EW", True)
        if effort <= 0 and best is not None and not budget.patient:
            return best
    assert best is not None
    return _ratchet(problem, target, best, effort, budget)


def quick(problem: Problem, target: int) -> Packing:
    """The packing of the first try that reaches the target, or one that does not."""
    target = max(target, problem.bound)
    packing, _ = _first(_guided(problem, target, GUIDED, 0.0, 0))
    return packing if packing is not None else _plain(problem, "EW", True)


def improve(problem: Problem, target: int, best: Packing, budget: Budget) -> Packing:
    """The best packing found until the budget is over, from one that is known."""
    return _ratchet(problem, max(target, problem.bound), best, 1 << 62, budget)


def _attempts(problem: Problem, target: int, enough: int, alone: bool, budget: Budget) -> Tries:
    """Packings with what each cost in placements, the most promising first."""
    count = len(problem.size)
    if enough > target:
        if alone:  # a try costs as much as all the time there is
            yield swept(ranked(problem, "AW", False), enough)
        else:
            yield packed(ranked(problem, "EW", False), target)
        yield from _layered(problem, enough, enough, _born)
        if alone:
            yield packed(ranked(problem, "EW", True), enough)
        for order, backwards in itertools.product(("EW", "AW"), (False, True)):
            turned = ranked(problem, order, backwards)
            yield packed(turned, enough)
            yield swept(turned, enough)
        yield _plain(problem, "Z", False), count
        yield _plain(problem, "EW", True), count
        yield from _layered(problem, target, enough, _briefly_guided)
        yield from _guided(problem, target, GUIDED, 0.0, 0)
    else:
        yield from _guided(problem, target, GUIDED, 0.0, 0)
        if budget.graph and alone and count <= COLOURED_LIMIT and not budget.over():
            yield from _coloured(problem, target)
        if count >= LAYERS_FROM:
            yield from _layered(problem, target, target + target // 1000, _born)
        if count >= SHAKEN_FROM:
            for nth in range(3):
                yield from _guided(problem, target, ("WA",), 0.3, nth + 1000 * budget.seed)
    for order in PLAIN:
        yield _plain(problem, order, False), count
    for order in GUIDED:
        for backwards in (False, True):
            packing = _plain(problem, order, True, backwards)
            yield packing, count
            yield _repaired(problem, packing, target), count
    if count <= HOLES_LIMIT and not problem.floor.any():
        for order, best_fit in (("Z", False), ("A", False), ("S", True)):
            yield _by_holes(problem, order, best_fit), count
    for nth, noise in enumerate(NOISES):
        yield from _guided(problem, target, GUIDED, noise, nth + 1000 * budget.seed)
    if count >= LAYERS_FROM:
        yield from _layered(problem, target, target + target // 100, _briefly_guided)


def _coloured(problem: Problem, target: int) -> Tries:
    """The colours of the lifespan graph, to the target or not at all; what others may cost is not less for it."""
    from stalloc.planner.colouring import tries  # imports networkx, for what the quickest tries leave

    return ((packing, 0) for packing, _ in tries(problem, target))


def _guided(problem: Problem, target: int, orders: tuple[str, ...], noise: float, seed: int) -> Tries:
    """Tries that end at the target or not at all; a failure costs a small part of a pass."""
    for order in orders:
        for backwards in (False, True):
            turned = ranked(problem, order, backwards, noise, seed)
            yield packed(turned, target)
            yield swept(turned, target)


def _briefly_guided(problem: Problem, target: int) -> Tries:
    return _guided(problem, target, GUIDED[:1], 0.0, 0)


def _born(problem: Problem, target: int) -> Tries:
    """Best fit in order of birth, time running backwards first."""
    for backwards in (True, False):
        turned = problem.reversed() if backwards else problem
        for high in (False, True):
            offset = by_birth(turned, target, high=high)
            method = f"best fit by {'death' if backwards else 'birth'}{', from above' if high else ''}"
            if offset is not None:
                yield Packing(offset, int((offset + turned.size).max()), method), len(offset) // 8
            else:
                yield None, len(turned.size) // 16


def _layered(problem: Problem, target: int, highest: int, tries: Callable[[Problem, int], Tries]) -> Tries:
    """The large requests at their own bound, the small ones above them; the division that costs least first.

    The small ones are a problem of their own above the peak of the large ones, if that is close enough; otherwise they
    sink into what the large ones leave.
    """
    for size in cuts(problem, highest):
        large, small = divided(problem, size)
        lower = part_of(problem, large, problem.floor)
        if not problem.floor.any():
            lower = compressed(lower.start, lower.end, lower.size)
        packing, cost = _first(tries(lower, lower.bound))
        if packing is None:
            yield None, cost
            continue
        offset = np.empty(len(problem.size), np.int64)
        offset[large] = packing.offset
        upper = compressed(problem.start[small], problem.end[small], problem.size[small])
        above, more = packed(ranked(upper, "EW", False), highest - packing.peak_bytes)
        base = packing.peak_bytes
        if above is None:
            upper, base = part_of(problem, small, raised(problem, large, packing.offset)), 0
            above, last = _first(_guided(upper, max(target, upper.bound), GUIDED[:1], 0.0, 0))
            more += last
        if above is None:
            above, more = _plain(upper, "EW", True), more + len(small)
        offset[small] = base + above.offset
        peak = max(packing.peak_bytes, base + above.peak_bytes)
        yield Packing(offset, peak, f"in two layers, {packing.method}"), cost + more


def _first(tries: Tries) -> tuple[Packing | None, int]:
    """The first packing of some tries, and what they cost in all."""
    total = 0
    for packing, cost in tries:
        total += cost
        if packing is not None:
            return packing, total
    return None, total


def _plain(problem: Problem, order: str, guided: bool, backwards: bool = False) -> Packing:
    """A sweep with no target, which always ends with a packing."""
    turned = problem.reversed() if backwards else problem
    rank = ranks(turned, order)
    offset, peak = sweep(turned.start, turned.end, turned.size, rank, turned.floor, FAR // 2, guided)
    return Packing(offset, int(peak), f"{'lowest and tightest' if guided else 'sweep'}, {order}")


def _repaired(problem: Problem, packing: Packing, target: int) -> Packing | None:
    """The packing with every request above the target moved into a hole, the largest first."""
    high = np.flatnonzero(packing.offset + problem.size > target)
    if problem.floor.any() or len(high) * len(problem.size) > 20_000_000:
        return None
    offset = packing.offset.copy()
    offset[high] = -1
    order = high[np.argsort(-problem.size[high], kind="stable")]
    none = np.zeros(len(offset), np.int64)
    peak = fill_holes(problem.start, problem.end, none, none, problem.size, offset, order, False)
    return Packing(offset, int(peak), f"{packing.method}, repaired")


def _by_holes(problem: Problem, order: str, best_fit: bool) -> Packing:
    offset = np.full(len(problem.size), -1, np.int64)
    none = np.zeros(len(offset), np.int64)
    by_rank = np.argsort(ranks(problem, order), kind="stable")
    peak = fill_holes(problem.start, problem.end, none, none, problem.size, offset, by_rank, best_fit)
    return Packing(offset, int(peak), f"{'best' if best_fit else 'first'} fit, {order}")


def _ratchet(problem: Problem, target: int, best: Packing, effort: int, budget: Budget) -> Packing:
    """Targets between the bound and the best peak, with new noise each round; each success lowers the best."""
    for seed in itertools.count(len(NOISES) + 1000 * budget.seed):
        noise = NOISES[seed % len(NOISES)]
        for fraction in FRACTIONS:
            aim = target + int((best.peak_bytes - target) * fraction)
            for packing, cost in _guided(problem, aim, GUIDED, noise, seed):
                effort -= cost
                if packing is not None and packing.peak_bytes < best.peak_bytes:
                    best = packing
                    budget.tell(len(problem.size), best.peak_bytes, problem.bound, best.method)
                    break
                if budget.over() or effort <= 0:
                    return best
            if best.peak_bytes <= target:
                return best
    raise AssertionError("unreachable")
