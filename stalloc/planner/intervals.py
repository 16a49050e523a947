"""Offsets for lifespans that are one interval each.

Contract: a packing without overlap, and the maximum load as its bound; parts that look alike are placed alike.
"""

import time
from functools import partial
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.planner.budget import Budget
from stalloc.planner.groups import by_phase, by_size
from stalloc.planner.hole_filling import HOLES_LIMIT, fill_holes
from stalloc.planner.packings import SINGLE, Packing, ranks
from stalloc.planner.placement import FAR, sweep
from stalloc.planner.portfolio import improve, quick, solve
from stalloc.planner.problem import Piece, Problem, compressed, parts_of, pieces_of, place_stacks

#: parts with more requests than this are not searched exactly
SEARCHED = 2_000
#: nodes times requests and epochs that a part may cost when nobody gave a time budget
WORK = 170_000_000
#: of the time that is left, what the exact search may take
SHARE = 0.9
#: from so many requests on, a peak this close to the bound will do
MANY, CLOSE_ENOUGH = 50_000, 1e-3


class Layout(NamedTuple):
    """Offsets with what they come to."""

    offset: Column  #: (n,) bytes
    peak_bytes: int
    lower_bound_bytes: int
    method: str  #: what found it, for people
    proven_bound_bytes: int = 0  #: no packing is lower, if that is more than the lower bound

    @property
    def bound_bytes(self) -> int:
        """The best bound that is proven."""
        return max(self.lower_bound_bytes, self.proven_bound_bytes)


def place_line(start: Column, end: Column, size: Column, budget: Budget) -> Layout:
    """Place lifespans that are one interval each."""
    whole = compressed(start, end, size)
    start, end, bound = whole.start, whole.end, whole.bound
    if budget.method in (*SINGLE, "homophase", "homosize"):
        named = _place_by_name(whole, budget.method)
        return Layout(named.offset, named.peak_bytes, bound, named.method)
    offset = np.zeros(len(size), np.int64)
    hurried = len(size) >= MANY and not budget.patient
    enough = bound + int(CLOSE_ENOUGH * bound) if hurried else bound
    parts = parts_of(start, end, size)
    place_stacks(parts, size, offset)
    pieces = [
        (piece, compressed(start[piece.rows], end[piece.rows], size[piece.rows]), piece.twin)
        for piece in pieces_of(parts)
    ]
    num_distinct = sum({key: len(problem.size) for _, problem, key in pieces}.values())
    peak, methods, proven = max(bound, budget.aim_bytes), [], bound
    known: dict[int, Packing] = {}
    for part, problem, key in pieces:
        packing = known.get(key)
        if packing is None or part.base_bytes + packing.peak_bytes > peak:
            share = len(problem.size) / num_distinct if hurried else 1.0
            packing, low = _placed(problem, peak - part.base_bytes, budget, share, enough - part.base_bytes)
            known[key], proven = packing, max(proven, part.base_bytes + low)
            methods.append((len(problem.size), packing.method))
        offset[part.rows] = part.base_bytes + packing.offset
        peak = max(peak, part.base_bytes + packing.peak_bytes)
    if budget.patient and budget.method not in ("annealing", "colouring") and peak > max(bound, budget.aim_bytes):
        _improved(pieces, known, offset, max(bound, budget.aim_bytes), methods, budget)
    return Layout(offset, int((offset + size).max()), bound, told(methods), proven)


def _placed(problem: Problem, target: int, budget: Budget, share: float, enough: int) -> tuple[Packing, int]:
    """The packing of a part by the method asked for, and the bound that is proven for it."""
    packing, low = _searched(problem, target, budget)
    if packing is not None and packing.peak_bytes <= max(target, low):
        return packing, low
    if budget.method == "annealing":
        from stalloc.planner.annealing import anneal

        tried = anneal(problem, target, budget)
    elif budget.method == "colouring":
        from stalloc.planner.colouring import coloured

        tried = coloured(problem, target, budget)
    else:
        tried = solve(problem, target, budget, share, enough)
    return (tried if packing is None or tried.peak_bytes < packing.peak_bytes else packing), low


def _searched(problem: Problem, target: int, budget: Budget) -> tuple[Packing | None, int]:
    """What exact search makes of a small part if the quickest tries do not reach the target, and the proven bound.

    The bound holds for the whole as well, on top of what is live throughout: that can always slide to the bottom.
    Counted in nodes, so that equal input gives equal output; with a time budget the search takes most of what is left.
    """
    count = len(problem.size)
    if budget.method in ("greedy", "annealing", "colouring") or count > SEARCHED:
        return None, problem.bound
    packing = quick(problem, target)
    budget.tell(count, packing.peak_bytes, problem.bound, packing.method)
    if packing.peak_bytes <= max(target, problem.bound) or budget.over():
        return packing, problem.bound
    from stalloc.planner.search import searching  # what the quick try reaches needs none of it

    until = SHARE * budget.seconds + (1 - SHARE) * (time.monotonic() - budget.began) if budget.seconds else np.inf
    nodes = WORK // (count + len(problem.floor)) if budget.seconds is None else 1 << 62
    best, bound = packing, problem.bound
    for state in searching(problem, packing, target, seed=budget.seed):
        if state.packing is not best:
            budget.tell(count, state.packing.peak_bytes, state.bound_bytes, state.packing.method)
        best, bound = state.packing, state.bound_bytes
        if state.num_nodes >= nodes or budget.over() or time.monotonic() - budget.began >= until:
            break
    return best, bound


def _improved(
    pieces: list[tuple[Piece, Problem, int]],
    known: dict[int, Packing],
    offset: Column,
    bound: int,
    methods: list[tuple[int, str]],
    budget: Budget,
) -> None:
    """Improve the highest part, and again, until the time is up. Writes `offset`."""
    while True:
        base = {key: 0 for _, _, key in pieces}
        for part, _, key in pieces:
            base[key] = max(base[key], part.base_bytes)
        peak, highest = max((base[key] + packing.peak_bytes, key) for key, packing in known.items())
        if budget.over() or peak <= bound:
            return
        problem = next(problem for _, problem, key in pieces if key == highest)
        second = max((base[key] + packing.peak_bytes for key, packing in known.items() if key != highest), default=0)
        better = improve(problem, max(second, bound) - base[highest], known[highest], budget)
        if better is known[highest]:
            return
        known[highest] = better
        methods.append((len(problem.size), better.method))
        for part, _, key in pieces:
            if key == highest:
                offset[part.rows] = part.base_bytes + better.offset


def _place_by_name(problem: Problem, method: str) -> Packing:
    """The packing of a single order, or of the HomoPhase or HomoSize groups of the STAlloc paper."""
    if method in SINGLE:
        offset = _in_order(problem, SINGLE[method])
    else:
        offset = (by_phase if method == "homophase" else by_size)(problem, partial(_in_order, order="ZW"))
    return Packing(offset, int((offset + problem.size).max(initial=0)), method)


def _in_order(problem: Problem, order: str) -> Column:
    """First fit in one order; above HOLES_LIMIT requests, an offset sweep with it as priority."""
    rank = ranks(problem, order)
    if len(rank) > HOLES_LIMIT:
        return sweep(problem, rank, FAR // 2, False)[0]
    return fill_holes(problem.stays, problem.size, np.argsort(rank, kind="stable"))[0]


def told(methods: list[tuple[int, str]]) -> str:
    """The method of the largest part, and how many parts there were."""
    if not methods:
        return "stacked"
    method = max(methods, key=lambda entry: entry[0])[1]
    return method if len(methods) == 1 else f"{method} (largest of {len(methods)} parts)"
