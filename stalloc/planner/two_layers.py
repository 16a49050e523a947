"""A problem packed as two layers: the large requests at the bottom, the small ones above whatever those leave.

Contract: a packing of the whole, or none. It costs the whole at least as much as the two layers' loads peak at
different times; for programs that do the same again and again that is a small share, and each layer has few distinct
sizes, which tile where the mixture does not (the idea behind the HomoSize groups of STAlloc, EuroSys 2026, section 5).
"""

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.compiled import BORROWING, njit
from stalloc.planner.problem import Problem, load_curve
from stalloc.planner.trees import build_floor, raise_floor

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


def skyline(start: Column, end: Column, top: Column, floor: Column) -> Column:
    """(T,) the highest of the floor and the tops of the requests that cover an epoch; tops ascend."""
    num_epochs = len(floor)
    cover, highest = build_floor(np.zeros(num_epochs, np.int64))
    _raise_each(cover, highest, start, end, top)
    level = 2
    while level < len(cover):  # what covers a node covers its children
        children = cover[level : 2 * level]
        np.maximum(children, np.repeat(cover[level // 2 : level], 2), out=children)
        level *= 2
    return np.maximum(cover[len(cover) // 2 :][:num_epochs], floor)


@njit(nogil=True, **BORROWING)
def _raise_each(cover, highest, start, end, top):
    for i in range(len(start)):
        raise_floor(cover, highest, start[i], end[i], top[i])
