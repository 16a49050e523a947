"""The ways of planning that can be asked for by name.

Contract: every name gives a packing without overlap; "auto" is never worse than "greedy" for the same problem.
"""

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.planner.groups import by_phase, by_size
from stalloc.planner.hole_filling import fill_holes
from stalloc.planner.orders import METHODS, SINGLE, ranks
from stalloc.planner.packings import Packing, compressed
from stalloc.planner.placement import sweep
from stalloc.planner.portfolio import HOLES_LIMIT
from stalloc.planner.problem import Problem
from stalloc.planner.trees import FAR

#: HomoPhase and HomoSize groups of the STAlloc paper
GROUPS = {"homophase": by_phase, "homosize": by_size}


def check_method(method: str) -> None:
    """Raise BadInputError if there is no such method."""
    if method not in METHODS:
        raise BadInputError(f"method is {method!r}: give one of {', '.join(METHODS)}.")


def place_by_name(method: str, start: Column, end: Column, size: Column) -> Packing:
    """The packing of a single order or grouping; lifespans [start, end) in epochs."""
    problem = compressed(start, end, size)
    if method in GROUPS:
        offset = GROUPS[method](problem.start, problem.end, size, _first_fit)
    else:
        offset = _in_order(problem, SINGLE[method])
    return Packing(offset, int((offset + size).max(initial=0)), method)


def _first_fit(start: Column, end: Column, size: Column) -> Column:
    """The largest first, each in the lowest hole."""
    return _in_order(compressed(start, end, size), "ZW")


def _in_order(problem: Problem, order: str) -> Column:
    """First fit in one order; above HOLES_LIMIT requests, an offset sweep with it as priority."""
    count = len(problem.size)
    rank = ranks(problem, order)
    if count > HOLES_LIMIT:
        return sweep(problem.start, problem.end, problem.size, rank, problem.floor, FAR // 2, False)[0]
    offset, none = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    fill_holes(problem.start, problem.end, none, none, problem.size, offset, np.argsort(rank, kind="stable"), False)
    return offset
