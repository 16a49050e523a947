"""A program that others recorded on a real GPU has the same requests and peaks on the virtual one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cuda_torch")]

_BENCH = Path(__file__).parents[1] / "scripts" / "bench" / "fidelity"


def test_a_recorded_program_is_exact(tmp_path: Path, shared_traces: Path) -> None:
    file = tmp_path / "rows.json"
    environment = os.environ | {"STALLOC_PYTHON": sys.executable, "STALLOC_SHARED": str(shared_traces.parent)}
    done = subprocess.run(
        [sys.executable, "-P", _BENCH, "--only", "autograd off", "--json", file],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode == 2 and "not run" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(file.read_text())
    assert row["num_requests"][0] == row["num_requests"][1] == 3221
    assert row["num_sizes_different"] == 0
    for what in ("allocated_peak_bytes", "reserved_peak_bytes"):
        recorded, virtual = row[what]
        assert recorded == virtual
