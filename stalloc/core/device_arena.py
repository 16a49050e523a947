"""The arena of one device as Python sees it: a schedule is installed, served from memory, given up."""

import numpy as np
from numba import types

from stalloc.core import arena, arena_pages, arena_segments, counters, handovers, step_begins
from stalloc.core.arena_schedule import ArenaSchedule, check
from stalloc.core.constants import (
    GRANULE,
    MAX_STREAMS,
    MODE_FOLLOW,
    MODE_HEAP,
    MODE_PLANNED,
    NO_PREVIOUS_USER,
    NO_STREAM,
    STREAM_BITS,
)
from stalloc.core.device_heap import DeviceHeap
from stalloc.core.device_tables import DeviceTables
from stalloc.core.record_types import Words
from stalloc.core.schedule_tables import ScheduleTables, make_tables

_MOST_AHEAD = 16  # pages that get memory before they are asked for


def load_for_moves() -> None:
    """Load the compiled code by which an arena is given up: that takes too long in the middle of a step."""
    arena_segments.dissolve_arena.compile((types.int64, types.int64[::1]))


class DeviceArena:
    """The schedule in place, if there is one, and the memory that it is served from."""

    def __init__(self, tables: DeviceTables, heap: DeviceHeap) -> None:
        self._tables, self._heap = tables, heap
        self.schedule: ScheduleTables | None = None
        self._needs = 0  # bytes of an arena that holds the schedule
        self.pages = np.zeros(0, np.int64)  #: a bit for each page of the arena, 1 if it has memory
        self._previous_users = np.zeros(0, np.int64)
        self._last_schedule: tuple[ScheduleTables | None, Words] = (None, self._previous_users)
        # of what was installed last, untouched
        self._made: tuple[ArenaSchedule | None, ScheduleTables | None] = None, None

    def install(self, schedule: ArenaSchedule, cursor: int = 0) -> None:
        """Put a schedule in place and follow it from entry `cursor`, without serving it yet.

        No arena may be in place: its blocks are known by the schedule that they were served from. Raises PlanError for
        a schedule that its arena does not hold, and leaves what was in place as it was.
        """
        check(schedule, cursor)
        assert self._tables.record.plan.arena_bytes == 0
        tables = self._tables_of(schedule)
        self._needs = schedule.arena_bytes
        self._keep(tables, np.zeros(0, np.int64))
        self._tables.write(
            {
                "schedule": tables.entries.ctypes.data,
                "num_entries": len(tables.entries),
                "interval_bits": tables.bits.ctypes.data,
                "intervals": tables.intervals.ctypes.data,
                "num_intervals": tables.num_intervals,
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
                "early_time": -1,
                "slots": tables.slots.ctypes.data,
                "slots_mask": len(tables.slots) - 1,
                "interval_streams": tables.interval_streams,
                "dynamic.failed_search.released_before": -1,
                "schedules": tables.cycles.ctypes.data,
                "num_schedules": tables.num_kinds,
                "cycle_start": int(tables.cycles["begin"][0]),
                "cycle_end": int(tables.cycles["end"][0]),
                "cursor": cursor,
                "history_count": 0,
                "miss_run": 0,
                "last_miss": 0,
                "misses_over_matches": 0,
                "ask_at_boundary": 0,
                "ask_after_iterations": 0,
                "mode": MODE_FOLLOW,
            }
        )

    def _tables_of(self, schedule: ArenaSchedule) -> ScheduleTables:
        """The tables of a schedule, made once: a schedule is installed again whenever its arena moves."""
        made_of, made = self._made
        if made is None or made_of is not schedule:
            made = make_tables(schedule)
            self._made = schedule, made
        return made.copy()

    def _keep(self, schedule: ScheduleTables, previous_users: Words) -> None:
        """Hold the memory of a schedule, and that of the last one: threads may still be looking at it."""
        self._last_schedule = self.schedule, self._previous_users
        self.schedule, self._previous_users = schedule, previous_users

    def share_intervals(self, handed_over: Words, events: list[int]) -> None:
        """Let streams share intervals of the schedule just installed, with an event and a wait for each handover.

        `handed_over` (k,) are entries whose event is to be recorded when they are freed. `events` are at least as many
        as there are entries with intervals that several streams use.
        """
        assert self.schedule is not None
        entries = self.schedule.entries
        shared = np.cumsum(np.append(0, self.schedule.intervals["stream"] == NO_STREAM))
        span = shared[entries["interval_high"]] - shared[entries["interval_low"]]
        rows = np.flatnonzero((entries["offset"] >= 0) & (span > 0))
        entries["event"][rows] = events[: len(rows)]
        entries["hands_over"][handed_over] = entries["event"][handed_over] != 0
        self._previous_users = np.full(len(self.schedule.intervals), NO_PREVIOUS_USER, np.int64)
        self._tables.write(
            {
                "has_handovers": int(len(rows) > 0),
                "previous_users": self._previous_users.ctypes.data,
            }
        )

    def end_sharing(self) -> None:
        """Part the intervals that streams share, once no schedule is served; the stream that asks most gets empty ones.

        It may be used when the device has done all that it was given before; only then let the arena be dissolved.
        """
        assert self.schedule is not None
        streams = self.schedule.entries["key"] & (MAX_STREAMS - 1)
        handovers.end_sharing(self._tables.address, int(np.bincount(streams).argmax()))

    def serve(self, address: int, arena_bytes: int) -> None:
        """Serve the schedule from an arena, which holds all of it; the counting of planned steps begins."""
        assert arena_bytes >= self._needs
        arena.serve_arena(self._tables.address, address, arena_bytes)

    def serve_pages(self, address: int, arena_bytes: int, *, anew: bool) -> None:
        """Serve the schedule from addresses that have no memory so far: it comes by `use_pages`.

        `anew`: it is another plan than before, of which hits are counted from here on.
        """
        assert arena_bytes >= self._needs
        self.pages = np.zeros(arena_bytes // GRANULE // 64 + 1, np.int64)
        arena_pages.serve_pages(self._tables.address, address, arena_bytes, self.pages.ctypes.data, anew)

    def planned_place(self, position: int) -> tuple[int, int]:
        """Where an entry of the schedule has its place: bytes [begin, end) from the arena's first; 0, 0: nowhere."""
        if (
            self.schedule is None
            or self._tables.record.hot.mode != MODE_PLANNED
            or position >= len(self.schedule.entries)
        ):
            return 0, 0
        entry = self.schedule.entries[position]
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
        """The program marks a step: follow the schedule [begin, end) from a position on, whatever was followed before.

        If a step of another kind comes instead, it is looked for on the schedules of the same turn.
        """
        schedules = self.schedule.schedules_beside(begin) if self.schedule is not None else 0
        step_begins.begin_step(self._tables.address, begin, end, position, schedules)

    def drop_schedule(self) -> None:
        """Serve everything from the heap again; what lives in the arena stays valid until it is freed."""
        self._tables.write({"mode": MODE_HEAP, "ask_at_boundary": 0, "ask_after_iterations": 0, "ask_after_misses": 0})

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
