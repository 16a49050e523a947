"""Streams in one arena: regions apart, or shared with planned handovers.

Contract: entries of streams that do not share a region never share a byte; for those that do, `handovers` lists every
pair of entries of different streams of which the later takes over a byte from the earlier, in any iteration.
"""

from bisect import bisect_right
from typing import TYPE_CHECKING, Literal

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.errors import BadInputError
from stalloc.planner.budget import Budget
from stalloc.planner.intervals import Layout
from stalloc.planner.layout import plan_arrays

if TYPE_CHECKING:
    from stalloc.lifespans.repeating_schedule import Schedule

Streams = Literal["separate", "share"]


def place_streams(
    schedule: "Schedule", alignment: int, streams: Streams, budget: Budget | None
) -> tuple[Column, int, str]:
    """(offset, peak, method): offsets of (n,) schedule entries in bytes, -1 for those that are not planned."""
    if streams not in ("separate", "share"):
        raise BadInputError(f"streams is {streams!r}: give 'separate' or 'share'.")
    planned = np.flatnonzero(schedule.planned)
    names = distinct(schedule.stream[planned]).tolist()
    groups = [tuple(names)] if streams == "share" and names else [(name,) for name in names]
    layouts = {group: _together(schedule, group, alignment, budget) for group in groups}
    offset = np.full(len(schedule.size), -1, np.int64)
    region = 0
    placed = [layouts[group] for group in sorted(layouts)]
    for rows, layout in placed:
        offset[rows] = region + layout.offset
        region += layout.peak_bytes
    return offset, region, "; ".join(layout.method for _, layout in placed) or "nothing to place"


def _together(
    schedule: "Schedule", group: tuple[int, ...], alignment: int, budget: Budget | None
) -> tuple[Column, Layout]:
    rows = np.flatnonzero(schedule.planned & np.isin(schedule.stream, group))
    cycle = schedule.cycle_start, schedule.cycle_end
    return rows, plan_arrays(
        schedule.start[rows], schedule.end[rows], schedule.size[rows], alignment=alignment, cycle=cycle, budget=budget
    )


def handovers(schedule: "Schedule", offset: Column) -> tuple[Column, Column]:
    """(earlier, later) schedule entries, ascending: of other streams, and the later one takes bytes of the earlier."""
    period = schedule.cycle_end - schedule.cycle_start
    uses = []
    for row in np.flatnonzero((offset >= 0) & (schedule.size > 0) & (schedule.start < schedule.end)).tolist():
        begin, low, high = int(schedule.start[row]), int(offset[row]), int(offset[row] + schedule.size[row])
        uses.append((begin, row, low, high))
        if row >= schedule.num_prologue:
            uses.append((begin + period, row, low, high))
    uses.sort()
    edges, owners = [0], [-1]  # owners[i] used the bytes [edges[i], edges[i + 1]) last
    pairs: set[tuple[int, int]] = set()
    for _, row, low, high in uses:
        for edge in (low, high):
            at = bisect_right(edges, edge)
            if edges[at - 1] != edge:
                edges.insert(at, edge)
                owners.insert(at, owners[at - 1])
        first, last = bisect_right(edges, low) - 1, bisect_right(edges, high) - 1
        pairs |= {
            (owner, row)
            for owner in owners[first:last]
            if owner >= 0 and schedule.stream[owner] != schedule.stream[row]
        }
        edges[first:last], owners[first:last] = [low], [row]
    columns = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return columns[:, 0].copy(), columns[:, 1].copy()
