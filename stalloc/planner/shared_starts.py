"""Steps of several kinds that begin alike: what they both begin with lies in the same places.

Contract: which kind a step is of shows only where it parts from the others, and what it asked for until then lies where
the expected kind has it; so that nothing of the rest is in its way, the kinds have one place for it. What is returned
for a kind can be kept: no two requests that are live together in it, and nothing that it keeps free for what earlier
steps carry over, share a byte.
"""

import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from stalloc.columns import Column
from stalloc.lifespans.units import StepKind
from stalloc.sizes import aligned

_CELLS = 1 << 16  # pairs of requests and places that are compared at a time
_LEAST = 8  # requests that two kinds have to begin with; fewer are in nobody's way


def places_of_begin(
    kind: StepKind, rows: Column, placed: Iterable[tuple[StepKind, Column]], kept: tuple[Column, Column, Column, Column]
) -> Column:
    """(m,) bytes: where the `rows` (m,) of a kind lie in the kind placed before that it has most in common with; or -1.

    `placed` are kinds with the offsets of their requests, -1 without one; `kept` are start, end, size and offset of the
    places that are kept for what is carried over to a step, whose ends may lie in the next one.
    """
    length, other, other_offset = 0, kind, np.zeros(0, np.int64)
    for one, its_offset in placed:
        common = _common(kind, one)
        if common > length:
            length, other, other_offset = common, one, its_offset
    places = np.full(len(rows), -1, np.int64)
    if length < _LEAST:
        return places
    begin = rows[rows < length]
    told = (other.end[begin] > 0) & (other.end[begin] <= len(other.size))  # neither carried over nor unknown
    places[: len(begin)] = np.where(told, other_offset[begin], -1)
    found = np.flatnonzero(places >= 0)
    at = rows[found]
    spans = at, kind.end[at], aligned(kind.size[at]), places[found]
    clashes = np.zeros(len(found), bool)
    for row in np.flatnonzero(kind.end[at] > other.end[at]).tolist():  # those that live longer than they did there
        beside = _overlaps(spans, *(column[row : row + 1, None] for column in spans))[0]
        beside[row] = False
        clashes[row] = (beside & ~clashes).any()
    start, end, size, offset = (column[(kept[3] >= 0) & (kept[0] < kept[1]), None] for column in kept)
    carried = np.zeros_like(start), end - len(kind.size), size, offset  # into this iteration from the one before
    at_once = max(1, _CELLS // max(len(found), 1))
    for columns, first in itertools.product(((start, end, size, offset), carried), range(0, len(start), at_once)):
        clashes |= _overlaps(spans, *(column[first : first + at_once] for column in columns)).any(axis=0)
    places[found[clashes]] = -1
    return places


def _common(one: StepKind, other: StepKind) -> int:
    """How many requests two kinds of steps both begin with."""
    most = min(len(one.size), len(other.size))
    differ = (one.size[:most] != other.size[:most]) | (one.stream[:most] != other.stream[:most])
    return int(differ.argmax()) if differ.any() else most


def _overlaps(
    spans: tuple[Column, Column, Column, Column], start: Column, end: Column, size: Column, offset: Column
) -> NDArray[np.bool_]:
    """(k, m) which of m requests are live at a time, and in a place, that each of (k, 1) others is."""
    starts, ends, sizes, offsets = spans
    together: NDArray[np.bool_] = (
        (starts < end) & (start < ends) & (offsets < offset + size) & (offset < offsets + sizes)
    )
    return together
