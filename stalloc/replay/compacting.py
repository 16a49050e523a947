"""One arena in which live blocks may be moved when only fragmentation stops a request: stalloc's move planner.

Upheld:
- the arena grows from its begin in granules of 2 MiB, as an expandable segment does, up to the device's bytes; a
  request takes the lowest free range that holds it, in units of 512 bytes, whatever its stream;
- where no range holds a request although enough bytes are free, the layout that moves the fewest bytes frees one
  (stalloc.compaction.largest_hole). A block that the program gave up while other streams use it stays where it is;
- with `move:0` nothing is moved, and such a request fails. What does not fit even so fails either way;
- memory behind the last block goes back when the cache is emptied; the device is called for the first and the last.

It is the one model that moves live blocks. It takes a move as free and possible at any request, which no program
grants: what it shows is how far moving at best could go.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column
from stalloc.compaction.layouts import Arena, largest_hole
from stalloc.errors import BadInputError
from stalloc.replay.blocks import GRANULE
from stalloc.replay.model import check_capacity, check_rows
from stalloc.replay.protocol import BlockMap, Counters, Events, Fed, Kind
from stalloc.replay.settings import as_flag, setting
from stalloc.sizes import aligned

_BASE = 1 << 40  # address of the arena
_NO_LIMIT = 1 << 46  # bytes


@dataclass(frozen=True, kw_only=True)
class CompactingSettings:
    """The settings of the arena."""

    move: int = setting(1, as_flag)
    """Whether live blocks may be moved."""


class Compacting:
    """An arena that moves its blocks."""

    name = "compacting"
    settings_type = CompactingSettings

    def __init__(self, settings: CompactingSettings | None = None, capacity_bytes: int = 0) -> None:
        check_capacity(capacity_bytes)
        self._moves = (settings or CompactingSettings()).move
        self._limit = capacity_bytes // GRANULE * GRANULE if capacity_bytes else _NO_LIMIT
        self._arena = Arena(self._limit)
        self._requested: dict[int, int] = {}  # live or waiting request -> bytes
        self._stream: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._last: dict[int, int] = {}  # request -> where it was placed last
        self._mapped = self._peak_mapped = self._allocated = self._peak_allocated = 0
        self._taken = self._given = self._compactions = self._moved = 0

    def feed(self, events: Events) -> Fed:
        check_rows(events)
        reserved, allocated = np.zeros((2, len(events.kind)), np.int64)
        size, stream, failed = events.size.tolist(), events.stream.tolist(), -1
        for at, (kind, row) in enumerate(zip(events.kind.tolist(), events.request.tolist(), strict=True)):
            if kind == Kind.ALLOC:
                if size[row] and not self._allocate(row, size[row], stream[row]):
                    failed = at
                    reserved[at:], allocated[at:] = self._mapped, self._allocated
                    break
            elif kind == Kind.EMPTY_CACHE:
                self._map(self._end(), trim=True)
            else:
                self._give_up(row, completed=kind == Kind.FREE_COMPLETED)
            reserved[at], allocated[at] = self._mapped, self._allocated
        return Fed(reserved, allocated, failed)

    def _allocate(self, row: int, requested: int, stream: int) -> bool:
        arena, need = self._arena, aligned(requested)
        if not arena.place(row, need):
            if not self._moves or not self._free_range(need):
                return False
            arena.place(row, need)
        self._map(arena.offset[row] + need)
        self._requested[row], self._stream[row] = requested, stream
        self._last[row] = arena.offset[row]
        self._allocated += requested
        self._peak_allocated = max(self._peak_allocated, self._allocated)
        return True

    def _free_range(self, need: int) -> bool:
        arena, live = self._arena, list(self._arena.offset)
        offset, size = [arena.offset[row] for row in live], [arena.size[row] for row in live]
        movable = [row not in self._waiting for row in live]
        try:
            layout = largest_hole(offset, size, capacity_bytes=self._limit, needed_bytes=need, movable=movable)
        except BadInputError:  # it holds more than is free in all, or what may not move is in the way
            return False
        arena.move(dict(zip(live, layout.target.tolist(), strict=True)))
        self._last |= arena.offset
        self._map(self._end())
        self._compactions, self._moved = self._compactions + 1, self._moved + layout.moved_bytes
        return True

    def _give_up(self, row: int, *, completed: bool) -> None:
        if row not in self._requested:
            return
        if row not in self._waiting:
            self._waiting.add(row)
            self._allocated -= self._requested[row]
        if completed:
            self._waiting.discard(row)
            del self._requested[row], self._stream[row]
            self._arena.free(row)

    def _end(self) -> int:
        arena = self._arena
        return max((low + arena.size[row] for row, low in arena.offset.items()), default=0)

    def _map(self, end: int, *, trim: bool = False) -> None:
        mapped = -(-end // GRANULE) * GRANULE
        if mapped > self._mapped or trim:
            self._taken += self._mapped == 0 < mapped
            self._given += mapped == 0 < self._mapped
            self._mapped = mapped
        self._peak_mapped = max(self._peak_mapped, mapped)

    def counters(self) -> Counters:
        return Counters(
            reserved_bytes=self._mapped,
            peak_reserved_bytes=self._peak_mapped,
            allocated_bytes=self._allocated,
            peak_allocated_bytes=self._peak_allocated,
            device_allocs=self._taken,
            device_frees=self._given,
            retries=0,
            more={"compactions": self._compactions, "moved_bytes": self._moved},
        )

    def addresses(self) -> Column:
        """(n,) where each request was placed, or moved, last; 0 for a request that never was, or that had no bytes."""
        found = np.zeros(max(self._last, default=-1) + 1, np.int64)
        for row, low in self._last.items():
            found[row] = _BASE + low
        return found

    def blocks(self) -> BlockMap:
        """All blocks, in one segment."""
        arena = self._arena
        taken = [
            (_BASE + low, arena.size[row], row, int(row in self._waiting), self._stream[row])
            for row, low in sorted(arena.offset.items(), key=lambda item: item[1])
        ]
        return BlockMap.covering([(_BASE, self._mapped, 0)] if self._mapped else [], taken)
