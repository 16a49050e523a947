"""What the plan in force did not serve of a program's steps.

Contract: it is counted from mark to mark, and from the first mark after a plan came into force.
"""

from typing import TYPE_CHECKING

from stalloc.core.state import DeviceState
from stalloc.runtime import decisions

if TYPE_CHECKING:
    from stalloc.runtime.steady_marks import SteadySteps


class StepMisses:
    """How many requests of each marked step on one device the plan did not serve."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._counts, self._plans = (0, 0), 0  # hits and misses, and plans that had been put in force by then
        self._bad = 0

    def of_step(self, num_plans: int) -> tuple[int, float]:
        """Requests that were not served of the step that just ended, and their share; `num_plans` were put in force."""
        counts = self._state.record.follow.hits, self._state.num_unserved
        fresh = self._plans == num_plans
        hits, missed = (counts[0] - self._counts[0], counts[1] - self._counts[1]) if fresh else (0, 0)
        self._counts, self._plans = counts, num_plans
        self._bad = self._bad + 1 if decisions.is_bad(missed, hits + missed) else 0
        return missed, missed / max(hits + missed, 1)

    def skip(self, steps: "SteadySteps") -> None:
        self._counts, self._bad = (steps.hits, steps.lost), 0

    @property
    def are_few(self) -> bool:
        return decisions.are_bad_steps_few(self._bad)
