"""When steps are recorded while a plan is in force, and when no more.

Contract: they are while there are steps that the plan does not know, be it in a few requests or altogether, and for a
time after plans of kinds of steps came into force. A watch that brought no plan is followed by a pause, twice as long
as the one before; a step that the plan knows nothing of shortens it.
"""

from typing import TYPE_CHECKING

from stalloc.core.state import DeviceState
from stalloc.runtime import decisions
from stalloc.runtime.cpu_budget import CpuBudget
from stalloc.runtime.recorded_steps import RecordedSteps

if TYPE_CHECKING:
    from stalloc.runtime.steady_marks import SteadySteps


class StepWatch:
    """Decides when the steps of one device are recorded while a plan is in force."""

    def __init__(self, state: DeviceState, recorded: RecordedSteps, cpu_budget: CpuBudget) -> None:
        self._state, self._recorded, self._cpu_budget = state, recorded, cpu_budget
        self._steps = self._pause = 0  # of this watch, and until the next one
        self._next_pause = decisions.watch_left(0)

    def begin(self, *, anew: bool) -> None:
        """Watch from here on, in the record that there is; `anew`: pauses begin to be short again."""
        self._steps = 1
        if anew:
            self._next_pause = decisions.watch_left(0)

    def end(self) -> None:
        self._steps = 0

    def pause(self) -> None:
        self._steps, self._pause = 0, self._next_pause

    @property
    def num_left(self) -> int:
        return decisions.watch_left(self._steps) if self._steps else 0

    def skip(self, steps: "SteadySteps") -> None:
        if self._steps:
            self._steps += steps.count
        else:
            self._pause -= steps.count

    def note_step(self, *, missed: bool, is_unknown: bool) -> None:
        """A step ended of which something was missed, or of which little was served."""
        if not self._steps:
            self._pause -= decisions.counts_in_pause(is_unknown=is_unknown)
            if missed and self._pause <= 0 and not self._cpu_budget.is_spent:
                self._steps = 1
                self._recorded.expect_last()
                self._recorded.begin_anew()
            return
        self._steps += 1
        if decisions.watch_left(self._steps) < 0:
            self.pause()
            self._next_pause *= 2
            self._state.forget_record()
            self._recorded.forget()
        elif decisions.is_record_long(self._state.record.log.num_events) or not self._state.record.hot.recording:
            self._recorded.begin_anew()
