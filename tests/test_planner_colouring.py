"""`method="colouring"`: plans of the lifespan graph, valid always, at the load on recorded traces, and repeatable."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from recordings import EVERY, each, path_of
from test_planner_schedule import training

from stalloc.lifespans import peak_load
from stalloc.planner import Plan, plan, validate
from stalloc.trace import load_traces

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

from planning import generator
from planning.cycles import random_cycle


def coloured(requests: list[tuple[int, int, int]]) -> Plan:
    """The plan of (start, end, size) by colouring, judged by the naive validator."""
    start, end, size = np.array(requests, np.int64).reshape(-1, 3).T
    made = plan((start, end, size), alignment=1, method="colouring")
    assert validate(made).detail == ""
    return made


@pytest.mark.parametrize("name", each(EVERY))
def test_every_recording_is_planned_at_its_maximum_load(name):
    for trace in load_traces(path_of(name)):
        made = plan(trace, method="colouring", fold="never")
        assert validate(made, trace).ok
        assert made.peak_bytes == peak_load(trace.start, trace.end, trace.aligned_size(512))


def test_requests_of_one_size_take_turns_in_rows():
    # two rows: births 0, 1, 2, ... of two events each
    made = coloured([(at, at + 2, 8) for at in range(20)])
    assert made.peak_bytes == 16
    assert set(made.offset.tolist()) == {0, 8}


def test_an_optimum_that_takes_more_than_first_come_first_served():
    # the long one has to lie beside both of 6, which have to lie at the same end
    assert coloured([(0, 2, 2), (0, 4, 4), (2, 6, 2), (4, 8, 4), (6, 8, 2)]).peak_bytes == 6


IMPORTS = """
import sys
import numpy as np
from stalloc.planner import plan, plan_arrays
rng = np.random.default_rng(6)
start = rng.integers(0, 60, 80)
columns = start, start + rng.integers(1, 30, 80), rng.integers(1, 100, 80)
print(plan_arrays(*columns, alignment=1).method)
print("networkx" in sys.modules)
plan(columns, alignment=1, method="colouring")
print("networkx" in sys.modules)
"""


def test_what_a_running_program_asks_for_does_without_networkx():
    done = subprocess.run([sys.executable, "-P", "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["exact search", "False", "True"]  # the first try does not reach the load


@pytest.mark.parametrize(
    ("requests", "peak"),
    [
        ([], 0),
        ([(3, 9, 5)], 5),
        ([(0, 4, 3)] * 4, 12),  # a single group
        ([(0, 4, 3), (2, 2, 100), (1, 3, 0), (4, 8, 3)], 3),  # of no time, of no bytes
        ([(0, 1, 7), (5, 9, 7), (20, 30, 6)], 7),  # never live together
    ],
)
def test_degenerate_problems(requests, peak):
    made = coloured(requests)
    assert made.peak_bytes == made.lower_bound_bytes == peak


@pytest.mark.parametrize("kind", ["moe", "varlen"])
def test_a_stage_of_varying_sizes_is_planned_at_its_load(kind):
    stage = generator.make(kind, 7_000, num_steps=1)
    made = plan((stage.start, stage.end, stage.size), method="colouring")
    assert validate(made).ok
    assert made.optimal


def test_equal_input_gives_equal_plans():
    rng = np.random.default_rng(5)
    start = rng.integers(0, 200, 150)
    columns = (start, start + rng.integers(1, 90, 150), rng.integers(1, 40, 150))
    first, second = (plan(columns, alignment=1, method="colouring") for _ in range(2))
    assert validate(first).ok
    assert (first.offset == second.offset).all()
    assert first.method == second.method


@pytest.mark.parametrize("second_stream", [False, True])
def test_a_program_that_repeats_is_planned_as_a_cycle(second_stream):
    trace = training(second_stream=second_stream)
    made = plan(trace, method="colouring")
    assert made.kind == "program"
    assert validate(made, trace).ok
    assert made.peak_bytes <= 1.1 * made.lower_bound_bytes or second_stream


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 3))])
def test_random_cycles_are_valid(seed):
    cycle = random_cycle(seed)
    offset, peak, _ = cycle.place("colouring")
    assert not cycle.overlaps(offset)
    assert peak == int((offset + cycle.size).max())
    assert (cycle.place("colouring")[0] == offset).all()
