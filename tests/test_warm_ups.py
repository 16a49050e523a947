"""Which requests before a capture are taken for its warm-up."""

import numpy as np

from stalloc.core.constants import ACTION_ALLOC as ALLOC
from stalloc.core.constants import ACTION_FREE_COMPLETED as FREE
from stalloc.core.constants import ACTION_SEGMENT_MAP as MAP
from stalloc.runtime.captures import Requests, last_run
from stalloc.runtime.decisions import is_planned_for_capture


def run_of(*events: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Size, first and last event of the requests that are taken, of events (action, address, size)."""
    found: Requests = last_run(*np.array(events, np.int64).reshape(-1, 3).T)
    return list(zip(found.size.tolist(), found.start.tolist(), found.end.tolist(), strict=True))


def test_the_warm_up_is_the_run_with_most_requests() -> None:
    assert run_of((ALLOC, 1, 8), (FREE, 1, 8), (ALLOC, 1, 4), (ALLOC, 2, 5), (FREE, 1, 4), (FREE, 2, 5)) == [
        (4, 2, 4),
        (5, 3, 5),
    ]


def test_of_equal_runs_it_is_the_last() -> None:
    assert run_of((ALLOC, 1, 4), (FREE, 1, 4), (ALLOC, 1, 6), (FREE, 1, 6)) == [(6, 2, 3)]


def test_what_lives_on_is_no_part_of_it_nor_what_was_there_before() -> None:
    assert run_of((FREE, 9, 3), (ALLOC, 1, 4), (MAP, 5, 2), (ALLOC, 2, 6), (FREE, 2, 6)) == [(6, 3, 4)]


def test_without_requests_there_is_none() -> None:
    assert run_of() == []
    assert run_of((ALLOC, 1, 4)) == []


def test_a_capture_does_not_wait_for_the_plan_of_a_warm_up_of_very_many_requests() -> None:
    assert is_planned_for_capture(16_384)
    assert not is_planned_for_capture(16_385)
    assert not is_planned_for_capture(0)
