"""Which live blocks to move, and where, so that a hole opens or the arena can shrink, with the fewest bytes moved.

Contract: after the moves no two blocks share a byte, all lie below the target height, and the hole asked for is free;
blocks that are not listed stay where they are. "Least" is proven for few blocks, otherwise the best that was found.
The order of the moves, and whether one needs a bounce buffer, is for whoever executes them.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from stalloc.columns import Column, distinct
from stalloc.errors import BadInputError
from stalloc.planner.constraints import check_places, columns, constraints

#: blocks up to which every choice of blocks to move is considered
EXACT_BLOCKS = 12
#: packings that are tried for one choice
TRIES = 2_000
#: ranges that are tried for the hole when there are too many blocks for every choice
RANGES = 500

Gaps = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Moves:
    """Where n live blocks are to lie."""

    offset: Column  #: (n,) bytes
    row: Column  #: (m,) the blocks that move, ascending
    moved_bytes: int  #: the sum of their sizes
    height_bytes: int  #: the highest end of a block
    hole: tuple[int, int]  #: the free range [low, high) that was asked for; empty if none was
    least: bool  #: whether no choice of blocks moves fewer bytes


def plan_moving_least(
    offset: ArrayLike, size: ArrayLike, *, target_height: int, needed_hole: int = 0, alignment: int = 512
) -> Moves:
    """Move live blocks, (n,) offsets and sizes in bytes, so that all lie below `target_height` bytes.

    A hole of `needed_hole` bytes, also below the target, stays free. All sizes are rounded up to `alignment`, a power
    of two, and every block that moves goes to a multiple of it.

    Raises BadInputError for blocks that share bytes, and when blocks and hole cannot fit below the target at all.
    """
    low, _, sizes = columns(offset, offset, size)
    given = constraints(len(sizes), alignment, low)
    if needed_hole < 0 or target_height < 0 or (sizes < 0).any() or (low < 0).any():
        raise BadInputError("offsets, sizes, the hole and the target height have to be 0 or more: correct them.")
    check_places(np.zeros_like(low), np.ones_like(low), sizes, given)
    grain = given.granule if len(sizes) else alignment
    rounded = (sizes + (grain - 1)) & -grain
    hole, height = -(-needed_hole // grain) * grain, target_height // grain * grain
    if int(rounded.sum()) + hole > height:
        raise BadInputError(
            f"{int(rounded.sum())} live bytes and a hole of {hole} do not fit below {target_height}: ask for less."
        )
    rows = np.flatnonzero(rounded > 0)
    choice, least = None, False
    if len(rows) <= EXACT_BLOCKS:
        choice, least = _least(low[rows].tolist(), rounded[rows].tolist(), height, hole)
    if choice is None:
        choice = _cheap(low[rows].tolist(), rounded[rows].tolist(), height, hole)
    places, hole_at = choice
    new = low.copy()
    for index, place in places.items():
        new[rows[index]] = place
    moved = np.flatnonzero(new != low)
    return Moves(
        offset=new,
        row=moved,
        moved_bytes=int(sizes[moved].sum()),
        height_bytes=int((new + sizes).max(initial=0)),
        hole=(hole_at, hole_at + needed_hole) if needed_hole else (0, 0),
        least=least,
    )


Choice = tuple[dict[int, int], int]  #: new offsets by block, and where the hole is


def _least(low: list[int], size: list[int], height: int, hole: int) -> tuple[Choice | None, bool]:
    """The choice that moves the fewest bytes; proven if every cheaper one was refuted."""
    indices = range(len(low))
    must = {index for index in indices if low[index] + size[index] > height}
    others = [index for index in indices if index not in must]
    sets = [
        (sum(size[index] for index in extra), extra)
        for count in range(len(others) + 1)
        for extra in combinations(others, count)
    ]
    sure = True
    for _, extra in sorted(sets):
        moving = sorted(must | set(extra), key=lambda index: (-size[index], index))
        gaps = _gaps(low, size, set(moving), height)
        wanted = [hole] * (hole > 0) + [size[index] for index in moving]
        tries = [TRIES]
        places = _pack(gaps, sorted(wanted, reverse=True), tries)
        if places is not None:
            return _assigned(moving, size, hole, places), sure
        sure = sure and tries[0] > 0
    return None, False


def _assigned(moving: list[int], size: list[int], hole: int, places: list[tuple[int, int]]) -> Choice:
    """(bytes, place) pairs given to the blocks that move and to the hole, by their sizes."""
    waiting: dict[int, list[int]] = {}
    for need, place in places:
        waiting.setdefault(need, []).append(place)
    hole_at = waiting[hole].pop() if hole else 0
    return {index: waiting[size[index]].pop() for index in moving}, hole_at


def _gaps(low: list[int], size: list[int], moving: set[int], height: int) -> Gaps:
    """What is free below the height, ascending, once the moving blocks are gone."""
    gaps, at = [], 0
    for start, end in sorted((low[i], low[i] + size[i]) for i in range(len(low)) if i not in moving):
        if start > at:
            gaps.append((at, start))
        at = max(at, end)
    if at < height:
        gaps.append((at, height))
    return gaps


def _pack(gaps: Gaps, wanted: list[int], tries: list[int]) -> list[tuple[int, int]] | None:
    """Places for sizes, the largest first, each in a gap; depth first, and no gap of a length is tried twice."""
    if not wanted:
        return []
    if sum(wanted) > sum(high - start for start, high in gaps):
        return None
    seen: set[int] = set()
    need = wanted[0]
    for at, (start, high) in enumerate(gaps):
        if high - start < need or high - start in seen or tries[0] <= 0:
            continue
        seen.add(high - start)
        tries[0] -= 1
        rest = [*gaps[:at], (start + need, high), *gaps[at + 1 :]]
        found = _pack(rest, wanted[1:], tries)
        if found is not None:
            return [(need, start), *found]
    return None


def _cheap(low: list[int], size: list[int], height: int, hole: int) -> Choice:
    """Clear one range for the hole, beginning or ending at a block, the cheapest first; failing that, slide down."""
    count = len(low)
    order = sorted(range(count), key=lambda index: low[index])
    best = _slid(order, low, size, height, hole)
    least_moved = sum(size[index] for index, place in best[0].items() if place != low[index])
    lows = np.array([low[index] for index in order], np.int64)
    tops = lows + np.array([size[index] for index in order], np.int64)
    over = np.flatnonzero(tops > height)
    base = int((tops - lows)[over].sum())
    if not hole:
        edges = np.array([height], np.int64)
    else:
        edges = distinct(np.concatenate([[0, height - hole], tops, lows - hole]))
        edges = edges[(edges >= 0) & (edges <= height - hole)]
    bytes_below = np.concatenate([[0], np.cumsum(np.where(tops > height, 0, tops - lows))])
    first, last = np.searchsorted(tops, edges, side="right"), np.searchsorted(lows, edges + hole)
    costs = base + np.where(last > first, bytes_below[last] - bytes_below[np.minimum(first, last)], 0)
    for at in np.argsort(costs, kind="stable")[:RANGES].tolist():
        if costs[at] >= least_moved:
            break
        edge, inside = int(edges[at]), range(int(first[at]), int(last[at]) if hole else 0)
        moving = [order[k] for k in dict.fromkeys([*over.tolist(), *inside])]
        gaps = _without(_gaps(low, size, set(moving), height), edge, edge + hole)
        places = _best_fit(gaps, sorted(moving, key=lambda index: -size[index]), size)
        if places is not None:
            return places, edge
    return best


def _without(gaps: Gaps, low: int, high: int) -> Gaps:
    pieces = [piece for a, b in gaps for piece in ((a, min(b, low)), (max(a, high), b))]
    return sorted({(a, b) for a, b in pieces if a < b})


def _best_fit(gaps: Gaps, moving: list[int], size: list[int]) -> dict[int, int] | None:
    """Each block, the largest first, into the smallest gap that holds it."""
    free = sorted((high - start, start) for start, high in gaps)
    places: dict[int, int] = {}
    for index in moving:
        at = bisect_left(free, (size[index], -1))
        if at == len(free):
            return None
        length, start = free.pop(at)
        places[index] = start
        if length > size[index]:
            piece = (length - size[index], start + size[index])
            free.insert(bisect_left(free, piece), piece)
    return places


def _slid(order: list[int], low: list[int], size: list[int], height: int, hole: int) -> Choice:
    """Blocks slid down in order of address, only as many as it takes: the lowest stay, the hole comes to the top."""
    for keep in range(len(order), -1, -1):
        at = max((low[index] + size[index] for index in order[:keep]), default=0)
        rest = order[keep:]
        if at + sum(size[index] for index in rest) + hole <= height:
            places = {}
            for index in rest:
                places[index] = at
                at += size[index]
            return places, at
    raise AssertionError("the caller has checked that all fit")
