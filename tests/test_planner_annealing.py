"""`method="annealing"`: valid on recorded traces and at their maximum load on most, valid on cycles, repeatable."""

import sys
from pathlib import Path

import pytest
from recordings import EVERY, path_of
from test_planner_schedule import training

from stalloc.planner import plan, validate
from stalloc.trace import load_traces

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

from planning.cycles import random_cycle


@pytest.mark.slow
def test_recorded_traces_are_planned_at_their_maximum_load_but_for_a_few():
    files = [path_of(name) for name in EVERY if path_of(name).exists()]
    at_bound = 0
    for file in files:
        traces = load_traces(file)
        plans = [plan(trace, method="annealing", fold="never") for trace in traces]
        for trace, made in zip(traces, plans, strict=True):
            assert validate(made, trace).ok, file.name
            assert "annealing" in made.method or made.optimal, file.name
        at_bound += all(made.peak_bytes == made.lower_bound_bytes for made in plans)
    assert at_bound >= len(files) - 2


@pytest.mark.parametrize("second_stream", [False, True])
def test_a_program_that_repeats_is_planned_as_a_cycle(second_stream):
    trace = training(second_stream=second_stream)
    made = plan(trace, method="annealing")
    assert made.kind == "program"
    assert validate(made, trace).ok
    assert made.peak_bytes <= 1.1 * made.lower_bound_bytes or second_stream


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 3, 4, 5))])
def test_random_cycles_are_valid(seed):
    cycle = random_cycle(seed)
    offset, peak, bound = cycle.place("annealing")
    assert not cycle.overlaps(offset)
    again, _, _ = cycle.place("annealing")
    assert (again == offset).all()
    assert peak == int((offset + cycle.size).max()) >= bound
