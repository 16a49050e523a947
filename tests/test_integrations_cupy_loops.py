"""Loops in CuPy, which sets no marks: found, planned, served, or left to the heap."""

import itertools
from typing import Any

import pytest
from programs.cupy_prologue import PROLOGUE

pytestmark = pytest.mark.usefixtures("cupy_installed")


def test_a_loop_without_marks_is_found_planned_and_served(run_checks: Any) -> None:
    result = run_checks(
        PROLOGUE
        + """
weights = [cp.ones(30_000 + 999 * i) for i in range(5)]
def step():
    total = 0
    for weight in weights:
        a = weight * 2
        b = cp.exp(a) + weight[::-1]
        c = cp.concatenate((a, b))
        total = total + c.reshape(2, -1).sum(axis=0).mean()
    return total
for _ in range(120):
    loss = step()
report = stalloc.statistics()[0]
print(json.dumps(dataclasses.asdict(report)))
"""
    )
    phase, rate, hits, note = (result[name] for name in ("phase", "hit_rate", "hits", "note"))
    assert phase == "running on the plan", note
    assert rate == 1.0
    assert hits > 1000
    assert result["plan_peak_bytes"] == result["lower_bound_bytes"]


def test_a_loop_whose_arrays_are_all_alike_recovers_from_an_extra_one(run_checks: Any) -> None:
    """Nothing tells one request from the next: after an extra request the plan's lifespans are out of step."""
    result = run_checks(
        PROLOGUE
        + """
import collections
def run(steps, held):
    for _ in range(steps):
        first = cp.empty(MIB // 2, dtype=cp.uint8)
        second = cp.empty(MIB // 2, dtype=cp.uint8)
        del first
        for _ in range(6):
            third = cp.empty(MIB // 2, dtype=cp.uint8)
            fourth = cp.empty(MIB // 2, dtype=cp.uint8)
            del third, fourth
        del second
        stalloc.step()
run(10, None)
before = stalloc.statistics()[0]
extra = cp.empty(MIB // 2, dtype=cp.uint8)
run(400, extra)
after = stalloc.statistics()[0]
CONTROLLER.memory.release_unused()
print(json.dumps([before.phase, after.phase, after.hit_rate, STATE.record.statistics.reserved_bytes,
    STATE.record.total.num_live, STATE.record.total.allocated_bytes]))
"""
    )
    before, _, _, reserved, live, allocated = result
    assert before == "running on the plan"
    assert live == 1
    assert allocated == 1 << 19
    assert reserved <= 16 << 20, "whatever the plan is worth, memory does not grow"


def test_a_program_that_never_repeats_is_left_to_the_heap_when_the_record_is_full(run_checks: Any) -> None:
    phase, note, events, exact = run_checks(
        PROLOGUE
        + """
import random
STATE.write(events_capacity=5000)
rng = random.Random(1)
for _ in range(5000):
    x = cp.empty(rng.randrange(1000, 100_000), dtype=cp.uint8)
report = stalloc.statistics()[0]
print(json.dumps([report.phase, report.note, STATE.record.log.num_events, STATE.record.policy.allocating_persistent]))
"""
    )
    assert phase == "serving from the heap"
    assert "before the record's table was full" in note
    assert events == 0, "the record is gone, which nobody looks at any more"
    assert exact == 0


def test_a_short_loop_is_served_after_its_first_few_steps(run_checks: Any) -> None:
    """It asks for eight arrays a step: as many steps again would go by if more of them had to be seen."""
    result = run_checks(
        PROLOGUE
        + """
x, hits = cp.ones(MIB), []
for _ in range(20):
    y = cp.sqrt(cp.exp(x * 2) + 1) / 3 - x
    z = cp.concatenate((y, x)).reshape(2, -1).sum(axis=0)
    hits.append(stalloc.statistics()[0].run_hits)
print(json.dumps(hits))
"""
    )
    by_step = [after - before for before, after in itertools.pairwise(result)]
    assert by_step[7] == by_step[-1] > 0, "the ninth step is served from the plan"


def test_arrays_that_were_all_kept_so_far_are_no_step_that_could_be_planned(run_checks: Any) -> None:
    """Made alike in a loop, they repeat; a plan of what was never freed would hold nothing."""
    phase, note, hits = run_checks(
        PROLOGUE
        + """
x = cp.ones(MIB)
for step in range(40):
    parts = [x * i for i in range(12)]
    total = sum(parts[1:], parts[0])
    if step % 10 == 9:
        del parts
        cp.zeros(3 * MIB).sum()
    total.max()
report = stalloc.statistics()[0]
print(json.dumps([report.phase, report.note, report.run_hits]))
"""
    )
    assert phase == "running on the plan", note
    assert hits > 0
