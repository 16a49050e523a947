"""A search for kinds of steps that recur, in a thread of its own, and the plans that come of it.

Contract: nothing that goes wrong in a search reaches the program; it ends with plans that were admitted, or with none.
"""

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stalloc.core.arena_tape import ArenaTape
from stalloc.core.device_arena import load_for_moves
from stalloc.core.host_memory import trim
from stalloc.runtime import decisions
from stalloc.runtime.effort import Effort
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
    effort: Effort  # what is left of it bounds how many kinds are planned that are not known; one at least
    looked_for: set[bytes] = field(default_factory=set)  # those of them that the trace is sure to show
    double_buffered: bool = False  # a kind may have two plans, which its marked steps alternate between
    ring: "KeptTrace | None" = None  # what the ring in force was found in: its steps are known kinds too
    of_ring: set[bytes] = field(default_factory=set)  # their names
    record: int | None = None  # the number of the record; None: no cycle of steps is looked for
    pages_move: bool = False  # in every step of the plans in force: a cycle that needs less takes their place
    may_wait: bool = False  # for another step, which may show how long what a cycle makes lives
    done: threading.Event = field(default_factory=threading.Event)
    tapes: "KindPlans | None" = None
    admitted: ArenaTape | None = None  # the plans, as they are served
    cycle: "Cycle | None" = None  # that the steps of the record make, if its plan has places for more of them
    awaits_cycle: bool = False  # its plan is to be made one step later

    @property
    def served(self) -> ArenaTape:
        """The plans, as they are served; to be asked for when there are any."""
        assert self.admitted is not None
        return self.admitted

    @property
    def plan(self) -> "Plan":
        """What reports speak of."""
        assert self.tapes is not None
        return self.tapes.largest_plan

    @property
    def longest(self) -> int:
        """Requests of the longest kind of step."""
        assert self.tapes is not None
        return max(len(kind.size) for kind in self.tapes.kinds)

    def start(self, trace: "Trace") -> None:
        """Begin, in a thread."""
        start_thread(self._run, trace)

    @property
    def lacks_places(self) -> bool:
        """Whether the plans have no places for much that the steps ask for."""
        tapes = self.tapes or self.before
        return tapes is not None and decisions.lacks_places(int((tapes.offset < 0).sum()), len(tapes.offset))

    def _run(self, trace: "Trace") -> None:
        try:
            with self.effort.counted():
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
        before = self.before.kinds if self.before is not None else self._kinds_of_ring()
        known = {kind.key for kind in before}
        fresh = [kind for kind in usable if kind.key not in known]
        if fresh:
            again = {kind.key: kind for kind in usable}
            kinds = [again[kind.key].with_what_was_known(kind) if kind.key in again else kind for kind in before]
            kinds += self._most_frequent(fresh)
            kinds.sort(key=lambda kind: -kind.times_seen)
            self.tapes = plan_steps(
                kinds[: decisions.num_planned_kinds(len(kinds))],
                self.made,
                trace.device,
                double_buffered=self.double_buffered,
            )
            self.admitted = admit(self.tapes.plans, ring_only=True, num_buffers=self.tapes.num_buffers)

    def _name(self, kind: "StepKind") -> bytes:
        return name_of(kind.size, kind.stream)

    def _kinds_of_ring(self) -> "list[StepKind]":
        """The steps of the ring in force."""
        from stalloc.lifespans.units import recurring_steps

        if self.ring is None:
            return []
        found = recurring_steps(self.ring.trace())
        return [kind for kind in found if self._name(kind) in self.of_ring and (kind.end > 0).any()]

    def _look_for_cycle(self, trace: "Trace", record: int) -> None:
        from stalloc.runtime.cycles import Cycle, find_cycle

        tapes = self.tapes or self.before
        found = find_cycle(trace, tapes, of_any_places=self.pages_move) if tapes is not None else None
        tape = found.tape if found is not None else None
        if found is None or tape is None or not decisions.is_cycle_affordable(len(tape.size), self.effort.left_seconds):
            return
        self.awaits_cycle = self.may_wait and not tape.planned.all()
        cycle = Cycle.planned(found, record) if not self.awaits_cycle else None
        if cycle is not None and tapes is not None and (self.lacks_places or cycle.arena_bytes < tapes.peak_bytes):
            self.cycle = cycle

    def _most_frequent(self, kinds: "list[StepKind]") -> "list[StepKind]":
        """As many as there is time for."""
        kinds = sorted(kinds, key=lambda kind: -kind.times_seen)
        return kinds[: decisions.num_affordable([len(kind.size) for kind in kinds], self.effort.left_seconds)]
