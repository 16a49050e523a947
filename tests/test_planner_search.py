"""What exact search adds: the lowest packing of small problems, and the published hard instances."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalloc.planner import plan, plan_arrays, search, validate
from stalloc.trace import load_traces

CAPACITY = 1 << 20


def lowest_peak(requests: list[tuple[int, int, int]]) -> int:
    """By brute force: some order, each request at the lowest place that is free, gives the lowest packing."""
    best = sum(size for _, _, size in requests)
    for order in itertools.permutations(requests):
        placed: list[tuple[int, int, int, int]] = []
        for start, end, size in order:
            offset = 0
            for low, high, s, e in sorted(placed):
                if s < end and start < e and offset + size > low and offset < high:
                    offset = high
            placed.append((offset, offset + size, start, end))
        best = min(best, max(high for _, high, _, _ in placed))
    return best


request = st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(1, 9))


@settings(deadline=None)  # the first one compiles
@given(st.lists(request, min_size=1, max_size=6))
def test_small_problems_get_the_lowest_peak_there_is(rows: list[tuple[int, int, int]]) -> None:
    requests = [(start, start + length, size) for start, length, size in rows]
    start, end, size = (np.array(column) for column in zip(*requests, strict=True))
    layout = plan_arrays(start, end, size, alignment=1)
    assert layout.peak_bytes == lowest_peak(requests)
    assert layout.lower_bound_bytes <= layout.bound_bytes <= layout.peak_bytes


#: start, end and size of requests that need 11 bytes, of which 10 are live at most
ONE_MORE = [
    (0, 2, 4),
    (0, 3, 3),
    (1, 7, 3),
    (2, 6, 2),
    (2, 10, 1),
    (5, 9, 2),
    (6, 7, 4),
    (8, 17, 4),
    (9, 16, 3),
    (10, 16, 3),
]


def test_a_search_ends_where_one_height_is_left_that_it_can_neither_reach_nor_exclude_soon(monkeypatch) -> None:
    monkeypatch.setattr(search, "BISECTED", 200)  # as if the requests were thousands
    start, end, size = np.array(ONE_MORE).T
    layout = plan_arrays(start, end, size, alignment=1)
    assert (layout.peak_bytes, layout.lower_bound_bytes, layout.bound_bytes) == (11, 10, 11)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in "DJ")) for name in "ABCDEFGHIJK"]
)
def test_the_hard_minimalloc_instances_fit_their_capacity(shared_instances, name: str) -> None:
    (trace,) = load_traces(shared_instances / f"{name}.1048576.csv")
    made = plan(trace, alignment=1)
    assert validate(made, trace).ok
    assert made.peak_bytes <= CAPACITY
    if name not in "DJ":  # whose bound nobody is known to have reached
        assert made.optimal
        assert made.peak_bytes == made.lower_bound_bytes
