"""A program that is held to a budget of reserved memory, with the plan that the budget was tried with.

Contract: no more is taken from a device from here on. A plan that is in force by now stays: what the program does
beside it is served by the heap, and the next step that is planned has its places again, as when it was tried; only a
request that could not be served otherwise ends it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stalloc.runtime.runtime_settings import Phase

if TYPE_CHECKING:
    from stalloc.runtime.controller import Controller


def hold_to_budget(controllers: "Sequence[Controller]", budget_bytes: int) -> None:
    """To be called before the first allocation."""
    for controller in controllers:
        controller.memory.keep_within(budget_bytes)
        controller.steps.keep_plan = controller.status.phase is Phase.PLANNED
