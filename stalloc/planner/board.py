"""A problem that exact search places request by request, and takes back again.

Contract: the floor of an epoch is the lowest offset that any of its unplaced requests can still have. Every change
since a mark is on the trail, so that `take_back` restores the board as it was, but for what was learnt (weight,
refuted, the lowest excess).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stalloc.columns import Column
from stalloc.compiled import BORROWING, inner, njit
from stalloc.planner.problem import Problem

NEVER = np.int64(1) << 62

#: one level of the search: a range of epochs, no unplaced lifespan crosses its ends
FRAME = np.dtype(
    [
        ("begin", np.int64),  # the range of epochs
        ("stop", np.int64),
        ("height", np.int64),  # to be kept
        ("epoch", np.int64),  # to branch on
        ("level", np.int64),  # its floor
        ("candidates", np.int64),  # the first of its own in Board.candidates
        ("count", np.int64),  # candidates; -1: nothing to branch on
        ("branch", np.int64),  # the next to try
        ("trail", np.int64),  # marks to take back to
        ("placed", np.int64),
        ("cursor", np.int64),  # epochs before it are packed
        ("slot", np.int64),  # of its state in Board.refuted
        ("key", np.uint64),
    ]
)

#: where the search is
CONTROL = np.dtype(
    [
        ("mode", np.int64),
        ("depth", np.int64),
        ("result", np.int64),  # of the range that was looked at last
        ("nodes", np.int64),  # since the search began
        ("step", np.int64),  # counts changes
        ("trail", np.int64),  # entries used
        ("placed", np.int64),
        ("candidates", np.int64),
        ("excess", np.int64),  # the least by which a branch exceeded the height
    ]
)


class Board(NamedTuple):
    """A problem, how far it is placed, and the way back. n requests, T epochs, m pairs of a request and its epochs."""

    start: Column  #: (n,)
    end: Column  #: (n,)
    size: Column  #: (n,)
    alike: Column  #: (n,) equal for requests of equal lifespan and size
    rank: Column  #: (n,) which candidate first
    least: Column  #: (n,) lowest offset that is still possible: the highest floor of its epochs
    offset: Column  #: (n,)
    placed: Column  #: (n,) 0 or 1
    by_start: Column  #: (n,) rows in order of start
    starts_below: Column  #: (T + 2,)
    first_member: Column  #: (T + 1,) into member
    member: Column  #: (m,) rows live in each epoch, the unplaced ones first
    first_where: Column  #: (n + 1,) into where
    where: Column  #: (m,) place of a request in the members of each of its epochs
    live: Column  #: (T,) unplaced requests
    floor: Column  #: (T,) lowest offset of any unplaced request
    flush: Column  #: (T,) unplaced requests that can lie on the floor
    unplaced: Column  #: (T,) bytes
    crossing: Column  #: (T + 1,) unplaced requests live on both sides of the epoch's beginning
    fingerprint: NDArray[np.uint64]  #: (T,) of the placed requests that start there
    stamp: Column  #: (T,) step that put the epoch on the trail last
    weight: NDArray[np.float64]  #: (T,) failures seen there
    salt: NDArray[np.uint64]  #: (2 T,)
    salt_of_kind: NDArray[np.uint64]  #: (n,)
    refuted: NDArray[np.uint64]  #: (power of two,) states without a packing
    trail: NDArray[np.int64]  #: (any, 3)
    placed_rows: Column  #: (n,)
    candidates: Column  #: (any,)
    frames: NDArray[np.void]  #: (any,) of FRAME
    control: NDArray[np.void]  #: (1,) of CONTROL


def board(problem: Problem, seed: int, *, room: int = 1) -> Board:
    """An empty board of a problem; `room` times the usual space for the way back."""
    count, num_epochs = len(problem.size), len(problem.floor)
    span = problem.end - problem.start
    generator = np.random.default_rng(seed)
    _, alike = np.unique(np.stack([problem.start, problem.end, problem.size]), axis=1, return_inverse=True)
    alike = alike.reshape(-1).astype(np.int64)
    num_members = int(span.sum())
    starts_below = np.zeros(num_epochs + 2, np.int64)
    np.add.at(starts_below, problem.start + 1, 1)
    salt_of_kind = generator.integers(1 << 63, size=count, dtype=np.uint64) | np.uint64(1)
    made = Board(
        start=problem.start,
        end=problem.end,
        size=problem.size,
        alike=alike,
        rank=np.arange(count),
        least=np.zeros(count, np.int64),
        offset=np.zeros(count, np.int64),
        placed=np.zeros(count, np.int64),
        by_start=np.argsort(problem.start, kind="stable"),
        starts_below=np.cumsum(starts_below),
        first_member=np.zeros(num_epochs + 1, np.int64),
        member=np.zeros(num_members, np.int64),
        first_where=np.concatenate([[0], np.cumsum(span)]),
        where=np.zeros(num_members, np.int64),
        live=np.zeros(num_epochs, np.int64),
        floor=problem.floor.copy(),
        flush=np.zeros(num_epochs, np.int64),
        unplaced=np.zeros(num_epochs, np.int64),
        crossing=np.zeros(num_epochs + 1, np.int64),
        fingerprint=np.zeros(num_epochs, np.uint64),
        stamp=np.zeros(num_epochs, np.int64),
        weight=np.zeros(num_epochs, np.float64),
        salt=generator.integers(1 << 63, size=2 * num_epochs, dtype=np.uint64) * np.uint64(2) + np.uint64(1),
        salt_of_kind=salt_of_kind[alike],
        refuted=np.zeros(1 << 18, np.uint64),
        trail=np.zeros((room * 200 * (count + num_epochs) + 1000, 3), np.int64),
        placed_rows=np.zeros(count, np.int64),
        candidates=np.zeros(room * 200 * count + 1000, np.int64),
        frames=np.zeros(room * 2 * (count + num_epochs) + 100, FRAME),
        control=np.zeros(1, CONTROL),
    )
    _set_up(made)
    return made


@njit(nogil=True, **BORROWING)
def _set_up(b: Any) -> None:
    """Members of every epoch, loads, and the floor as the lowest possible offset of what is live."""
    num_epochs = len(b.floor)
    for i in range(len(b.size)):
        for t in range(b.start[i], b.end[i]):
            b.live[t] += 1
            b.unplaced[t] += b.size[i]
            b.least[i] = max(b.least[i], b.floor[t])
        for t in range(b.start[i] + 1, b.end[i]):
            b.crossing[t] += 1
    for t in range(num_epochs):
        b.first_member[t + 1] = b.first_member[t] + b.live[t]
        b.live[t] = 0
    for i in range(len(b.size)):
        for t in range(b.start[i], b.end[i]):
            place = b.first_member[t] + b.live[t]
            b.member[place] = i
            b.where[b.first_where[i] + t - b.start[i]] = place
            b.live[t] += 1
    for t in range(num_epochs):
        _set_floor(b, t)


@inner(nogil=True, **BORROWING)
def _set_floor(b: Any, t: int) -> None:
    """The floor of an epoch as the least offset of its unplaced requests, and how many of them have it."""
    lowest, count = NEVER, 0
    first = b.first_member[t]
    for k in range(first, first + b.live[t]):
        least = b.least[b.member[k]]
        if least < lowest:
            lowest, count = least, 1
        elif least == lowest:
            count += 1
    if count:
        b.floor[t] = lowest
    b.flush[t] = count


@inner(nogil=True, **BORROWING)
def _remember(b: Any, t: int) -> None:
    """Put an epoch on the trail, once a step."""
    if b.stamp[t] != b.control[0].step:
        b.stamp[t] = b.control[0].step
        top = b.control[0].trail
        b.trail[top, 0], b.trail[top, 1], b.trail[top, 2] = t, b.floor[t], b.flush[t]
        b.control[0].trail = top + 1


@inner(nogil=True, **BORROWING)
def _lift(b: Any, i: int, level: int) -> None:
    """Request i cannot be below `level` any more."""
    top = b.control[0].trail
    least = b.least[i]
    b.trail[top, 0], b.trail[top, 1] = -i - 1, least
    b.control[0].trail = top + 1
    b.least[i] = level
    for t in range(b.start[i], b.end[i]):
        if b.floor[t] == least:
            _remember(b, t)
            b.flush[t] -= 1


@inner(nogil=True, **BORROWING)
def take(b: Any, i: int, offset: int) -> None:
    """Request i is placed: no longer among what its epochs wait for."""
    b.placed[i] = 1
    b.offset[i] = offset
    b.placed_rows[b.control[0].placed] = i
    b.control[0].placed += 1
    b.fingerprint[b.start[i]] += b.salt_of_kind[i]
    base = b.first_where[i] - b.start[i]
    for t in range(b.start[i], b.end[i]):
        b.unplaced[t] -= b.size[i]
        b.live[t] -= 1
        mine, last = b.where[base + t], b.first_member[t] + b.live[t]
        other = b.member[last]
        b.member[mine], b.member[last] = other, i
        b.where[b.first_where[other] + t - b.start[other]] = mine
        b.where[base + t] = last
        if b.floor[t] == b.least[i]:
            _remember(b, t)
            b.flush[t] -= 1
    for t in range(b.start[i] + 1, b.end[i]):
        b.crossing[t] -= 1


@inner(nogil=True, **BORROWING)
def settle(b: Any, begin: int, stop: int, height: int) -> bool:
    """New floors where nothing can lie on the old one; False if what is unplaced exceeds the height somewhere."""
    for t in range(begin, stop):
        if b.live[t] > 0 and b.flush[t] == 0:
            _set_floor(b, t)
            if b.floor[t] + b.unplaced[t] > height:
                b.weight[t] += 1.0
                b.control[0].excess = min(b.control[0].excess, b.floor[t] + b.unplaced[t] - height)
                return False
    return True


@inner(nogil=True, **BORROWING)
def lay(b: Any, i: int, level: int, height: int) -> bool:
    """Lay request i on the floor; what overlaps it in time goes above it."""
    b.control[0].step += 1
    take(b, i, level)
    top = level + b.size[i]
    begin, stop = b.start[i], b.end[i]
    first = b.first_member[begin]
    for k in range(first, first + b.live[begin]):
        j = b.member[k]
        if b.least[j] < top:
            _lift(b, j, top)
            begin = min(begin, b.start[j])
            stop = max(stop, b.end[j])
    for k in range(b.starts_below[b.start[i] + 1], b.starts_below[b.end[i]]):
        j = b.by_start[k]
        if b.placed[j] == 0 and b.least[j] < top:
            _lift(b, j, top)
            stop = max(stop, b.end[j])
    return settle(b, begin, stop, height)


@inner(nogil=True, **BORROWING)
def waste(b: Any, epoch: int, level: int, height: int) -> bool:
    """Nothing lies below `level` in this epoch."""
    b.control[0].step += 1
    begin, stop = epoch, epoch + 1
    first = b.first_member[epoch]
    for k in range(first, first + b.live[epoch]):
        j = b.member[k]
        if b.least[j] < level:
            _lift(b, j, level)
            begin = min(begin, b.start[j])
            stop = max(stop, b.end[j])
    return settle(b, begin, stop, height)


@inner(nogil=True, **BORROWING)
def take_back(b: Any, trail: int, placed: int) -> None:
    """Undo down to the given marks."""
    for k in range(b.control[0].placed - 1, placed - 1, -1):
        i = b.placed_rows[k]
        b.placed[i] = 0
        b.fingerprint[b.start[i]] -= b.salt_of_kind[i]
        for t in range(b.start[i], b.end[i]):
            b.unplaced[t] += b.size[i]
            b.live[t] += 1
        for t in range(b.start[i] + 1, b.end[i]):
            b.crossing[t] += 1
    b.control[0].placed = placed
    for k in range(b.control[0].trail - 1, trail - 1, -1):
        entry = b.trail[k, 0]
        if entry < 0:
            b.least[-entry - 1] = b.trail[k, 1]
        else:
            b.floor[entry], b.flush[entry] = b.trail[k, 1], b.trail[k, 2]
    b.control[0].trail = trail
    b.control[0].step += 1
