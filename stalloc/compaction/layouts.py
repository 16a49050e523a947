"""Where live blocks are to go: slide together, go to planned offsets, or clear one range with the fewest bytes moved.

Contract: targets share no byte with each other or with what stays, lie below the capacity and are multiples of the
alignment; what cannot be done raises before anything is decided.

What is proven: `slide` moves the fewest bytes of all layouts that keep the blocks' order and leave no gap below the
last one (or above the first). `largest_hole` moves the fewest bytes of all layouts that keep the order: whatever lies
between the hole's nearest neighbours that stay has to move, and the cheapest such window is taken. For few blocks that
may all move, layouts in any order compete (stalloc.planner.plan_moving_least), which are proven up to 12 blocks.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from stalloc.columns import Column
from stalloc.compaction.move_order import order_moves
from stalloc.compaction.schedule import column
from stalloc.errors import BadInputError

#: blocks up to which layouts that change the order are tried as well
REORDER_BLOCKS = 256


@dataclass(frozen=True, eq=False)
class Layout:
    """Targets of n live blocks."""

    target: Column  #: (n,) bytes
    moved_bytes: int  #: the sum of the sizes of the blocks that move
    hole: tuple[int, int]  #: the largest free range [low, high) afterwards
    least: bool  #: whether no layout at all moves fewer bytes, not only none that keeps the order


def slide(
    offset: ArrayLike,
    size: ArrayLike,
    *,
    capacity_bytes: int,
    movable: ArrayLike | None = None,
    alignment: int = 512,
    towards: str | None = None,
) -> Layout:
    """Slide n live blocks together, (n,) offsets and sizes in bytes of an arena of `capacity_bytes`.

    `towards`: "low", "high", or None for whichever moves less. Blocks that may not move (`movable`, (n,) booleans)
    stay, and others slide up to them. Raises BadInputError for blocks that share bytes or leave the arena.
    """
    blocks = _Blocks(offset, size, movable, capacity_bytes, alignment)
    if towards not in (None, "low", "high"):
        raise BadInputError(f"blocks slide towards 'low' or 'high', not {towards!r}.")
    ways = [blocks.layout(blocks.slid(way)) for way in ("low", "high") if towards in (None, way)]
    return min(ways, key=lambda layout: layout.moved_bytes)


def to_plan(offset: ArrayLike, size: ArrayLike, planned: ArrayLike, *, capacity_bytes: int) -> Layout:
    """Send n live blocks to planned offsets, (n,) each.

    Raises BadInputError if those share bytes or leave the arena.
    """
    blocks = _Blocks(offset, size, None, capacity_bytes, 1)
    target = column(planned, "planned")
    if len(target) != len(blocks.low):
        raise BadInputError(
            f"{len(target)} planned offsets for {len(blocks.low)} blocks do not belong together: give one for each."
        )
    _Blocks(target, size, None, capacity_bytes, 1)
    return blocks.layout(target)


def largest_hole(
    offset: ArrayLike,
    size: ArrayLike,
    *,
    capacity_bytes: int,
    needed_bytes: int | None = None,
    movable: ArrayLike | None = None,
    alignment: int = 512,
) -> Layout:
    """Free one contiguous range of `needed_bytes` (None: as many as there are) by moving as few bytes as possible.

    (n,) offsets and sizes in bytes. Raises BadInputError if the range cannot be freed, whatever moves.
    """
    blocks = _Blocks(offset, size, movable, capacity_bytes, alignment)
    if needed_bytes is None:
        if blocks.movable.all():
            return slide(offset, size, capacity_bytes=capacity_bytes, alignment=alignment)
        needed_bytes = blocks.most_free()
    free = capacity_bytes - int(blocks.size.sum())
    if not 0 <= needed_bytes <= free:
        raise BadInputError(f"{needed_bytes} bytes cannot be free in one piece: {free} of {capacity_bytes} are in all.")
    target = blocks.window(needed_bytes)
    kept = blocks.layout(target) if target is not None else None
    if blocks.movable.all() and len(blocks.low) <= REORDER_BLOCKS and (kept is None or kept.moved_bytes):
        other = _reordered(blocks, needed_bytes)
        if other is not None and (kept is None or other.moved_bytes < kept.moved_bytes or other.least):
            return other
    if kept is None:
        raise BadInputError(
            f"no range of {needed_bytes} bytes can be freed between the blocks that may not move: the largest has "
            f"{blocks.most_free()} bytes."
        )
    return kept


def _reordered(blocks: "_Blocks", needed_bytes: int) -> Layout | None:
    from stalloc.planner.least_moves import plan_moving_least

    try:
        moves = plan_moving_least(
            blocks.low, blocks.size, target_height=blocks.capacity, needed_hole=needed_bytes, alignment=blocks.alignment
        )
    except BadInputError:  # rounding to its grain left no room
        return None
    return blocks.layout(moves.offset, least=moves.least)


class _Blocks:
    """Live blocks in order of address, checked."""

    def __init__(
        self, offset: ArrayLike, size: ArrayLike, movable: ArrayLike | None, capacity_bytes: int, alignment: int
    ) -> None:
        self.low, self.size = column(offset, "offset"), column(size, "size")
        may = np.ones(len(self.low), bool) if movable is None else np.asarray(movable, bool)
        if not len(self.low) == len(self.size) == len(may):
            raise BadInputError(
                "offsets, sizes and what may move do not belong together: give one of each for every block."
            )
        if alignment < 1 or alignment & (alignment - 1):
            raise BadInputError(f"an alignment is a power of two, not {alignment}.")
        self.movable, self.capacity, self.alignment = may, capacity_bytes, alignment
        self.order = np.argsort(self.low, kind="stable")
        self.order = self.order[self.size[self.order] > 0]
        low, end = self.low[self.order], (self.low + self.size)[self.order]
        if (self.size < 0).any() or (low[1:] < end[:-1]).any() or (low < 0).any() or (end > capacity_bytes).any():
            raise BadInputError(f"live blocks share bytes or leave the arena of {capacity_bytes} bytes: correct them.")

    def layout(self, target: Column, *, least: bool = False) -> Layout:
        """The record for some targets."""
        moved = int(self.size[target != self.low].sum())
        order = np.argsort(target, kind="stable")
        order = order[self.size[order] > 0]
        starts = np.append(target[order], self.capacity)
        ends = np.append(0, (target + self.size)[order])
        widest = int(np.argmax(starts - ends))
        return Layout(target, moved, (int(ends[widest]), int(starts[widest])), least or moved == 0)

    def slid(self, towards: str) -> Column:
        """Targets of all blocks slid together; one that is not aligned never moves the wrong way."""
        target, grain = self.low.copy(), self.alignment
        if towards == "low":
            at = 0
            for i in self.order.tolist():
                if self.movable[i]:
                    target[i] = min(-(-at // grain) * grain, self.low[i])
                at = int(target[i] + self.size[i])
        else:
            at = self.capacity
            for i in self.order[::-1].tolist():
                if self.movable[i]:
                    target[i] = max((at - self.size[i]) // grain * grain, self.low[i])
                at = int(target[i])
        return target

    def _edges(self) -> tuple[Column, Column]:
        """Free bytes, with sizes rounded up, from the arena's begin up to each block, and up to what is after the last.

        Window [i, j) of blocks, between neighbours i - 1 and j that stay, has before[j] - after[i] bytes for a hole.
        """
        low, size = self.low[self.order], self.size[self.order]
        rounded = -(-size // self.alignment) * self.alignment
        used = np.append(0, np.cumsum(rounded))
        before = np.append(low, self.capacity) - used
        ends = np.append(0, -(-(low + size) // self.alignment) * self.alignment)
        return before, ends - used

    def window(self, needed: int) -> Column | None:
        """Targets that free a range by pushing the blocks of the cheapest window down; None if there is no window."""
        before, after = self._edges()
        fixed = np.append(0, np.cumsum(~self.movable[self.order]))
        weight = np.append(0, np.cumsum(self.size[self.order]))
        # alignment can make `before` fall by less than a grain: its running maximum finds the first window all the same
        first = np.arange(len(before))
        last = np.maximum(np.searchsorted(np.maximum.accumulate(before), after + needed), first)
        inside = last < len(before)
        first, last = first[inside], last[inside]
        good = (fixed[last] == fixed[first]) & (before[last] - after[first] >= needed)
        if not good.any():
            return None
        first, last = first[good], last[good]
        best = int(np.argmin(weight[last] - weight[first]))
        target = self.low.copy()
        rows = self.order[first[best] : last[best]]
        at = 0
        if first[best]:
            before_it = self.order[first[best] - 1]
            at = int(self.low[before_it] + self.size[before_it])
        for i in rows.tolist():
            at = -(-at // self.alignment) * self.alignment
            target[i], at = at, at + int(self.size[i])
        return target

    def most_free(self) -> int:
        """The largest range that can be freed without moving what may not move."""
        before, after = self._edges()
        fixed = np.flatnonzero(np.append(~self.movable[self.order], True))
        starts = np.append(0, fixed[:-1] + 1)
        return int((before[fixed] - after[starts]).max())


if TYPE_CHECKING:
    from stalloc.trace import Trace


@dataclass(frozen=True)
class ArenaRun:
    """How a program fared."""

    failed_event: int  #: event index of the first request that found no place; -1: all did
    num_compactions: int
    moved_bytes: int
    num_waves: int
    bounce_bytes: int  #: the largest bounce buffer that any of the moves wanted


def run_in_arena(
    trace: "Trace", capacity_bytes: int, *, compact: bool, bounce_bytes: int = 1 << 20, alignment: int = 512
) -> ArenaRun:
    """Serve a trace's requests from one arena of `capacity_bytes`; stops at the first that finds no place."""
    size = trace.aligned_size(alignment)
    rows = np.arange(len(size))
    time = np.concatenate([trace.end, trace.start])
    begins = np.repeat([0, 1], len(size))
    order = np.lexsort((begins, time))
    arena = Arena(capacity_bytes)
    compactions = moved = waves = bounce = 0
    for at in order.tolist():
        row = int(rows[at % len(size)])
        if not begins[at]:
            arena.free(row)
            continue
        need = int(size[row])
        if need and not arena.place(row, need):
            if not compact or arena.free_bytes < need:
                return ArenaRun(int(trace.start[row]), compactions, moved, waves, bounce)
            live = list(arena.offset)
            offsets, sizes = [arena.offset[i] for i in live], [arena.size[i] for i in live]
            layout = largest_hole(offsets, sizes, capacity_bytes=capacity_bytes, needed_bytes=need, alignment=alignment)
            schedule = order_moves(offsets, layout.target, sizes, bounce_bytes=bounce_bytes)
            arena.move(dict(zip(live, layout.target.tolist(), strict=True)))
            placed = arena.place(row, need)
            assert placed, "the layout has freed a range of this size"
            compactions, moved = compactions + 1, moved + schedule.moved_bytes
            waves, bounce = waves + schedule.num_waves, max(bounce, schedule.bounce_bytes)
    return ArenaRun(-1, compactions, moved, waves, bounce)


class Arena:
    """Live blocks by request, and the free ranges between them, ascending."""

    def __init__(self, capacity: int) -> None:
        self.offset: dict[int, int] = {}
        self.size: dict[int, int] = {}
        self.free_bytes = self._capacity = capacity
        self._free = [(0, capacity)]

    def place(self, row: int, need: int) -> bool:
        """The lowest free range that is large enough; False if there is none."""
        for i, (low, high) in enumerate(self._free):
            if high - low >= need:
                self.offset[row], self.size[row] = low, need
                self.free_bytes -= need
                self._free[i : i + 1] = [(low + need, high)] if high - low > need else []
                return True
        return False

    def free(self, row: int) -> None:
        """Free a request's block; one that never had any is left alone."""
        if row not in self.offset:
            return
        low, size = self.offset.pop(row), self.size.pop(row)
        self.free_bytes += size
        i = j = bisect_left(self._free, (low, low))
        high = low + size
        if j < len(self._free) and self._free[j][0] == high:
            high, j = self._free[j][1], j + 1
        if i > 0 and self._free[i - 1][1] == low:
            low, i = self._free[i - 1][0], i - 1
        self._free[i:j] = [(low, high)]

    def move(self, target: dict[int, int]) -> None:
        """Put live blocks where they are to be."""
        self.offset = target
        blocks = sorted((low, low + self.size[row]) for row, low in target.items())
        lows = [0, *(high for _, high in blocks)]
        highs = [*(low for low, _ in blocks), self._capacity]
        self._free = [(low, high) for low, high in zip(lows, highs, strict=True) if low < high]
