"""A capped arena in numbers: does a recorded program fit, with and without moving what lives?

Contract: first fit at the lowest address; where no free range is large enough although enough bytes are free in all,
the layout that moves least frees one (`largest_hole`), and the moves are ordered like real ones. Nothing but
fragmentation is cured: a program whose live bytes exceed the capacity fails either way.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stalloc.compaction.layouts import largest_hole
from stalloc.compaction.move_order import order_moves

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
        self._low, self._high = [0], [capacity]

    def place(self, row: int, need: int) -> bool:
        """The lowest free range that is large enough; False if there is none."""
        for i, (low, high) in enumerate(zip(self._low, self._high, strict=True)):
            if high - low >= need:
                self.offset[row], self.size[row] = low, need
                self.free_bytes -= need
                if high - low == need:
                    del self._low[i], self._high[i]
                else:
                    self._low[i] = low + need
                return True
        return False

    def free(self, row: int) -> None:
        """Free a request's block; one that never had any is left alone."""
        if row not in self.offset:
            return
        low, size = self.offset.pop(row), self.size.pop(row)
        high = low + size
        self.free_bytes += size
        i = bisect_left(self._low, low)
        if i < len(self._low) and self._low[i] == high:
            high = self._high.pop(i)
            del self._low[i]
        j = bisect_right(self._high, low) - 1
        if j >= 0 and self._high[j] == low:
            self._high[j] = high
        else:
            self._low.insert(j + 1, low)
            self._high.insert(j + 1, high)

    def move(self, target: dict[int, int]) -> None:
        """Put live blocks where they are to be."""
        self.offset = target
        blocks = sorted((low, low + self.size[row]) for row, low in target.items())
        lows = [0, *(high for _, high in blocks)]
        highs = [*(low for low, _ in blocks), self._capacity]
        gaps = [(low, high) for low, high in zip(lows, highs, strict=True) if low < high]
        self._low, self._high = [low for low, _ in gaps], [high for _, high in gaps]
