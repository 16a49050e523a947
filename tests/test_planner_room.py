"""A plan of a cycle leaves room for requests that are none of it, where that costs nothing."""

import numpy as np
import pytest

from stalloc.lifespans.repeating_schedule import Schedule
from stalloc.planner import plan_schedule, validate
from stalloc.planner.planning import leave_room

UNIT = 100  # of the finer clock, to one of the cycle's entries


def cycle(*requests: tuple[int, int, int], length: int, planned: bool = True) -> Schedule:
    """(start, end, KiB) each."""
    start, end, size = np.array(requests, np.int64).T
    return Schedule(
        size=size * 1024,
        stream=np.zeros(len(size), np.int64),
        start=start,
        end=end,
        planned=np.full(len(size), planned),
        row=np.arange(len(size)),
        num_prologue=0,
        cycle_start=0,
        cycle_end=length,
        period_requests=len(size),
        covered_requests=len(size),
        minimum_size=513,
    )


def with_more(schedule: Schedule, *requests: tuple[int, int, int]) -> Schedule:
    """The same on the finer clock with others among them: (start, end, KiB) in hundredths of entries."""
    own = list(zip(schedule.start * UNIT, schedule.end * UNIT, schedule.size // 1024, schedule.row, strict=True))
    rows = sorted([*own, *((*request, -1) for request in requests)])
    made = cycle(*(row[:3] for row in rows), length=schedule.cycle_end * UNIT)
    made.row[:] = [row[3] for row in rows]
    return made


def largest_idle(plan, begin: int, end: int) -> int:
    """The largest piece, in KiB, that no request has that lives in a part of [begin, end)."""
    meets = (plan.schedule_offset >= 0) & (plan.schedule_start < end) & (plan.schedule_end > begin)
    taken = sorted(zip(plan.schedule_offset[meets], (plan.schedule_offset + plan.schedule_size)[meets], strict=True))
    largest, last = 0, 0
    for low, high in [*taken, (plan.peak_bytes, plan.peak_bytes)]:
        largest, last = max(largest, low - last), max(last, high)
    return int(largest) // 1024


#: those that live together change; at the end something as large as the arena
STEP = cycle((0, 3, 8), (1, 4, 8), (2, 5, 16), (3, 6, 16), (4, 6, 24), (5, 6, 16), (6, 7, 72), length=7)


@pytest.mark.parametrize("size", [12, 16])
def test_room_is_left_for_as_long_as_such_a_request_lives(size: int) -> None:
    plan = plan_schedule(STEP)
    assert largest_idle(plan, 1, 5) == 8, "what is idle lies in pieces"
    made = leave_room(plan, with_more(STEP, (150, 500, size)))
    assert largest_idle(made, 1, 5) >= size
    assert (made.peak_bytes, made.lower_bound_bytes) == (72 << 10, 72 << 10)
    assert validate(made).ok


def test_the_peak_does_not_rise_for_it() -> None:
    plan = plan_schedule(STEP)
    made = leave_room(plan, with_more(STEP, (150, 500, 16), (250, 600, 40)))
    assert made.peak_bytes == plan.peak_bytes, "with the larger one more than the cycle's own load would live"
    assert validate(made).ok
    assert largest_idle(made, 1, 5) >= 16, "the other has room"


def test_what_has_no_place_gets_none() -> None:
    step = cycle((0, 2, 8), (1, 3, 8), length=3, planned=False)
    made = leave_room(plan_schedule(step), with_more(step, (50, 150, 4)))
    assert (made.schedule_offset == -1).all()
