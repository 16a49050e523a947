"""When a cycle of steps is looked for, whose plan takes the place of those of kinds of steps.

Contract: it is where many requests have no place in the plans of kinds, in ever longer records, and once for such plans
where pages move in every step of what they serve.
"""

from typing import TYPE_CHECKING

from stalloc.runtime import thresholds
from stalloc.runtime.recorded_steps import RecordedSteps

if TYPE_CHECKING:
    from stalloc.runtime.kind_search import KindSearch
    from stalloc.runtime.step_cycle import Cycle

_MANY = 1 << 30


class CycleWatch:
    """Of the steps of one device."""

    def __init__(self, recorded: RecordedSteps) -> None:
        self._recorded = recorded
        self.forget()

    def forget(self) -> None:
        """The plan is given up."""
        self._found: Cycle | None = None  # to be put in force
        self._search_at = 0  # recorded steps, after which a cycle of them may show; 0: none is looked for
        self._patience = thresholds.CYCLE_WAITS
        self.begin_plans()

    def begin_plans(self) -> None:
        """Plans of kinds are put in force."""
        self._looked_for_moves = False

    def ends(self, search: "KindSearch") -> bool:
        """A search has ended: whether its plans do not matter, as there is a cycle, or is to be one step later."""
        if search.lacks_places:
            self._search_at = 2 * self._recorded.count
        if search.awaits_cycle:
            self._search_at, self._patience = self._recorded.count + 1, self._patience - 1
            return True
        if search.cycle is not None and search.cycle.record == self._recorded.num_records:
            self._found = search.cycle
            return True
        return False

    def take(self) -> "Cycle | None":
        """The cycle whose plan is to take the place of those in force, once."""
        cycle, self._found = self._found, None
        return cycle

    @property
    def is_found(self) -> bool:
        """Whether there is one."""
        return self._found is not None

    @property
    def num_left(self) -> int:
        """Recorded steps before the one after which a cycle is looked for; many if none is."""
        return self._search_at - self._recorded.count - 1 if self._search_at else _MANY

    def is_due(self, *, pages_move: bool) -> bool:
        """Whether one is to be looked for in what was recorded so far; `pages_move` in every step of the plans."""
        return 0 < self._search_at <= self._recorded.count or (pages_move and not self._looked_for_moves)

    def note_search(self, *, pages_move: bool) -> bool:
        """A search of all of the record begins; whether its cycle may wait for another step."""
        self._search_at = 0
        self._looked_for_moves |= pages_move
        return self._patience > 0
