"""`stalloc bench NAME`: each benchmark of the checkout runs to its end, in its quick form where it has one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stalloc.device import detect

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
#: what makes it short; targets of time may be missed by a machine that does other things
QUICK: dict[str, list[str]] = {
    "budget": ["--quick", "--only", "accumulated"],
    "budget_epochs": ["--quick"],
    "capacity": ["--quick", "--device", "virtual", "--size", "tiny"],
    "cap": ["--only", "language", "--steps", "2"],
    "convolutions": ["--only", "no network"],
    "cost": [],
    "first_use": ["--only", "starts", "--repeats", "1"],
    "graphs": ["--models", "small", "--sizes", "3", "--orders", "smallest", "--keep", "none"],
    "hostile": ["--mutations", "40", "--plans", "4", "--traces", "-"],
    "largest": ["pieces", "--quick"],
    "mixtures": ["--only", "least", "--steps", "8"],
    "networks": ["--only", "no network"],
    "no_harm": ["--quick", "--only", "elementwise"],
    "operations": ["--only", "ResNet", "--rounds", "3"],
    "pages": [str(BENCH.parents[1] / "examples" / "train_gpt.py"), "--size", "tiny", "--steps", "4"],
    "planner": ["--quick"],
    "policies": ["--only", "GPT", "--policy", "selective"],
    "recorder": ["--rounds", "4", "--requests", "50"],
    "replay": [],
    "report": ["--requests", "20000"],
    "runtime": ["--quick"],
    "serving": ["--only", "no engine"],
    "soak": ["--operations", "20000", "--programs", "10", "--in-order", "20000"],
    "tiers": ["--quick", "--only", "page"],
    "values": ["--size", "tiny", "--pairs", "1"],
}
#: by tests of their own (test_fidelity.py has recordings, test_bench_paper.py runs a step, test_shard_ranks.py ranks),
#: and what needs a GPU
ELSEWHERE = {"ablate", "fidelity", "kernels", "mutate", "paper", "shard"}
NEEDS_TRACES = ("cost", "replay")


def test_every_benchmark_is_run_by_a_test() -> None:
    found = {path.name for path in BENCH.iterdir() if path.is_file() and not path.suffix}
    assert found == {*QUICK} | ELSEWHERE


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
@pytest.mark.parametrize("name", QUICK)
def test_a_benchmark_runs_to_its_end(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name in NEEDS_TRACES and request.getfixturevalue("shared_traces") is None:
        pytest.skip("the recordings of others that it compares with are not here")
    out = tmp_path / "figures.json"
    command = [sys.executable, "-P", "-m", "stalloc", "bench", name, "--json", str(out), *QUICK[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.skipif(detect() == "cuda", reason="there is a GPU")
def test_the_benchmark_of_kernels_says_that_it_needs_a_gpu() -> None:
    command = [sys.executable, "-P", "-m", "stalloc", "bench", "kernels", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("bench/kernels: no GPU that torch can use")
