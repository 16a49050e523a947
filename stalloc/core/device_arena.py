"""The arena of one device as Python sees it: a tape is installed, served from memory, given up."""

import numpy as np
from numba import types

from stalloc.core import arena, arena_pages, arena_segments, counters, handovers, step_begins
from stalloc.core.arena_tape import ArenaTape, check
from stalloc.core.constants import (
    GRANULE,
    MAX_STREAMS,
    MODE_FOLLOW,
    MODE_HEAP,
    MODE_REPLAY,
    NO_PREVIOUS_USER,
    NO_STREAM,
    STREAM_BITS,
)
from stalloc.core.device_heap import DeviceHeap
from stalloc.core.device_tables import DeviceTables
from stalloc.core.record_types import Words
from stalloc.core.tape_tables import TapeTables, make_tables

_MOST_AHEAD = 16  # pages that get memory before they are asked for


def load_for_moves() -> None:
    """Load the compiled code by which an arena is given up: that takes too long in the middle of a step."""
    arena_segments.dissolve_arena.compile((types.int64, types.int64[::1]))


class DeviceArena:
    """The tape in place, if there is one, and the memory that it is served from."""

    def __init__(self, tables: DeviceTables, heap: DeviceHeap) -> None:
        self._tables, self._heap = tables, heap
        self.tape: TapeTables | None = None
        self._needs = 0  # bytes of an arena that holds the tape
        self.pages = np.zeros(0, np.int64)  #: a bit for each page of the arena, 1 if it has memory
        self._previous_users = np.zeros(0, np.int64)
        self._last_tape: tuple[TapeTables | None, Words] = (None, self._previous_users)
        self._made: tuple[ArenaTape | None, TapeTables | None] = (None, None)  # of what was installed last, untouched

    def install(self, tape: ArenaTape, cursor: int = 0) -> None:
        """Put a tape in place and follow it from entry `cursor`, without serving it yet.

        No arena may be in place: its blocks are known by the tape that they were served from. Raises PlanError for a
        tape that its arena does not hold, and leaves what was in place as it was.
        """
        check(tape, cursor)
        assert self._tables.record.arena_bytes == 0
        tables = self._tables_of(tape)
        self._needs = tape.arena_bytes
        self._keep(tables, np.zeros(0, np.int64))
        self._tables.write(
            {
                "tape": tables.entries.ctypes.data,
                "num_entries": len(tables.entries),
                "cell_bits": tables.bits.ctypes.data,
                "cells": tables.cells.ctypes.data,
                "num_cells": tables.num_cells,
                "use_starts": tables.use_starts.ctypes.data,
                "uses": tables.uses.ctypes.data if len(tables.uses) else 0,
                "lifespans": tables.lifespans.ctypes.data,
                "keys": tables.keys.ctypes.data,
                "keys_mask": len(tables.keys) - 1,
                "places": tables.places.ctypes.data,
                "gaps": tables.gaps.ctypes.data if len(tables.gaps) > 1 else 0,
                "ratios": tables.ratios.ctypes.data,
                "gap_time": -1,
                "dynamic_in_gap": 0,
                "known_in_gap": 0,
                "last_dynamic_bytes": 0,
                "slots": tables.slots.ctypes.data,
                "slots_mask": len(tables.slots) - 1,
                "cell_streams": tables.cell_streams,
                "failed_search.released_before": -1,
                "tapes": tables.rings.ctypes.data,
                "num_tapes": tables.num_kinds,
                "ring_start": int(tables.rings["begin"][0]),
                "ring_end": int(tables.rings["end"][0]),
                "cursor": cursor,
                "history_count": 0,
                "miss_run": 0,
                "last_miss": 0,
                "excess_misses": 0,
                "ask_at_boundary": 0,
                "ask_at_step": 0,
                "mode": MODE_FOLLOW,
            }
        )

    def _tables_of(self, tape: ArenaTape) -> TapeTables:
        """Those of a tape, made once: while it is followed its arena moves, and it is installed again."""
        made_of, made = self._made
        if made is None or made_of is not tape:
            made = make_tables(tape)
            self._made = tape, made
        return made.copy()

    def _keep(self, tape: TapeTables, previous_users: Words) -> None:
        """Hold the memory of a tape, and that of the last one: threads may still be looking at it."""
        self._last_tape = self.tape, self._previous_users
        self.tape, self._previous_users = tape, previous_users

    def share_cells(self, handed_over: Words, events: list[int]) -> None:
        """Let streams share cells of the tape that was just installed, with an event and a wait for each handover.

        `handed_over` (k,) are entries whose event is to be recorded when they are freed. `events` are at least as many
        as there are entries with cells that several streams use.
        """
        assert self.tape is not None
        entries = self.tape.entries
        shared = np.cumsum(np.append(0, self.tape.cells["stream"] == NO_STREAM))
        span = shared[entries["cell_high"]] - shared[entries["cell_low"]]
        rows = np.flatnonzero((entries["offset"] >= 0) & (span > 0))
        entries["event"][rows] = events[: len(rows)]
        entries["hands_over"][handed_over] = entries["event"][handed_over] != 0
        self._previous_users = np.full(len(self.tape.cells), NO_PREVIOUS_USER, np.int64)
        self._tables.write(
            {
                "has_handovers": int(len(rows) > 0),
                "previous_users": self._previous_users.ctypes.data,
            }
        )

    def end_sharing(self) -> None:
        """Part the cells that streams share, once no tape is served; what is empty goes to the stream that asks most.

        It may be used when the device has done all that it was given before; only then let the arena be dissolved.
        """
        assert self.tape is not None
        streams = self.tape.entries["key"] & (MAX_STREAMS - 1)
        handovers.end_sharing(self._tables.address, int(np.bincount(streams).argmax()))

    def serve(self, address: int, arena_bytes: int) -> None:
        """Serve the tape from an arena, which holds all of it; the counting of planned steps begins."""
        assert arena_bytes >= self._needs
        arena.serve_arena(self._tables.address, address, arena_bytes)

    def serve_pages(self, address: int, arena_bytes: int, *, anew: bool) -> None:
        """Serve the tape from addresses that have no memory so far: it comes by `use_pages`.

        `anew`: it is another plan than before, of which hits are counted from here on.
        """
        assert arena_bytes >= self._needs
        self.pages = np.zeros(arena_bytes // GRANULE // 64 + 1, np.int64)
        arena_pages.serve_pages(self._tables.address, address, arena_bytes, self.pages.ctypes.data, anew)

    def planned_place(self, position: int) -> tuple[int, int]:
        """Where an entry of the tape has its place: bytes [begin, end) from where the arena begins; 0, 0: nowhere."""
        if self.tape is None or self._tables.record.mode != MODE_REPLAY or position >= len(self.tape.entries):
            return 0, 0
        entry = self.tape.entries[position]
        offset = int(entry["offset"])
        return (offset, offset + (int(entry["key"]) >> STREAM_BITS)) if offset >= 0 else (0, 0)

    def lacking_ahead(self, position: int) -> list[int]:
        """Where pages without memory begin that the plan needs soon after an entry, in that order."""
        begins = np.empty(_MOST_AHEAD, np.int64)
        return begins[: arena_pages.lacking_ahead(self._tables.address, position, begins)].tolist()

    def use_pages(self, begin: int, end: int) -> None:
        """The pages [begin, end), bytes from where the arena begins, have memory now."""
        arena_pages.use_arena_pages(self._tables.address, begin, end)

    def begin_step(self, begin: int, end: int, position: int) -> None:
        """The program marks a step: follow the tape [begin, end) from a position on, whatever was followed before.

        If a step of another kind comes instead, it is looked for on the tapes of the same turn.
        """
        tapes = self.tape.tapes_beside(begin) if self.tape is not None else 0
        step_begins.begin_step(self._tables.address, begin, end, position, tapes)

    def drop_tape(self) -> None:
        """Serve everything from the heap again; what lives in the arena stays valid until it is freed."""
        self._tables.write({"mode": MODE_HEAP, "ask_at_boundary": 0, "ask_at_step": 0, "ask_after_misses": 0})

    def count(self, arena_bytes: int) -> None:
        """Count an arena that came from the device (negative: went back)."""
        counters.count_arena(self._tables.address, arena_bytes)

    def is_idle(self) -> bool:
        """Whether nothing lives in the arena."""
        return bool(arena.arena_is_idle(self._tables.address))

    def forget(self) -> int:
        """Let go of an arena that is not served and in which nothing lives: its bytes, 0 if it has to stay."""
        return int(arena.forget_arena(self._tables.address))

    def dissolve(self) -> list[int]:
        """Make ordinary segments of an arena that is no longer served; where they begin, none if it has to stay."""
        addresses = np.zeros(MAX_STREAMS, np.int64)
        count = arena_segments.dissolve_arena(self._tables.address, addresses)
        return [int(address) for address in addresses[:count]]
