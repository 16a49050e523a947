"""What is to be served from an arena: in columns, checked, moved to pages, and as the tables that the core reads.

Contract: what passes `check` makes no address outside [arena, arena + arena_bytes) and no index outside a table,
whoever made it. It shares no code with the planner's validator, which has judged overlaps in time before. The tables
are never resized after that, the core writes into them only what the records say, and they outlive their schedule.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stalloc.columns import distinct
from stalloc.core import constants
from stalloc.core.lookup import fill_slots
from stalloc.core.record_types import Record, Words
from stalloc.core.records import Cycle, Gap, Interval, Key, Ratio, ScheduleEntry, Slot, Word, table
from stalloc.core.schedule_cursor import fill_keys
from stalloc.errors import PlanError
from stalloc.sizes import aligned, whole_pages

_FEW_SHIFT = 6  # little requests lie apart where they, and a page, are no more than 1 / 2 ** shift of the others
_MAX_USES = 1 << 21  # of intervals by entries; beyond, nothing is kept of when intervals are needed


@dataclass(frozen=True, eq=False)
class Between:
    """What steps have beside the entries of a schedule, or leave out, by the k entries that are expected next."""

    num_dynamic: Words
    """(k,) dynamic requests of a step, whose sizes are none of the schedule's, that come before each, at most."""
    least_dynamic: Words
    """(k,) the same, at least."""
    lasts: Words
    """(s,) for each of these, in their order, how many entries are asked for while it lives, and one; 0: not known."""
    ratios: Words
    """(s, 2) the size of each is that of the one before it times the first number over the second; 0: not known."""
    next_sure: Words
    """(k,) for an entry that some steps leave out, the next one that all have, k if there is none; else itself."""
    without: Words
    """(k,) the entry that a request like each is where no dynamic one came before it: itself, or a later one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ArenaSchedule:
    """One schedule, or those of several kinds of steps one after the other."""

    arena_bytes: int  #: of the arena that serves it; 0: the schedule is followed, but not served
    size: Words  #: (k,) requested bytes
    stream: Words  #: (k,) stream indices
    offset: Words  #: (k,) bytes from where the arena begins; -1: served from the heap
    num_prologue: int = 0  #: entries that are served once, before the cycle
    begins: tuple[int, ...] = ()  #: where the cycle of each kind of step begins; empty: one cycle, after the prologue
    num_buffers: int = 1  #: of which each has a cycle for every kind; those of one buffer lie together
    ahead: Words | None = None  #: (k,) bytes by which more is to live at most than when each entry is asked for
    between: Between | None = None  #: None: a step has what the schedule has and nothing else
    gives: Words | None = None  #: (g,) entries whose memory passes to another stream, after an event and a wait

    @property
    def cross_streams(self) -> bool:
        """Whether memory passes from one stream to another."""
        return self.gives is not None and len(self.gives) > 0

    @cached_property
    def num_streams(self) -> int:
        """How many streams have places."""
        return len(distinct(self.stream[self.offset >= 0]))

    @property
    def cycles(self) -> Words:
        """(r, 2) entries [begin, end) of each cycle."""
        begins = self.begins or (self.num_prologue,)
        return np.array([begins, (*begins[1:], len(self.size))], np.int64).T.copy()


def check(schedule: ArenaSchedule, cursor: int) -> None:
    """Raise PlanError unless every entry, however it is reached, stays inside the arena and the tables."""
    count = len(schedule.size)
    if count == 0 or {len(schedule.stream), len(schedule.offset)} != {count}:
        raise PlanError(f"a schedule of {count} entries cannot be served.")
    if not 0 <= schedule.arena_bytes <= constants.MAX_REQUEST:
        raise PlanError(f"an arena of {schedule.arena_bytes} bytes cannot be served.")
    size, stream, offset, arena_bytes = schedule.size, schedule.stream, schedule.offset, schedule.arena_bytes
    # each bound by itself first, so that no sum below overflows
    wrong = (size < 0) | (size > constants.MAX_REQUEST) | (stream < 0) | (stream >= constants.MAX_STREAMS)
    wrong |= (offset != -1) & ((offset < 0) | (offset > arena_bytes) | (offset % constants.ALIGNMENT != 0))
    last = (
        np.where(wrong, 0, offset)
        + (np.where(wrong, 0, size) + (constants.ALIGNMENT - 1)) // constants.ALIGNMENT * constants.ALIGNMENT
    )
    wrong |= (offset != -1) & (last > arena_bytes)
    if wrong.any():
        row = int(wrong.argmax())
        raise PlanError(
            f"schedule entry {row} ({size[row]} bytes at {offset[row]}, stream {stream[row]}) is not inside an arena "
            f"of {arena_bytes} bytes."
        )
    cycles, prologue = schedule.cycles, schedule.num_prologue
    if prologue < 0 or (cycles[:, 0] < prologue).any() or (cycles[:, 0] >= cycles[:, 1]).any():
        raise PlanError(f"cycles that begin at {cycles[:, 0].tolist()} do not fit a schedule of {count} entries.")
    if schedule.num_buffers < 1 or len(cycles) % schedule.num_buffers:
        raise PlanError(f"{len(cycles)} cycles cannot have {schedule.num_buffers} buffers.")
    if not 0 <= cursor < count:
        raise PlanError(f"entry {cursor} is none of a schedule of {count} entries.")
    if schedule.between is not None:
        _check_between(schedule.between, count)
    if schedule.gives is not None and ((schedule.gives < 0) | (schedule.gives >= count)).any():
        raise PlanError(f"a handover names an entry that is none of {count}.")


def _check_between(between: Between, count: int) -> None:
    num_dynamic, lasts, next_sure = between.num_dynamic, between.lasts, between.next_sure
    least, without, entries = between.least_dynamic, between.without, np.arange(count)
    lengths = {len(num_dynamic), len(least), len(next_sure), len(without)}
    is_whole = lengths == {count} and len(lasts) <= constants.MOST_DYNAMIC
    if not is_whole or (num_dynamic < 0).any() or (num_dynamic > len(lasts)).any() or num_dynamic.sum() != len(lasts):
        raise PlanError(f"{len(lasts)} dynamic requests cannot come between {count} entries of a schedule.")
    wrong_ratios = between.ratios.shape != (len(lasts), 2) or (between.ratios < 0).any()
    wrong_entries = (next_sure < entries) | (next_sure > count) | (without < entries) | (without >= count)
    if wrong_ratios or (lasts < 0).any() or wrong_entries.any():
        raise PlanError(f"what comes between {count} entries of a schedule does not fit it.")


def on_pages(schedule: ArenaSchedule, *, apart: bool = True) -> ArenaSchedule:
    """The schedule with each stream on pages of its own; with the offsets as they are if streams share memory.

    Requests that are much smaller than a page lie `apart` behind the others: one that lives on alone would keep a page
    from whoever needs memory.
    """
    if schedule.cross_streams:
        return replace(schedule, arena_bytes=whole_pages(schedule.arena_bytes))
    end, moved = 0, np.full(len(schedule.offset), -1, np.int64)
    for index in distinct(schedule.stream[schedule.offset >= 0]).tolist():
        end = whole_pages(end)
        own = np.flatnonzero((schedule.stream == index) & (schedule.offset >= 0))
        for rows in _apart(schedule, own) if apart else (own,):
            packed, size_bytes = _without_gaps(schedule.offset[rows], aligned(schedule.size[rows]))
            moved[rows] = packed + end
            end += size_bytes
    return replace(schedule, offset=moved, arena_bytes=max(whole_pages(end), constants.GRANULE))


def _apart(schedule: ArenaSchedule, rows: Words) -> tuple[Words, ...]:
    """An owner's rows, small ones for themselves where that takes few bytes more."""
    is_small = schedule.size[rows] < constants.LITTLE
    small, others = rows[is_small], rows[~is_small]
    packed = [_without_gaps(schedule.offset[part], aligned(schedule.size[part])) for part in (small, others)]
    small_bytes, other_bytes = (size_bytes for _, size_bytes in packed)
    few = small_bytes > 0 and max(small_bytes, constants.GRANULE) <= other_bytes >> _FEW_SHIFT
    return (others, small) if few else (rows,)


def _without_gaps(offset: Words, size: Words) -> tuple[Words, int]:
    """(k,) offsets from 0 on without the bytes that no row uses, and where they end; nothing else changes."""
    order = np.argsort(offset, kind="stable")
    low, high = offset[order], np.maximum.accumulate(offset[order] + size[order])
    unused = np.cumsum(np.maximum(low - np.append(0, high[:-1]), 0))
    packed = np.empty_like(offset)
    packed[order] = low - unused
    return packed, int((packed + size).max(initial=0))


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
    entries["key"] = size << constants.STREAM_BITS | stream
    entries["offset"] = np.where(planned, offset, -1)
    spans = np.stack([np.searchsorted(bounds, low), np.searchsorted(bounds, high)], axis=1)
    entries["interval_low"][planned], entries["interval_high"][planned] = spans.T
    offsets = distinct(low)
    slots, rows = table(Slot, _hash_rows(len(offsets))), np.zeros(len(offsets), np.int64)
    slots["offset"] = slots["entry"] = slots["requested_bytes"] = -1
    slots["state"] = constants.BLOCK_FREE
    fill_slots(slots.ctypes.data, len(slots) - 1, offsets, rows)
    entries["slot"][planned] = rows[np.searchsorted(offsets, low)]
    intervals = table(Interval, len(bounds) + 1)
    intervals["offset"][:-1] = bounds
    intervals["needed_at"] = -1
    intervals["stream"] = _interval_streams(spans, stream[planned], bounds)
    use_starts, uses = _interval_uses(spans, np.flatnonzero(planned), len(intervals))
    cycles = table(Cycle, len(schedule.cycles))
    cycles["begin"], cycles["end"] = schedule.cycles.T
    lifespans, gaps, ratios, entries["gap"] = _gaps(schedule)
    key = entries["key"].copy()
    places = np.argsort(key, kind="stable")
    keys = table(Key, _hash_rows(len(distinct(key))))
    fill_keys(keys.ctypes.data, len(keys) - 1, key, places)
    return ScheduleTables(
        entries=entries,
        bits=np.zeros((len(bounds) + 1) // 64 + 1, np.int64),
        slots=slots,
        intervals=intervals,
        use_starts=use_starts,
        uses=uses,
        lifespans=lifespans,
        gaps=gaps,
        ratios=ratios,
        cycles=cycles,
        num_kinds=len(cycles) // schedule.num_buffers,
        keys=keys,
        places=places,
    )


def _copied(record: type[Record], rows: np.ndarray) -> np.ndarray:
    copy = table(record, len(rows))
    copy[:] = rows
    return copy


def _gaps(schedule: ArenaSchedule) -> tuple[np.ndarray, np.ndarray, np.ndarray, Words]:
    """The tables of lifespans, of gaps and of the ratios of dynamic requests, and the gap before each entry."""
    between, gap = schedule.between, np.zeros(len(schedule.size), np.int64)
    if between is None:
        return table(Word, constants.LIFESPAN_ROWS), table(Gap, 1), table(Ratio, 1), gap
    num_dynamic, lasts = between.num_dynamic, between.lasts
    rows = np.flatnonzero((num_dynamic > 0) | (between.next_sure != np.arange(len(num_dynamic))))
    first = np.cumsum(num_dynamic) - num_dynamic
    lifespans, gaps = table(Word, constants.LIFESPAN_ROWS + len(lasts)), table(Gap, 1 + len(rows))
    lifespans["value"][constants.LIFESPAN_ROWS :] = lasts
    gaps["first_dynamic"][1:] = constants.LIFESPAN_ROWS + first[rows]
    for number, at in enumerate(rows.tolist()):
        own = lasts[first[at] : first[at] + num_dynamic[at]]
        gaps["longest_dynamic"][1 + number] = constants.LIFESPAN_ROWS + first[at] + (own.argmax() if len(own) else 0)
    for name in ("num_dynamic", "least_dynamic", "next_sure", "without"):
        gaps[name][1:] = getattr(between, name)[rows]
    gap[rows] = 1 + np.arange(len(rows))
    ratios = table(Ratio, len(between.ratios))
    ratios["times"], ratios["over"] = between.ratios.T
    return lifespans, gaps, ratios, gap


def _hash_rows(count: int) -> int:
    """Rows of a hash table for so many: at most half of them are used."""
    return 1 << max(4, int(2 * count).bit_length())


def _interval_streams(spans: Words, stream: Words, bounds: Words) -> Words:
    """(b + 1,) the stream of each interval, NO_STREAM if several use it.

    One that none uses goes with the one before it. `spans` (k, 2) are the intervals of each
    entry, `stream` (k,) its stream, `bounds` (b,) the offsets where intervals begin.
    """
    count = len(bounds) + 1
    owner = np.full(count, constants.NO_STREAM, np.int64)
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
    owner[shared] = constants.NO_STREAM
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
