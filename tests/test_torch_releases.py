"""Each release of PyTorch that is at hand runs the operators, and a program on a plan, and is replayed exactly.

STALLOC_OTHER_TORCH names folders with other releases, made by `pip install --no-deps --target FOLDER torch==2.2.1`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cuda_torch")]

_MATRIX = Path(__file__).parents[1] / "scripts" / "matrix"
_FOLDERS = [folder for folder in os.environ.get("STALLOC_OTHER_TORCH", "").split(os.pathsep) if folder]


def test_every_release_at_hand(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    named = [word for folder in _FOLDERS for word in ("--torch", folder)]
    environment = os.environ | {"STALLOC_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, "-P", _MATRIX, *named, "--json", file], env=environment, capture_output=True, text=True
    )
    rows = json.loads(file.read_text())
    assert len(rows) == 1 + len(_FOLDERS)
    for row in rows:
        assert set(row["passes"].values()) == {True}, done.stdout + done.stderr
        assert row["stalloc"][0]["allocated_peak_bytes"] == row["native"]["allocated_peak_bytes"]
