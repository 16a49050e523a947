"""What is known of a device's steps stays small over thousands of them."""

import math
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
    for number in range(4000):
        step(kept, [3 * MIB, 5 * MIB, 7 * MIB], "")
        if number % 100 == 0:
            assert kept.state.malloc(2 * MIB)  # which stays
        assert not kept.state.malloc(2 << 30)
    trace = kept.recording.trace()
    free = trace.address[trace.action == ACTION_OOM]
    assert len(free) > 50
    assert (free == kept.device.free_bytes()).sum() > 50
    assert free.max() <= 1 << 30
