"""Which of several kinds a step is that begins as others do, seen while it runs."""

import numpy as np
import pytest
from programs.step_program import MIB, Program

from stalloc.runtime.runtime_settings import Phase


def test_an_arena_that_moves_before_two_kinds_of_steps_part_costs_no_hits() -> None:
    """Which of the two it is shows in the next request, as the place in what they begin with is still known."""
    program = Program()

    def train(kind: int, *, moves: bool = False) -> None:
        live = [program.allocate(MIB + 4096 * number) for number in range(24)]
        if moves:
            assert program.controller.arenas.move()
        live += [program.allocate((2 + kind) * MIB + 512 * number) for number in range(20)]
        for address in live:
            program.free(address)

    for number in range(24):
        program.step(lambda kind=number // 4 % 2: train(kind))
    assert [program.step(lambda kind=kind: train(kind, moves=True)) for kind in (0, 1, 0, 1)] == [(44, 0)] * 4


def test_a_plan_outlasts_a_step_that_begins_as_the_planned_one_time_and_again() -> None:
    program = Program()
    sizes = [(1 + i % 7) * MIB + 512 * i for i in range(60)]

    def work(*, looks_ahead: bool) -> None:
        for turn in range(10 if looks_ahead else 0):
            live = [program.allocate(size) for size in sizes[:35]]
            live += [program.allocate(2 * MIB + 4096 * (16 * turn + i)) for i in range(16)]
            for address in live:
                program.free(address)
        live = [program.allocate(size) for size in sizes]
        for address in live:
            program.free(address)

    served = [program.step(lambda number=number: work(looks_ahead=number % 3 == 0)) for number in range(24)]
    assert served[-3:] == [(570, 0), (60, 0), (60, 0)]
    assert program.controller.status.num_plans <= 3


@pytest.mark.parametrize("seed", [1, 3, 7])
def test_a_step_that_keeps_more_is_followed_without_marks_too(seed: int) -> None:
    program, rng = Program(), np.random.default_rng(seed)
    program.controller.expects_marks = False

    def step(width: int, *, keeps: bool) -> None:
        live = []
        for i in range(13):
            live.append(program.allocate(width * (1000 + 7 * i)))
            if not keeps and len(live) > 1:
                program.free(live.pop(0))
        live += [program.allocate(width * (3000 + 7 * i)) for i in range(0 if keeps else 6)]
        for address in live:
            program.free(address)

    for _ in range(160):
        width, keeps = int(rng.choice([1500, 2000, 2600])), not rng.integers(2)
        step(width, keeps=keeps)
    assert program.controller.status.phase is Phase.PLANNED
    assert program.controller.steps.schedules is not None
