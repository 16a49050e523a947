"""The tables of a schedule: its entries, and the intervals, slots and keys that they are found by.

Contract: made in Python before the schedule is put in place, and never resized after that; the core writes into them
only what the records say. They have to outlive the schedule in the core.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stalloc.columns import distinct
from stalloc.core.arena_schedule import ArenaSchedule
from stalloc.core.constants import (
    BLOCK_FREE,
    LIFESPAN_ROWS,
    NO_STREAM,
    STREAM_BITS,
)
from stalloc.core.record_types import Record, Words
from stalloc.core.records import Cycle, Gap, Interval, Key, Ratio, ScheduleEntry, Slot, Word, table
from stalloc.core.schedule_cursor import fill_keys
from stalloc.core.slots import fill_slots
from stalloc.sizes import aligned

_MAX_USES = 1 << 21  # of intervals by entries; beyond, nothing is kept of when intervals are needed


@dataclass(frozen=True, eq=False)
class ScheduleTables:
    """Everything that the core reads of a schedule."""

    entries: np.ndarray  #: of ScheduleEntry
    bits: Words  #: of taken intervals
    slots: np.ndarray  #: of Slot, by hash
    intervals: np.ndarray
    """Interval records, two more than the plan has: for the arena's bytes beyond it, and where those end."""
    use_starts: Words
    uses: Words  #: empty: too many to keep
    lifespans: np.ndarray
    gaps: np.ndarray  #: of Gap; row 0 means none
    ratios: np.ndarray  #: of Ratio, as the lifespans of dynamic requests
    cycles: np.ndarray  #: of Cycle
    num_kinds: int  #: cycles of one turn
    keys: np.ndarray  #: of Key, by hash
    places: Words

    def copy(self) -> "ScheduleTables":
        """A copy whose tables the core may write."""
        return replace(
            self,
            entries=_copied(ScheduleEntry, self.entries),
            bits=self.bits.copy(),
            slots=_copied(Slot, self.slots),
            intervals=_copied(Interval, self.intervals),
            lifespans=_copied(Word, self.lifespans),
        )

    @property
    def num_intervals(self) -> int:
        """Intervals that the plan itself has."""
        return len(self.intervals) - 2

    def schedules_beside(self, begin: int) -> int:
        """Where the cycles of the turn are of which one begins at an entry."""
        address, begins = self._cycles
        return address + bisect_left(begins, begin) // self.num_kinds * self.num_kinds * self.cycles.dtype.itemsize

    @cached_property
    def _cycles(self) -> tuple[int, list[int]]:
        """Where the cycles are, and the entries that they begin at."""
        return self.cycles.ctypes.data, self.cycles["begin"].tolist()

    @property
    def interval_streams(self) -> int:
        """The streams that have any intervals: a bit for each index modulo 64, as a signed number."""
        return int(np.bitwise_or.reduce(1 << (distinct(self.intervals["stream"]) & 63)))


def make_tables(schedule: ArenaSchedule) -> ScheduleTables:
    """The tables of a schedule."""
    stream, offset = schedule.stream, schedule.offset
    size = aligned(schedule.size)
    planned = offset >= 0
    low, high = offset[planned], (offset + size)[planned]
    bounds = distinct(np.concatenate([[0], low, high])).astype(np.int64)
    entries = table(ScheduleEntry, len(size))
    entries["key"] = size << STREAM_BITS | stream
    entries["offset"] = np.where(planned, offset, -1)
    spans = np.stack([np.searchsorted(bounds, low), np.searchsorted(bounds, high)], axis=1)
    entries["interval_low"][planned], entries["interval_high"][planned] = spans.T
    slots, rows = _slots(low)
    entries["slot"][planned] = rows
    intervals = table(Interval, len(bounds) + 1)
    intervals["offset"][:-1] = bounds
    intervals["needed_at"] = -1
    intervals["stream"] = _interval_streams(spans, stream[planned], bounds)
    use_starts, uses = _interval_uses(spans, np.flatnonzero(planned), len(intervals))
    cycles = table(Cycle, len(schedule.cycles))
    cycles["begin"], cycles["end"] = schedule.cycles.T
    lifespans, gaps, entries["gap"] = _gaps(schedule)
    keys, places = _keys(entries["key"].copy())
    return ScheduleTables(
        entries=entries,
        bits=np.zeros((len(bounds) + 1) // 64 + 1, np.int64),
        slots=slots,
        intervals=intervals,
        use_starts=use_starts,
        uses=uses,
        lifespans=lifespans,
        gaps=gaps,
        ratios=_ratios(schedule),
        cycles=cycles,
        num_kinds=len(cycles) // schedule.num_buffers,
        keys=keys,
        places=places,
    )


def _copied(record: type[Record], rows: np.ndarray) -> np.ndarray:
    copy = table(record, len(rows))
    copy[:] = rows
    return copy


def _gaps(schedule: ArenaSchedule) -> tuple[np.ndarray, np.ndarray, Words]:
    """The table of lifespans, that of gaps, and the gap before each entry of a schedule."""
    if schedule.between is None:
        return table(Word, LIFESPAN_ROWS), table(Gap, 1), np.zeros(len(schedule.size), np.int64)
    between = schedule.between
    num_dynamic, lasts = between.num_dynamic, between.lasts
    rows = np.flatnonzero((num_dynamic > 0) | (between.next_sure != np.arange(len(num_dynamic))))
    first = np.cumsum(num_dynamic) - num_dynamic
    lifespans, gaps = table(Word, LIFESPAN_ROWS + len(lasts)), table(Gap, 1 + len(rows))
    lifespans["value"][LIFESPAN_ROWS:] = lasts
    gaps["first_dynamic"][1:] = LIFESPAN_ROWS + first[rows]
    for number, at in enumerate(rows.tolist()):
        own = lasts[first[at] : first[at] + num_dynamic[at]]
        gaps["longest_dynamic"][1 + number] = LIFESPAN_ROWS + first[at] + (own.argmax() if len(own) else 0)
    for name in ("num_dynamic", "least_dynamic", "next_sure", "without"):
        gaps[name][1:] = getattr(between, name)[rows]
    gap = np.zeros(len(schedule.size), np.int64)
    gap[rows] = 1 + np.arange(len(rows))
    return lifespans, gaps, gap


def _ratios(schedule: ArenaSchedule) -> np.ndarray:
    """The table of ratios, where the lifespans of dynamic requests are in theirs."""
    if schedule.between is None:
        return table(Ratio, 1)
    ratios = table(Ratio, len(schedule.between.ratios))
    ratios["times"], ratios["over"] = schedule.between.ratios.T
    return ratios


def _hash_rows(count: int) -> int:
    """Rows of a hash table for so many: at most half of them are used."""
    return 1 << max(4, int(2 * count).bit_length())


def _slots(low: Words) -> tuple[np.ndarray, Words]:
    """The table of slots for entries at these offsets, and each one's row."""
    offsets = distinct(low)
    slots, rows = table(Slot, _hash_rows(len(offsets))), np.zeros(len(offsets), np.int64)
    slots["offset"] = slots["entry"] = slots["requested_bytes"] = -1
    slots["state"] = BLOCK_FREE
    fill_slots(slots.ctypes.data, len(slots) - 1, offsets, rows)
    return slots, rows[np.searchsorted(offsets, low)]


def _keys(key: Words) -> tuple[np.ndarray, Words]:
    """The table of keys, and the entries by key and position."""
    places = np.argsort(key, kind="stable")
    keys = table(Key, _hash_rows(len(distinct(key))))
    fill_keys(keys.ctypes.data, len(keys) - 1, key, places)
    return keys, places


def _interval_streams(spans: Words, stream: Words, bounds: Words) -> Words:
    """(b + 1,) the stream of each interval, NO_STREAM if several use it.

    One that none uses goes with the one before it. `spans` (k, 2) are the intervals of each
    entry, `stream` (k,) its stream, `bounds` (b,) the offsets where intervals begin.
    """
    count = len(bounds) + 1
    owner = np.full(count, NO_STREAM, np.int64)
    users = np.zeros(count, np.int64)
    for index in distinct(stream).tolist():
        of_stream = spans[stream == index]
        change = np.zeros(count + 1, np.int64)
        np.add.at(change, of_stream[:, 0], 1)
        np.subtract.at(change, of_stream[:, 1], 1)
        covered = np.cumsum(change[:-1]) > 0
        owner[covered] = index
        users += covered
    shared = users > 1
    used = np.flatnonzero(users > 0)
    if not len(used):
        return np.zeros(count, np.int64)
    before = np.searchsorted(used, np.arange(count), side="right") - 1
    owner = owner[used[np.maximum(before, 0)]]
    owner[shared] = NO_STREAM
    return owner


def _interval_uses(spans: Words, entries: Words, count: int) -> tuple[Words, Words]:
    """For each interval the entries that need it, in order: where each interval's begin (count + 1,), and they."""
    lengths = spans[:, 1] - spans[:, 0]
    total = int(lengths.sum())
    if total > _MAX_USES:
        return np.zeros(count + 1, np.int64), np.zeros(0, np.int64)
    first = np.cumsum(lengths) - lengths
    intervals = np.arange(total) - np.repeat(first - spans[:, 0], lengths)
    # few bits are sorted in a few passes
    order = np.argsort(intervals.astype(np.min_scalar_type(count)), kind="stable")
    starts = np.cumsum(np.append(0, np.bincount(intervals, minlength=count)))
    return starts, np.ascontiguousarray(np.repeat(entries, lengths)[order])
