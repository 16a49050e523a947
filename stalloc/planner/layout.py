"""Offsets for lifespans, once or in a cycle that repeats for ever.

Contract: offsets are multiples of the alignment, no two requests that are live together share a byte, what is fixed
stays, what is forbidden is not used, and the lower bound is the maximum load of the sizes rounded up to the (smallest)
alignment. Equal input gives equal output. A request of no bytes or of no time (start == end) gets offset 0, unless it
is fixed, and constrains nothing.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.planner.budget import Budget
from stalloc.planner.constrained import place_constrained, stays
from stalloc.planner.constraints import Constraints, Ranges, check_places, constraints
from stalloc.planner.cycle import cycle_bound, place_cycle
from stalloc.planner.intervals import Layout, place_line
from stalloc.planner.problem import load_curve
from stalloc.sizes import aligned
from stalloc.trace.record import MAX_BYTES


def plan_arrays(
    start: ArrayLike,
    end: ArrayLike,
    size: ArrayLike,
    *,
    alignment: ArrayLike = 512,
    cycle: tuple[int, int] | None = None,
    fixed: Mapping[int, int] | ArrayLike | None = None,
    forbidden: Ranges = (),
    ids: NDArray[Any] | None = None,
    budget: Budget | None = None,
    ring: tuple[int, int] | None = None,
) -> Layout:
    """Place n requests with lifespans [start, end) (any integer clock) and sizes in bytes, each (n,).

    With `cycle` = (cycle_start, cycle_end), requests that start in it are live again one period later, and again, for
    ever; an end beyond cycle_end reaches into the next iteration, at most to start + period. Requests that start before
    cycle_start are live once: until an end of at most cycle_end, or for ever with end = cycle_end + period.

    `alignment` is one power of two for all, or (n,). `fixed` maps rows to the offsets where they are, or is (n,) with
    -1 for those to be placed. `forbidden` are ranges [low, high) of bytes that no request may use. `ids` are (n,) names
    for errors. Without a `budget` the usual effort is spent. `ring` is the name that
    `cycle` had in the last release.

    Raises BadInputError, naming the row, for input that is none of this.
    """
    if ring is not None:
        warnings.warn("plan_arrays(ring=...) is called cycle= now.", DeprecationWarning, stacklevel=2)
        cycle = ring
    begin, stop, sizes = columns(start, end, size)
    budget = budget or Budget()
    given = constraints(len(sizes), alignment, fixed, forbidden, ids)
    rounded = _checked(begin, stop, sizes, given, cycle)
    offset = np.maximum(given.fixed, 0)
    rows = np.flatnonzero((rounded > 0) & (begin < stop))
    if len(rows) == 0:
        return Layout(offset, 0, 0, "nothing to place")
    if not given.plain:
        check_places(begin, stop, sizes, given, cycle)
        layout = _constrained(begin[rows], stop[rows], rounded[rows], given.of(rows), cycle, budget)
    elif cycle is None:
        layout = place_line(begin[rows], stop[rows], rounded[rows], budget)
    else:
        layout = place_cycle(begin[rows], stop[rows], rounded[rows], cycle, budget)
    offset[rows] = layout.offset
    return layout._replace(offset=offset)


def _constrained(
    start: Column, end: Column, size: Column, given: Constraints, cycle: tuple[int, int] | None, budget: Budget
) -> Layout:
    live = stays(start, end, cycle)
    if cycle is None:
        bound = int(load_curve(live.start, live.end, size, live.num_epochs).max())
    else:
        bound = cycle_bound(start, end, size, *cycle)
    found = place_constrained(live, size, given, bound, budget)
    return Layout(found.offset, found.peak_bytes, bound, found.method, found.proven_bound_bytes)


def columns(start: ArrayLike, end: ArrayLike, size: ArrayLike) -> tuple[Column, Column, Column]:
    """Three int64 columns of one length. Raises BadInputError if they are not."""
    made = _column("start", start), _column("end", end), _column("size", size)
    if len({len(column) for column in made}) > 1:
        raise BadInputError(
            f"start, end and size have {len(made[0])}, {len(made[1])} and {len(made[2])} rows: give as many of each."
        )
    return made


def _column(name: str, values: ArrayLike) -> Column:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise BadInputError(
            f"{name} is a {array.ndim}-dimensional array of {array.dtype}: give one whole number a request."
        )
    if array.dtype.kind == "u" and len(array) and int(array.max()) >= 2**63:
        raise BadInputError(f"{name} of row {int(array.argmax())} is {int(array.max())}: it has to be below 2**63.")
    return array.astype(np.int64)


def _checked(start: Column, end: Column, size: Column, given: Constraints, cycle: tuple[int, int] | None) -> Column:
    """The sizes rounded up to the smallest alignment, or the sentence about the first row that is wrong."""
    granule = given.granule
    for wrong, sentence in (
        (size < 0, "has a negative size"),
        (end < start, "ends before it starts"),
        (size > MAX_BYTES - given.alignment, "is larger than 2**61 bytes with its alignment"),
    ):
        if wrong.any():
            row = int(wrong.argmax())
            raise BadInputError(f"row {row} ([{start[row]}, {end[row]}), {size[row]} bytes) {sentence}: correct it.")
    rounded = aligned(size, granule)
    most = np.maximum(rounded, (size + (given.alignment - 1)) & -given.alignment)
    total = np.cumsum(most.astype(np.float64))
    if len(total) and total[-1] >= MAX_BYTES:
        row = int((total >= MAX_BYTES).argmax())
        raise BadInputError(f"the sizes up to row {row} add up to more than 2**61 bytes: plan fewer requests at once.")
    if cycle is not None:
        _check_cycle(start, end, *cycle)
    return rounded


def _check_cycle(start: Column, end: Column, cycle_start: int, cycle_end: int) -> None:
    period = cycle_end - cycle_start
    if period <= 0:
        raise BadInputError(f"the cycle [{cycle_start}, {cycle_end}) is empty: it has to last for at least one event.")
    once = start < cycle_start
    for wrong, sentence in (
        (start >= cycle_end, f"starts after the cycle's end at {cycle_end}"),
        (~once & (end - start > period), f"lives longer than the period of {period}"),
        (
            once & (end > cycle_end) & (end != cycle_end + period),
            "starts before the cycle and ends after its first iteration",
        ),
    ):
        if wrong.any():
            row = int(wrong.argmax())
            raise BadInputError(f"row {row} ([{start[row]}, {end[row]})) {sentence}: correct it or move the cycle.")
