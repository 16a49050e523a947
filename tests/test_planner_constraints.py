"""What a plan must keep beside lifespans: the naive validator judges, and wrong input is named."""

import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import strategies as st
from properties import holds_for, variants

from stalloc.errors import BadInputError
from stalloc.planner import METHODS, load_plans, plan, plan_arrays, save_plans, validate

REQUEST = st.tuples(st.integers(0, 30), st.integers(0, 12), st.one_of(st.integers(0, 9), st.sampled_from([511, 700])))
REQUESTS = st.lists(REQUEST, min_size=1, max_size=20)


def arrays(requests: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    start, lasts, size = np.array(requests, np.int64).T
    return start, start + lasts, size


@holds_for(REQUESTS, st.data(), few=16, many=200)
def test_alignments_of_rows_are_kept(requests, data):
    alignment = np.array(
        data.draw(st.lists(st.sampled_from([1, 2, 64, 512]), min_size=len(requests), max_size=len(requests)))
    )
    made = plan(arrays(requests), alignment=alignment)
    assert validate(made).detail == ""
    assert not (made.offset % alignment)[made.offset >= 0].any()
    assert made.lower_bound_bytes <= made.proven_bound_bytes <= made.peak_bytes


@holds_for(REQUESTS, st.data(), few=16, many=200)
def test_what_is_placed_stays_and_what_is_forbidden_is_not_used(requests, data):
    lifespans = arrays(requests)
    first = plan(lifespans, alignment=4).offset
    rows = data.draw(st.sets(st.integers(0, len(requests) - 1)))
    shift = 4 * data.draw(st.integers(0, 5))
    fixed = {row: max(int(first[row]), 0) + shift for row in rows}  # -1: of no time
    low = 4 * data.draw(st.integers(0, 400))
    top = max((place + int(lifespans[2][row]) for row, place in fixed.items()), default=0)
    forbidden = [(max(low, top), max(low, top) + data.draw(st.integers(1, 50)))]
    made = plan(lifespans, alignment=4, fixed=fixed, forbidden=forbidden)
    assert validate(made).detail == ""
    assert all(made.offset[row] == place for row, place in fixed.items())
    assert made.proven_bound_bytes <= made.peak_bytes


@holds_for(REQUESTS, REQUEST, few=13, many=150)
def test_adding_a_request_leaves_room_for_those_that_are_placed(requests, another):
    before = plan(arrays(requests), alignment=1)
    made = plan(arrays([*requests, another]), alignment=1, fixed=[*before.offset.tolist(), -1])
    assert validate(made).detail == ""
    assert made.offset[:-1].tolist() == before.offset.tolist()


@holds_for(REQUESTS, few=13, many=150)
def test_equal_input_gives_equal_plans_under_constraints(requests):
    alignment = 1 << (np.arange(len(requests)) % 4)
    one, two = (plan(arrays(requests), alignment=alignment, forbidden=[(40, 50)]) for _ in range(2))
    assert (one.offset == two.offset).all()


@holds_for(st.integers(0, 10), st.integers(2, 12), st.data(), few=13, many=150)
def test_fixed_places_are_kept_in_every_pass_of_a_cycle(cycle_start, period, data):
    cycle_end = cycle_start + period
    rows = []
    for _ in range(data.draw(st.integers(1, 12))):
        size = data.draw(st.integers(0, 9))
        if cycle_start and data.draw(st.booleans()):
            start = data.draw(st.integers(0, cycle_start - 1))
            end = cycle_end + period if data.draw(st.booleans()) else data.draw(st.integers(start, cycle_end))
        else:
            start = data.draw(st.integers(cycle_start, cycle_end - 1))
            end = start + data.draw(st.integers(0, period))
        rows.append((start, end, size))
    start, end, size = np.array(rows, np.int64).T
    cycle = (cycle_start, cycle_end)
    fixed = {0: int(plan_arrays(start, end, size, alignment=2, cycle=cycle).offset[0])}
    layout = plan_arrays(start, end, size, alignment=2, cycle=cycle, fixed=fixed, forbidden=[(1000, 1002)])
    uses = []
    for (born, dies, num_bytes), low in zip(rows, layout.offset.tolist(), strict=True):
        if born >= cycle_start:
            uses += [(born + i * period, dies + i * period, low, low + num_bytes) for i in range(4)]
        else:
            uses.append((born, dies if dies <= cycle_end else cycle_end + 4 * period, low, low + num_bytes))
    uses = [use for use in uses if use[0] < use[1]]
    for index, one in enumerate(uses):
        for two in uses[:index]:
            together = max(one[0], two[0]) < min(one[1], two[1])
            assert not (together and max(one[2], two[2]) < min(one[3], two[3])), (one, two)
    assert layout.offset[0] == fixed[0]


def test_room_below_what_is_fixed_is_used():
    made = plan(([0, 0], [9, 9], [10, 10]), alignment=1, fixed={0: 10})
    assert (made.offset.tolist(), made.peak_bytes, made.optimal) == ([10, 0], 20, True)


def test_waste_that_alignment_makes_certain_is_proven():
    # two requests of 1 byte on multiples of 512 end at 513 at the least, with one more anywhere as well
    made = plan(([0, 0, 0], [9, 9, 9], [1, 1, 1]), alignment=[512, 512, 1])
    assert (made.lower_bound_bytes, made.proven_bound_bytes, made.peak_bytes, made.optimal) == (3, 513, 513, True)


def test_waste_below_a_forbidden_range_is_proven():
    made = plan(([0, 0], [9, 9], [10, 10]), alignment=1, forbidden=[(5, 100)])
    assert (made.proven_bound_bytes, made.peak_bytes, made.optimal) == (120, 120, True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"fixed": {0: 0, 1: 100}}, "row 0 and row 1"),
        ({"fixed": {1: 3}}, "row 1"),
        ({"fixed": {7: 0}}, "row 7"),
        ({"fixed": {0: -5}}, "row 0"),
        ({"fixed": [0, -2, -1]}, "row 1"),
        ({"fixed": [0, -1]}, "3 requests"),
        ({"fixed": {0: 0}, "forbidden": [(16, 20)]}, "row 0"),
        ({"forbidden": [(9, 9)]}, r"\[9, 9\)"),
        ({"alignment": [4, 3, 4]}, "row 1"),
        ({"alignment": [4, 4]}, "3 requests"),
        ({"method": "best"}, "method"),
        ({"time_budget_seconds": -1}, "budget"),
    ],
)
def test_what_cannot_be_kept_is_one_sentence(options, named):
    with pytest.raises(BadInputError, match=named) as caught:
        plan(([0, 2, 9], [5, 7, 12], [400, 400, 400]), **{"alignment": 4} | options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fixed_row": [0], "fixed_offset": [4]}, "moved"),
        ({"fixed_row": [0, 1], "fixed_offset": [0, 0]}, "moved"),  # they live together, so one of them lies above
        ({"fixed_row": [9], "fixed_offset": [0]}, "bad-constraint"),
        ({"row_alignment": [1, 512, 1]}, "misaligned"),
        ({"row_alignment": [3, 1, 1]}, "bad-constraint"),
        ({"forbidden_low": [100], "forbidden_high": [101]}, "forbidden"),
        ({"forbidden_low": [700], "forbidden_high": [900]}, "forbidden"),  # of which a request takes a part
        ({"proven_bound_bytes": 10_000}, "wrong-proven-bound"),
        ({"peak_bytes": 1000, "optimal": True}, "wrong-proven-bound"),  # 800 are proven
    ],
)
def test_the_validator_sees_each_broken_constraint(changes, reason):
    made = plan(([0, 2, 9], [5, 7, 12], [400, 400, 400]), alignment=4)
    assert validate(made).ok
    columns = {name: np.array(value) if isinstance(value, list) else value for name, value in changes.items()}
    assert validate(dataclasses.replace(made, **columns)).reason == reason


def test_constraints_are_kept_in_the_file(tmp_path):
    made = plan(([0, 2], [5, 7], [400, 400]), alignment=[4, 8], fixed={0: 8}, forbidden=[(2, 6)])
    save_plans(tmp_path / "a.plan.npz", [made])
    (read,) = load_plans(tmp_path / "a.plan.npz")
    assert validate(read).ok
    assert read.row_alignment.tolist() == [4, 8]
    assert (read.fixed_row.tolist(), read.fixed_offset.tolist()) == ([0], [8])
    assert (read.forbidden_low.tolist(), read.forbidden_high.tolist()) == ([2], [6])


def hard(num_requests: int = 120) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A rectangle of time and bytes cut again and again: it can be put together without a gap, but hardly by chance."""
    rng = np.random.default_rng(5)
    pieces = [(0, 1000, 0, 100_000)]
    while len(pieces) < num_requests:
        index = max(range(len(pieces)), key=lambda i: (pieces[i][1] - pieces[i][0]) * (pieces[i][3] - pieces[i][2]))
        first, last, low, high = pieces.pop(index)
        if rng.random() < 0.5:
            cut = int(rng.integers(first + 1, last))
            pieces += [(first, cut, low, high), (cut, last, low, high)]
        else:
            cut = int(rng.integers(low + 1, high))
            pieces += [(first, last, low, cut), (first, last, cut, high)]
    start, end, low, high = np.array(pieces).T
    return start, end, high - low


@variants("method", METHODS)
def test_every_method_gives_a_valid_plan(method):
    made = plan(hard(), alignment=1, method=method)
    assert validate(made).detail == ""
    assert made.num_planned == 120


def test_a_search_that_is_stopped_says_so_and_is_valid():
    stop = threading.Event()
    stop.set()
    made = plan(hard(), alignment=1, stop=stop)
    assert validate(made).ok
    assert not made.optimal
    assert made.interrupted == "Ctrl-C"
    assert "best so far" in made.method


def test_no_time_at_all_still_gives_a_valid_plan():
    made = plan(hard(), alignment=1, time_budget_seconds=0)
    assert validate(made).ok
    assert made.interrupted == "time budget"


def test_progress_tells_of_better_and_better_packings():
    told = []
    made = plan(hard(), alignment=1, progress=told.append)
    peaks = [progress.peak_bytes for progress in told]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == made.peak_bytes
    assert all(progress.bound_bytes <= progress.peak_bytes for progress in told)
