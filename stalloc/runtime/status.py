"""What a device is at, as its controller decides and reports say."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalloc.runtime import decisions
from stalloc.runtime.cpu_budget import CpuBudget
from stalloc.runtime.runtime_settings import Observed, Phase, Settings

if TYPE_CHECKING:
    from stalloc.planner import Plan


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
    plans_in_a_row: int = 0  #: that were given up, or never put in force, with none between them that fitted

    def note_dropped(self, note: str, num_iterations: int) -> bool:
        """A plan is given up, after so many iterations over it; whether the program is to be watched for another."""
        if self.phase is Phase.PLANNED:
            self.num_dropped, self.dropped_note = self.num_dropped + 1, note
        # what counts is drift that goes on: a plan that served for long begins the count anew, and was of steps
        self.plans_in_a_row = 1 if decisions.has_fitted(num_iterations) else self.plans_in_a_row + 1
        return self.plans_in_a_row < self.settings.max_plans and self.settings.plan
