"""Many quick packings of one problem, the best kept: stop at the bound, otherwise ratchet the target down.

Contract: deterministic (effort is counted in placements, not in seconds), and never worse than the first sweeps alone.
"""

import itertools
from collections.abc import Callable

import numpy as np

from stalloc.columns import distinct
from stalloc.planner.budget import Budget
from stalloc.planner.hole_filling import by_birth
from stalloc.planner.packings import GUIDED, Packing, Tries, ranked
from stalloc.planner.placement import FAR, skyline
from stalloc.planner.problem import Problem, compressed, load_curve

#: placements that a problem may cost beyond the first round of every order
EFFORT = 600_000
#: the same for many parts together, and a pass more, where a peak that is close enough will do
HURRIED_EFFORT = 1_200_000
#: where between the bound and the best peak a target is tried
FRACTIONS = (0.0, 0.02, 0.1, 0.3, 0.6, 0.9)
NOISES = (0.05, 0.3, 0.1)
#: with fewer requests than this two layers are not tried: the small ones are worth finer search
LAYERS_FROM = 2_000
#: with more requests the graph of their groups takes longer than other tries
COLOURED_LIMIT = 50_000
#: sizes at which a problem may be divided in two layers, and how many of those that are good enough are tried
MAX_CUTS, MAX_TRIED = 16, 3


def solve(problem: Problem, target: int, budget: Budget, share: float = 1.0, enough: int = 0) -> Packing:
    """The best packing found; looks no further once the peak is at most `target` or the problem's bound.

    `share` of the usual effort is spent, for callers that solve several variants of one problem. A peak of at most
    `enough`, if that is more, will do once the quick tries at the target have failed.
    """
    count = len(problem.size)
    if count == 0:
        return Packing(np.empty(0, np.int64), int(problem.floor.max(initial=0)), "nothing to place")
    target = max(target, problem.bound)
    best: Packing | None = None
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
            return best if best is not None else _plain(problem)
        if effort <= 0 and best is not None and not budget.patient:
            return best
    assert best is not None
    return improve(problem, target, best, budget, effort)


def quick(problem: Problem, target: int) -> Packing:
    """The packing of the first try that reaches the target, or one that does not."""
    packing, _ = _first(_guided(problem, max(target, problem.bound), GUIDED))
    return packing if packing is not None else _plain(problem)


def _attempts(problem: Problem, target: int, enough: int, alone: bool, budget: Budget) -> Tries:
    """Packings with what each cost in placements, the most promising first."""
    count = len(problem.size)
    if enough > target:
        if alone:  # a try costs as much as all the time there is
            yield ranked(problem, "AW", False).swept(enough)
        else:
            yield ranked(problem, "EW", False).packed(target)
        yield from _layered(problem, enough, enough, _born)
        if alone:
            yield ranked(problem, "EW", True).packed(enough)
        for order, backwards in itertools.product(("EW", "AW"), (False, True)):
            turned = ranked(problem, order, backwards)
            yield turned.packed(enough)
            yield turned.swept(enough)
        yield _plain(problem, "Z", guided=False), count
        yield _plain(problem), count
        yield from _layered(problem, target, enough, lambda lower, bound: _guided(lower, bound, GUIDED[:1]))
        yield from _guided(problem, target, GUIDED)
    else:
        yield from _guided(problem, target, GUIDED)
        if budget.graph and alone and count <= COLOURED_LIMIT and not budget.over():
            from stalloc.planner.colouring import tries  # imports networkx, for what the quickest tries leave

            # what others may cost is not less for it
            yield from ((packing, 0) for packing, _ in tries(problem, target))
        if count >= LAYERS_FROM:
            yield from _layered(problem, target, target + target // 1000, _born)
            for nth in range(3):  # noise helps soonest, where exact search does not take so many requests
                yield from _guided(problem, target, ("WA",), 0.3, nth + 1000 * budget.seed)
    for order, backwards in itertools.product(GUIDED, (False, True)):
        yield _plain(problem, order, backwards), count


def _guided(problem: Problem, target: int, orders: tuple[str, ...], noise: float = 0.0, seed: int = 0) -> Tries:
    """Tries that end at the target or not at all; a failure costs a small part of a pass."""
    for order, backwards in itertools.product(orders, (False, True)):
        turned = ranked(problem, order, backwards, noise, seed)
        yield turned.packed(target)
        yield turned.swept(target)


def _born(problem: Problem, target: int) -> Tries:
    """Best fit in order of birth, time running backwards first."""
    for backwards, high in itertools.product((True, False), (False, True)):
        turned = problem.reversed() if backwards else problem
        offset = by_birth(turned, target, high=high)
        if offset is None:
            yield None, len(turned.size) // 16
        else:
            method = f"best fit by {'death' if backwards else 'birth'}{', from above' if high else ''}"
            yield Packing(offset, int((offset + turned.size).max()), method), len(offset) // 8


def _layered(problem: Problem, target: int, highest: int, tries: Callable[[Problem, int], Tries]) -> Tries:
    """The large requests at the bottom, at their own bound, the small ones above; the division that costs least first.

    It costs the whole at least as much as the two layers' loads peak at different times; for programs that do the same
    again and again that is a small share, and each layer has few distinct sizes, which tile where the mixture does not
    (the idea behind the HomoSize groups of STAlloc, EuroSys 2026, section 5). The small ones are a problem of their own
    above the peak of the large ones, if that is close enough; otherwise they sink into what the large ones leave.
    """
    for size in _cuts(problem, highest):
        large, small = np.flatnonzero(problem.size >= size), np.flatnonzero(problem.size < size)
        lower = problem.part(large, problem.floor)
        if not problem.floor.any():
            lower = compressed(lower.start, lower.end, lower.size)
        packing, cost = _first(tries(lower, lower.bound))
        if packing is None:
            yield None, cost
            continue
        offset = np.empty(len(problem.size), np.int64)
        offset[large] = packing.offset
        upper = compressed(problem.start[small], problem.end[small], problem.size[small])
        above, more = ranked(upper, "EW", False).packed(highest - packing.peak_bytes)
        base = packing.peak_bytes
        if above is None:
            upper, base = problem.part(small, skyline(problem.part(large, problem.floor), packing.offset)), 0
            above, last = _first(_guided(upper, max(target, upper.bound), GUIDED[:1]))
            more += last
        if above is None:
            above, more = _plain(upper), more + len(small)
        offset[small] = base + above.offset
        peak = max(packing.peak_bytes, base + above.peak_bytes)
        yield Packing(offset, peak, f"in two layers, {packing.method}"), cost + more


def _cuts(problem: Problem, highest: int) -> list[int]:
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


def _first(tries: Tries) -> tuple[Packing | None, int]:
    total = 0
    for packing, cost in tries:
        total += cost
        if packing is not None:
            return packing, total
    return None, total


def _plain(problem: Problem, order: str = "EW", backwards: bool = False, *, guided: bool = True) -> Packing:
    """A sweep with no target, which always ends with a packing."""
    packing, _ = ranked(problem, order, backwards).swept(FAR // 2, guided)
    assert packing is not None
    return packing


def improve(problem: Problem, target: int, best: Packing, budget: Budget, effort: int = 1 << 62) -> Packing:
    """The best packing found until the budget is over or the effort spent, from one that is known.

    Targets lie between the bound and the best peak, with new noise each round; each success lowers the best.
    """
    target = max(target, problem.bound)
    for seed in itertools.count(1000 * budget.seed):
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
