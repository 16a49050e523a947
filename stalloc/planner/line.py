"""Offsets for lifespans that are one interval each.

Contract: a packing without overlap, and the maximum load as its bound; parts that look alike are placed alike.
"""

from typing import NamedTuple

import numpy as np

from stalloc.planner.portfolio import Packing, compressed, solve
from stalloc.planner.problem import Column, epochs, load_curve, parts


class Layout(NamedTuple):
    """Offsets with what they come to."""

    offset: Column  #: (n,) bytes
    peak_bytes: int
    lower_bound_bytes: int
    method: str  #: what found it, for people


def place_line(start: Column, end: Column, size: Column) -> Layout:
    """Every lifespan is one interval."""
    start, end, num_epochs = epochs(start, end)
    bound = int(load_curve(start, end, size, num_epochs).max())
    offset = np.zeros(len(size), np.int64)
    peak, methods = bound, []
    known: dict[tuple[bytes, bytes, bytes], Packing] = {}
    for part in sorted(parts(start, end, size), key=lambda part: -part.base_bytes - part.load_bytes):
        rows = part.rows
        if len(rows) == 1:
            offset[rows] = part.base_bytes
            continue
        problem = compressed(start[rows], end[rows], size[rows])
        key = (problem.start.tobytes(), problem.end.tobytes(), problem.size.tobytes())
        packing = known.get(key)
        if packing is None or part.base_bytes + packing.peak_bytes > peak:
            packing = known[key] = solve(problem, peak - part.base_bytes)
            methods.append((len(rows), packing.method))
        offset[rows] = part.base_bytes + packing.offset
        peak = max(peak, part.base_bytes + packing.peak_bytes)
    return Layout(offset, peak, bound, told(methods))


def told(methods: list[tuple[int, str]]) -> str:
    """The method of the largest part, and how many parts there were."""
    if not methods:
        return "stacked"
    method = max(methods, key=lambda entry: entry[0])[1]
    return method if len(methods) == 1 else f"{method} (largest of {len(methods)} parts)"
