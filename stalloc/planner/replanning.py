"""A plan changed to fit a trace that is nearly the same.

Contract: the plan fits the new trace. What both have keeps its offset wherever the new lifespans allow, and only the
rest is placed; if that costs more than the stated gap, everything is planned anew.
"""

import dataclasses

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import njit
from stalloc.errors import BadInputError
from stalloc.planner.constraints import columns
from stalloc.planner.hole_filling import fill_holes
from stalloc.planner.plan_record import Plan
from stalloc.planner.planning import Arrays, plan, where_live
from stalloc.planner.problem import Stays, compressed, load_curve
from stalloc.trace import Trace

#: how far apart two traces may drift between requests that match, and how many in a row must match again
DRIFT, AGAIN = 128, 6
#: requests that may be looked at against all others: more take longer than planning anew
MANY = 300
#: moments a request up to which the load is counted moment by moment, which takes less than sorting
SPARSE = 16


def replan(before: Plan, source: Trace | Arrays, *, worst_gap: float = 0.001) -> Plan:
    """The plan `before` changed to fit `source`, a trace or (start, end, size), each (n,).

    Requests are matched in order of start by their sizes, as a text is compared with a later version of it. The new
    plan may lie further above its lower bound than `before` by at most `worst_gap` of that bound; else, and for plans
    of programs, the source is planned from scratch. `provenance["replanned_rows"]` is how many rows were placed.

    Raises BadInputError for a plan with constraints on rows, and for input that cannot be planned.
    """
    if len(before.row_alignment) or len(before.fixed_row) or len(before.forbidden_low):
        raise BadInputError("the plan has constraints on rows, which another trace does not have: plan it anew.")
    given = (source.start, source.end, source.size) if isinstance(source, Trace) else source
    start, end, size = columns(*given)
    if before.kind != "trace" or len(size) == 0 or len(before.size) == 0:
        return plan(source, alignment=before.alignment)
    if (size < 0).any() or (end < start).any() or float(size.sum(dtype=np.float64)) >= 2.0**60:
        return plan(source, alignment=before.alignment)  # which says what is wrong
    rounded = (size + (before.alignment - 1)) & -before.alignment
    old_order, new_order = np.argsort(before.start, kind="stable"), np.argsort(start, kind="stable")
    match = matched(before.size[old_order], size[new_order])
    found = np.flatnonzero(match >= 0)
    old, new = old_order[match[found]], new_order[found]
    offset = np.full(len(size), -1, np.int64)
    offset[new] = before.offset[old]
    idle = (rounded == 0) | (start == end)
    offset[idle] = 0
    bound = _maximum_load(start, end, rounded)
    # two rows of which neither outlives another number of others than before are live together exactly if they were
    outlived = np.searchsorted(before.start[old], before.end[old]), np.searchsorted(start[new], end[new])
    suspects = new[outlived[0] != outlived[1]]
    if len(suspects) > MANY:
        return plan(source, alignment=before.alignment, fold="never")
    for row in suspects[~idle[suspects]].tolist():  # what shares bytes with one that is live with it
        beside = (offset >= 0) & ~idle & (start < end[row]) & (start[row] < end)
        beside[row] = False
        if (beside & (offset < offset[row] + rounded[row]) & (offset[row] < offset + rounded)).any():
            offset[row] = -1
    height = bound + before.peak_bytes - before.lower_bound_bytes
    most = height + int(worst_gap * bound)
    placed = _place_rest(start, end, rounded, offset, height, most)
    if placed is None:
        return plan(source, alignment=before.alignment, fold="never")
    peak = int((offset + rounded)[~idle].max(initial=0))
    if peak > most:
        return plan(source, alignment=before.alignment, fold="never")
    stream = source.stream if isinstance(source, Trace) else np.zeros(len(size), np.int64)
    return dataclasses.replace(
        before,
        offset=where_live(offset, start, end, size),
        size=size,
        start=start,
        end=end,
        stream=stream,
        peak_bytes=peak,
        lower_bound_bytes=bound,
        proven_bound_bytes=bound,
        optimal=peak == bound,
        provenance={**before.provenance, "replanned_rows": placed},
    )


def _place_rest(start: Column, end: Column, size: Column, offset: Column, height: int, most: int) -> int | None:
    """Place what has no offset, then what ends above `height`, then all around that if some ends above `most`.

    None if that is too much, else how many rows were placed.
    """
    none, total = np.zeros(len(size), np.int64), 0
    for stage in range(3):
        high = np.flatnonzero((offset + size > height) & (start < end))
        if stage and len(high) == 0:
            break
        if stage == 2:
            around = np.flatnonzero(
                (start >= start[high].min()) & (end <= end[high].max()) & (start < end) & (size > 0)
            )
            if total + len(around) > MANY:
                break
            offset[around] = -1
        offset[high] = -1
        rest = np.flatnonzero(offset < 0)
        total += len(rest)
        if total > MANY:
            return None
        order = rest[np.argsort(-size[rest], kind="stable")]
        offset[:], _ = fill_holes(Stays(start, end, none, none, 0), size, order, True, kept=offset)
    return total


def _maximum_load(start: Column, end: Column, size: Column) -> int:
    first, last = int(start.min()), int(end.max())
    if last - first > SPARSE * len(start):
        rows = start < end
        return compressed(start[rows], end[rows], size[rows]).bound
    return int(load_curve(start - first, end - first, size, max(last - first, 1)).max(initial=0))


@njit(nogil=True)
def matched(old, new):
    """(n,) the position in `old` that each position of `new` stands for, or -1; ascending, equal values only."""
    match = np.full(len(new), -1, np.int64)
    i, j = 0, 0
    while i < len(old) and j < len(new):
        if old[i] == new[j]:
            match[j] = i
            i += 1
            j += 1
            continue
        di, dj = 1, 1
        for drift in range(1, DRIFT):
            hit = False
            for skip in range(drift + 1):
                same = 0
                a, b = i + skip, j + drift - skip
                while same < AGAIN and a + same < len(old) and b + same < len(new) and old[a + same] == new[b + same]:
                    same += 1
                if same == AGAIN or (same > 0 and a + same == len(old) and b + same == len(new)):
                    di, dj, hit = skip, drift - skip, True
                    break
            if hit:
                break
        i += di
        j += dj
    return match
