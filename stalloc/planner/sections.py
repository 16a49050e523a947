"""Exact search for a packing below a given height: depth first over what lies lowest in an epoch.

Contract: FOUND leaves offsets of a packing that keeps the height, NONE is said only when no packing does (but for a
collision of 64-bit hashes), and anything else decides nothing. Effort is counted in nodes, so that equal input and
seed give equal output; a search that has used up its nodes can be continued or begun again.

Every packing can be pushed down until each request rests on the floor or on another. So take an epoch in a valley of
the floor: what is lowest there either lies on the floor, which gives a branch for each request that can, or the floor
of this epoch rises to the next height at which something can rest. Floor + unplaced bytes above the height anywhere
ends a branch (section-wise inference of MiniMalloc: Moffitt, ASPLOS 2023). What is left falls apart where no unplaced
lifespan crosses; a request that lives through all of such a range can go to its top.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stalloc.columns import Column
from stalloc.compiled import njit
from stalloc.planner.problem import Problem

FOUND, NONE, PAUSED, NO_ROOM = 1, 0, -1, -2

#: columns of a frame, one level of the search
_BEGIN, _STOP, _HEIGHT, _EPOCH, _LEVEL, _CANDIDATES, _COUNT, _BRANCH, _TRAIL, _PLACED, _CURSOR = range(11)
_SLOT, _KEY, _WIDTH = 11, 12, 13

#: entries of the control record
_MODE, _DEPTH, _NODES, _STEP, _TRAIL_TOP, _PLACED_TOP, _CANDIDATES_TOP, _RESULT, _EXCESS = range(9)
_ENTER, _BRANCH_NEXT, _SPLIT, _LEAVE = range(4)

#: how the epoch to branch on is chosen
TIGHTEST, FEWEST, WEIGHTED, VALLEYS = range(4)

_ODD = np.uint64(0x9E3779B97F4A7C15)
_ODD2 = np.uint64(0xD6E8FEB86659FD93)
_NEVER = np.int64(1) << 62


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
    frames: NDArray[np.int64]  #: (any, 13)
    control: Column  #: (9,)


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
        frames=np.zeros((room * 2 * (count + num_epochs) + 100, _WIDTH), np.int64),
        control=np.zeros(9, np.int64),
    )
    _set_up(made)
    return made


@njit(nogil=True)
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


@njit(nogil=True)
def _set_floor(b: Any, t: int) -> None:
    """The floor of an epoch as the least offset of its unplaced requests, and how many of them have it."""
    lowest, count = _NEVER, 0
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


@njit(nogil=True)
def _remember(b: Any, t: int) -> None:
    """Put an epoch on the trail, once a step."""
    if b.stamp[t] != b.control[_STEP]:
        b.stamp[t] = b.control[_STEP]
        top = b.control[_TRAIL_TOP]
        b.trail[top, 0], b.trail[top, 1], b.trail[top, 2] = t, b.floor[t], b.flush[t]
        b.control[_TRAIL_TOP] = top + 1


@njit(nogil=True)
def _lift(b: Any, i: int, level: int) -> None:
    """Request i cannot be below `level` any more."""
    top = b.control[_TRAIL_TOP]
    least = b.least[i]
    b.trail[top, 0], b.trail[top, 1] = -i - 1, least
    b.control[_TRAIL_TOP] = top + 1
    b.least[i] = level
    for t in range(b.start[i], b.end[i]):
        if b.floor[t] == least:
            _remember(b, t)
            b.flush[t] -= 1


@njit(nogil=True)
def _take(b: Any, i: int, offset: int) -> None:
    """Request i is placed: no longer among what its epochs wait for."""
    b.placed[i] = 1
    b.offset[i] = offset
    b.placed_rows[b.control[_PLACED_TOP]] = i
    b.control[_PLACED_TOP] += 1
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


@njit(nogil=True)
def _settle(b: Any, begin: int, stop: int, height: int) -> bool:
    """New floors where nothing can lie on the old one; False if what is unplaced exceeds the height somewhere."""
    for t in range(begin, stop):
        if b.live[t] > 0 and b.flush[t] == 0:
            _set_floor(b, t)
            if b.floor[t] + b.unplaced[t] > height:
                b.weight[t] += 1.0
                b.control[_EXCESS] = min(b.control[_EXCESS], b.floor[t] + b.unplaced[t] - height)
                return False
    return True


@njit(nogil=True)
def _lay(b: Any, i: int, level: int, height: int) -> bool:
    """Lay request i on the floor; what overlaps it in time goes above it."""
    b.control[_STEP] += 1
    _take(b, i, level)
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
    return _settle(b, begin, stop, height)


@njit(nogil=True)
def _waste(b: Any, epoch: int, level: int, height: int) -> bool:
    """Nothing lies below `level` in this epoch."""
    b.control[_STEP] += 1
    begin, stop = epoch, epoch + 1
    first = b.first_member[epoch]
    for k in range(first, first + b.live[epoch]):
        j = b.member[k]
        if b.least[j] < level:
            _lift(b, j, level)
            begin = min(begin, b.start[j])
            stop = max(stop, b.end[j])
    return _settle(b, begin, stop, height)


@njit(nogil=True)
def _take_back(b: Any, trail: int, placed: int) -> None:
    """Undo down to the given marks."""
    for k in range(b.control[_PLACED_TOP] - 1, placed - 1, -1):
        i = b.placed_rows[k]
        b.placed[i] = 0
        b.fingerprint[b.start[i]] -= b.salt_of_kind[i]
        for t in range(b.start[i], b.end[i]):
            b.unplaced[t] += b.size[i]
            b.live[t] += 1
        for t in range(b.start[i] + 1, b.end[i]):
            b.crossing[t] += 1
    b.control[_PLACED_TOP] = placed
    for k in range(b.control[_TRAIL_TOP] - 1, trail - 1, -1):
        entry = b.trail[k, 0]
        if entry < 0:
            b.least[-entry - 1] = b.trail[k, 1]
        else:
            b.floor[entry], b.flush[entry] = b.trail[k, 1], b.trail[k, 2]
    b.control[_TRAIL_TOP] = trail
    b.control[_STEP] += 1


@njit(nogil=True)
def _state(b: Any, begin: int, stop: int, height: int) -> np.uint64:
    """Hash of what decides whether the range can be packed below the height: what is unplaced, and the floor."""
    num_epochs = len(b.floor)
    key = (np.uint64(begin) * np.uint64(1000003) + np.uint64(stop)) * _ODD ^ np.uint64(height) * _ODD2
    for t in range(begin, stop):
        x = np.uint64(b.floor[t] + 1) * b.salt[t]
        y = b.fingerprint[t] * b.salt[num_epochs + t]
        key += (x ^ (x >> np.uint64(31))) * _ODD2 + (y ^ (y >> np.uint64(29)))
    return key | np.uint64(1)


@njit(nogil=True)
def _choose(b: Any, begin: int, stop: int, height: int, rule: int) -> int:
    """The epoch to branch on: in a valley of the floor; the lowest one unless the rule is VALLEYS."""
    lowest = _NEVER
    for t in range(begin, stop):
        lowest = min(lowest, b.floor[t])
    chosen, best, best_slack = -1, np.inf, _NEVER
    t = begin
    while t < stop:
        level = b.floor[t]
        run = t + 1
        while run < stop and b.floor[run] == level:
            run += 1
        valley = level == lowest
        if rule == VALLEYS:
            valley = (t == begin or b.floor[t - 1] > level) and (run == stop or b.floor[run] > level)
        if valley:
            for u in range(t, run):
                slack = height - level - b.unplaced[u]
                branches = b.flush[u] + (1 if slack > 0 else 0)
                if rule == TIGHTEST:
                    cost = 0.0
                elif rule == FEWEST:
                    cost = float(branches)
                else:
                    cost = 0.0 if branches <= 1 else branches / (b.weight[u] + 1.0)
                if cost < best or (cost == best and slack < best_slack):
                    chosen, best, best_slack = u, cost, slack
        t = run
    return chosen


@njit(nogil=True)
def _next_level(b: Any, epoch: int, level: int) -> int:
    """The lowest height above the floor on which a request of this epoch can come to rest if none lies on the floor.

    It would lie on one that cannot be lower, or on an unplaced one that is not live in this epoch.
    """
    found = _NEVER
    first = b.first_member[epoch]
    for k in range(first, first + b.live[epoch]):
        i = b.member[k]
        if b.least[i] > level:
            found = min(found, b.least[i])
    for k in range(first, first + b.live[epoch]):
        i = b.member[k]
        if b.least[i] > level:
            continue
        begin = b.first_member[b.start[i]]
        for q in range(begin, begin + b.live[b.start[i]]):
            j = b.member[q]
            if b.end[j] <= epoch:
                found = min(found, b.least[j] + b.size[j])
        for q in range(b.starts_below[b.start[i] + 1], b.starts_below[b.end[i]]):
            j = b.by_start[q]
            if b.placed[j] == 0 and (b.end[j] <= epoch or b.start[j] > epoch):
                found = min(found, b.least[j] + b.size[j])
    return int(found)


@njit(nogil=True)
def begin_search(b: Any, height: int) -> None:
    """Back to the empty board, to look for a packing below `height`; what was learnt stays."""
    _take_back(b, 0, 0)
    b.control[_NODES] = 0
    b.control[_CANDIDATES_TOP] = 0
    b.control[_DEPTH] = 0
    b.control[_MODE] = _SPLIT
    b.control[_RESULT] = NONE
    frame = b.frames[0]
    if frame[_HEIGHT] != height:
        b.control[_EXCESS] = _NEVER
    frame[:] = 0
    frame[_STOP], frame[_HEIGHT], frame[_COUNT] = len(b.floor), height, -1
    for t in range(len(b.floor)):
        if b.floor[t] + b.unplaced[t] > height:
            b.control[_MODE] = _LEAVE
            b.control[_EXCESS] = min(b.control[_EXCESS], b.floor[t] + b.unplaced[t] - height)


def nodes(b: Board) -> int:
    """How many nodes the search has seen since it began."""
    return int(b.control[_NODES])


def next_height(b: Board) -> int:
    """After NONE: the lowest height that is not excluded; every branch exceeded by at least the difference."""
    return int(b.frames[0, _HEIGHT] + b.control[_EXCESS])


@njit(nogil=True)
def search(b: Any, rule: int, num_nodes: int) -> int:
    """Go on for `num_nodes` more nodes: FOUND, NONE, PAUSED, or NO_ROOM if the way back needs a larger board."""
    limit = b.control[_NODES] + num_nodes
    depth = b.control[_DEPTH]
    mode = b.control[_MODE]
    result = b.control[_RESULT]
    count, num_epochs = len(b.size), len(b.floor)
    while True:
        f = b.frames[depth]
        if mode == _ENTER:
            status = 0
            if b.control[_NODES] >= limit:
                status = PAUSED
            elif (
                depth + 2 >= len(b.frames)
                or b.control[_TRAIL_TOP] + 2 * (count + num_epochs) >= len(b.trail)
                or b.control[_CANDIDATES_TOP] + count + 1 >= len(b.candidates)
            ):
                status = NO_ROOM
            if status:
                b.control[_DEPTH], b.control[_MODE], b.control[_RESULT] = depth, mode, result
                return status
            b.control[_NODES] += 1
            begin, stop, height = f[_BEGIN], f[_STOP], f[_HEIGHT]
            f[_TRAIL], f[_PLACED], f[_CURSOR] = b.control[_TRAIL_TOP], b.control[_PLACED_TOP], begin
            f[_CANDIDATES], f[_COUNT], f[_BRANCH] = b.control[_CANDIDATES_TOP], -1, 0
            # what lives through the whole range goes to its top
            first = b.first_member[begin]
            k = first
            b.control[_STEP] += 1
            while k < first + b.live[begin]:
                i = b.member[k]
                if b.end[i] >= stop and b.start[i] <= begin:
                    height -= b.size[i]
                    _take(b, i, height)
                else:
                    k += 1
            if height < f[_HEIGHT]:
                f[_HEIGHT] = height
                mode = _SPLIT
                if not _settle(b, begin, stop, height):
                    result, mode = NONE, _LEAVE
                continue
            key = _state(b, begin, stop, height)
            slot = np.int64((key ^ (key >> np.uint64(32))) & np.uint64(len(b.refuted) - 1))
            f[_SLOT], f[_KEY] = slot, np.int64(key)
            if b.refuted[slot] == key:
                result, mode = NONE, _LEAVE
                continue
            epoch = _choose(b, begin, stop, height, rule)
            level = b.floor[epoch]
            first = b.first_member[epoch]
            top = f[_CANDIDATES]
            for k in range(first, first + b.live[epoch]):
                i = b.member[k]
                if b.least[i] == level:
                    q = top - 1
                    while q >= f[_CANDIDATES] and b.rank[b.candidates[q]] > b.rank[i]:
                        b.candidates[q + 1] = b.candidates[q]
                        q -= 1
                    b.candidates[q + 1] = i
                    top += 1
            f[_EPOCH], f[_LEVEL], f[_COUNT] = epoch, level, top - f[_CANDIDATES]
            b.control[_CANDIDATES_TOP] = top
            mode = _BRANCH_NEXT
        elif mode == _BRANCH_NEXT:
            branch = f[_BRANCH]
            f[_BRANCH] = branch + 1
            if branch < f[_COUNT]:
                i = b.candidates[f[_CANDIDATES] + branch]
                twin = False
                for q in range(f[_CANDIDATES], f[_CANDIDATES] + branch):
                    twin = twin or b.alike[b.candidates[q]] == b.alike[i]
                if twin:
                    continue
                kept = _lay(b, i, f[_LEVEL], f[_HEIGHT])
            elif branch == f[_COUNT]:
                level = _next_level(b, f[_EPOCH], f[_LEVEL])
                excess = level + b.unplaced[f[_EPOCH]] - f[_HEIGHT]
                kept = excess <= 0 and _waste(b, f[_EPOCH], level, f[_HEIGHT])
                if excess > 0:
                    b.control[_EXCESS] = min(b.control[_EXCESS], excess)
            else:
                b.refuted[f[_SLOT]] = np.uint64(f[_KEY])
                result, mode = NONE, _LEAVE
                continue
            if kept:
                f[_CURSOR] = f[_BEGIN]
                mode = _SPLIT
            else:
                _take_back(b, f[_TRAIL], f[_PLACED])
        elif mode == _SPLIT:
            begin, stop = f[_CURSOR], f[_STOP]
            while begin < stop and b.live[begin] == 0:
                begin += 1
            if begin >= stop:
                result, mode = FOUND, _LEAVE
                continue
            to = begin + 1
            while to < stop and b.crossing[to] > 0:
                to += 1
            f[_CURSOR] = to
            child = b.frames[depth + 1]
            child[_BEGIN], child[_STOP], child[_HEIGHT] = begin, to, f[_HEIGHT]
            depth += 1
            mode = _ENTER
        else:
            if depth > 0:
                b.control[_CANDIDATES_TOP] = f[_CANDIDATES]
                if result == NONE:
                    _take_back(b, f[_TRAIL], f[_PLACED])
            if depth == 0:
                b.control[_DEPTH], b.control[_MODE], b.control[_RESULT] = depth, mode, result
                return result
            depth -= 1
            parent = b.frames[depth]
            if result == FOUND:
                mode = _SPLIT
            elif parent[_COUNT] < 0:
                mode = _LEAVE
            else:
                _take_back(b, parent[_TRAIL], parent[_PLACED])
                mode = _BRANCH_NEXT
