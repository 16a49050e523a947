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


FOUND, NONE, PAUSED, NO_ROOM = 1, 0, -1, -2

#: how the epoch to branch on is chosen
FEWEST, WEIGHTED, VALLEYS = range(3)

_ENTER, _BRANCH, _SPLIT, _LEAVE = range(4)  # what is to be done with the frame that the search is in

_ODD = np.uint64(0x9E3779B97F4A7C15)
_ODD2 = np.uint64(0xD6E8FEB86659FD93)


@inner(nogil=True, **BORROWING)
def _state(b: Any, begin: int, stop: int, height: int) -> np.uint64:
    """Hash of what decides whether the range can be packed below the height: what is unplaced, and the floor."""
    num_epochs = len(b.floor)
    key = (np.uint64(begin) * np.uint64(1000003) + np.uint64(stop)) * _ODD ^ np.uint64(height) * _ODD2
    for t in range(begin, stop):
        x = np.uint64(b.floor[t] + 1) * b.salt[t]
        y = b.fingerprint[t] * b.salt[num_epochs + t]
        key += (x ^ (x >> np.uint64(31))) * _ODD2 + (y ^ (y >> np.uint64(29)))
    return key | np.uint64(1)


@inner(nogil=True, **BORROWING)
def _choose(b: Any, begin: int, stop: int, height: int, rule: int) -> int:
    """The epoch to branch on: in a valley of the floor; the lowest one unless the rule is VALLEYS."""
    lowest = NEVER
    for t in range(begin, stop):
        lowest = min(lowest, b.floor[t])
    chosen, best, best_slack = -1, np.inf, NEVER
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
                cost = float(branches)
                if rule != FEWEST:
                    cost = 0.0 if branches <= 1 else branches / (b.weight[u] + 1.0)
                if cost < best or (cost == best and slack < best_slack):
                    chosen, best, best_slack = u, cost, slack
        t = run
    return chosen


@inner(nogil=True, **BORROWING)
def _next_level(b: Any, epoch: int, level: int) -> int:
    """The lowest height above the floor on which a request of this epoch can come to rest if none lies on the floor.

    It would lie on one that cannot be lower, or on an unplaced one that is not live in this epoch.
    """
    found = NEVER
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


@njit(nogil=True, **BORROWING)
def begin_search(b: Any, height: int) -> None:
    """Back to the empty board, to look for a packing below `height`; what was learnt stays."""
    take_back(b, 0, 0)
    now, frame = b.control[0], b.frames[0]
    now.nodes = now.candidates = now.depth = 0
    now.mode, now.result = _SPLIT, NONE
    if frame.height != height:
        now.excess = NEVER
    frame.begin = frame.candidates = frame.trail = frame.placed = frame.cursor = 0
    frame.stop, frame.height, frame.count = len(b.floor), height, -1
    for t in range(len(b.floor)):
        if b.floor[t] + b.unplaced[t] > height:
            now.mode = _LEAVE
            now.excess = min(now.excess, b.floor[t] + b.unplaced[t] - height)


def nodes(b: Board) -> int:
    """How many nodes the search has seen since it began."""
    return int(b.control["nodes"][0])


def next_height(b: Board) -> int:
    """After NONE: the lowest height that is not excluded; every branch exceeded by at least the difference."""
    return int(b.frames["height"][0] + b.control["excess"][0])


@njit(nogil=True, **BORROWING)
def search(b: Any, rule: int, num_nodes: int) -> int:
    """Go on for `num_nodes` more nodes: FOUND, NONE, PAUSED, or NO_ROOM if the way back needs a larger board."""
    now = b.control[0]
    limit = now.nodes + num_nodes
    while True:
        if now.mode == _ENTER:
            if now.nodes >= limit:
                return PAUSED
            if _is_full(b):
                return NO_ROOM
            _enter(b, rule)
        elif now.mode == _BRANCH:
            _branch(b)
        elif now.mode == _SPLIT:
            _split(b)
        elif now.depth > 0:
            _leave(b)
        else:
            return int(now.result)


@inner(nogil=True, **BORROWING)
def _is_full(b: Any) -> bool:
    """Whether the next node may need more room than there is for the way back."""
    now, count = b.control[0], len(b.size)
    return bool(
        now.depth + 2 >= len(b.frames)
        or now.trail + 2 * (count + len(b.floor)) >= len(b.trail)
        or now.candidates + count + 1 >= len(b.candidates)
    )


@inner(nogil=True, **BORROWING)
def _enter(b: Any, rule: int) -> None:
    """A new node: what can be said of its range at once, and what there is to branch on."""
    now = b.control[0]
    f = b.frames[now.depth]
    now.nodes += 1
    f.trail, f.placed, f.cursor = now.trail, now.placed, f.begin
    f.candidates, f.count, f.branch = now.candidates, -1, 0
    height = f.height
    if _top_off(b, f):
        now.mode = _SPLIT
        if not settle(b, f.begin, f.stop, f.height):
            now.result, now.mode = NONE, _LEAVE
        return
    key = _state(b, f.begin, f.stop, height)
    f.slot, f.key = np.int64((key ^ (key >> np.uint64(32))) & np.uint64(len(b.refuted) - 1)), key
    if b.refuted[f.slot] == key:
        now.result, now.mode = NONE, _LEAVE
        return
    f.epoch = _choose(b, f.begin, f.stop, height, rule)
    f.level = b.floor[f.epoch]
    _gather(b, f)
    now.mode = _BRANCH


@inner(nogil=True, **BORROWING)
def _top_off(b: Any, f: Any) -> bool:
    """Place what lives through the whole range at its top; whether there is any such."""
    b.control[0].step += 1
    height = f.height
    first = b.first_member[f.begin]
    k = first
    while k < first + b.live[f.begin]:
        i = b.member[k]
        if b.end[i] >= f.stop and b.start[i] <= f.begin:
            height -= b.size[i]
            take(b, i, height)
        else:
            k += 1
    lowered = height < f.height
    f.height = height
    return bool(lowered)


@inner(nogil=True, **BORROWING)
def _gather(b: Any, f: Any) -> None:
    """The candidates of a frame: what can lie on the floor of its epoch, by rank."""
    top = f.candidates
    first = b.first_member[f.epoch]
    for k in range(first, first + b.live[f.epoch]):
        i = b.member[k]
        if b.least[i] == f.level:
            q = top - 1
            while q >= f.candidates and b.rank[b.candidates[q]] > b.rank[i]:
                b.candidates[q + 1] = b.candidates[q]
                q -= 1
            b.candidates[q + 1] = i
            top += 1
    f.count = top - f.candidates
    b.control[0].candidates = top


@inner(nogil=True, **BORROWING)
def _branch(b: Any) -> None:
    """The next branch: a candidate on the floor, then none of them, then there is no packing."""
    now = b.control[0]
    f = b.frames[now.depth]
    branch = f.branch
    f.branch = branch + 1
    if branch < f.count:
        i = b.candidates[f.candidates + branch]
        for q in range(f.candidates, f.candidates + branch):
            if b.alike[b.candidates[q]] == b.alike[i]:
                return
        kept = lay(b, i, f.level, f.height)
    elif branch == f.count:
        level = _next_level(b, f.epoch, f.level)
        excess = level + b.unplaced[f.epoch] - f.height
        kept = excess <= 0 and waste(b, f.epoch, level, f.height)
        if excess > 0:
            now.excess = min(now.excess, excess)
    else:
        b.refuted[f.slot] = f.key
        now.result, now.mode = NONE, _LEAVE
        return
    if kept:
        f.cursor = f.begin
        now.mode = _SPLIT
    else:
        take_back(b, f.trail, f.placed)


@inner(nogil=True, **BORROWING)
def _split(b: Any) -> None:
    """Enter the next part of a range that no unplaced lifespan leaves; FOUND behind the last."""
    now = b.control[0]
    f = b.frames[now.depth]
    begin = f.cursor
    while begin < f.stop and b.live[begin] == 0:
        begin += 1
    if begin >= f.stop:
        now.result, now.mode = FOUND, _LEAVE
        return
    to = begin + 1
    while to < f.stop and b.crossing[to] > 0:
        to += 1
    f.cursor = to
    now.depth += 1
    child = b.frames[now.depth]
    child.begin, child.stop, child.height = begin, to, f.height
    now.mode = _ENTER


@inner(nogil=True, **BORROWING)
def _leave(b: Any) -> None:
    """Back to the frame above with the result of this one."""
    now = b.control[0]
    f, parent = b.frames[now.depth], b.frames[now.depth - 1]
    now.candidates = f.candidates
    now.depth -= 1
    if now.result == FOUND:
        now.mode = _SPLIT
        return
    take_back(b, f.trail, f.placed)
    if parent.count < 0:
        now.mode = _LEAVE
    else:
        take_back(b, parent.trail, parent.placed)
        now.mode = _BRANCH
