"""The Python scripts run as they are, with whatever interpreter comes first, from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
PYTHON_SCRIPTS = sorted(
    path.relative_to(SCRIPTS).as_posix()
    for path in (*SCRIPTS.iterdir(), *(SCRIPTS / "bench").iterdir())
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python3\n")
)


@pytest.mark.parametrize("name", PYTHON_SCRIPTS)
def test_a_script_enters_the_environment_by_itself(name: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["STALLOC_PYTHON"] = sys.executable
    done = subprocess.run([SCRIPTS / name, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {Path(name).name} ")
    assert ("--json" in done.stdout) == (name not in ("real_programs", "pictures", "site"))
