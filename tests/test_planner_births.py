"""Best fit in order of birth: what it accepts, where it puts things, and long pipelines packed with its help."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalloc.planner import plan, validate
from stalloc.planner.hole_filling import by_birth
from stalloc.planner.problem import Problem, compressed

request = st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(1, 9))


def problem_of(rows: list[tuple[int, int, int]]) -> Problem:
    start, length, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return compressed(start, start + length, size)


def overlaps(problem: Problem, offset: np.ndarray) -> bool:
    for i in range(len(offset)):
        for j in range(i):
            in_time = problem.start[i] < problem.end[j] and problem.start[j] < problem.end[i]
            in_space = offset[i] < offset[j] + problem.size[j] and offset[j] < offset[i] + problem.size[i]
            if in_time and in_space:
                return True
    return False


@settings(deadline=None)  # the first one compiles
@given(st.lists(request, min_size=1, max_size=20), st.booleans(), st.integers(0, 30))
def test_what_is_placed_keeps_the_height_and_overlaps_nothing(
    rows: list[tuple[int, int, int]], high: bool, more: int
) -> None:
    problem = problem_of(rows)
    height = problem.bound + more
    offset = by_birth(problem, height, high=high)
    if offset is not None:
        assert offset.min() >= 0
        assert int((offset + problem.size).max()) <= height
        assert not overlaps(problem, offset)


@settings(deadline=None)
@given(st.lists(request, min_size=1, max_size=20), st.booleans())
def test_all_sizes_together_are_always_room_enough(rows: list[tuple[int, int, int]], high: bool) -> None:
    problem = problem_of(rows)
    assert by_birth(problem, int(problem.size.sum()), high=high) is not None


def test_the_tightest_hole_is_taken() -> None:
    # 3 bytes and 2 bytes become free, kept apart; then 2 are asked for, and 3
    rows = [(0, 2, 3), (0, 9, 1), (0, 2, 2), (3, 3, 2), (4, 2, 3)]
    assert by_birth(problem_of(rows), 6).tolist() == [0, 5, 3, 3, 0]


def test_nothing_is_placed_above_a_floor_or_beyond_the_height() -> None:
    problem = problem_of([(0, 1, 4)])
    assert by_birth(problem, 3) is None
    assert by_birth(Problem(problem.start, problem.end, problem.size, problem.floor + 1), 9) is None


def pipeline(num_microbatches: int, in_flight: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One forward, one backward: each layer keeps a small and a large tensor, the backward pass needs scratch."""
    live: dict[int, list[tuple[int, int]]] = {}
    rows: list[tuple[int, int, int]] = []
    clock = 0
    for turn in range(num_microbatches + in_flight - 1):
        if turn < num_microbatches:
            live[turn] = []
            for _ in range(4):
                for size in (2, 1):
                    live[turn].append((clock, size))
                    clock += 1
        done = turn - in_flight + 1
        for start, size in reversed(live.pop(done, [])):
            rows.append((clock, clock + 3, size))
            rows.append((clock + 1, clock + 2, size))
            rows.append((start, clock + 2, size))
            clock += 3
    start, end, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return start, end, size * 512


@pytest.mark.parametrize("num_microbatches", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_long_pipeline_stays_close_to_the_bound_however_long(num_microbatches: int) -> None:
    start, end, size = pipeline(num_microbatches, 8)
    made = plan((start, end, size))
    assert validate(made).ok
    assert made.peak_bytes <= made.lower_bound_bytes + 512
