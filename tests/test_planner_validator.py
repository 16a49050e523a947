"""The naive validator: each way a plan can be wrong has its name, and a quadratic check agrees with it."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import strategies as st
from properties import holds_for

from stalloc.planner import Plan, plan, plan_arrays, validate


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def plan_of(requests: list[tuple[int, int, int]], offset: np.ndarray | None = None, alignment: int = 512) -> Plan:
    start, end, size = (column(*values) for values in zip(*requests, strict=True))
    layout = plan_arrays(start, end, size, alignment=alignment)
    if offset is None:
        offset = layout.offset
    return Plan(
        offset=offset,
        size=size,
        start=start,
        end=end,
        stream=np.zeros(len(size), np.int64),
        device=0,
        alignment=alignment,
        peak_bytes=int((offset + -(-size // alignment) * alignment).max(initial=0)),
        lower_bound_bytes=layout.lower_bound_bytes,
        optimal=False,
        method="",
        kind="trace",
        provenance={},
    )


THREE = [(0, 4, 512), (2, 6, 512), (4, 8, 512)]


def program(**changes) -> Plan:
    """Cycle [10, 20): entry 0 stays for ever, 1 is the prologue's, 2 wraps round, 3 does not."""
    schedule = {
        "schedule_start": column(1, 2, 18, 13),
        "schedule_end": column(30, 12, 22, 17),
        "schedule_size": column(512, 512, 512, 512),
        "schedule_stream": column(0, 0, 0, 0),
        "schedule_offset": column(0, 512, 512, 512),
        "schedule_row": column(0, 1, 2, 3),
    }
    schedule |= {name: value for name, value in changes.items() if name in schedule}
    plan = Plan(
        offset=schedule["schedule_offset"],
        size=schedule["schedule_size"],
        start=schedule["schedule_start"],
        end=schedule["schedule_end"],
        stream=schedule["schedule_stream"],
        device=0,
        alignment=512,
        peak_bytes=1024,
        lower_bound_bytes=1024,
        optimal=True,
        method="",
        kind="program",
        provenance={},
        num_prologue=2,
        cycle_start=10,
        cycle_end=20,
        **schedule,
    )
    return dataclasses.replace(plan, **changes)


def test_a_good_plan_passes():
    plan = plan_of(THREE)
    assert validate(plan).ok
    assert validate(plan, plan).ok


def test_a_good_program_passes():
    assert validate(program()).ok


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"offset": column(0, 0, 0)}, "overlap"),
        ({"offset": column(0, 500, 0)}, "misaligned"),
        ({"offset": column(0, -512, 0)}, "negative-offset"),
        ({"peak_bytes": 1023}, "beyond-peak"),
        ({"lower_bound_bytes": 512}, "wrong-lower-bound"),
        ({"alignment": 0}, "bad-constraint"),
        ({"alignment": -512}, "bad-constraint"),
        ({"size": column(512, -512, 512)}, "bad-size"),
        ({"size": column(512, 1 << 62, 512)}, "bad-size"),
        ({"size": column(512, (1 << 63) - 1, 512)}, "bad-size"),
        ({"size": column(512, (1 << 63) - 1, 512), "offset": column(0, -1, 0)}, "bad-size"),
        ({"stream": column(0, -1, 0)}, "bad-stream"),
        ({"stream": column(0, 1 << 40, 0)}, "bad-stream"),
        ({"end": column(4, 1, 8)}, "bad-lifespan"),
        ({"offset": column(0, -2, 0)}, "negative-offset"),
        ({"offset": column(0, 1 << 62, 0)}, "beyond-peak"),
        # nothing lives at an empty lifespan, but who follows the plan goes by its place all the same
        ({"end": column(4, 2, 8), "offset": column(0, 1 << 62, 0)}, "beyond-peak"),
        ({"end": column(4, 2, 8), "offset": column(0, -512, 0)}, "negative-offset"),
        ({"end": column(4, 2, 8), "offset": column(0, 1, 0)}, "misaligned"),
    ],
)
def test_each_wrong_plan_is_named(changes, reason):
    verdict = validate(dataclasses.replace(plan_of(THREE), **changes))
    assert (verdict.ok, verdict.reason) == (False, reason)
    assert verdict.detail


def test_a_size_that_is_rounded_up_has_to_stay_inside_the_arena() -> None:
    plan = dataclasses.replace(plan_of([(0, 4, 512)]), size=column(513), lower_bound_bytes=1024, peak_bytes=1023)
    assert validate(plan).reason == "beyond-peak"
    assert validate(dataclasses.replace(plan, peak_bytes=1024)).ok


@pytest.mark.parametrize("fixed", [None, {1: 4096}])
def test_plans_of_requests_that_live_for_no_time_are_valid(fixed: dict[int, int] | None) -> None:
    """They need no place; one that they are given is inside the arena."""
    made = plan(([0, 3, 5, 2], [4, 3, 5, 6], [512, 1 << 20, 512, 512]), fixed=fixed)
    assert validate(made).ok
    assert made.offset[1] == (-1 if fixed is None else 4096)


def test_an_overlap_names_rows_bytes_and_events():
    detail = validate(plan_of(THREE, column(0, 0, 512))).detail
    assert detail == "requests 0 and 1 share bytes [0, 512) during events [2, 4)"


@pytest.mark.parametrize("name", ["size", "start", "end"])
def test_a_plan_of_another_trace_is_a_mismatch(name):
    plan = plan_of(THREE)
    trace = dataclasses.replace(plan, **{name: getattr(plan, name) + column(0, 0, 1)})
    verdict = validate(plan, trace)
    assert verdict.reason == "trace-mismatch"
    assert "request 2" in verdict.detail


def test_fewer_rows_than_the_trace_are_a_mismatch():
    assert validate(plan_of(THREE), plan_of(THREE[:2])).reason == "trace-mismatch"


def test_requests_that_are_not_planned_are_not_judged():
    plan = plan_of(THREE, column(0, -1, 0))
    assert validate(dataclasses.replace(plan, peak_bytes=512, lower_bound_bytes=512)).ok


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"schedule_end": column(30, 12, 24, 17)},
            "overlap",
        ),  # what wraps meets the cycle's other one in the next pass
        ({"schedule_end": column(30, 14, 22, 17)}, "overlap"),  # what the prologue leaves meets it in the first
        ({"schedule_end": column(20, 12, 22, 17), "lower_bound_bytes": 1024}, ""),
        ({"schedule_end": column(25, 12, 22, 17)}, "bad-schedule"),
        ({"schedule_start": column(1, 2, 20, 13), "schedule_end": column(30, 12, 22, 17)}, "bad-schedule"),
        ({"schedule_end": column(30, 12, 29, 17)}, "bad-schedule"),
        ({"cycle_end": 10}, "bad-schedule"),
        ({"cycle_end": (1 << 63) - 1}, "bad-schedule"),
        ({"cycle_start": -(1 << 63)}, "bad-schedule"),
        ({"num_prologue": 4}, "bad-schedule"),
        ({"schedule_size": column(512, 512, 512, -512)}, "bad-size"),
        ({"schedule_size": column(512, 512, 512, (1 << 63) - 1)}, "bad-size"),
        ({"schedule_stream": column(0, 0, 0, -1)}, "bad-stream"),
        ({"schedule_stream": column(0, 0, 0, 1 << 40)}, "bad-stream"),
        ({"schedule_end": column(30, 12, 22, 13), "schedule_offset": column(0, 512, 512, 1 << 62)}, "beyond-peak"),
        ({"schedule_end": column(30, 12, 22, 13), "schedule_offset": column(0, 512, 512, 1024)}, "beyond-peak"),
        ({"offset": column(0, 512, 0, 512)}, "bad-schedule"),
        ({"schedule_row": column(0, 1, 2, 4)}, "bad-schedule"),
        ({"schedule_stream": column(0, 0, 1, 0)}, "shared-by-streams"),
        ({"schedule_offset": column(0, 512, 1024, 512)}, "beyond-peak"),
        ({"lower_bound_bytes": 1536}, "wrong-lower-bound"),
    ],
)
def test_each_wrong_program_is_named(changes, reason):
    assert validate(program(**changes)).reason == reason


REQUEST = st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(0, 3), st.integers(0, 5))


@holds_for(st.lists(REQUEST, min_size=1, max_size=8), few=50, many=600)
def test_it_agrees_with_looking_at_every_pair(requests):
    rows = [(start, start + lasts, size) for start, lasts, size, _ in requests]
    plan = plan_of(rows, column(*(low for *_, low in requests)), alignment=1)
    clash = any(
        max(one[0], two[0]) < min(one[0] + one[1], two[0] + two[1])
        and max(one[3], two[3]) < min(one[3] + one[2], two[3] + two[2])
        for one, two in itertools.combinations(requests, 2)
    )
    assert validate(plan).reason == ("overlap" if clash else "")


def test_a_single_overlap_among_twenty_thousand_is_found():
    count = 20_000
    rows = [(i, i + 50, 512) for i in range(count)]
    good = plan_of(rows)
    assert validate(good).ok
    offset = good.offset.copy()
    offset[12_345] = offset[12_344]
    verdict = validate(dataclasses.replace(good, offset=offset))
    assert verdict.reason == "overlap"
    assert "12344 and 12345" in verdict.detail
