"""A cycle of several marked steps, whose order repeats: a ring of them has places for what their kinds cannot place.

Plans of kinds have none for a request that replaces one of an earlier step before that is gone, nor for what lives
through many steps; the plan of a ring has. Contract: a cycle is at the end of the record, and too long to be chance.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stalloc.core.constants import TINY
from stalloc.runtime import decisions
from stalloc.runtime.looking import Found
from stalloc.runtime.planning_job import PlanJob
from stalloc.trace import MARK_STEP

if TYPE_CHECKING:
    from stalloc.planner.kind_plans import KindPlans
    from stalloc.trace import Trace


@dataclass(frozen=True, eq=False)
class Cycle:
    """A cycle, and its plan."""

    found: Found
    job: PlanJob
    record: int  #: the number of the record that it was found in

    @classmethod
    def planned(cls, found: Found, record: int) -> "Cycle":
        """Make the plan, in this thread. Raises what planning raises."""
        assert found.tape is not None
        job = PlanJob(found.tape)
        job.make(None)
        job.done.set()
        return cls(found, job, record)

    @property
    def arena_bytes(self) -> int:
        """What its plan needs; 0 if there is none."""
        return self.job.admitted.arena_bytes if self.job.admitted is not None else 0


def find_cycle(trace: "Trace", tapes: "KindPlans", *, of_any_places: bool = False) -> Found | None:
    """The cycle that the steps of a record make, if its ring has places for twice as much as the plans of kinds.

    With `of_any_places` it need not, if there is a place for everything.
    """
    from stalloc.lifespans.periods import find_step_period, sequence_rows
    from stalloc.lifespans.tape import fold

    longest = max(len(kind.size) for kind in tapes.kinds)
    period = find_step_period(trace, min_length=longest + 1, at_end=True)
    sizable = sequence_rows(trace, TINY + 1)
    if period is None or period.first + period.covered < len(sizable):
        return None
    marks = np.searchsorted(trace.start[sizable], trace.mark_event[trace.mark_kind == MARK_STEP])
    if not decisions.makes_a_cycle(int((marks >= period.first).sum())):
        return None
    tape = fold(trace, with_prologue=False, period=period)
    if tape is None:
        return None
    has_more = 2 * np.mean(~tape.planned) <= np.mean(tapes.offset < 0)
    return Found(trace, tape, sizable) if has_more or (of_any_places and tape.planned.all()) else None
