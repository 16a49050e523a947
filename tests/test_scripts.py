"""The Python scripts run as they are, with whatever interpreter comes first, from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "scripts" / "bench"


@pytest.mark.parametrize(
    "name", ["capacity", "fidelity", "hostile", "kernels", "no_harm", "planner", "replay", "runtime", "soak", "values"]
)
def test_a_bench_enters_the_environment_by_itself(name, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["STALLOC_PYTHON"] = sys.executable
    done = subprocess.run([BENCH / name, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
