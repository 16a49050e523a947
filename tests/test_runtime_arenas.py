"""What becomes of an arena when another plan comes, and what steps without a plan need beside it."""

from collections.abc import Callable

import numpy as np
import pytest
from programs.step_program import MIB, Program

from stalloc.runtime.runtime_settings import Phase


def grow(program: Program, work: Callable[[int], None], seed: int, num_steps: int) -> list[tuple[int, int]]:
    """Kinds of steps that need more are added twice; what is reserved for each new plan, and has to be (bytes)."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    widths, found, plans = [20_000, 23_000], [], 0
    for number in range(num_steps):
        if number in (num_steps // 3, 2 * num_steps // 3):
            widths.append(2 * max(widths))
        program.step(lambda: work(widths[int(rng.integers(len(widths)))]))
        if program.controller.status.num_plans > plans:
            record = program.state.record  # where pages were held at the peak before, some may wait in the heap
            found.append((record.statistics.reserved_bytes, max(record.plan.arena_bytes, record.total.allocated_peak)))
        plans = program.controller.status.num_plans
    return found


def drift(program: Program, widths: list[int], until: Callable[[], bool]) -> None:
    """Evaluate, with these widths in turn, until something is so."""
    for number in range(300):
        if until():
            return
        program.step(lambda number=number: program.evaluate(widths[number % len(widths)]))
    raise AssertionError("it never was so")


def test_the_state_of_an_optimizer_does_not_pin_what_is_transient() -> None:
    """It is made when the memory of a whole step is free, and two would not fit into the segment of an activation."""
    program = Program()
    for number in range(8):
        program.step(
            lambda: program.train(40_000),
            *[lambda: program.make_state(6)] * (number == 0),
        )
    assert program.controller.status.phase is Phase.PLANNED
    state = program.state
    assert (
        state.record.statistics.reserved_bytes <= state.allocated_peak_bytes + 40 * MIB
    )  # two segments that are not full


def test_watching_needs_hardly_more_than_what_is_allocated() -> None:
    """Requests of many sizes share memory while they are recorded."""
    program = Program()
    for _ in range(3):
        program.step(lambda: program.train(40_000), lambda: program.evaluate(37_000), lambda: program.evaluate(29_000))
    assert program.controller.status.num_plans == 0
    assert program.state.reserved_peak_bytes < 1.1 * program.state.allocated_peak_bytes + 20 * MIB


def test_an_unknown_step_finds_room_in_the_arena_of_a_full_device() -> None:
    """Everything that is idle is lent, and where that is not enough the plan goes, before memory is said to be out."""
    wanted = Program()
    for _ in range(8):
        wanted.step(lambda: wanted.train(40_000))
    program = Program(capacity_bytes=wanted.state.reserved_peak_bytes + 64 * MIB)
    for _ in range(12):
        program.step(lambda: program.train(40_000))
    assert program.controller.status.phase is Phase.PLANNED
    for width in (39_000, 31_000, 35_000):  # each asserts that it is served
        program.step(lambda width=width: program.train(width))
    for _ in range(12):
        program.step(lambda: program.train(40_000))
    assert program.step(lambda: program.train(40_000)) == (37, 0)


@pytest.mark.parametrize(("times", "planned"), [(3, False), (20, True)])
def test_a_step_that_needs_more_than_any_before_ends_the_plan_where_it_may_fill_the_device(
    times: int, planned: bool
) -> None:
    """What the plan does not know is packed better without it, and nobody knows yet how much that will be."""
    wanted = Program()
    wanted.step(lambda: wanted.train(40_000))
    program = Program(capacity_bytes=times * wanted.state.reserved_peak_bytes)
    for _ in range(8):
        program.step(lambda: program.train(40_000))
    assert program.controller.status.phase is Phase.PLANNED
    program.step(lambda: program.train(60_000))
    assert (program.controller.status.phase is Phase.PLANNED) == planned


def test_an_unknown_step_reserves_hardly_more_than_was_ever_allocated() -> None:
    program = Program()
    for _ in range(8):
        program.step(lambda: program.train(40_000))
    before = program.state.record.statistics.reserved_bytes
    hits, missed = program.step(lambda: program.train(36_000))
    assert missed > hits
    assert program.state.record.iterations.iteration_reserved_peak <= before + 20 * MIB


def test_unknown_steps_in_a_row_reserve_hardly_more_than_was_ever_allocated() -> None:
    program = Program()
    for _ in range(8):
        program.step(lambda: program.train(40_000))
    before = program.state.record.statistics.reserved_bytes
    for width in (36_000, 39_000, 34_000, 38_000):
        program.step(lambda width=width: program.train(width))
        assert program.state.record.statistics.reserved_bytes <= before + 40 * MIB


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_an_arena_in_which_nothing_lives_goes_back_before_a_larger_one_is_taken(seed: int, streams: int) -> None:
    """Evaluations hand nothing on."""
    program = Program(streams=streams)
    found = grow(program, program.evaluate, seed, 60)
    assert len({needed for _, needed in found}) >= 3
    for reserved, needed in found:
        assert reserved < needed + 40 * MIB


@pytest.mark.parametrize("streams", [1, 3])
def test_a_plan_waits_for_what_was_borrowed_from_the_arena_before_it(streams: int) -> None:
    """The batch is replaced only once there is the next one, and has no place in the plan."""
    program = Program(streams=streams, keeps_batch=True)
    found = grow(program, program.evaluate, 1, 60)
    assert len({needed for _, needed in found}) >= 3
    for reserved, needed in found:
        assert reserved < needed + 2 * 80_000 * 900 + 40 * MIB  # and batches


def test_the_old_arena_goes_back_when_what_was_handed_on_is_gone() -> None:
    """Gradients live up to the backward pass, so that a larger arena is taken beside; nothing new is served there."""
    program = Program(streams=3, keeps_batch=True)  # of which one is served elsewhere in every step
    grow(program, program.train, 2, 60)
    for _ in range(4):
        program.step(lambda: program.train(20_000))
    assert program.state.record.statistics.reserved_bytes < 1.25 * program.state.record.plan.arena_bytes


@pytest.mark.parametrize("streams", [1, 3])
def test_an_arena_that_is_a_block_goes_back_with_what_lives_there(streams: int) -> None:
    """A plan of less gets a block of its own; what the last one keeps stays where it is until it is freed."""
    program = Program(streams=streams, arena="pool")
    controller, state = program.controller, program.state
    drift(program, [60_000], lambda: controller.status.phase is Phase.PLANNED)
    large, arena = state.record.plan.arena_bytes, state.record.plan.arena
    kept = program.allocate(100 * MIB)
    assert arena <= kept < arena + large
    drift(program, [20_000, 23_000], lambda: controller.status.num_plans > 1)
    assert state.record.plan.arena_bytes < 0.5 * large
    program.free(kept)
    for width in [23_000, 20_000] * 3:
        program.step(lambda width=width: program.evaluate(width))
    assert state.record.statistics.reserved_bytes < state.record.plan.arena_bytes + 40 * MIB
    taken = controller.device.num_allocs
    for width in [23_000, 20_000] * 10:
        assert program.step(lambda width=width: program.evaluate(width)) == (13, 0)
    assert controller.device.num_allocs == taken


def lost_by_step(num_steps: int, every: int) -> list[int]:
    """Requests of each step that its plan did not serve; every so many steps a buffer is filled anew at its begin."""
    rng, program, buffer = np.random.default_rng(3), Program(), []
    sizes = (rng.uniform(1, 16, 40) * MIB).astype(int).tolist()

    def work(step: int) -> None:
        if step % every == every - 1:
            parts = [program.allocate(int(rng.uniform(4, 24) * MIB)) for _ in range(12)]
            for address in buffer + parts[4:]:
                program.free(address)
            buffer[:] = parts[:4]
        live = []
        for index, size in enumerate(sizes):
            live.append(program.allocate(size))
            if index >= 8:
                program.free(live.pop(index % 7))
        for address in live:
            program.free(address)

    return [program.step(lambda step=step: work(step))[1] for step in range(num_steps)]


def test_an_arena_moves_out_of_the_way_however_often_a_buffer_is_filled_anew() -> None:
    lost = lost_by_step(120, every=7)
    print(lost)
    assert max(lost) > 0
    assert all(number == 0 for step, number in enumerate(lost) if step % 7 != 6)
