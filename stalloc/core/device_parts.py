"""The memory of one device's records, and its arena and expected steps, as Python sees them.

Tables are made once and never move, since compiled code holds their addresses; their pages are touched only as they
fill. Python never holds the core's lock: between two bytecodes another thread could take the GIL and wait for that
lock. Whatever must change together is written by one call into the core.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import types

from stalloc.compiled import BORROWING
from stalloc.core import arena, constants, counters, handovers, schedule_cursor
from stalloc.core.arena_schedule import ArenaSchedule, ScheduleTables, check, make_tables
from stalloc.core.intrinsics import address_of, under_lock
from stalloc.core.record_types import Words
from stalloc.core.records import (
    Bins,
    Block,
    Event,
    ExpectedStep,
    GraphPool,
    IterationRow,
    LiveBlock,
    Pool,
    Segment,
    State,
    StreamUse,
    Word,
    dtype_of,
    offset_of,
    path_of,
    table,
    view_at,
    word_at,
)

_PAGE = mmap.PAGESIZE
_DONT_NEED = 4  # Linux's MADV_DONTNEED: the pages read as zeros from then on
MAX_RANGES = 4096  # of pages that lose their memory at a time
_MOST_AHEAD = 16  # pages that get memory before they are asked for


def forget_pages(table: np.ndarray) -> None:
    """Let go of the whole pages of a table of zeros, whose content nobody needs any more."""
    first = -(-table.ctypes.data // _PAGE) * _PAGE
    last = (table.ctypes.data + table.nbytes) // _PAGE * _PAGE
    with contextlib.suppress(OSError, AttributeError):
        if last > first:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONT_NEED)


def trim() -> None:
    """Hand what the C library's malloc holds without need back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


@under_lock(**BORROWING)
def _write(state, words, values):
    for i in range(len(words)):
        word_at(address_of(state), words[i]).value = values[i]


class DeviceTables:
    """The tables of one device; each is an array of the record that it is named for. `record` are its own fields."""

    def __init__(self) -> None:
        self.memory = table(State, 1)  #: of the record
        self.address: int = self.memory.ctypes.data
        self.record = view_at(State, self.address)
        self.blocks = table(Block, 1 << 22)
        self.segments = table(Segment, 1 << 17)
        self.pools = table(Pool, 1 << 13)
        self.graph_pools = table(GraphPool, 1 << 8)  #: those of further ones lend nothing
        self.bins = table(Bins, len(self.pools))
        first_live, most_live = 1 << 12, 1 << 22  # rows; each table that follows the first one has twice as many
        self.live = table(LiveBlock, 2 * most_live)  #: all tables of live blocks, one behind the other
        self.streams = table(Word, constants.MAX_STREAMS)
        self.events = table(Event, 1 << 22)
        self.stream_uses = table(StreamUse, 1 << 20)
        self.iteration_log = table(IterationRow, constants.ITERATION_LOG_ROWS)
        tables = ("blocks", "segments", "pools", "graph_pools", "bins", "live", "streams", "events")
        self.write({name: getattr(self, name).ctypes.data for name in (*tables, "iteration_log", "stream_uses")})
        limited = ("blocks", "segments", "graph_pools", "events")
        self.write({f"{name}_capacity": len(getattr(self, name)) for name in limited})
        # row 0 of blocks, segments, pools of graphs and uses means none; stream 0, the default stream, has index 0
        used = ("blocks_used", "segments_used", "graph_pools_used", "stream_uses_used", "num_streams")
        masks = {"pools_mask": len(self.pools) - 1, "live_mask": first_live - 1, "max_live_mask": most_live - 1}
        self.write(dict.fromkeys(used, 1) | masks | {"events_clock": constants.CLOCK})

    def write(self, fields: dict[str, int]) -> None:
        """Write several fields of the record at once, under the core's lock: by their names, or as `a.b`."""
        words = np.array([offset_of(State, path_of(State, name)) // 8 for name in fields], np.int64)
        _write(self.address, words, np.array(list(fields.values()), np.int64))


def load_for_moves() -> None:
    """Load the compiled code by which an arena is given up: that takes too long in the middle of a step."""
    arena.dissolve_arena.compile((types.int64, types.int64[::1]))


class DeviceArena:
    """The schedule in place, if there is one, and the memory that it is served from."""

    def __init__(self, tables: DeviceTables) -> None:
        self._tables = tables
        self.schedule: ScheduleTables | None = None
        self._needs = 0  # bytes of an arena that holds the schedule
        self.pages = np.zeros(0, np.int64)  #: a bit for each page of the arena, 1 if it has memory
        self._previous_users = np.zeros(0, np.int64)
        self._last_schedule: tuple[ScheduleTables | None, Words] = (None, self._previous_users)
        self._made: tuple[ArenaSchedule, ScheduleTables] | None = None  # of what was installed last, untouched

    def install(self, schedule: ArenaSchedule, cursor: int = 0) -> None:
        """Put a schedule in place and follow it from entry `cursor`, without serving it yet.

        No arena may be in place: its blocks are known by the schedule that they were served from. Raises PlanError for
        a schedule that its arena does not hold, and leaves what was in place as it was.
        """
        check(schedule, cursor)
        assert self._tables.record.plan.arena_bytes == 0
        if self._made is None or self._made[0] is not schedule:  # it is installed again whenever its arena moves
            self._made = schedule, make_tables(schedule)
        tables = self._made[1].copy()
        self._needs = schedule.arena_bytes
        self._keep(tables, np.zeros(0, np.int64))
        addresses = ("lifespans", "keys", "places", "ratios", "slots", "intervals", "use_starts")
        begin_at_zero = (
            *("dynamic_in_gap", "known_in_gap", "last_dynamic_bytes", "history_count", "miss_run", "last_miss"),
            *("misses_over_matches", "ask_at_boundary", "ask_after_iterations"),
        )
        self._tables.write(
            {name: getattr(tables, name).ctypes.data for name in addresses}
            | dict.fromkeys(begin_at_zero, 0)
            | dict.fromkeys(("gap_time", "early_time", "dynamic.failed_search.released_before"), -1)
            | {
                "schedule": tables.entries.ctypes.data,
                "num_entries": len(tables.entries),
                "interval_bits": tables.bits.ctypes.data,
                "num_intervals": tables.num_intervals,
                "uses": tables.uses.ctypes.data if len(tables.uses) else 0,
                "keys_mask": len(tables.keys) - 1,
                "gaps": tables.gaps.ctypes.data if len(tables.gaps) > 1 else 0,
                "slots_mask": len(tables.slots) - 1,
                "interval_streams": tables.interval_streams,
                "schedules": tables.cycles.ctypes.data,
                "num_schedules": tables.num_kinds,
                "cycle_start": int(tables.cycles["begin"][0]),
                "cycle_end": int(tables.cycles["end"][0]),
                "cursor": cursor,
                "mode": constants.MODE_FOLLOW,
            }
        )

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
        shared = np.cumsum(np.append(0, self.schedule.intervals["stream"] == constants.NO_STREAM))
        span = shared[entries["interval_high"]] - shared[entries["interval_low"]]
        rows = np.flatnonzero((entries["offset"] >= 0) & (span > 0))
        entries["event"][rows] = events[: len(rows)]
        entries["hands_over"][handed_over] = entries["event"][handed_over] != 0
        self._previous_users = np.full(len(self.schedule.intervals), constants.NO_PREVIOUS_USER, np.int64)
        users = self._previous_users.ctypes.data
        self._tables.write({"has_handovers": int(len(rows) > 0), "previous_users": users})

    def end_sharing(self) -> None:
        """Part the intervals that streams share, once no schedule is served; the stream that asks most gets empty ones.

        It may be used when the device has done all that it was given before; only then let the arena be dissolved.
        """
        assert self.schedule is not None
        streams = self.schedule.entries["key"] & (constants.MAX_STREAMS - 1)
        handovers.end_sharing(self._tables.address, int(np.bincount(streams).argmax()))

    def serve(self, address: int, arena_bytes: int) -> None:
        """Serve the schedule from an arena, which holds all of it; the counting of planned steps begins."""
        assert arena_bytes >= self._needs
        arena.serve_arena(self._tables.address, address, arena_bytes, 0, True)

    def serve_pages(self, address: int, arena_bytes: int, *, anew: bool) -> None:
        """Serve the schedule from addresses that have no memory so far: it comes by `use_pages`.

        `anew`: it is another plan than before, of which hits are counted from here on.
        """
        assert arena_bytes >= self._needs
        self.pages = np.zeros(arena_bytes // constants.GRANULE // 64 + 1, np.int64)
        arena.serve_arena(self._tables.address, address, arena_bytes, self.pages.ctypes.data, anew)

    def planned_place(self, position: int) -> tuple[int, int]:
        """Where an entry of the schedule has its place: bytes [begin, end) from the arena's first; 0, 0: nowhere."""
        schedule = self.schedule if self._tables.record.hot.mode == constants.MODE_PLANNED else None
        if schedule is None or position >= len(schedule.entries):
            return 0, 0
        entry = schedule.entries[position]
        offset = int(entry["offset"])
        return (offset, offset + (int(entry["key"]) >> constants.STREAM_BITS)) if offset >= 0 else (0, 0)

    def lacking_ahead(self, position: int) -> list[int]:
        """Where pages without memory begin that the plan needs soon after an entry, in that order."""
        begins = np.empty(_MOST_AHEAD, np.int64)
        return begins[: arena.lacking_ahead(self._tables.address, position, begins)].tolist()

    def use_pages(self, begin: int, end: int) -> None:
        """The pages [begin, end), bytes from where the arena begins, have memory now."""
        arena.use_arena_pages(self._tables.address, begin, end)

    def begin_step(self, begin: int, end: int, position: int) -> None:
        """The program marks a step: follow the schedule [begin, end) from a position on, whatever was followed before.

        If a step of another kind comes instead, it is looked for on the schedules of the same turn.
        """
        schedules = self.schedule.schedules_beside(begin) if self.schedule is not None else 0
        schedule_cursor.begin_step(self._tables.address, begin, end, position, schedules)

    def drop_schedule(self) -> None:
        """Serve everything from the heap again; what lives in the arena stays valid until it is freed."""
        self._tables.write(
            {"mode": constants.MODE_HEAP, "ask_at_boundary": 0, "ask_after_iterations": 0, "ask_after_misses": 0}
        )

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
        addresses = np.zeros(constants.MAX_STREAMS, np.int64)
        return addresses[: arena.dissolve_arena(self._tables.address, addresses)].tolist()


@dataclass(frozen=True)
class StepAhead:
    """A step that is expected on the schedule."""

    end: int  #: entry that the cursor is at when it is over
    num_entries: int
    following: tuple[int, int, int]  #: the schedule [begin, end) that is followed after it, and from where


class DeviceSteps:
    """What is expected from the last mark on that Python was told of."""

    def __init__(self, tables: DeviceTables, arena: DeviceArena) -> None:
        self._tables, self._arena = tables, arena
        self._expected = table(ExpectedStep, 0)

    def expect(self, steps: Sequence[StepAhead], overdue: int) -> None:
        """From the mark that was just set on these steps are expected; `overdue`: requests until a mark has to come."""
        assert self._arena.schedule is not None
        schedules_beside = self._arena.schedule.schedules_beside
        words = [(one.end, one.num_entries, *one.following, schedules_beside(one.following[0]), 0, 0) for one in steps]
        rows = np.array(words, np.int64).view(dtype_of(ExpectedStep))[:, 0]
        schedule_cursor.expect_steps(self._tables.address, rows.ctypes.data, len(rows), overdue)
        self._expected = rows

    def end_known(self) -> bool:
        """The program marks a step: whether it is the one that was expected, and nobody has to be told now."""
        return bool(schedule_cursor.end_known_step(self._tables.address))

    def end_all(self) -> list[int]:
        """Nothing is expected from here on; events in the record at the end of each step that came as expected."""
        count = schedule_cursor.end_known_steps(self._tables.address)
        num_events: list[int] = self._expected["num_events"][:count].tolist()
        return num_events
