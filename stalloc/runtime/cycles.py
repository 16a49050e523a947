"""Cycles of several marked steps, whose order repeats: when one is looked for, and what is found.

Plans of kinds have no place for a request that replaces one of an earlier step before that is gone, nor for what lives
through many steps; the plan of a cycle of all the steps has. Contract: a cycle is at the end of the record, and too
long to be chance. It is looked for where many requests have no place in the plans of kinds, in ever longer records, and
once for such plans where pages move in every step of what they serve.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stalloc.core.constants import TINY
from stalloc.runtime import decisions
from stalloc.runtime.planning_job import PlanJob
from stalloc.runtime.record_search import Found
from stalloc.runtime.recorded_steps import RecordedSteps
from stalloc.trace import MARK_STEP

if TYPE_CHECKING:
    from stalloc.planner.kind_plans import KindPlans
    from stalloc.runtime.kind_search import KindSearch
    from stalloc.trace import Trace


_MANY = 1 << 30


class CycleWatch:
    """Watches the marked steps of one device for an order that repeats."""

    def __init__(self, recorded: RecordedSteps) -> None:
        self._recorded = recorded
        self.forget()

    def forget(self) -> None:
        self._found: Cycle | None = None  # to be put in force
        self._search_at = 0  # recorded steps, after which a cycle of them may show; 0: none is looked for
        self._waited = 0
        self.begin_plans()

    def begin_plans(self) -> None:
        self._looked_for_moves = False

    def ends(self, search: "KindSearch") -> bool:
        """A search has ended: whether its plans do not matter, as there is a cycle, or is to be one step later."""
        if search.lacks_places:
            self._search_at = 2 * self._recorded.count
        if search.awaits_cycle:
            self._search_at, self._waited = self._recorded.count + 1, self._waited + 1
            return True
        if search.cycle is not None and search.cycle.record == self._recorded.num_records:
            self._found = search.cycle
            return True
        return False

    def take(self) -> "Cycle | None":
        cycle, self._found = self._found, None
        return cycle

    @property
    def is_found(self) -> bool:
        return self._found is not None

    @property
    def num_left(self) -> int:
        """Recorded steps before the one after which a cycle is looked for; many if none is."""
        return self._search_at - self._recorded.count - 1 if self._search_at else _MANY

    def is_due(self, *, pages_move: bool) -> bool:
        """Whether one is to be looked for in what was recorded so far; `pages_move` in every step of the plans."""
        return 0 < self._search_at <= self._recorded.count or (pages_move and not self._looked_for_moves)

    def note_search(self, *, pages_move: bool) -> bool:
        """A search of all of the record begins; whether its cycle may wait for another step."""
        self._search_at = 0
        self._looked_for_moves |= pages_move
        return decisions.may_wait_for_lifespans(self._waited)


@dataclass(frozen=True, eq=False)
class Cycle:
    """A cycle, and its plan."""

    found: Found
    job: PlanJob
    record: int  #: the number of the record that it was found in

    @classmethod
    def planned(cls, found: Found, record: int) -> "Cycle":
        """Make the plan, in this thread. Raises what planning raises."""
        assert found.schedule is not None
        job = PlanJob(found.schedule)
        job.make(None)
        job.done.set()
        return cls(found, job, record)

    @property
    def arena_bytes(self) -> int:
        return self.job.admitted.arena_bytes if self.job.admitted is not None else 0


def find_cycle(trace: "Trace", schedules: "KindPlans", *, of_any_places: bool = False) -> Found | None:
    """The cycle that the steps of a record make, if its cycle has places for twice as much as the plans of kinds.

    With `of_any_places` it need not, if there is a place for everything.
    """
    from stalloc.lifespans.periods import find_step_period, sequence_rows
    from stalloc.lifespans.repeating_schedule import fold

    longest = max(len(kind.size) for kind in schedules.kinds)
    period = find_step_period(trace, min_length=longest + 1, at_end=True)
    sizable = sequence_rows(trace, TINY + 1)
    if period is None or period.first + period.covered < len(sizable):
        return None
    marks = np.searchsorted(trace.start[sizable], trace.mark_event[trace.mark_kind == MARK_STEP])
    if not decisions.makes_a_cycle(int((marks >= period.first).sum())):
        return None
    schedule = fold(trace, with_prologue=False, period=period)
    if schedule is None:
        return None
    has_more = 2 * np.mean(~schedule.planned) <= np.mean(schedules.offset < 0)
    return Found(trace, schedule, sizable) if has_more or (of_any_places and schedule.planned.all()) else None
