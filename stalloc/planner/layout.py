"""Offsets for lifespans, once or in a ring that repeats for ever.

Contract: offsets are multiples of the alignment, no two requests that are live together share a byte, and the lower
bound is the maximum load of the sizes rounded up to the alignment. Equal input gives equal output. A request of no
bytes or of no time (start == end) gets offset 0 and constrains nothing.
"""

import numpy as np
from numpy.typing import ArrayLike

from stalloc.errors import BadInputError
from stalloc.planner.line import Layout, place_line
from stalloc.planner.problem import Column
from stalloc.planner.ring import place_ring

#: sums of sizes stay below this, so that no sum in the search overflows
MOST_BYTES = 1 << 61


def plan_arrays(
    start: ArrayLike,
    end: ArrayLike,
    size: ArrayLike,
    *,
    alignment: int = 512,
    ring: tuple[int, int] | None = None,
) -> Layout:
    """Place n requests with lifespans [start, end) (any integer clock) and sizes in bytes, each (n,).

    With `ring` = (ring_start, ring_end), requests that start in it are live again one period later, and again, for
    ever; an end beyond ring_end reaches into the next pass, at most to start + period. Requests that start before
    ring_start are live once: until an end of at most ring_end, or for ever with end = ring_end + period.

    Raises BadInputError, naming the row, for input that is none of this.
    """
    times = [_column("start", start), _column("end", end)]
    sizes = _column("size", size)
    begin, stop, rounded = _checked(times[0], times[1], sizes, alignment, ring)
    offset = np.zeros(len(sizes), np.int64)
    rows = np.flatnonzero((rounded > 0) & (begin < stop))
    if len(rows) == 0:
        return Layout(offset, 0, 0, "nothing to place")
    if ring is None:
        layout = place_line(begin[rows], stop[rows], rounded[rows])
    else:
        layout = place_ring(begin[rows], stop[rows], rounded[rows], *ring)
    offset[rows] = layout.offset
    return layout._replace(offset=offset)


def _column(name: str, values: ArrayLike) -> Column:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise BadInputError(
            f"{name} is a {array.ndim}-dimensional array of {array.dtype}: give one whole number a request."
        )
    if array.dtype.kind == "u" and len(array) and int(array.max()) >= 2**63:
        raise BadInputError(f"{name} of row {int(array.argmax())} is {int(array.max())}: it has to be below 2**63.")
    return array.astype(np.int64)


def _checked(
    start: Column, end: Column, size: Column, alignment: int, ring: tuple[int, int] | None
) -> tuple[Column, Column, Column]:
    """The columns with sizes rounded up, or the sentence about the first row that is wrong."""
    if not len(start) == len(end) == len(size):
        raise BadInputError(
            f"start, end and size have {len(start)}, {len(end)} and {len(size)} rows: give as many of each."
        )
    if alignment < 1 or alignment & (alignment - 1) or alignment >= MOST_BYTES:
        raise BadInputError(f"alignment {alignment} is not a power of two below 2**61: 512 is what torch uses.")
    for wrong, sentence in (
        (size < 0, "has a negative size"),
        (end < start, "ends before it starts"),
        (size > MOST_BYTES - alignment, "is larger than 2**61 bytes with its alignment"),
    ):
        if wrong.any():
            row = int(wrong.argmax())
            raise BadInputError(f"row {row} ([{start[row]}, {end[row]}), {size[row]} bytes) {sentence}: correct it.")
    rounded = (size + (alignment - 1)) & -alignment
    total = np.cumsum(rounded.astype(np.float64))
    if len(total) and total[-1] >= MOST_BYTES:
        row = int((total >= MOST_BYTES).argmax())
        raise BadInputError(f"the sizes up to row {row} add up to more than 2**61 bytes: plan fewer requests at once.")
    if ring is not None:
        _check_ring(start, end, *ring)
    return start, end, rounded


def _check_ring(start: Column, end: Column, ring_start: int, ring_end: int) -> None:
    period = ring_end - ring_start
    if period <= 0:
        raise BadInputError(f"the ring [{ring_start}, {ring_end}) is empty: it has to last for at least one event.")
    once = start < ring_start
    for wrong, sentence in (
        (start >= ring_end, f"starts after the ring's end at {ring_end}"),
        (~once & (end - start > period), f"lives longer than the period of {period}"),
        (once & (end > ring_end) & (end != ring_end + period), "starts before the ring and ends after its first pass"),
    ):
        if wrong.any():
            row = int(wrong.argmax())
            raise BadInputError(f"row {row} ([{start[row]}, {end[row]})) {sentence}: correct it or move the ring.")
