"""scripts/bench/paper: programs are recorded and planned phase by phase, and devices are found where stalloc wins."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

from planning.baselines import stalloc_paper  # noqa: E402
from planning.cases import Case  # noqa: E402
from planning.generator import make  # noqa: E402
from planning.judging import judged  # noqa: E402
from pretraining.measuring import MIB, Need, bubble, cases  # noqa: E402

TINY = ("--layers", "8", "--length", "64", "--sequences", "1")


def need(configuration: str, seconds: float, native: int, expandable: int, stalloc: int) -> Need:
    return Need(
        model="gpt2",
        configuration=configuration,
        seconds=seconds,
        native_bytes=native * MIB,
        expandable_bytes=expandable * MIB,
        stalloc_bytes=stalloc * MIB,
    )


def test_a_device_is_found_between_what_stalloc_and_what_torch_needs() -> None:
    slow, fast = need("R", 1.2, 900, 920, 890), need("VR", 1.0, 1100, 1050, 1001)
    (case,) = cases([slow, fast])
    assert (case.device_bytes, case.faster, case.other) == (1010 * MIB, fast, slow)
    assert case.gain == pytest.approx(0.2)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([need("R", 1.2, 900, 920, 890), need("VR", 1.0, 1100, 1000, 1000)], id="torch runs it as well"),
        pytest.param([need("R", 0.9, 900, 920, 895), need("VR", 1.0, 1100, 1050, 1001)], id="it is slower"),
    ],
)
def test_no_device_is_named_where_stalloc_wins_nothing(rows: list[Need]) -> None:
    assert all(case.faster.configuration != "VR" for case in cases(rows))


def test_a_virtual_pipeline_waits_half_as_long() -> None:
    assert bubble("N") == bubble("ZOR") == 3 / 8
    assert bubble("VR") == 3 / 16


@pytest.mark.parametrize("kind", ["1f1b", "moe"])
def test_the_published_method_makes_valid_plans_of_steps_whose_phases_are_known(kind: str) -> None:
    made = make(kind, 3_000, num_steps=1)
    case = Case("stage", made.name, made.start, made.end, made.size, 512, made.phase_edges)
    offset = stalloc_paper.place(case.start, case.end, case.size, phase_edges=case.phase_edges)
    assert case.load_bytes <= judged(case, offset, case.load_bytes) < case.size.sum()  # valid, and bytes are reused


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_torch")
@pytest.mark.parametrize(("model", "forwards"), [("gpt2", 16), ("mixtral", 16)])
def test_a_tiny_model_is_measured_from_end_to_end(model: str, forwards: int, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ("--only", model, "--configurations", "VR", "--no-runs", "--rows", tmp_path / "rows", "--json", file)
    command = [sys.executable, "-P", BENCH / "paper", *options, "--options", *TINY]
    environment = os.environ | {"STALLOC_PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert f"| {model} | VR | " in done.stdout, done.stderr
    for rank in (0, 3):
        row = json.loads(file.read_text())["rows"][f"{model} VR {rank}"]
        of = row["recorded"]
        assert of["phases"] >= 2 * forwards  # one for each forward and backward pass of a stage, and the rest
        assert of["load_bytes"] <= of["plan_bytes"] <= of["paper_bytes"]
        assert of["allocated_bytes"] <= of["expandable_least_bytes"] <= of["expandable_bytes"]
        assert of["allocated_bytes"] <= row["stalloc_bytes"]
