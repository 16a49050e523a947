"""Plans in the making: of one schedule, and of the kinds of steps that a search finds.

Contract: nothing that goes wrong in a thread here reaches the program; it ends with plans that were admitted, or with
none. A cycle is followed without being served, so that the boundary is known at which its plan can come into force.
Plans of kinds have no place for a request that replaces one of an earlier step before that is gone, nor for what lives
through many steps; the plan of a cycle of all the steps has.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stalloc.core.arena_schedule import ArenaSchedule, Between
from stalloc.core.constants import TINY
from stalloc.core.device_parts import load_for_moves, trim
from stalloc.core.state import DeviceState
from stalloc.device.ordering import ordering
from stalloc.runtime import decisions
from stalloc.runtime.admission import admit
from stalloc.runtime.record_search import Found
from stalloc.runtime.recorded_steps import name_of
from stalloc.runtime.recording import Recording
from stalloc.runtime.runtime_settings import CpuBudget, Status
from stalloc.threads import start_thread
from stalloc.trace import MARK_STEP
from stalloc.trace.packing import KeptTrace

if TYPE_CHECKING:
    from stalloc.lifespans.recurring_steps import StepKind
    from stalloc.lifespans.repeating_schedule import Schedule
    from stalloc.planner import Layout, Plan
    from stalloc.planner.kind_plans import KindPlans
    from stalloc.planner.planning import Streams
    from stalloc.trace import Trace

    Planner = Callable[..., Plan]  # (schedule, streams=), as plan_schedule; called in any thread


@dataclass
class PlanJob:
    """A plan of `schedule`; `done` is set when `plan` and `admitted`, or `error`, are there."""

    schedule: "Schedule"  #: the cycle that is planned
    streams: "Streams" = "separate"
    between: Between | None = None  #: what steps have beside it, if they are not all the same
    with_dynamic: "Schedule | None" = None  #: the cycle with such requests among its own, for which room is left
    done: threading.Event = field(default_factory=threading.Event)
    plan: "Plan | None" = None
    admitted: ArenaSchedule | None = None  #: the plan, as it is served
    error: str | None = None

    @property
    def periods(self) -> int:
        return self.schedule.cycle_length // self.schedule.period_requests

    @property
    def may_share(self) -> bool:
        """Whether the plan keeps several streams apart that could share memory, where the driver orders them.

        Not where steps differ: dynamic requests need what is idle on their own stream.
        """
        schedule = self.admitted if self.between is None else None
        several = schedule is not None and schedule.num_streams > 1
        return self.streams == "separate" and several and ordering() is not None

    def start(self, planner: "Planner | None", observed: KeptTrace | None, cpu_budget: CpuBudget) -> None:
        start_thread(self._run, planner, observed, cpu_budget)

    def _run(self, planner: "Planner | None", observed: KeptTrace | None, cpu_budget: CpuBudget) -> None:
        try:
            with cpu_budget.counted():
                self.make(planner)
        except Exception as error:
            self.error = f"planning failed: {type(error).__name__}: {error}"
        finally:
            try:
                if observed is not None:
                    observed.pack()
            finally:
                self.done.set()
        load_for_moves()

    def make(self, planner: "Planner | None") -> ArenaSchedule:
        """Make the plan, in this thread: as it is served. Raises what planning raises."""
        from stalloc.planner import plan_schedule
        from stalloc.planner.planning import leave_room

        make = planner or plan_schedule
        plan = make(self.schedule, streams=self.streams)
        if self.with_dynamic is not None and self.streams == "separate":
            plan = leave_room(plan, self.with_dynamic)
        self.plan, self.admitted = plan, replace(admit([plan], cycle_only=True), between=self.between)
        return self.admitted


class NextPlan:
    """The plan that is being made for one device, and the cycle that is followed meanwhile."""

    def __init__(self, status: Status, state: DeviceState, recording: Recording, planner: "Planner | None") -> None:
        self._status, self._state, self._recording, self._planner = status, state, recording, planner
        self.job: PlanJob | None = None  #: that makes it; None: no plan is in the making
        self._wait_seconds = 0.0  # that the next boundary waits for it
        # a cycle in force, and its plan in which streams share memory
        self._shared: tuple[Schedule, PlanJob] | None = None

    def forget(self) -> None:
        self.job = self._shared = None

    def make(self, job: PlanJob, cursor: int, *, is_sure: bool = True) -> None:
        """Start a job; until its plan is there, follow its cycle from an entry on, so that its boundary is known.

        Without marks a period of it is enough: its plan may begin with any. `is_sure`: the program is at that entry.
        """
        self.job, self._wait_seconds = job, self._status.settings.plan_wait_seconds
        if not job.done.is_set():
            job.start(self._planner, self._recording.kept, self._status.cpu_budget)
        schedule, first = job.schedule, job.schedule.num_prologue
        length = schedule.cycle_length if self._recording.marks else schedule.period_requests
        cycle, nowhere = slice(first, first + length), np.full(length, -1, np.int64)
        self._state.triggers.at_recorded(0)
        cursor %= length
        followed = ArenaSchedule(
            arena_bytes=0, size=schedule.size[cycle], stream=schedule.stream[cycle], offset=nowhere, between=job.between
        )
        self._state.arena.install(followed, cursor)
        self._state.triggers.at_boundary()
        self._state.triggers.after_misses(decisions.most_misses(schedule.cycle_length))
        if is_sure:
            self._state.arena.begin_step(0, length, cursor)

    @property
    def is_at_begin(self) -> bool:
        """Whether the cycle that is to be planned, found without marks, begins anew with the request that comes now."""
        record = self._state.record
        return (
            not self._recording.marks
            and record.follow.cursor == record.follow.cycle_start
            and record.follow.history_count == 0 > record.iterations.last_miss
        )

    def take_shared(self, schedule: "Schedule") -> PlanJob | None:
        """The plan of the cycle in force in which streams share memory, waited for once; None: that goes on."""
        if self._shared is None or self._shared[0] is not schedule:
            self._shared = schedule, PlanJob(schedule, "share")
            self._shared[1].start(self._planner, None, self._status.cpu_budget)
            self._shared[1].done.wait(self._status.settings.plan_wait_seconds)
        job = self._shared[1]
        if not job.done.is_set():
            self._state.triggers.at_boundary()
            return None
        if job.admitted is None:
            return None
        self._shared = None
        return job

    def take_made(self) -> PlanJob | None:
        wait, self._wait_seconds = self._wait_seconds, 0.0
        if self.job is not None and not self.job.done.wait(wait):
            self._state.triggers.at_boundary()
            return None
        job, self.job = self.job, None
        return job


class Cycle(NamedTuple):
    """A cycle, and its plan."""

    found: Found
    job: PlanJob
    record: int  #: the number of the record that it was found in


def find_cycle(trace: "Trace", schedules: "KindPlans", *, of_any_places: bool = False) -> Found | None:
    """The cycle at the end of a record, if it has places for twice as much as the plans, or `of_any_places` for all."""
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


@dataclass
class KindSearch:
    """A search for kinds of steps, and their plans; `done` is set at its end, `admitted` is None if nothing is new."""

    before: "KindPlans | None"  # of the kinds that are known
    wanted: set[bytes]  # names of the kinds that are to be planned, the known ones too
    made: "dict[bytes, Layout]"
    cpu_budget: CpuBudget  # what is left of it bounds how many kinds are planned that are not known; one at least
    looked_for: set[bytes] = field(default_factory=set)  # those of them that the trace is sure to show
    double_buffered: bool = False  # a kind may have two plans, which its marked steps alternate between
    in_force: "KeptTrace | None" = None  # what the cycle in force was found in: its steps are known kinds too
    in_force_kinds: set[bytes] = field(default_factory=set)  # their names
    record: int | None = None  # the number of the record; None: no cycle of steps is looked for
    pages_move: bool = False  # in every step of the plans in force: a cycle that needs less takes their place
    may_wait: bool = False  # for another step, which may show how long what a cycle makes lives
    done: threading.Event = field(default_factory=threading.Event)
    schedules: "KindPlans | None" = None
    admitted: ArenaSchedule | None = None  # the plans, as they are served
    cycle: Cycle | None = None  # that the steps of the record make, if its plan has places for more of them
    awaits_cycle: bool = False  # its plan is to be made one step later

    @property
    def planned(self) -> "KindPlans":
        assert self.schedules is not None
        return self.schedules

    @property
    def names(self) -> list[bytes]:
        return [name_of(kind.size, kind.stream) for kind in self.planned.kinds]

    def start(self, trace: "Trace") -> None:
        start_thread(self._run, trace)

    @property
    def lacks_places(self) -> bool:
        """Whether the plans have no places for much that the steps ask for."""
        schedules = self.schedules or self.before
        offset = schedules.offset if schedules is not None else np.empty(0)
        return decisions.lacks_places(int((offset < 0).sum()), len(offset))

    def _run(self, trace: "Trace") -> None:
        try:
            with self.cpu_budget.counted():
                self.search(trace)
                if (self.lacks_places or self.pages_move) and self.record is not None:
                    self._look_for_cycle(trace, self.record)
        except Exception:  # these kinds are not planned then; the program must not see it
            self.admitted = None
        finally:
            self.done.set()
            trim()
        load_for_moves()

    def search(self, trace: "Trace") -> None:
        from stalloc.planner.kind_plans import plan_steps

        usable = _recurring(trace, self.wanted)
        if self.before is not None:
            before = self.before.kinds
        else:
            before = _recurring(self.in_force.trace(), self.in_force_kinds) if self.in_force is not None else []
        known, again = {kind.key for kind in before}, {kind.key: kind for kind in usable}
        fresh = _by_frequency(kind for kind in usable if kind.key not in known)
        if fresh:
            kinds = [again[kind.key].with_what_was_known(kind) if kind.key in again else kind for kind in before]
            lengths = [len(kind.size) for kind in fresh]
            kinds = _by_frequency(kinds + fresh[: decisions.num_affordable(lengths, self.cpu_budget.left_seconds)])
            kinds = kinds[: decisions.num_planned_kinds(len(kinds))]
            self.schedules = plan_steps(kinds, self.made, trace.device, double_buffered=self.double_buffered)
            self.admitted = admit(self.schedules.plans, cycle_only=True, num_buffers=self.schedules.num_buffers)

    def _look_for_cycle(self, trace: "Trace", record: int) -> None:
        schedules = self.schedules or self.before
        found = find_cycle(trace, schedules, of_any_places=self.pages_move) if schedules is not None else None
        schedule = found.schedule if found is not None else None
        if schedules is None or found is None or schedule is None:
            return
        if not decisions.is_cycle_affordable(len(schedule.size), self.cpu_budget.left_seconds):
            return
        if self.may_wait and not schedule.planned.all():
            self.awaits_cycle = True
            return
        job = PlanJob(schedule)
        arena_bytes = job.make(None).arena_bytes
        job.done.set()
        if self.lacks_places or arena_bytes < schedules.peak_bytes:
            self.cycle = Cycle(found, job, record)


def _recurring(trace: "Trace", names: set[bytes]) -> "list[StepKind]":
    """The kinds of steps in a trace that recur and have these names, if anything of them is known to end."""
    from stalloc.lifespans.recurring_steps import recurring_steps

    found = recurring_steps(trace)
    return [kind for kind in found if name_of(kind.size, kind.stream) in names and (kind.end > 0).any()]


def _by_frequency(kinds: "Iterable[StepKind]") -> "list[StepKind]":
    return sorted(kinds, key=lambda kind: -kind.times_seen)
