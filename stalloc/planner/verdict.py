"""What a validator says of a plan, and what it looks at: every stay of a request in the arena.

Contract: shares nothing with the planner but the record that it reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stalloc.columns import Column
from stalloc.planner.plan_record import Plan


@dataclass(frozen=True)
class Verdict:
    """What the validator says of a plan."""

    ok: bool
    reason: str = ""  #: one of REASONS; empty if the plan is valid
    detail: str = ""  #: one sentence with rows, bytes and events


#: every reason a plan can be refused for
REASONS = (
    "trace-mismatch",  # the rows are not those of the trace
    "bad-size",  # a size is negative or more than any address space holds
    "bad-lifespan",  # a request ends before it starts
    "bad-stream",  # a stream has a negative index, or one that no program reaches
    "bad-schedule",  # the schedule is no prologue and cycle, or the rows do not follow it
    "negative-offset",  # below the arena
    "misaligned",  # an offset is no multiple of the alignment
    "bad-constraint",  # a table of constraints or handovers names what is not there
    "moved",  # a request that was placed beforehand is elsewhere
    "forbidden",  # a request uses bytes that it must not
    "beyond-peak",  # a request, its size rounded up, ends above the stated peak
    "overlap",  # two requests that are live together share bytes
    "shared-by-streams",  # requests of two streams share bytes in a plan that is to be followed
    "bad-handover",  # a planned handover joins two schedule entries that cannot follow each other in one place
    "bad-handed-on",  # what one kind of step leaves to the next is not where all kinds keep a place free for it
    "wrong-lower-bound",  # the stated bound is not the maximum load
    "wrong-proven-bound",  # what is said to be proven contradicts the plan
)


class Uses(NamedTuple):
    """The stays of requests in the arena, in columns of m: bytes [low, high) during events [start, end)."""

    start: Column
    end: Column
    low: Column
    high: Column
    row: Column

    def lasting(self) -> "Uses":
        """The uses that are not empty: at least one byte during at least one event."""
        return self._of((self.low < self.high) & (self.start < self.end))

    def by_start(self) -> "Uses":
        """The uses in the order in which they begin."""
        return self._of(np.argsort(self.start, kind="stable"))

    def tuples(self) -> Iterator[tuple[int, int, int, int, int]]:
        """One after the other."""
        return zip(*(column.tolist() for column in self), strict=True)

    def _of(self, chosen: NDArray[Any]) -> "Uses":
        return Uses(*(column[chosen] for column in self))


def uses_of_rows(plan: Plan) -> Uses:
    """Every request that has a place."""
    rows = np.flatnonzero(plan.offset != -1)
    low = plan.offset[rows]
    return Uses(plan.start[rows], plan.end[rows], low, low + plan.size[rows], rows)


def uses_of_schedule(plan: Plan) -> Uses:
    """The schedule unrolled over prologue and two iterations."""
    period = plan.cycle_end - plan.cycle_start
    first = np.flatnonzero(plan.schedule_offset != -1)
    second = first[first >= plan.num_prologue]
    end = np.minimum(plan.schedule_end[second] + period, plan.cycle_end + period)
    rows = np.concatenate([first, second])
    low = plan.schedule_offset[rows]
    return Uses(
        np.concatenate([plan.schedule_start[first], plan.schedule_start[second] + period]),
        np.concatenate([plan.schedule_end[first], end]),
        low,
        low + plan.schedule_size[rows],
        rows,
    )
