"""Lifespan classes: how long a request lives compared with steps and phases, and whether it does so every time.

Every request has exactly one class. Persistent: it lives across at least two step boundaries, or, where no steps are
known, from the first phase or before it to the end of the record. Transient: it dies in the phase in which it was
born. Scoped: all others.
"""

import enum
from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column, distinct
from stalloc.lifespans.periods import sequence_rows
from stalloc.lifespans.phases import Phases, find_phases
from stalloc.lifespans.repeating_schedule import Schedule, expand
from stalloc.trace import MARK_STEP, Trace


class LifespanClass(enum.IntEnum):
    """How long a request lives."""

    PERSISTENT = 0
    SCOPED = 1
    TRANSIENT = 2


class Regularity(enum.IntEnum):
    """Whether a request comes and lives the same way in every step."""

    UNKNOWN = 0
    """Before the steps begin to repeat, too small to be on the schedule, or no steps are known."""
    STATIC = 1
    DYNAMIC = 2


@dataclass(frozen=True)
class Total:
    """How many requests a class has, and their bytes."""

    requests: int
    bytes: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Classes:
    """The classes of a trace's n requests."""

    lifespan: Column
    """(n,) int8 of LifespanClass."""
    regularity: Column
    """(n,) int8 of Regularity."""
    birth_phase: Column
    """(n,) index into `phases`; -1: before recording."""
    death_phase: Column
    """(n,) index into `phases`; len(phases.begin): never freed."""
    phases: Phases

    def totals(self, size: Column) -> dict[str, Total]:
        """Requests and bytes of each class by its lower-case name, given (n,) bytes."""
        return {
            member.name.lower(): Total(int(np.count_nonzero(column == member)), int(size[column == member].sum()))
            for column, members in ((self.lifespan, LifespanClass), (self.regularity, Regularity))
            for member in members
        }


def classify(trace: Trace, schedule: Schedule | None = None) -> Classes:
    """The classes of all requests; `schedule` is the fold of the trace, which knows its steps, if there is one."""
    boundaries = _step_boundaries(trace, schedule)
    phases = find_phases(trace, int(np.median(np.diff(boundaries))) if len(boundaries) >= 2 else None)
    num_phases = len(phases.begin)
    never_freed = trace.end >= trace.num_events
    birth = np.where(trace.start < 0, -1, phases.of(trace.start))
    death = np.where(never_freed, num_phases, phases.of(trace.end))
    if len(boundaries) >= 2:
        crossed = np.searchsorted(boundaries, trace.end, "left") - np.searchsorted(boundaries, trace.start, "right")
        persistent = (crossed >= 2) | ((trace.start < 0) & never_freed)
    else:
        persistent = never_freed & (birth < 1) & ((num_phases > 1) | (trace.start < 0))
    lifespan = np.where(
        persistent,
        LifespanClass.PERSISTENT,
        np.where(birth == death, LifespanClass.TRANSIENT, LifespanClass.SCOPED),
    )
    return Classes(
        lifespan=lifespan.astype(np.int8),
        regularity=_regularity(trace, schedule),
        birth_phase=birth,
        death_phase=death,
        phases=phases,
    )


def _step_boundaries(trace: Trace, schedule: Schedule | None) -> Column:
    """Events at which a step begins."""
    marks = distinct(trace.mark_event[trace.mark_kind == MARK_STEP])
    if len(marks) or schedule is None:
        return marks
    rows = sequence_rows(trace, schedule.minimum_size)
    first = int(np.searchsorted(rows, schedule.row[schedule.num_prologue]))
    return trace.start[rows[first : first + schedule.covered_requests : schedule.period_requests]]


def _regularity(trace: Trace, schedule: Schedule | None) -> Column:
    regularity = np.full(trace.num_requests, Regularity.UNKNOWN, np.int8)
    if schedule is None:
        return regularity
    rows = sequence_rows(trace, schedule.minimum_size)
    regularity[rows[rows >= schedule.row[schedule.num_prologue]]] = Regularity.DYNAMIC
    on_schedule = np.zeros(schedule.num_requests, np.int64)
    on_schedule[: schedule.num_prologue] = -1
    regularity[expand(schedule, on_schedule, trace) >= 0] = Regularity.STATIC
    return regularity
