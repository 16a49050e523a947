"""The STAlloc paper's planner for static requests: HomoPhase groups, their fusion, HomoSize layers.

Source: Huang et al., "STAlloc: Enhancing Memory Efficiency in Large-Scale Model Training with Spatio-Temporal
Planning", EuroSys 2026, the sections on offline planning. Requests with the same phases of birth and death form a
group that is packed by itself, the longest-lived first; a group is fused into another where that wastes less memory x
time than keeping them apart; groups of one size share memory layers, in which no two are live together; sizes are
taken from the largest down, and a group goes into an idle space of the layers there are before a new layer is made.
The better of this and of layers of single requests is kept, as their planner chooses between two ways.
Ours where nothing but lifespans is given: a phase ends where the load has turned back by a twentieth of its range;
and each group is tried for fusion with the few that most tightly hold its time.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.compiled import njit

from .placing import Column, stack_in_order, ticks

TURN = 0.05
#: hosts that a group is tried with
HOSTS = 4
#: with more requests only groups are tried
MAX_SINGLES = 120_000
CHUNK = 64


@dataclass(eq=False)
class _Group:
    """Requests packed together: a box of `height` bytes, live during [start, end)."""

    rows: Column
    offset: Column
    start: int
    end: int
    height: int

    @property
    def area(self) -> int:
        return self.height * (self.end - self.start)


def place(start: Column, end: Column, size: Column, phase_edges: Column | None = None) -> Column:
    """(n,) offsets. `phase_edges` are the events at which phases begin, if they are known."""
    if len(size) == 0:
        return np.zeros(0, np.int64)
    if phase_edges is None:
        phase_edges = find_edges(start, end, size)
    born = np.searchsorted(phase_edges, start, side="right")
    dies = np.searchsorted(phase_edges, end - 1, side="right")
    order = np.lexsort([dies, born])
    splits = np.flatnonzero((np.diff(born[order]) != 0) | (np.diff(dies[order]) != 0)) + 1
    groups = _fused([_packed(rows, start, end, size) for rows in np.split(order, splits)], start, end, size)
    begins, ends, heights = np.array([(group.start, group.end, group.height) for group in groups]).T.copy()
    grouped = np.zeros(len(size), np.int64)
    bases = _layered(begins, ends, heights, np.lexsort([begins, -heights]))
    for group, base in zip(groups, bases.tolist(), strict=True):
        grouped[group.rows] = base + group.offset
    if len(size) > MAX_SINGLES:
        return grouped
    single = _layered(start, end, size, np.lexsort([start, -size]))
    return min((grouped, single), key=lambda offset: int((offset + size).max()))


def find_edges(start: Column, end: Column, size: Column) -> Column:
    """Events at which the load turns by a twentieth of its range, the first event included."""
    events, inverse = np.unique(np.concatenate([start, end]), return_inverse=True)
    change = np.zeros(len(events), np.int64)
    np.add.at(change, inverse, np.concatenate([size, -size]))
    return events[_turns(np.cumsum(change), TURN)]


@njit(nogil=True)
def _turns(load, share):
    turns = np.zeros(len(load) + 1, np.int64)
    count, low, high, rises = 1, 0, 0, True
    threshold = max(int((load.max() - load.min()) * share), 1)
    for i in range(len(load)):
        if load[i] > load[high]:
            high = i
        if load[i] < load[low]:
            low = i
        if rises and load[high] - load[i] >= threshold:
            turns[count] = high
            count, low, rises = count + 1, i, False
        elif not rises and load[i] - load[low] >= threshold:
            turns[count] = low
            count, high, rises = count + 1, i, True
    return np.unique(turns[:count])


def _packed(rows: Column, start: Column, end: Column, size: Column) -> _Group:
    first, last, num_ticks = ticks(start[rows], end[rows])
    order = np.lexsort([-size[rows], start[rows] - end[rows]])
    offset = stack_in_order(first, last, size[rows], order, num_ticks)
    height = int((offset + size[rows]).max())
    return _Group(rows, offset, int(start[rows].min()), int(end[rows].max()), height)


def _fused(groups: list[_Group], start: Column, end: Column, size: Column) -> list[_Group]:
    """Each group, the smallest first, fused into one that holds its time if their box is no more than both."""
    groups = sorted(groups, key=lambda group: (group.area, group.start))
    alive = np.ones(len(groups), bool)
    begins = np.array([group.start for group in groups])
    ends = np.array([group.end for group in groups])
    for k, group in enumerate(groups):
        holds = np.flatnonzero(alive & (begins <= group.start) & (ends >= group.end))
        holds = holds[holds > k]
        for host in holds[np.argsort(ends[holds] - begins[holds], kind="stable")][:HOSTS].tolist():
            both = _packed(np.concatenate([groups[host].rows, group.rows]), start, end, size)
            if both.area <= groups[host].area + group.area and both.height < groups[host].height + group.height:
                groups[host], alive[k] = both, False
                break
    return [group for k, group in enumerate(groups) if alive[k]]


@njit(nogil=True)
def _layered(start, end, height, order):
    """(n,) offsets of boxes: each in the first layer with room above what it meets there, else in a new layer.

    What is placed in a layer is kept in chunks that know the time they span.
    """
    count = len(start)
    most = count + count // CHUNK + 1
    begin = np.empty((most, CHUNK), np.int64)
    stop = np.empty((most, CHUNK), np.int64)
    top = np.empty((most, CHUNK), np.int64)
    held = np.zeros(most, np.int64)
    earliest = np.empty(most, np.int64)
    latest = np.empty(most, np.int64)
    following = np.full(most, -1, np.int64)  # the next chunk of the same layer
    first_chunk = np.empty(count, np.int64)
    last_chunk = np.empty(count, np.int64)
    room = np.empty(count, np.int64)
    base = np.empty(count, np.int64)
    num_layers, num_chunks, total = 0, 0, np.int64(0)
    offset = np.zeros(count, np.int64)
    for i in order:
        a, b, wanted = start[i], end[i], height[i]
        level = np.int64(0)
        home = -1
        for layer in range(num_layers):
            level = np.int64(0)
            chunk = first_chunk[layer]
            while chunk >= 0 and level + wanted <= room[layer]:
                if earliest[chunk] < b and latest[chunk] > a:
                    for j in range(held[chunk]):
                        if begin[chunk, j] < b and stop[chunk, j] > a:
                            level = max(level, top[chunk, j])
                chunk = following[chunk]
            if level + wanted <= room[layer]:
                home = layer
                break
        if home < 0:
            home, level = num_layers, np.int64(0)
            room[home], base[home] = wanted, total
            total += wanted
            first_chunk[home] = last_chunk[home] = -1
            num_layers += 1
        chunk = last_chunk[home]
        if chunk < 0 or held[chunk] == CHUNK:
            new = num_chunks
            num_chunks += 1
            if chunk < 0:
                first_chunk[home] = new
            else:
                following[chunk] = new
            last_chunk[home] = chunk = new
            earliest[chunk], latest[chunk] = a, b
        j = held[chunk]
        begin[chunk, j], stop[chunk, j], top[chunk, j] = a, b, level + wanted
        held[chunk] += 1
        earliest[chunk], latest[chunk] = min(earliest[chunk], a), max(latest[chunk], b)
        offset[i] = base[home] + level
    return offset
