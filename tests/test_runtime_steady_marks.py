"""Steps that come as planned go by without a word to Python: nothing may come of that but less to do."""

from collections.abc import Callable

import pytest
from programs.step_program import Program, in_rounds

from stalloc.core import constants
from stalloc.runtime.runtime_settings import Phase
from stalloc.trace import Trace

Steps = Callable[[Program, int], None]


def _one(program: Program, number: int) -> None:
    program.train(2000)


def _in_order(program: Program, number: int) -> None:
    program.evaluate(3000) if number % 5 == 4 else program.train(2000 + 500 * (number % 5 == 2))


def _with_strangers(program: Program, number: int) -> None:
    """Now and then a step that nobody has seen before, and after it those that are known."""
    program.train(2000 + (50 * number if number % 23 == 22 else 0))


def _that_goes_on_with_another(program: Program, number: int) -> None:
    program.train((2000, 3000, 2000)[number // 40 % 3])


def _with_something_kept(program: Program, number: int) -> None:
    if number % 7 == 6:
        program.weights.append(program.allocate(3 << 20))
    program.train(2000)


def _run(steps: Steps, *, hears_all: bool, keeps_batch: bool, num_steps: int = 120) -> list[tuple[int, ...]]:
    """What each step was like: requests served and not served from the plan, bytes reserved, plans made by then."""
    program, rows = Program(keeps_batch=keeps_batch, hears_all=hears_all), []
    for number in range(num_steps):
        served = program.step(lambda number=number: steps(program, number))
        rows.append((*served, int(program.state.record.statistics.reserved_bytes), program.controller.status.num_plans))
    return rows


@pytest.mark.parametrize("keeps_batch", [False, True])
@pytest.mark.parametrize("steps", [_one, _in_order, _with_strangers, _that_goes_on_with_another, _with_something_kept])
def test_a_program_is_served_as_if_each_mark_had_been_looked_at(steps: Steps, keeps_batch: bool) -> None:
    run, heard = (_run(steps, hears_all=hears_all, keeps_batch=keeps_batch) for hears_all in (False, True))
    assert run == heard


@pytest.mark.parametrize("seed", range(3))
def test_so_is_one_whose_steps_come_in_any_order(seed: int) -> None:
    widths = [2000 + 400 * kind for kind in in_rounds(seed, 3, 40)]
    run, heard = (
        _run(lambda program, number: program.train(widths[number]), hears_all=hears_all, keeps_batch=True)
        for hears_all in (False, True)
    )
    assert run == heard


def _recorded(*, hears_all: bool) -> Trace:
    """Steps are recorded for a time after plans of several kinds came into force."""
    program = Program(hears_all=hears_all)
    for kind in [*in_rounds(1, 3, 8), *([0, 0, 1, 2] * 8)]:
        program.step(lambda width=2000 + 400 * kind: program.train(width))
    assert program.controller.status.phase is Phase.PLANNED
    assert program.state.record.hot.recording
    program.controller.expect_persistent()  # whoever asks for something has it told of the steps before
    return program.controller.recording.trace()


def test_the_record_has_the_marks_of_all_steps_where_they_were() -> None:
    trace, heard = (_recorded(hears_all=hears_all) for hears_all in (False, True))
    assert trace.mark_event.tolist() == heard.mark_event.tolist()
    assert trace.mark_kind.tolist() == heard.mark_kind.tolist()
    assert len(trace.mark_event) > 30


def test_each_mark_keeps_its_time() -> None:
    program = Program()
    for number in range(50):
        program.step(lambda: program.train(2000))
        assert len(program.controller.recording.step_times_ns) == number + 1


def test_an_interruption_while_steps_go_by_leaves_the_program_to_be_watched_anew() -> None:
    """It may come before the parts are told of those steps, which belong to a record that is forgotten then."""
    program = Program()
    for _ in range(60):
        program.step(lambda: program.train(2000))
    assert program.controller.status.phase is Phase.PLANNED
    program.controller.recover(constants.AT_BOUNDARY, 0, KeyboardInterrupt())
    for _ in range(20):
        program.step(lambda: program.train(2000))
    assert program.controller.status.phase is Phase.PLANNED
    assert program.controller.status.num_plans == 2
