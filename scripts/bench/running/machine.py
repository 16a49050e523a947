"""The whole runtime on a device of numbers: controller, planner and compiled core; steps are marked, or not.

Contract: what a program asks for goes through the core exactly as torch's and CuPy's requests do; figures are the
core's own counters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from planning.generator import Column

from running.programs import Step
from stalloc.compiled import njit
from stalloc.core.constants import TINY
from stalloc.core.frees import free
from stalloc.core.records import state_at
from stalloc.core.requests import malloc
from stalloc.replay.offline import make_controller
from stalloc.runtime.controller import MARK_STEP
from stalloc.runtime.runtime_settings import Phase, Settings


@njit(nogil=True)
def _run(device, size, events, address, peaks):
    state = state_at(device)
    for event in events:
        row = abs(event) - 1
        if event > 0:
            address[row] = malloc(device, size[row], 0)
            if address[row] == 0:
                return False
            peaks[0] = max(peaks[0], state.total.allocated_bytes)
            peaks[1] = max(peaks[1], state.statistics.reserved_bytes)
        else:
            free(device, address[row])
    return True


@dataclass(frozen=True)
class Figures:
    """What one step was like."""

    hits: int
    missed: int  #: requests above 512 bytes that the plan did not serve
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    reserved_bytes: int  #: at the end of the step
    planned: bool  #: whether a plan was in force at its begin and at its end


class Machine:
    """One device and one program."""

    def __init__(
        self,
        standing: Column | None = None,
        *,
        marked: bool = True,
        settings: Settings | None = None,
        capacity_bytes: int = 0,
    ) -> None:
        self.controller = make_controller(
            capacity_bytes, settings or Settings(plan_wait_seconds=1e6, planning_share=math.inf)
        )
        self.controller.expects_marks = marked
        self.state = self.controller.state
        self.marked = marked
        for size in (standing if standing is not None else np.zeros(0, np.int64)).tolist():
            assert self.state.malloc(size)

    def run(self, step: Step) -> Figures:
        """Run one step and mark its end."""
        before = self._counts()
        began_planned = self.controller.status.phase is Phase.PLANNED
        plans = self.controller.status.num_plans
        peaks = np.zeros(2, np.int64)
        address = np.zeros(step.num_requests, np.int64)
        assert _run(self.state.address, step.size, step.events, address, peaks), "the device has no end"
        if self.marked:
            self._mark()
        planned = (
            began_planned
            and self.controller.status.phase is Phase.PLANNED
            and plans == self.controller.status.num_plans
        )
        if planned:
            hits, missed = (now - then for now, then in zip(self._counts(), before, strict=True))
        else:
            hits, missed = 0, int((step.size > TINY).sum())
        return Figures(hits, missed, int(peaks[0]), int(peaks[1]), self.state.record.statistics.reserved_bytes, planned)

    def follow(self, size: Column, events: Column, step_ends: Sequence[int]) -> bool:
        """Run a program whose requests may outlive its steps, and mark their ends; False if it runs out of memory."""
        address, peaks = np.zeros(len(size), np.int64), np.zeros(2, np.int64)
        start = 0
        for end in step_ends:
            if not _run(self.state.address, size, events[start:end], address, peaks):
                return False
            self._mark()
            start = end
        return True

    def _mark(self) -> None:
        self.controller.mark(MARK_STEP, "")
        search = self.controller.steps.search
        if search is not None:  # equal runs give equal figures: what runs beside the program is waited for
            search.done.wait()

    def _counts(self) -> tuple[int, int]:
        state = self.state
        return state.record.follow.hits, state.record.iterations.misses + state.record.iterations.conflicts
