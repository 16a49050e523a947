"""What is to be served from an arena, in columns; and the last check before the arena's tables are built from it.

Contract: what passes `check` makes no address outside [arena, arena + arena_bytes) and no index outside a table,
whoever made it. It shares no code with the planner's validator, which has judged overlaps in time before.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stalloc.columns import distinct
from stalloc.core.constants import ALIGNMENT, MAX_REQUEST, MAX_STREAMS, MOST_DYNAMIC
from stalloc.core.record_types import Words
from stalloc.errors import PlanError


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
    if not 0 <= schedule.arena_bytes <= MAX_REQUEST:
        raise PlanError(f"an arena of {schedule.arena_bytes} bytes cannot be served.")
    placed = schedule.offset != -1
    # each bound by itself first, so that no sum below overflows
    wrong = (
        (schedule.size < 0) | (schedule.size > MAX_REQUEST) | (schedule.stream < 0) | (schedule.stream >= MAX_STREAMS)
    )
    wrong |= placed & (
        (schedule.offset < 0) | (schedule.offset > schedule.arena_bytes) | (schedule.offset % ALIGNMENT != 0)
    )
    last = (
        np.where(wrong, 0, schedule.offset)
        + (np.where(wrong, 0, schedule.size) + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    )
    wrong |= placed & (last > schedule.arena_bytes)
    if wrong.any():
        row = int(wrong.argmax())
        raise PlanError(
            f"schedule entry {row} ({schedule.size[row]} bytes at {schedule.offset[row]}, "
            f"stream {schedule.stream[row]}) is not inside an arena of {schedule.arena_bytes} bytes."
        )
    cycles = schedule.cycles
    if (
        schedule.num_prologue < 0
        or (cycles[:, 0] < schedule.num_prologue).any()
        or (cycles[:, 0] >= cycles[:, 1]).any()
    ):
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
    is_whole = lengths == {count} and len(lasts) <= MOST_DYNAMIC
    if not is_whole or (num_dynamic < 0).any() or (num_dynamic > len(lasts)).any() or num_dynamic.sum() != len(lasts):
        raise PlanError(f"{len(lasts)} dynamic requests cannot come between {count} entries of a schedule.")
    wrong_ratios = between.ratios.shape != (len(lasts), 2) or (between.ratios < 0).any()
    wrong_entries = (next_sure < entries) | (next_sure > count) | (without < entries) | (without >= count)
    if wrong_ratios or (lasts < 0).any() or wrong_entries.any():
        raise PlanError(f"what comes between {count} entries of a schedule does not fit it.")
