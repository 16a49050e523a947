"""A search for kinds of steps that recur, in a thread of its own, and the plans that come of it.

Contract: nothing that goes wrong in a search reaches the program; it ends with plans that were admitted, or with none.
"""

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stalloc.core.arena_schedule import ArenaSchedule
from stalloc.core.device_parts import load_for_moves, trim
from stalloc.runtime import decisions
from stalloc.runtime.cpu_budget import CpuBudget
from stalloc.runtime.kind_names import name_of
from stalloc.runtime.threads import start_thread

if TYPE_CHECKING:
    from stalloc.lifespans.units import StepKind
    from stalloc.planner import Layout, Plan
    from stalloc.planner.kind_plans import KindPlans
    from stalloc.runtime.cycles import Cycle
    from stalloc.trace import Trace
    from stalloc.trace.packing import KeptTrace


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
    cycle: "Cycle | None" = None  # that the steps of the record make, if its plan has places for more of them
    awaits_cycle: bool = False  # its plan is to be made one step later

    @property
    def served(self) -> ArenaSchedule:
        """The plans, as they are served; to be asked for when there are any."""
        assert self.admitted is not None
        return self.admitted

    @property
    def plan(self) -> "Plan":
        """What reports speak of."""
        assert self.schedules is not None
        return self.schedules.largest_plan

    @property
    def longest(self) -> int:
        """Requests of the longest kind of step."""
        assert self.schedules is not None
        return max(len(kind.size) for kind in self.schedules.kinds)

    def start(self, trace: "Trace") -> None:
        """Begin, in a thread."""
        start_thread(self._run, trace)

    @property
    def lacks_places(self) -> bool:
        """Whether the plans have no places for much that the steps ask for."""
        schedules = self.schedules or self.before
        return schedules is not None and decisions.lacks_places(
            int((schedules.offset < 0).sum()), len(schedules.offset)
        )

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
        """Plan the kinds of steps that recur together with those that are known."""
        from stalloc.lifespans.units import recurring_steps
        from stalloc.planner.kind_plans import plan_steps
        from stalloc.runtime.admission import admit

        found = recurring_steps(trace)
        usable = [kind for kind in found if self._name(kind) in self.wanted and (kind.end > 0).any()]
        before = self.before.kinds if self.before is not None else self._kinds_of_cycle()
        known = {kind.key for kind in before}
        fresh = [kind for kind in usable if kind.key not in known]
        if fresh:
            again = {kind.key: kind for kind in usable}
            kinds = [again[kind.key].with_what_was_known(kind) if kind.key in again else kind for kind in before]
            kinds += self._most_frequent(fresh)
            kinds.sort(key=lambda kind: -kind.times_seen)
            self.schedules = plan_steps(
                kinds[: decisions.num_planned_kinds(len(kinds))],
                self.made,
                trace.device,
                double_buffered=self.double_buffered,
            )
            self.admitted = admit(self.schedules.plans, cycle_only=True, num_buffers=self.schedules.num_buffers)

    def _name(self, kind: "StepKind") -> bytes:
        return name_of(kind.size, kind.stream)

    def _kinds_of_cycle(self) -> "list[StepKind]":
        """The steps of the cycle in force."""
        from stalloc.lifespans.units import recurring_steps

        if self.in_force is None:
            return []
        found = recurring_steps(self.in_force.trace())
        return [kind for kind in found if self._name(kind) in self.in_force_kinds and (kind.end > 0).any()]

    def _look_for_cycle(self, trace: "Trace", record: int) -> None:
        from stalloc.runtime.cycles import Cycle, find_cycle

        schedules = self.schedules or self.before
        found = find_cycle(trace, schedules, of_any_places=self.pages_move) if schedules is not None else None
        schedule = found.schedule if found is not None else None
        if (
            found is None
            or schedule is None
            or not decisions.is_cycle_affordable(len(schedule.size), self.cpu_budget.left_seconds)
        ):
            return
        self.awaits_cycle = self.may_wait and not schedule.planned.all()
        cycle = Cycle.planned(found, record) if not self.awaits_cycle else None
        if (
            cycle is not None
            and schedules is not None
            and (self.lacks_places or cycle.arena_bytes < schedules.peak_bytes)
        ):
            self.cycle = cycle

    def _most_frequent(self, kinds: "list[StepKind]") -> "list[StepKind]":
        """The most frequent kinds of steps, as many as there is time to plan."""
        kinds = sorted(kinds, key=lambda kind: -kind.times_seen)
        return kinds[: decisions.num_affordable([len(kind.size) for kind in kinds], self.cpu_budget.left_seconds)]
