"""Packings by groups: requests of one size, and requests born in one phase and dead in one phase.

Contract: each function returns offsets without overlap for lifespans in epochs. The groups are those of STAlloc (Huang
et al., EuroSys 2026, section 5): HomoPhase groups are packed by themselves and fused where that wastes no more bytes
over time; HomoSize groups are rows of equal height that serve one request after another.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.planner.problem import load_curve

#: share of the load's height by which it has to turn for a phase to end
TURN = 0.2
#: groups that are looked at for fusion
MAX_FUSED = 256

Pack = Callable[[Column, Column, Column], Column]  #: (start, end, size) to offsets


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


def by_size(start: Column, end: Column, size: Column, pack: Pack) -> Column:
    """Requests of equal size share rows; each row is then a block from its first birth to its last death."""
    groups: list[_Group] = []
    for each in distinct(size)[::-1].tolist():
        members = np.flatnonzero(size == each)
        members = members[np.argsort(start[members], kind="stable")]
        lanes: list[list[int]] = []
        free: list[tuple[int, int]] = []  # when a lane is free again, newest first among equals
        for row in members.tolist():
            if free and free[0][0] <= start[row]:
                _, lane = heapq.heappop(free)
                lanes[lane].append(row)
            else:
                lane = len(lanes)
                lanes.append([row])
            heapq.heappush(free, (int(end[row]), lane))
        for lane in range(len(lanes)):
            rows = np.array(lanes[lane])
            groups.append(_block(rows, np.zeros(len(rows), np.int64), start, end, each))
    return _placed(groups, len(size), pack)


def by_phase(start: Column, end: Column, size: Column, pack: Pack) -> Column:
    """Requests with equal phases of birth and death are packed together, fused where it pays, then placed as blocks."""
    edges = phase_edges(start, end, size)
    born, dies = np.searchsorted(edges, start, side="right"), np.searchsorted(edges, end, side="left")
    order = np.lexsort((dies, born))
    turns = np.flatnonzero((np.diff(born[order]) != 0) | (np.diff(dies[order]) != 0)) + 1
    groups = [_packed(rows, start, end, size, pack) for rows in np.split(order, turns)]
    return _placed(_fused(groups, start, end, size, pack), len(size), pack)


def phase_edges(start: Column, end: Column, size: Column) -> Column:
    """(k,) epochs at which the load turns by a good part of its height: from forward to backward, and back."""
    load = load_curve(start, end, size, int(end.max(initial=1)))
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


def _block(rows: Column, offset: Column, start: Column, end: Column, size: int) -> _Group:
    return _Group(rows, offset, int(start[rows].min()), int(end[rows].max()), size)


def _packed(rows: Column, start: Column, end: Column, size: Column, pack: Pack) -> _Group:
    offset = pack(start[rows], end[rows], size[rows])
    return _block(rows, offset, start, end, int((offset + size[rows]).max()))


def _fused(groups: list[_Group], start: Column, end: Column, size: Column, pack: Pack) -> list[_Group]:
    """Neighbours in time are packed together where the common block is no larger than the two."""
    groups = sorted(groups, key=lambda group: (group.start, group.end))
    if len(groups) > MAX_FUSED:
        return groups
    done: list[_Group] = []
    for group in groups:
        if done:
            both = _packed(np.concatenate([done[-1].rows, group.rows]), start, end, size, pack)
            if both.area <= done[-1].area + group.area:
                done[-1] = both
                continue
        done.append(group)
    return done


def _placed(groups: list[_Group], num_requests: int, pack: Pack) -> Column:
    columns = np.array([(group.start, group.end, group.size) for group in groups], np.int64)
    base = pack(columns[:, 0], columns[:, 1], columns[:, 2])
    offset = np.zeros(num_requests, np.int64)
    for group, bottom in zip(groups, base.tolist(), strict=True):
        offset[group.rows] = bottom + group.offset
    return offset
