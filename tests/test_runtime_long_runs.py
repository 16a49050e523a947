"""What is known of a device's steps stays small over thousands of them."""

import math
import random
from typing import Any

import numpy as np
import pytest

from stalloc.core.constants import ACTION_OOM
from stalloc.replay.offline import make_controller
from stalloc.runtime.runtime_settings import Phase, Settings
from stalloc.trace import MARK_STEP

MIB = 1 << 20
EVENTS = 1 << 10  # that are kept


@pytest.fixture
def kept() -> Any:
    """A controller that keeps the last events, as under torch.cuda.memory._record_memory_history."""
    settings = Settings(
        plan_wait_seconds=1e6, planning_share=math.inf, keep_recording=True, keep_events=EVENTS, exact_times=False
    )
    controller = make_controller(1 << 30, settings)
    controller.expects_marks = True
    controller.state.write(events_wrap=1)
    return controller


def step(controller: Any, sizes: list[int], name: str) -> None:
    for address in [controller.state.malloc(size) for size in sizes]:
        assert address
        controller.state.free(address)
    controller.mark(MARK_STEP, name)


def test_the_marks_that_a_ring_of_events_has_lost_are_forgotten(kept: Any) -> None:
    for number in range(6000):
        step(kept, [3 * MIB, 5 * MIB, 7 * MIB], str(number))
    assert kept.status.phase is Phase.PLANNED
    assert len(kept.recording.marks) < 2 * EVENTS
    trace = kept.recording.trace()
    assert len(trace.mark_event) > 100
    assert (np.diff(trace.mark_event) == 6).all()


def test_steps_that_nobody_looks_for_are_not_remembered(kept: Any) -> None:
    """Each second step is like none before, for as long as the program runs."""
    for number in range(3000):
        step(kept, [3 * MIB, 5 * MIB, 7 * MIB], "")
        if number > 20:
            step(kept, [4 * MIB + 512 * number], "")
    assert kept.status.phase is Phase.PLANNED
    assert len(kept.steps.recorded.names) < 100


def test_a_ring_of_events_has_what_was_free_at_the_refused_requests_it_still_shows(kept: Any) -> None:
    for number in range(1500):
        step(kept, [3 * MIB, 5 * MIB, 7 * MIB], "")
        if number % 100 == 0:
            assert kept.state.malloc(2 * MIB)  # which stays
        assert not kept.state.malloc(2 << 30)
    trace = kept.recording.trace()
    free = trace.address[trace.action == ACTION_OOM]
    assert len(free) > 50
    assert (free == kept.device.free_bytes()).sum() > 50
    assert free.max() <= 1 << 30


def test_an_arena_that_moves_again_and_again_leaves_no_addresses_behind() -> None:
    """What lives a step longer now and then is in the way; three streams take pages from one another at each step."""
    controller = make_controller(8 << 30, Settings(plan_wait_seconds=1e6, planning_share=math.inf))
    controller.expects_marks = True
    state, rng = controller.state, random.Random(1)
    late: list[tuple[int, int]] = []  # in which step a block goes, and its address
    for number in range(4000):
        held = []
        for place in range(6):
            held.append(state.malloc((3 + 2 * place) * MIB + 512, place % 3))
            if place % 2:
                late.append((number + (rng.random() < 0.25), held.pop(0)))
        held.append(state.malloc(rng.randrange(1, 9) * MIB if rng.random() < 0.1 else 4 * MIB))
        for address in [*held, *(address for when, address in late if when <= number)]:
            assert address
            state.free(address)
        late = [one for one in late if one[0] > number]
        controller.mark(MARK_STEP, "")
    assert controller.status.phase is Phase.PLANNED
    assert controller.memory.paging.num_moves > 1000, "pages never rest"
    assert len(controller.device.ranges) < 40
    assert state.record.heap.segments_used < 120, "nor rows of tables"
