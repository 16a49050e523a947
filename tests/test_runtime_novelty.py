"""A program most of whose steps are new to it is served by the heap alone: plans would serve parts of its steps."""

import math

import numpy as np
import pytest
from programs.core_machine import MIB

from stalloc.replay.offline import make_controller
from stalloc.runtime.runtime_settings import Phase, Settings
from stalloc.trace import MARK_STEP


class Program:
    """Each kind of step has so many layers and asks for sizes of its own."""

    def __init__(self) -> None:
        self.controller = make_controller(0, Settings(plan_wait_seconds=1e6, max_effort=math.inf))
        self.controller.expects_marks = True
        self.state = self.controller.state
        self.state.malloc(50 * MIB, 0)

    def step(self, kind: int) -> None:
        """One step of a kind."""
        rng = np.random.default_rng(kind)
        sizes = (rng.uniform(0.6, 12, rng.integers(10, 40)) * MIB).astype(int).tolist()
        layers = [int(self.state.malloc(size, 0)) for size in sizes]
        for address, size in zip(layers[::-1], sizes[::-1], strict=True):
            gradient = self.state.malloc(size, 0)
            self.state.free(address)
            self.state.free(gradient)
        self.controller.mark(MARK_STEP, "")


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_planned_where_most_steps_are_new(seed: int) -> None:
    program, rng = Program(), np.random.default_rng(seed)

    def some_steps(number: int) -> None:
        for kind in rng.integers(200, size=number).tolist():
            program.step(kind)
            if rng.random() < 0.2:
                program.step(kind)

    some_steps(60)
    num_plans = program.controller.status.num_plans  # of what came twice in a row in the first few steps
    some_steps(60)
    assert program.controller.status.phase is Phase.OBSERVING
    assert program.controller.status.num_plans == num_plans


def test_plans_are_given_up_where_most_steps_come_to_be_new_and_made_again_where_they_do_not() -> None:
    program, rng = Program(), np.random.default_rng(0)
    for kind in rng.integers(3, size=30).tolist():
        program.step(kind)
    assert program.controller.status.phase is Phase.PLANNED
    for kind in rng.integers(1000, 2000, size=60).tolist():
        program.step(kind)
    assert program.controller.status.phase is Phase.OBSERVING
    for kind in rng.integers(3, size=60).tolist():
        program.step(kind)
    hits, lost = program.state.record.hits, program.state.record.misses + program.state.record.conflicts
    for kind in rng.integers(3, size=5).tolist():
        program.step(kind)
    assert program.state.record.hits > hits
    assert program.state.record.misses + program.state.record.conflicts == lost
