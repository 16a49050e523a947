"""The planner's table: every baseline packs, the made-up stages are what they say, the command writes its rows."""

import sys
from pathlib import Path

import numpy as np
import pytest

from stalloc.cli import main
from stalloc.planner import plan_arrays

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

from planning import generator  # noqa: E402
from planning.baselines import BASELINES, Baseline  # noqa: E402
from planning.cases import Case  # noqa: E402
from planning.judging import judged  # noqa: E402

RUNNABLE = [
    pytest.param(
        baseline, id=baseline.name, marks=pytest.mark.skipif(bool(baseline.missing), reason=baseline.missing or "-")
    )
    for baseline in BASELINES
]


def random_case(seed: int, num_requests: int) -> Case:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 2 * num_requests, num_requests)
    end = start + rng.integers(1, num_requests + 1, num_requests)
    return Case("made up", f"seed {seed}", start, end, rng.integers(1, 40, num_requests), alignment=1)


@pytest.mark.slow
@pytest.mark.parametrize("baseline", RUNNABLE)
def test_a_baseline_packs_without_overlap(baseline: Baseline) -> None:
    for seed, num_requests in enumerate((1, 2, 7, 30, 30, 90)):
        print(f"seed {seed}")
        case = random_case(seed, num_requests)
        offset = baseline.place(case.start, case.end, case.size)
        assert judged(case, offset, case.load_bytes) >= case.load_bytes


@pytest.mark.slow
@pytest.mark.parametrize("baseline", RUNNABLE)
def test_a_baseline_gives_the_same_offsets_again(baseline: Baseline) -> None:
    case = random_case(11, 40)
    first = baseline.place(case.start, case.end, case.size)
    assert np.array_equal(baseline.place(case.start, case.end, case.size), first)


@pytest.mark.slow
@pytest.mark.parametrize("baseline", RUNNABLE)
def test_a_baseline_needs_no_more_than_the_load_where_nothing_meets(baseline: Baseline) -> None:
    start = np.arange(20)
    size = np.full(20, 512)
    assert not baseline.place(start, start + 1, size).any()


@pytest.mark.slow
def test_gap_fillers_take_many_requests_and_the_peak_stays_below_stacking() -> None:
    stage = generator.make("recompute", 3_000, num_steps=1)
    case = Case("stage", stage.name, stage.start, stage.end, stage.size, 512)
    peaks = {
        baseline.name: judged(case, baseline.place(case.start, case.end, case.size), case.load_bytes)
        for baseline in BASELINES
        if baseline.name in ("TFLite, by size", "XLA", "USMP, by size")
    }
    assert peaks["XLA"] <= peaks["TFLite, by size"] <= peaks["USMP, by size"]


def test_what_is_no_packing_is_refused() -> None:
    case = random_case(3, 20)
    with pytest.raises(AssertionError, match="overlap"):
        judged(case, np.zeros(20, np.int64), case.load_bytes)


@pytest.mark.parametrize("kind", generator.KINDS)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_stage_has_the_requests_asked_for(kind: str, num_steps: int) -> None:
    stage = generator.make(kind, 12_000, num_steps=num_steps)
    again = generator.make(kind, 12_000, num_steps=num_steps)
    for name in ("start", "end", "size", "phase_edges"):
        assert np.array_equal(getattr(stage, name), getattr(again, name)), name
    assert len(stage.size) >= 12_000
    if kind != "interleaved":  # which takes at least a group of microbatches
        assert len(stage.size) - 12_000 <= len(stage.size) / stage.num_microbatches
    assert (stage.size > 0).all()
    assert (stage.size % 512 == 0).all()
    assert (stage.start < stage.end).all()
    assert (np.diff(stage.start) > 0).all()


@pytest.mark.parametrize("kind", generator.KINDS)
def test_what_outlives_a_step_is_weights_gradients_and_optimizer_state(kind: str) -> None:
    stage = generator.make(kind, 12_000, num_steps=3)
    horizon = stage.end.max()
    standing = stage.end == horizon
    assert standing.sum() % 3 == 0
    assert (stage.start[standing] < stage.start[~standing].min()).all()
    steps = generator.make(kind, 40_000, num_steps=1)
    assert (steps.end == steps.end.max()).sum() == standing.sum()


def test_one_forward_one_backward_holds_as_many_microbatches_as_stages() -> None:
    model = generator.Model(num_stages=4, stage=1)
    in_flight, most = 0, 0
    for kind, _, _ in generator.schedule(model, 10):
        in_flight += 1 if kind == generator.FORWARD else -1
        most = max(most, in_flight)
    assert in_flight == 0
    assert most == 3


def test_recomputation_and_routing_change_the_load_as_they_should() -> None:
    loads = {}
    for kind in ("1f1b", "recompute"):
        stage = generator.make(kind, 12_000, num_steps=1)
        loads[kind] = Case("stage", kind, stage.start, stage.end, stage.size, 512).load_bytes
    assert loads["recompute"] < loads["1f1b"] / 2
    experts = generator.make("moe", 12_000, num_steps=1)
    others = generator.make("moe", 12_000, num_steps=1, seed=1)
    assert len(np.unique(experts.size)) > 100
    assert not np.array_equal(experts.size, others.size)


@pytest.mark.parametrize("kind", generator.KINDS)
def test_a_stage_is_planned_close_to_its_load(kind: str) -> None:
    stage = generator.make(kind, 7_000, num_steps=1)
    case = Case("stage", stage.name, stage.start, stage.end, stage.size, 512, stage.phase_edges)
    layout = plan_arrays(case.start, case.end, case.size)
    assert judged(case, layout.offset, case.load_bytes) <= 1.02 * case.load_bytes


def test_too_few_requests_or_an_unknown_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        generator.make("1f1b", 100)
    with pytest.raises(ValueError, match="zigzag"):
        generator.make("zigzag", 100_000)


def test_the_command_line_hands_over_to_a_benchmark(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "planner", "--quick", "--help"]) == 0
    assert "--markdown" in capfd.readouterr().out


def test_an_unknown_benchmark_is_named_beside_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plannner"]) == 2
    said = capsys.readouterr().err
    assert "no benchmark 'plannner': choose from" in said
    assert all(name in said for name in ("planner", "replay", "report", "runtime"))
