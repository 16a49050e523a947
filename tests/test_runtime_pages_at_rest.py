"""Pages of a program that repeats come to rest, with a plan or without one: each move waits for the device."""

import math

import numpy as np
import pytest
from programs.core_machine import MIB

from stalloc.replay.offline import make_controller
from stalloc.runtime.runtime_settings import Phase, Settings
from stalloc.trace import MARK_STEP

NUM_REQUESTS, NUM_LIVE = 120, 20


def moves_by_step(num_steps: int) -> tuple[list[int], float]:
    """Requests for which pages moved in each step of a program that no plan serves; the most held by allocated."""
    rng = np.random.default_rng(4)
    sizes = (rng.uniform(0.6, 24, NUM_REQUESTS) * MIB).astype(int).tolist()
    freed = rng.integers(NUM_LIVE, size=NUM_REQUESTS).tolist()
    controller = make_controller(0, Settings(plan=False))
    state, paging = controller.state, controller.memory.paging
    for _ in range(10):  # what lasts
        state.malloc(int(rng.uniform(1, 30) * MIB), 0)
    moves = []
    for _ in range(num_steps):
        before, live = paging.num_moves, []
        for size, which in zip(sizes, freed, strict=True):
            live.append(int(state.malloc(size, 0)))
            if len(live) > NUM_LIVE:
                state.free(live.pop(which))
        for address in live:
            state.free(address)
        controller.mark(MARK_STEP, "")
        moves.append(paging.num_moves - before)
    return moves, state.record.statistics.reserved_peak.total / state.record.total.allocated_peak


def test_a_little_more_is_held_where_pages_would_move_in_every_step() -> None:
    moves, held = moves_by_step(150)
    print(moves, held)
    assert min(moves[:10]) > 0
    assert max(moves[-20:]) == 0
    assert held < 1 + 1 / 16


@pytest.mark.parametrize("num_before", [12, 45])
def test_pages_rest_once_a_kind_of_step_that_keeps_much_for_others_comes_alone(num_before: int) -> None:
    """Steps end in the middle of a backward pass; later after it, and what the first hand on is never there again."""
    rng = np.random.default_rng(0)
    controller = make_controller(0, Settings(plan_wait_seconds=1e6, planning_share=math.inf))
    controller.expects_marks = True
    state, paging = controller.state, controller.memory.paging
    outputs, gradients = (rng.uniform(1, 10, (2, 16, 4)) * MIB).astype(int).tolist()

    def use(size: int, times: int) -> None:
        for address in [int(state.malloc(size, 0)) for _ in range(times)]:
            state.free(address)

    def step(*, updates_in_backward: bool) -> int:
        moves, kept = paging.num_moves, []
        layers = [[int(state.malloc(size, 0)) for size in sizes] for sizes in outputs]
        for number, (layer, sizes) in enumerate(zip(layers[::-1], gradients, strict=True)):
            for size in sizes:
                kept.append((size, int(state.malloc(size, 0))))
                if updates_in_backward:
                    use(size, times=3)
                    state.free(kept.pop()[1])
            if updates_in_backward and number == 0:
                controller.mark(MARK_STEP, "")
            for address in layer:
                state.free(address)
        if not updates_in_backward:
            controller.mark(MARK_STEP, "")
        for size, address in kept:
            use(size, times=2)
            state.free(address)
        return paging.num_moves - moves

    step(updates_in_backward=True)
    use(3 * MIB, times=2)  # a step that never comes again, so that the record goes on beside the plan
    for _ in range(num_before):
        step(updates_in_backward=True)
    moves = [step(updates_in_backward=False) for _ in range(40)]
    print(moves)
    assert moves[10] > 0
    assert max(moves[-10:]) == 0
    assert controller.status.phase is Phase.PLANNED


def test_pages_rest_where_a_plan_keeps_streams_apart() -> None:
    """A side stream works when the activations are gone; the regions of both are more than was ever live."""
    rng = np.random.default_rng(0)
    controller = make_controller(0, Settings(plan_wait_seconds=1e6, planning_share=math.inf))
    controller.expects_marks = True
    state, paging = controller.state, controller.memory.paging
    state.malloc(100 * MIB, 0)
    activations, gathered = ((rng.uniform(5, 15, number) * MIB).astype(int).tolist() for number in (20, 2))
    moves = []
    for _ in range(40):
        before = paging.num_moves
        for stream, sizes in ((0, activations), (7, gathered)):
            for address in [state.malloc(size, stream) for size in sizes]:
                state.free(address)
        controller.mark(MARK_STEP, "")
        moves.append(paging.num_moves - before)
    print(moves)
    assert controller.status.phase is Phase.PLANNED
    assert max(moves) > 0
    assert max(moves[-20:]) == 0
    assert state.record.statistics.reserved_bytes <= 1.125 * state.record.total.allocated_peak


def test_what_a_step_needs_again_at_once_is_given_back_ever_more_rarely() -> None:
    """A few bytes on each stream, free where a step ends, for which no plan has a place."""
    controller = make_controller(0, Settings(plan_wait_seconds=1e6, planning_share=math.inf))
    controller.expects_marks = True
    state, paging = controller.state, controller.memory.paging
    growths = []
    for _ in range(2_000):
        for address in [int(state.malloc(size, stream)) for size in (40 * MIB, 500) for stream in (0, 16)]:
            state.free(address)
        controller.mark(MARK_STEP, "")
        growths.append(paging.num_growths)
    assert controller.status.phase is Phase.PLANNED
    assert growths[-1] - growths[399] <= 8
