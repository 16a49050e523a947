"""How a device is served, what it is at, and what its plans may cost.

Contract of the budget: the time of all threads counts, compiling apart. It is a share of the program's, by default
1 %, and in advance one second before the first plan, after it the share of 1,000 steps or 0.3 s. What is under way when
that is spent comes to its end.
"""

import contextlib
import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stalloc.compiled import compile_time
from stalloc.runtime import decisions

if TYPE_CHECKING:
    from stalloc.planner import Plan
    from stalloc.planner.planning import Streams

Arena = Literal["pages", "pool"]


class Phase(enum.Enum):
    """What a device is at; the value is what reports say."""

    OBSERVING = "observing"
    PLANNING = "planning"
    PLANNED = "running on the plan"
    RESTING = "serving from the heap"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a program is watched."""

    observe_steps: int = 0  #: step marks to see before a plan is made; 0: as soon as a period is confirmed
    plan: bool = True  #: False: only record
    plan_wait_seconds: float = 20.0
    """How long a step boundary waits for the planner, once a plan, so that short runs gain."""
    planning_share: float = 0.01
    """Share of the program's processor time for planning, see `CpuBudget`; inf: equal runs plan alike."""
    max_plans: int = 8  #: plans in a row that soon no longer fit before the heap is left to serve for good
    keep_recording: bool = False  #: record to the end, for `stalloc record`
    keep_events: int = 0  #: of that record so many of the last, once nobody looks for steps; 0: as many as have room
    exact_times: bool = True  #: of those; False: to a few milliseconds
    call_sites: bool = False  #: note which line of the program makes each request
    streams: "Streams" = "separate"  #: whether streams share the arena, with planned handovers: see plan_schedule
    arena: Arena = "pages"  #: where memory comes from: pages, mapped where they are needed, or blocks of CuPy's pool


@dataclass
class Observed:
    """What the steps before the plan were like."""

    allocated_peak_bytes: int = 0
    reserved_peak_bytes: int = 0


@dataclass(frozen=True)
class SteadySteps:
    """Steps of one device that went by, and counts as of the mark that ended the last of them."""

    names: list[str]  #: of their marks
    num_events: list[int]  #: in the record, at each of these
    place: int  #: entries of the schedule from where the cycle begins
    hits: int
    lost: int  #: misses and conflicts
    followed: int  #: requests that the schedule was followed by
    num_requests: int
    requested_bytes: int
    allocated_bytes: int

    @property
    def count(self) -> int:
        return len(self.num_events)


class CpuBudget:
    """The processor time that planning for one device's program took, and what it may still take."""

    def __init__(self, share: float) -> None:
        """`share`: what comes in, of the program's time; as much is there to begin with, for 1,000 steps."""
        self._share, self._spent_ns = share, 0
        self._began_ns = self._planned_ns = time.process_time_ns()
        self._has_plan = False
        self._num_steps = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        began, compiled = time.thread_time_ns(), compile_time().processor_ns
        try:
            yield
        finally:
            self._spent_ns += time.thread_time_ns() - began - (compile_time().processor_ns - compiled)

    def note_step(self) -> None:
        if self._num_steps == 0:
            self._began_ns = time.process_time_ns()
        self._num_steps += 1

    def skip(self, steps: SteadySteps) -> None:
        self._num_steps += steps.count

    def note_plan(self) -> None:
        """A plan is in force; the first ends what is spent before it."""
        if not self._has_plan:
            self._has_plan, self._spent_ns, self._planned_ns = True, 0, time.process_time_ns()

    @property
    def left_seconds(self) -> float:
        now = time.process_time_ns()
        step_seconds = (now - self._began_ns) / 1e9 / max(1, self._num_steps - 1)
        since_seconds = (now - self._planned_ns) / 1e9
        return decisions.seconds_left(
            self._share, step_seconds, since_seconds, self._spent_ns / 1e9, has_plan=self._has_plan
        )

    @property
    def is_spent(self) -> bool:
        return self.left_seconds < 0


@dataclass
class Status:
    """The status of one device: its phase, its plan and how that came about."""

    settings: Settings
    cpu_budget: CpuBudget  #: what has gone into its plans
    phase: Phase = Phase.OBSERVING
    note: str = ""  #: why the device rests, or what went wrong
    plan: "Plan | None" = None  #: the last one that was put in force
    observed: Observed | None = None  #: what the steps before it were like
    observed_steps: int = 0  #: in the record, when its plan was made
    planned_since_ns: int | None = None  #: monotonic time at which the last plan was put in force
    steps_per_cycle: int = 1  #: of that plan
    num_plans: int = 0  #: that were put in force
    earlier_hits: int = 0  #: of the plans before the last
    earlier_misses: int = 0  #: the same, with planned requests whose place was still taken
    num_dropped: int = 0  #: plans that were given up since the program no longer followed them
    dropped_note: str = ""  #: why the last of those was
    is_settled: bool = False  #: so many steps were seen without one that repeats that no plan is expected soon
    plans_in_a_row: int = 0  #: that were given up, or never put in force, with none between them that fitted

    def note_dropped(self, note: str, num_iterations: int) -> bool:
        """A plan is given up, after so many iterations over it; whether the program is to be watched for another."""
        if self.phase is Phase.PLANNED:
            self.num_dropped, self.dropped_note = self.num_dropped + 1, note
        # what counts is drift that goes on: a plan that served for long begins the count anew, and was of steps
        self.plans_in_a_row = 1 if decisions.has_fitted(num_iterations) else self.plans_in_a_row + 1
        return self.plans_in_a_row < self.settings.max_plans and self.settings.plan
