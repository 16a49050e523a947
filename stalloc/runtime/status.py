"""What a device is at, as its controller decides and reports say."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stalloc.runtime.effort import Effort
from stalloc.runtime.runtime_settings import Observed, Phase, Settings

if TYPE_CHECKING:
    from stalloc.planner import Plan


@dataclass
class Status:
    """One device."""

    settings: Settings
    effort: Effort  #: what has gone into its plans
    phase: Phase = Phase.OBSERVING
    note: str = ""  #: why the device rests, or what went wrong
    plan: "Plan | None" = None  #: the last one that was put in force
    observed: Observed | None = None  #: what the steps before it were like
    observed_steps: int = 0  #: in the record, when its plan was made
    planned_since_ns: int | None = None  #: monotonic time at which the last plan was put in force
    steps_per_ring: int = 1  #: of that plan
    num_plans: int = 0  #: that were put in force
    earlier_hits: int = 0  #: of the plans before the last
    earlier_misses: int = 0  #: the same, with planned requests whose place was still taken
    num_dropped: int = 0  #: plans that were given up since the program no longer followed them
    dropped_note: str = ""  #: why the last of those was
