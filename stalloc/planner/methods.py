"""The ways of planning that can be asked for by name.

Contract: every name gives a packing without overlap; "auto" is never worse than "greedy" for the same problem.
"""

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.planner.hole_filling import fill_holes
from stalloc.planner.orders import METHODS, SINGLE, ranks
from stalloc.planner.packings import Packing, compressed
from stalloc.planner.placement import sweep
from stalloc.planner.portfolio import HOLES_LIMIT
from stalloc.planner.problem import Problem
from stalloc.planner.trees import FAR


def check_method(method: str) -> None:
    """Raise BadInputError if there is no such method."""
    if method not in METHODS:
        raise BadInputError(f"method is {method!r}: give one of {', '.join(METHODS)}.")


def place_by_name(method: str, start: Column, end: Column, size: Column) -> Packing:
    """The packing of a single order; lifespans [start, end) in epochs."""
    offset = _in_order(compressed(start, end, size), SINGLE[method])
    return Packing(offset, int((offset + size).max(initial=0)), method)


def _in_order(problem: Problem, order: str) -> Column:
    """First fit in one order; above HOLES_LIMIT requests, an offset sweep with it as priority."""
    count = len(problem.size)
    rank = ranks(problem, order)
    if count > HOLES_LIMIT:
        return sweep(problem.start, problem.end, problem.size, rank, problem.floor, FAR // 2, False)[0]
    offset, none = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    fill_holes(problem.start, problem.end, none, none, problem.size, offset, np.argsort(rank, kind="stable"), False)
    return offset
