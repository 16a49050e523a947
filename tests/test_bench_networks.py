"""scripts/bench/convolutions and networks: programs without a recording run, and their bounds hold the figure given."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cuda_torch")]

_BENCH = Path(__file__).parents[1] / "scripts" / "bench"


def _run(script: str, file: Path, *arguments: str) -> tuple[str, Any]:
    command = [sys.executable, "-P", _BENCH / script, "--json", file, *arguments]
    environment = os.environ | {"STALLOC_PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text())


def test_bounds_of_a_convolutional_network_hold_its_peak(tmp_path: Path) -> None:
    shown, found = _run("convolutions", tmp_path / "bounds.json", "--gpu", "T4", "--only", "mobilenet_v1")
    assert shown.splitlines()[-1].startswith("| MobileNet, by hand, 32 | ")
    runs = found["mobilenet_v1"]["T4"]
    least, likely, most = (runs[kind]["allocated_peak_bytes"] for kind in ("least", "likely", "most"))
    assert least <= likely < most
    assert most - likely <= runs["likely"]["unknown_bytes"]  # which may be more where the peak is another moment


def test_a_network_written_by_hand_trains_in_half_precision_on_an_old_card(tmp_path: Path) -> None:
    arguments = ("--only", "vit_by_hand", "--gpu", "T4", "--precision", "fp16")
    shown, rows = _run("networks", tmp_path / "rows.json", *arguments)
    assert shown.splitlines()[-1] == "1 of 1 completed"
    (row,) = rows
    assert row["allocated_peak_bytes"] > 0
    assert "right: " in row["output"]
