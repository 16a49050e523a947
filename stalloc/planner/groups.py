"""Groups of requests that are placed as one block each, so that one placement stands for many.

The groups are those of STAlloc (Huang et al., EuroSys 2026, section 5). HomoSize groups are rows of equal height that
serve one request after another; HomoPhase groups are of requests that are born in one phase and die in one.

`by_size` and `by_phase` are packings as the paper has them, which fuses what wastes least over time. Where requests are
`Fused`, the blocks' load is nowhere above the limit given: what lies idle in a block is paid for out of what the load
leaves, since it is the load that the peak is held to. Boxes that may waste a bounded share are the way to bounds in
Buchsbaum et al., "OPT versus LOAD in dynamic storage allocation" (SIAM Journal on Computing, 2004).
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.compiled import BORROWING, njit
from stalloc.planner.placement import add_load, build_load, highest_load
from stalloc.planner.problem import Problem, compressed, load_curve

#: share of the load's height by which it has to turn for a phase to end
TURN = 0.2
#: groups that are looked at for fusion
MAX_FUSED = 256

Pack = Callable[[Problem], Column]  #: offsets of a problem


class _Group(NamedTuple):
    """Requests that are placed as one block."""

    rows: Column
    offset: Column  #: of the rows, from the block's bottom
    start: int
    end: int
    size: int

    @property
    def area(self) -> int:
        return (self.end - self.start) * self.size


def by_size(problem: Problem, pack: Pack) -> Column:
    """(n,) offsets: requests of equal size share rows; each is then a block from its first birth to its last death."""
    groups: list[_Group] = []
    for each in distinct(problem.size)[::-1].tolist():
        members = np.flatnonzero(problem.size == each)
        lanes: list[list[int]] = []
        free: list[tuple[int, int]] = []  # when a lane is free again, newest first among equals
        for row in members[np.argsort(problem.start[members], kind="stable")].tolist():
            if free and free[0][0] <= problem.start[row]:
                lane = heapq.heappop(free)[1]
            else:
                lane = len(lanes)
                lanes.append([])
            lanes[lane].append(row)
            heapq.heappush(free, (int(problem.end[row]), lane))
        groups += [_block(problem, np.array(rows), np.zeros(len(rows), np.int64), each) for rows in lanes]
    return _placed(groups, len(problem.size), pack)


def by_phase(problem: Problem, pack: Pack) -> Column:
    """(n,) offsets: equal phases of birth and death are packed together, neighbours in time fused where it pays."""
    born, dies = phases_of(problem, phase_edges(problem))
    order = np.lexsort((dies, born))
    turns = np.flatnonzero((np.diff(born[order]) != 0) | (np.diff(dies[order]) != 0)) + 1
    groups = [_packed(problem, rows, pack) for rows in np.split(order, turns)]
    groups.sort(key=lambda group: (group.start, group.end))
    if len(groups) <= MAX_FUSED:
        apart, groups = groups, []
        for group in apart:
            if groups:
                both = _packed(problem, np.concatenate([groups[-1].rows, group.rows]), pack)
                if both.area <= groups[-1].area + group.area:
                    groups[-1] = both
                    continue
            groups.append(group)
    return _placed(groups, len(problem.size), pack)


def phases_of(problem: Problem, edges: Column) -> tuple[Column, Column]:
    """(n,) the phases in which each request is born and dies; `edges` (k,) are the epochs at which phases begin."""
    return np.searchsorted(edges, problem.start, side="right"), np.searchsorted(edges, problem.end, side="left")


def phase_edges(problem: Problem) -> Column:
    """(k,) epochs at which the load turns by a good part of its height: from forward to backward, and back."""
    load = problem.load[: int(problem.end.max(initial=1))]
    swing = TURN * float(load.max(initial=0) - load.min(initial=0))
    edges, low, high, low_at, high_at, rising = [], load[0], load[0], 0, 0, True
    for epoch, level in enumerate(load.tolist()):
        if level > high:
            high, high_at = level, epoch
        if level < low:
            low, low_at = level, epoch
        if rising and level < high - swing:
            edges.append(high_at)
            rising, low, low_at = False, level, epoch
        elif not rising and level > low + swing:
            edges.append(low_at)
            rising, high, high_at = True, level, epoch
    return np.array(edges, np.int64)


def _block(problem: Problem, rows: Column, offset: Column, size: int) -> _Group:
    return _Group(rows, offset, int(problem.start[rows].min()), int(problem.end[rows].max()), size)


def _packed(problem: Problem, rows: Column, pack: Pack) -> _Group:
    size = problem.size[rows]
    offset = pack(compressed(problem.start[rows], problem.end[rows], size))
    return _block(problem, rows, offset, int((offset + size).max()))


def _placed(groups: list[_Group], num_requests: int, pack: Pack) -> Column:
    columns = np.array([(group.start, group.end, group.size) for group in groups], np.int64)
    base = pack(compressed(*columns.T))
    offset = np.zeros(num_requests, np.int64)
    for group, bottom in zip(groups, base.tolist(), strict=True):
        offset[group.rows] = bottom + group.offset
    return offset


@dataclass(frozen=True, eq=False)
class Fused:
    """A problem of m blocks that stands for n requests."""

    problem: Problem
    block: Column  #: (n,) block of each request
    above: Column  #: (n,) bytes of the block that lie below the request

    def offsets(self, offset: Column) -> Column:
        """(n,) bytes: where the requests lie if the blocks lie at `offset` (m,)."""
        return offset[self.block] + self.above


def single(problem: Problem) -> Fused:
    """Every request by itself."""
    count = len(problem.size)
    return Fused(problem, np.arange(count), np.zeros(count, np.int64))


def in_rows(problem: Problem, limit: Column) -> Fused:
    """Rows of requests of one size, each of which begins when the one before it has ended.

    `limit` is (T,) bytes that floor and load may reach.
    """
    count, num_epochs = len(problem.size), len(problem.floor)
    by_start = np.lexsort((problem.start - problem.end, problem.start, -problem.size))
    by_end = np.lexsort((problem.end, -problem.size))
    turns = np.flatnonzero(np.diff(problem.size[by_start])) + 1
    edges = np.concatenate([[0], turns, [count]]).astype(np.int64)
    # what may still be wasted is tracked as a load: that of the requests, and the limit's shortfall from its maximum
    everywhere = np.arange(num_epochs)
    highest = int(limit.max())
    load = build_load(
        np.concatenate([problem.start, everywhere]),
        np.concatenate([problem.end, everywhere + 1]),
        np.concatenate([problem.size, highest - limit + problem.floor]),
        num_epochs,
    )
    row = np.empty(count, np.int64)
    num_rows = _join(
        (problem.start, problem.end, problem.size), by_start, by_end, edges, load, highest, row, by_end.copy()
    )
    return _of_blocks(problem, row, np.zeros(count, np.int64), problem.size, int(num_rows))


def in_blocks(fused: Fused, limit: Column, edges: Column) -> Fused:
    """The rows of one size with equal phases of birth and death as one block, what wastes least first.

    `edges` (k,) are the epochs at which phases begin.
    """
    rows = fused.problem
    born, dies = phases_of(rows, edges)
    order = np.lexsort((rows.start, rows.size, dies, born))
    turns = np.flatnonzero(np.diff(np.stack([born, dies, rows.size])[:, order]).any(axis=0)) + 1
    groups = [group for group in np.split(order, turns) if len(group) > 1]
    load = rows.floor + rows.load
    leader, above = np.arange(len(rows.size)), np.zeros(len(rows.size), np.int64)
    for group in sorted(groups, key=lambda group: _idle(rows, group)):
        first, last = int(rows.start[group].min()), int(rows.end[group].max())
        total = int(rows.size[group].sum())
        own = load_curve(rows.start[group] - first, rows.end[group] - first, rows.size[group], last - first)
        whole = load[first:last] - own + total
        if (whole <= limit[first:last]).all():
            load[first:last] = whole
            leader[group] = group[0]
            above[group] = np.cumsum(rows.size[group]) - rows.size[group]
    leads = leader == np.arange(len(leader))
    block = (np.cumsum(leads) - 1)[leader]
    height = np.zeros(len(block), np.int64)
    np.add.at(height, block, rows.size)
    blocks = _of_blocks(rows, block, above, height[block], int(block.max(initial=-1)) + 1)
    return Fused(blocks.problem, block[fused.block], above[fused.block] + fused.above)


def _idle(rows: Problem, group: Column) -> int:
    """Bytes times epochs that the rows of a group leave idle in a block of them all."""
    span = int(rows.end[group].max() - rows.start[group].min())
    return int((span - (rows.end - rows.start)[group]).sum()) * int(rows.size[group[0]])


def _of_blocks(problem: Problem, block: Column, above: Column, height: Column, num_blocks: int) -> Fused:
    """Blocks as long as all of their members; `height` is (n,) that of each member's block."""
    start, end, size = (
        np.full(num_blocks, len(problem.floor)),
        np.zeros(num_blocks, np.int64),
        np.zeros(num_blocks, np.int64),
    )
    np.minimum.at(start, block, problem.start)
    np.maximum.at(end, block, problem.end)
    size[block] = height
    return Fused(Problem(start, end, size, problem.floor), block, above)


@njit(nogil=True, **BORROWING)
def _join(requests, by_start, by_end, edges, loads, limit, row, free):
    """Write (n,) rows, of requests whose sizes turn at `edges` in both orders; how many rows there are.

    Of the rows that are free, the one that ended last is tried. If its gap cannot be paid for, no gap of a row that
    ended earlier can, now or later, since those gaps hold this one.
    """
    start, end, size = requests
    load, pending = loads
    num_rows = 0
    for k in range(len(edges) - 1):
        num_free, next_end = 0, edges[k]
        for place in range(edges[k], edges[k + 1]):
            i = by_start[place]
            while next_end < edges[k + 1] and end[by_end[next_end]] <= start[i]:
                free[num_free] = by_end[next_end]
                num_free += 1
                next_end += 1
            joins = False
            if num_free > 0:
                before = free[num_free - 1]
                joins = end[before] == start[i]
                if not joins and highest_load(load, pending, end[before], start[i])[0] + size[i] <= limit:
                    joins = True
                    add_load(load, pending, end[before], start[i], size[i])
            if joins:
                num_free -= 1
                row[i] = row[free[num_free]]
            else:
                num_free = 0
                row[i] = num_rows
                num_rows += 1
    return num_rows
