"""A plan in the making: the job that makes it, and the cycle that is followed until it is there.

Contract: nothing that goes wrong in a job reaches the program; it ends with a plan that was admitted, or with an error.
A cycle is followed without being served, so that the boundary is known at which its plan can come into force.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from stalloc.core.arena_schedule import ArenaSchedule, Between
from stalloc.core.device_parts import load_for_moves
from stalloc.core.state import DeviceState
from stalloc.device.ordering import ordering
from stalloc.runtime import decisions
from stalloc.runtime.admission import admit
from stalloc.runtime.cpu_budget import CpuBudget
from stalloc.runtime.recording import Recording
from stalloc.runtime.status import Status
from stalloc.runtime.threads import start_thread
from stalloc.trace.packing import KeptTrace

if TYPE_CHECKING:
    from stalloc.lifespans.repeating_schedule import Schedule
    from stalloc.planner import Plan
    from stalloc.planner.sharing import Streams

    Planner = Callable[..., Plan]  # (schedule, streams=), as plan_schedule; called in any thread


@dataclass
class PlanJob:
    """A plan of `schedule`; `done` is set when `plan` and `admitted`, or `error`, are there."""

    schedule: "Schedule"  #: the cycle that is planned
    streams: "Streams" = "separate"
    between: Between | None = None  #: what steps have beside it, if they are not all the same
    with_dynamic: "Schedule | None" = (
        None  #: the cycle with such requests among its own, for which the plan leaves room
    )
    done: threading.Event = field(default_factory=threading.Event)
    plan: "Plan | None" = None
    admitted: ArenaSchedule | None = None  #: the plan, as it is served
    error: str | None = None

    @property
    def periods(self) -> int:
        """How many periods the cycle has."""
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
        """Begin, in a thread; `planner` stands in for `plan_schedule`. The trace is packed afterwards."""
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

    def make(self, planner: "Planner | None") -> None:
        """Make the plan, in this thread. Raises what planning raises."""
        from stalloc.planner import plan_schedule
        from stalloc.planner.room import leave_room

        make = planner or plan_schedule
        plan = make(self.schedule, streams=self.streams)
        if self.with_dynamic is not None and self.streams == "separate":
            plan = leave_room(plan, self.with_dynamic)
        self.plan, self.admitted = plan, replace(admit([plan], cycle_only=True), between=self.between)


class NextPlan:
    """The plan that is being made for one device, and the cycle that is followed meanwhile."""

    def __init__(self, status: Status, state: DeviceState, recording: Recording, planner: "Planner | None") -> None:
        """`planner` stands in for `plan_schedule`."""
        self._status, self._state, self._recording = status, state, recording
        self._planner = planner
        self.job: PlanJob | None = None  #: that makes it; None: no plan is in the making
        self._wait_seconds = 0.0  # that the next boundary waits for it
        # a cycle in force, and its plan in which streams share memory
        self._shared: tuple[Schedule, PlanJob] | None = None

    def forget(self) -> None:
        """No plan is in the making any more."""
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
        """The plan of the cycle in force in which streams share memory, which is waited for once; None: not made.

        Should it take longer, or fail, the plan in force goes on.
        """
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
        """At a boundary: the job, if it is done; once it is waited for."""
        job = self.job
        if job is None:
            return None
        wait, self._wait_seconds = self._wait_seconds, 0.0
        if not job.done.wait(wait):
            self._state.triggers.at_boundary()
            return None
        self.job = None
        return job
