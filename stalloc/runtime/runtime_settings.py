"""How a program is watched, and what was seen of it."""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
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
    num_requests: int = 0
    seconds: float = 0.0
