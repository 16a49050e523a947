"""Offsets for lifespans that are one interval each.

Contract: a packing without overlap, and the maximum load as its bound; parts that look alike are placed alike.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from stalloc.planner.portfolio import Packing, compressed, solve
from stalloc.planner.problem import Column, Part, Problem, epochs, load_curve, parts

#: from so many requests on, a peak this close to the bound will do
MANY, CLOSE_ENOUGH = 50_000, 1e-3


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
    hurried = len(size) >= MANY
    enough = bound + int(CLOSE_ENOUGH * bound) if hurried else bound
    pieces: list[tuple[Part, Problem, bytes]] = []
    for part in sorted(parts(start, end, size), key=lambda part: -part.base_bytes - part.load_bytes):
        if len(part.rows) == 1:
            offset[part.rows] = part.base_bytes
            continue
        problem = compressed(start[part.rows], end[part.rows], size[part.rows])
        pieces.append((part, problem, _key(problem)))
    distinct = sum({key: len(problem.size) for _, problem, key in pieces}.values())
    peak, methods = bound, []
    known: dict[bytes, Packing] = {}
    for part, problem, key in pieces:
        packing = known.get(key)
        if packing is None or part.base_bytes + packing.peak_bytes > peak:
            share = len(problem.size) / distinct if hurried else 1.0
            packing = known[key] = solve(problem, peak - part.base_bytes, share, enough - part.base_bytes)
            methods.append((len(problem.size), packing.method))
        offset[part.rows] = part.base_bytes + packing.offset
        peak = max(peak, part.base_bytes + packing.peak_bytes)
    return Layout(offset, peak, bound, told(methods))


def _key(problem: Problem) -> bytes:
    """Equal for problems that are equal."""
    digest = hashlib.blake2b(digest_size=32)
    for column in (problem.start, problem.end, problem.size):
        digest.update(column.tobytes())
    return digest.digest()


def told(methods: list[tuple[int, str]]) -> str:
    """The method of the largest part, and how many parts there were."""
    if not methods:
        return "stacked"
    method = max(methods, key=lambda entry: entry[0])[1]
    return method if len(methods) == 1 else f"{method} (largest of {len(methods)} parts)"
