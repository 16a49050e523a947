"""`method="annealing"`: valid on recorded traces and at their maximum load on most, valid on rings, repeatable."""

import numpy as np
import pytest
from test_planner_tape import training

from stalloc.errors import BadInputError
from stalloc.planner import plan, plan_arrays, validate
from stalloc.planner.budget import Budget
from stalloc.trace import load_traces


@pytest.mark.slow
def test_recorded_traces_are_planned_at_their_maximum_load_but_for_a_few(shared_traces):
    files = sorted(file for file in shared_traces.glob("*.*") if file.suffix != ".md")
    at_bound = 0
    for file in files:
        try:
            traces = load_traces(file)
        except BadInputError:  # a file of no use here
            continue
        plans = [plan(trace, method="annealing", fold="never") for trace in traces]
        for trace, made in zip(traces, plans, strict=True):
            assert validate(made, trace).ok, file.name
            assert "annealing" in made.method or made.optimal, file.name
        at_bound += all(made.peak_bytes == made.lower_bound_bytes for made in plans)
    assert at_bound >= 20


@pytest.mark.parametrize("second_stream", [False, True])
def test_a_program_that_repeats_is_planned_as_a_ring(second_stream):
    trace = training(second_stream=second_stream)
    made = plan(trace, method="annealing")
    assert made.kind == "program"
    assert validate(made, trace).ok
    assert made.peak_bytes <= 1.1 * made.lower_bound_bytes or second_stream


@pytest.mark.parametrize("seed", range(6))
def test_random_rings_are_valid(seed):
    rng = np.random.default_rng(seed)
    count, ring_start, ring_end = 60, 20, 100
    start = rng.integers(0, ring_end, count)
    in_prologue = np.minimum(start + rng.integers(1, 60, count), ring_end)
    end = np.where(start < ring_start, in_prologue, start + rng.integers(1, ring_end - ring_start, count))
    size = rng.integers(1, 50, count) * 512
    ring = ring_start, ring_end
    layout = plan_arrays(start, end, size, ring=ring, budget=Budget(method="annealing"))
    assert not _overlaps(start, end, size, layout.offset, ring)
    again = plan_arrays(start, end, size, ring=ring, budget=Budget(method="annealing"))
    assert (again.offset == layout.offset).all()
    assert layout.peak_bytes == int((layout.offset + size).max()) >= layout.lower_bound_bytes


def _overlaps(start, end, size, offset, ring):
    """Pairs that share a byte at some moment of the prologue or the first three passes, looked at one by one."""
    period = ring[1] - ring[0]
    lives = [
        (begin + shift * period, stop + shift * period, low, low + need, row)
        for row, (begin, stop, need, low) in enumerate(zip(start, end, size, offset, strict=True))
        for shift in range(3 if begin >= ring[0] else 1)
    ]
    return [
        (one, other)
        for i, one in enumerate(lives)
        for other in lives[:i]
        if one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]
    ]
