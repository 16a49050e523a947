"""Offsets for lifespans, once or in a ring that repeats for ever.

Contract: offsets are multiples of the alignment, no two requests that are live together share a byte, and the lower
bound is the maximum load of the sizes rounded up to the alignment. Equal input gives equal output. A request of no
bytes or of no time (start == end) gets offset 0 and constrains nothing.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from stalloc.errors import BadInputError
from stalloc.planner.placement import fill_holes
from stalloc.planner.portfolio import Packing, compressed, solve
from stalloc.planner.problem import Column, Problem, epochs, load_curve, parts, split_at_cuts

#: hole filling looks at every placed request for each one it places
HOLES_LIMIT = 20_000
#: sums of sizes stay below this, so that no sum in the search overflows
MOST_BYTES = 1 << 61


class Layout(NamedTuple):
    """What planning arrays gives."""

    offset: Column  #: (n,) bytes
    peak_bytes: int
    lower_bound_bytes: int
    method: str


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
        layout = _line(begin[rows], stop[rows], rounded[rows])
    else:
        layout = _ring(begin[rows], stop[rows], rounded[rows], *ring)
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


def _line(start: Column, end: Column, size: Column) -> Layout:
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
    return Layout(offset, peak, bound, _told(methods))


def _told(methods: list[tuple[int, str]]) -> str:
    """The method of the largest part, and how many parts there were."""
    if not methods:
        return "stacked"
    method = max(methods, key=lambda entry: entry[0])[1]
    return method if len(methods) == 1 else f"{method} (largest of {len(methods)} parts)"


def _ring(start: Column, end: Column, size: Column, ring_start: int, ring_end: int) -> Layout:
    """Prologue and ring on one axis [.., ring_end): what wraps round is live at its end and at its beginning.

    A request that wraps and the prologue's request of the same size that it follows in the first pass (equal ends one
    period apart) are one thing here: they hand the same bytes on, as the passes of the ring do among themselves.
    Without a partner, the wrapped part is kept free in the first pass too.
    """
    period = ring_end - ring_start
    bound = ring_bound(start, end, size, ring_start, ring_end)
    wraps = np.flatnonzero((start >= ring_start) & (end > ring_end))
    dies = np.flatnonzero((start < ring_start) & (end > ring_start) & (end <= ring_end))
    partner = _partners(wraps, end[wraps] - period, dies, end[dies], size)
    leads = np.ones(len(size), bool)
    leads[partner[partner >= 0]] = False  # placed by the request that follows it
    first, last = start.copy(), np.minimum(end, ring_end)
    first2, last2 = np.zeros(len(size), np.int64), np.zeros(len(size), np.int64)
    first2[wraps], last2[wraps] = start[wraps], ring_end
    first[wraps] = np.where(partner >= 0, start[partner], ring_start)
    last[wraps] = end[wraps] - period
    whole = wraps[first2[wraps] == last[wraps]]  # live without a break
    last[whole], first2[whole], last2[whole] = ring_end, 0, 0

    rows = np.flatnonzero(leads)
    wrapping = last2[rows] > 0
    both = rows[wrapping]
    offset = np.zeros(len(size), np.int64)
    if len(both) == 0:
        layout = _line(first[rows], last[rows], size[rows])
        offset[rows], peak, method = layout.offset, layout.peak_bytes, layout.method
    else:
        a, b, num_epochs = epochs(
            np.concatenate([first[rows], first2[both]]), np.concatenate([last[rows], last2[both]])
        )
        a2, b2 = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        a2[wrapping], b2[wrapping] = a[len(rows) :], b[len(rows) :]
        offset[rows], peak, method = _above_wrapping(
            a[: len(rows)], b[: len(rows)], a2, b2, size[rows], num_epochs, bound
        )
    followed = wraps[partner >= 0]
    offset[partner[partner >= 0]] = offset[followed]
    return Layout(offset, peak, bound, method)


def _partners(wraps: Column, wrapped_end: Column, dies: Column, end: Column, size: Column) -> Column:
    """For each request that wraps, the prologue's request that dies where it would in the first pass, or -1."""
    waiting: dict[tuple[int, int], list[int]] = {}
    for row, at in zip(dies[::-1].tolist(), end[::-1].tolist(), strict=True):
        waiting.setdefault((int(size[row]), at), []).append(row)
    found = [
        candidates.pop() if (candidates := waiting.get((int(size[row]), at))) else -1
        for row, at in zip(wraps.tolist(), wrapped_end.tolist(), strict=True)
    ]
    return np.array(found, np.int64)


def ring_bound(start: Column, end: Column, size: Column, ring_start: int, ring_end: int) -> int:
    """The maximum load of prologue, first pass and second pass; all later passes are like the second."""
    period = ring_end - ring_start
    again = start >= ring_start
    horizon = ring_end + period
    a, b, num_epochs = epochs(
        np.concatenate([start, start[again] + period]), np.concatenate([end, np.minimum(end[again] + period, horizon)])
    )
    return int(load_curve(a, b, np.concatenate([size, size[again]]), num_epochs).max())


def _above_wrapping(
    a: Column, b: Column, a2: Column, b2: Column, size: Column, num_epochs: int, bound: int
) -> tuple[Column, int, str]:
    """(offset, peak, method): what wraps is stacked at the bottom, the rest is placed above it or in its holes."""
    lasting = np.flatnonzero((b == num_epochs) & (b2 == 0))
    lasting = lasting[np.lexsort((-size[lasting], a[lasting]))]  # by birth: then no hole lies below them
    wrapping = np.flatnonzero(b2 > 0)
    best: tuple[Column, int, str] | None = None
    gap = a2 - b
    for name, keys in (
        ("by gap", (-size[wrapping], gap[wrapping])),
        ("by return", (-b[wrapping], a2[wrapping])),
        ("by leave", (a2[wrapping], -b[wrapping])),
        ("by size", (gap[wrapping], -size[wrapping])),
    ):
        stack = np.concatenate([lasting, wrapping[np.lexsort(keys)]])
        offset, floor = _stacked(stack, a, b, a2, b2, size, num_epochs)
        rest = np.setdiff1d(np.arange(len(size)), stack)
        method = _place_rest(rest, a, b, size, offset, floor, bound)
        peak = int((offset + size).max())
        if best is None or peak < best[1]:
            best = offset, peak, f"ring {name}, {method}"
        if peak > bound and len(size) <= HOLES_LIMIT:
            high = np.flatnonzero(offset + size > bound)
            offset[high] = -1
            high = high[np.argsort(-size[high], kind="stable")]
            peak = int(fill_holes(a, b, a2, b2, size, offset, high, False))
            if peak < best[1]:
                best = offset, peak, f"ring {name}, {method}, repaired"
        if best[1] <= bound:
            return best
    assert best is not None
    if len(size) <= HOLES_LIMIT:
        span = (b - a) + (b2 - a2)
        for name, key in (("size", size), ("area", size * span.astype(np.float64)), ("lifetime", span)):
            offset = np.full(len(size), -1, np.int64)
            peak = int(fill_holes(a, b, a2, b2, size, offset, np.argsort(-key, kind="stable"), False))
            if peak < best[1]:
                best = offset, peak, f"ring first fit by {name}"
    return best


def _stacked(
    stack: Column, a: Column, b: Column, a2: Column, b2: Column, size: Column, num_epochs: int
) -> tuple[Column, Column]:
    """Offsets of the rows of `stack`, each on the highest one below it, and the floor that they make."""
    floor = np.zeros(num_epochs, np.int64)
    offset = np.zeros(len(size), np.int64)
    for row in stack.tolist():
        one, two = floor[a[row] : b[row]], floor[a2[row] : b2[row]]
        offset[row] = max(one.max(), two.max(initial=0))
        one[:] = two[:] = offset[row] + size[row]
    return offset, floor


def _place_rest(rest: Column, a: Column, b: Column, size: Column, offset: Column, floor: Column, bound: int) -> str:
    """Place the rows of `rest` above the floor, one piece between cuts at a time. Writes `offset`."""
    if len(rest) == 0:
        return "stacked"
    pieces = []
    for piece in split_at_cuts(a[rest], b[rest]):
        rows = rest[piece]
        first, last = int(a[rows].min()), int(b[rows].max())
        pieces.append((rows, Problem(a[rows] - first, b[rows] - first, size[rows], floor[first:last])))
    target, methods = bound, []
    known: dict[tuple[bytes, ...], Packing] = {}
    for rows, problem in sorted(pieces, key=lambda entry: -entry[1].bound):
        key = tuple(column.tobytes() for column in (problem.start, problem.end, problem.size, problem.floor))
        if key not in known:
            known[key] = solve(problem, target)
            methods.append((len(rows), known[key].method))
        offset[rows] = known[key].offset
        target = max(target, known[key].peak_bytes)
    return _told(methods)
