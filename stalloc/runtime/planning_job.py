"""A plan in the making: one job, in a thread of its own, one judgement of what it made.

Contract: nothing that goes wrong in a job reaches the program; it ends with a plan that was admitted, or with an error.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stalloc.core.arena_tape import ArenaTape
from stalloc.core.device_arena import load_for_moves
from stalloc.device.ordering import ordering
from stalloc.runtime.admission import admit
from stalloc.runtime.effort import Effort
from stalloc.runtime.threads import start_thread
from stalloc.trace.packing import KeptTrace

if TYPE_CHECKING:
    from stalloc.lifespans.tape import Tape
    from stalloc.planner import Plan
    from stalloc.planner.sharing import Streams

    Planner = Callable[..., Plan]  # (tape, streams=), as plan_tape; called in any thread


@dataclass
class PlanJob:
    """A plan of `tape`; `done` is set when `plan` and `admitted`, or `error`, are there."""

    tape: "Tape"  #: the ring that is planned
    streams: "Streams" = "separate"
    done: threading.Event = field(default_factory=threading.Event)
    plan: "Plan | None" = None
    admitted: ArenaTape | None = None  #: the plan, as it is served
    error: str | None = None

    @property
    def periods(self) -> int:
        """How many periods the ring has."""
        return self.tape.ring_length // self.tape.period_requests

    @property
    def may_share(self) -> bool:
        """Whether the plan keeps several streams apart that could share memory, where the driver orders them."""
        tape = self.admitted
        several = tape is not None and tape.num_streams > 1
        return self.streams == "separate" and several and ordering() is not None

    def start(self, planner: "Planner | None", observed: KeptTrace | None, effort: Effort) -> None:
        """Begin, in a thread; `planner` stands in for `plan_tape`. The trace is packed afterwards."""
        start_thread(self._run, planner, observed, effort)

    def _run(self, planner: "Planner | None", observed: KeptTrace | None, effort: Effort) -> None:
        try:
            with effort.counted():
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
        from stalloc.planner import plan_tape

        make = planner or plan_tape
        plan = make(self.tape, streams=self.streams)
        self.plan, self.admitted = plan, admit([plan], ring_only=True)
