"""How soon the first plan serves: with the step after those in which what repeats was seen often enough."""

import math
from collections.abc import Callable

from stalloc.replay.offline import make_controller
from stalloc.runtime.controller import MARK_STEP, Controller
from stalloc.runtime.runtime_settings import Phase, Settings

MIB = 1 << 20
SIZES = [MIB + 4096 * number for number in range(80)]


def watched(*, marks: bool) -> Controller:
    """A device whose program is watched; every boundary waits for a plan in the making."""
    controller = make_controller(0, Settings(plan_wait_seconds=1e6, planning_share=math.inf))
    controller.expects_marks = marks
    return controller


def served_by_step(controller: Controller, num_steps: int, step: Callable[[], None]) -> list[int]:
    """How many requests of each step the plan serves; the counting begins anew with a plan."""
    status, record, served = controller.status, controller.state.record, []
    for _ in range(num_steps):
        plans, before = status.num_plans, record.follow.hits
        step()
        is_new = status.num_plans != plans
        served.append(
            (record.follow.hits if is_new else record.follow.hits - before) if status.phase is Phase.PLANNED else 0
        )
    print(served)
    return served


def allocate(controller: Controller, size_bytes: int) -> int:
    """A request; it has to be served."""
    address = int(controller.state.malloc(size_bytes))
    assert address
    return address


def layer(controller: Controller, sizes: list[int]) -> None:
    """Requests, all of which live together in the end."""
    for address in [allocate(controller, size) for size in sizes]:
        controller.state.free(address)


def test_buffers_that_take_turns_are_served_once_their_lifespans_are_known() -> None:
    """What a step makes last lives until the end of the next: the cycle is of two steps, and begins with either.

    The fourth step shows that the third's is no exception.
    """
    controller = watched(marks=False)
    kept: list[int] = []

    def step() -> None:
        layer(controller, SIZES[:7])
        kept.append(allocate(controller, 8 * MIB))
        if len(kept) > 1:
            controller.state.free(kept.pop(0))

    served = served_by_step(controller, 10, step)
    assert controller.status.num_plans == 1
    assert served[4:] == [8] * 6


def test_a_little_that_is_kept_of_each_step_does_not_hold_up_the_plan() -> None:
    controller = watched(marks=True)

    def step() -> None:
        layer(controller, SIZES)
        allocate(controller, 4096 + 512)
        controller.mark(MARK_STEP, "")

    assert served_by_step(controller, 8, step)[3:] == [len(SIZES)] * 5
