"""What a plan must keep beside the lifespans: an alignment for each request, places already taken, forbidden bytes.

Contract: constraints that exist can be kept. Each alignment is a power of two, each fixed offset a multiple of its
row's alignment, no two fixed requests that are live together share a byte, and none uses a forbidden one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.planner.validator import Uses, walk
from stalloc.sizes import aligned
from stalloc.trace.record import MAX_BYTES

Ranges = Iterable[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Constraints:
    """Where each of n requests may be placed: alignments, fixed offsets and bytes that must not be used."""

    alignment: Column  #: (n,) bytes
    fixed: Column  #: (n,) bytes from the start of the arena; -1: free to be placed
    forbidden: Column  #: (b, 2) ranges [low, high) of bytes, ascending and apart
    ids: NDArray[Any] | None = None  #: (n,) what the caller calls the rows

    @property
    def granule(self) -> int:
        """Every offset is a multiple of this: the smallest alignment."""
        return int(self.alignment.min(initial=MAX_BYTES)) if len(self.alignment) else 1

    @property
    def plain(self) -> bool:
        """Whether there is nothing but one alignment for all."""
        one = len(self.alignment) == 0 or self.alignment.min() == self.alignment.max()
        return bool(one and not len(self.forbidden) and (self.fixed < 0).all())

    def name(self, row: int) -> str:
        """A row for people."""
        return f"row {row}" if self.ids is None else f"row {row} (id {self.ids[row]})"

    def of(self, rows: Column) -> "Constraints":
        """The constraints of some rows."""
        return Constraints(self.alignment[rows], self.fixed[rows], self.forbidden)


def constraints(
    num_requests: int,
    alignment: ArrayLike = 512,
    fixed: Mapping[int, int] | ArrayLike | None = None,
    forbidden: Ranges = (),
    ids: NDArray[Any] | None = None,
) -> Constraints:
    """Read what a caller gives: one alignment or (n,); fixed offsets by row or (n,) with -1; ranges [low, high).

    Raises BadInputError, naming the row or the range, for what cannot be. Places are compared by `check_places`.
    """
    return Constraints(_alignments(num_requests, alignment), _places(num_requests, fixed), _ranges(forbidden), ids)


def _alignments(num_requests: int, alignment: ArrayLike) -> Column:
    given = np.asarray(alignment)
    if given.dtype.kind not in "iu" or given.ndim > 1 or (given.ndim == 1 and len(given) != num_requests):
        raise BadInputError(
            f"alignment is neither a whole number nor one for each of the {num_requests} requests: give either."
        )
    values = np.atleast_1d(given)
    wrong = (values < 1) | (values >= MAX_BYTES) | (values & np.maximum(values, 1) - 1 != 0)
    if wrong.any():
        row = int(wrong.argmax())
        where = f" of row {row}" if given.ndim else ""
        raise BadInputError(
            f"alignment {values[row]}{where} is not a power of two below 2**61: 512 is what torch uses."
        )
    return np.ascontiguousarray(np.broadcast_to(given.astype(np.int64), num_requests))


def _places(num_requests: int, fixed: Mapping[int, int] | ArrayLike | None) -> Column:
    places = np.full(num_requests, -1, np.int64)
    if fixed is None:
        return places
    if isinstance(fixed, Mapping):
        for row, place in fixed.items():
            if not 0 <= row < num_requests:
                raise BadInputError(f"row {row} is fixed, but there are {num_requests} requests: name one of those.")
            if not 0 <= place < MAX_BYTES:
                raise BadInputError(f"row {row} is fixed at {place}: give an offset from 0 and below 2**61.")
            places[row] = place
        return places
    given = np.asarray(fixed)
    if given.shape != places.shape or (given.dtype.kind not in "iu" and len(given)):
        raise BadInputError(f"fixed is no whole number for each of the {num_requests} requests: give -1 for free ones.")
    wrong = (given < -1) | (given >= MAX_BYTES)
    if wrong.any():
        row = int(wrong.argmax())
        raise BadInputError(f"row {row} is fixed at {given[row]}: give an offset from 0 and below 2**61, or -1.")
    return given.astype(np.int64)


def _ranges(forbidden: Ranges) -> Column:
    merged: list[list[int]] = []
    for low, high in sorted((int(low), int(high)) for low, high in forbidden):
        if not 0 <= low < high <= MAX_BYTES:
            raise BadInputError(f"the forbidden range [{low}, {high}) is none: give 0 <= low < high and at most 2**61.")
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return np.array(merged, np.int64).reshape(-1, 2)


def check_places(
    start: Column, end: Column, size: Column, given: Constraints, cycle: tuple[int, int] | None = None
) -> None:
    """Raise BadInputError for the first fixed request that cannot be where it is. Lifespans [start, end), (n,)."""
    rows = np.flatnonzero(given.fixed >= 0)
    _check_each(rows, size, given)
    rows = rows[(size[rows] > 0) & (start[rows] < end[rows])]
    begins, ends = start[rows], end[rows]
    if cycle is not None:  # the second iteration: all later ones are like it
        again, period = begins >= cycle[0], cycle[1] - cycle[0]
        rows, begins = (np.concatenate([rows, rows[again]]), np.concatenate([begins, begins[again] + period]))
        ends = np.concatenate([ends, np.minimum(ends[again], cycle[1]) + period])
    low = given.fixed[rows]
    if (pair := walk(Uses(begins, ends, low, low + size[rows], rows), 1)[0]) is not None:
        one, two = sorted(rows[[*pair]].tolist())
        raise BadInputError(
            f"{given.name(one)} and {given.name(two)} are fixed at {given.fixed[one]} and {given.fixed[two]}, "
            f"share bytes there and are live together: leave one of them free."
        )


def _check_each(rows: Column, size: Column, given: Constraints) -> None:
    """Raise BadInputError for the first of the fixed rows that could not be where it is if it were the only one."""
    place, (low, high) = given.fixed[rows], given.forbidden.T
    top = place + size[rows]
    next_range = np.searchsorted(high, place, side="right")
    is_forbidden = (np.append(low, MAX_BYTES)[next_range] < top) & (place < top)
    wrong = (place % given.alignment[rows] != 0) | (top > MAX_BYTES) | is_forbidden
    if not wrong.any():
        return
    first = int(wrong.argmax())
    row = int(rows[first])
    name, begin, end, alignment = given.name(row), int(place[first]), int(top[first]), int(given.alignment[row])
    if begin % alignment:
        raise BadInputError(f"{name} is fixed at {begin}, which is no multiple of its alignment {alignment}: move it.")
    if end > MAX_BYTES:
        raise BadInputError(f"{name} is fixed at {begin} and ends beyond 2**61: place it lower.")
    used = int(next_range[first])
    raise BadInputError(
        f"{name} is fixed at [{begin}, {end}), of which [{low[used]}, {high[used]}) is forbidden: lift one of them."
    )


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


def rounded_sizes(
    start: Column, end: Column, size: Column, given: Constraints, cycle: tuple[int, int] | None
) -> Column:
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
