"""The Python scripts run as they are, with whatever interpreter comes first, from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm_programs import run_file

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS / "lib"))

from near_tests import near_tests  # noqa: E402

PYTHON_SCRIPTS = sorted(
    path.relative_to(SCRIPTS).as_posix()
    for path in (*SCRIPTS.iterdir(), *(SCRIPTS / "bench").iterdir())
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python3\n")
)


def check_help(name: str, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {Path(name).name} ")
    assert ("--json" in done.stdout) == (name not in ("make_recordings", "real_programs", "pictures", "site"))


@pytest.mark.parametrize("name", PYTHON_SCRIPTS)
def test_a_script_says_how_it_is_used(name: str, tmp_path: Path) -> None:
    check_help(name, run_file(SCRIPTS / name, "--help", folder=tmp_path))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "bench/soak")) for name in PYTHON_SCRIPTS]
)
def test_a_script_enters_the_environment_by_itself(name: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["STALLOC_PYTHON"] = sys.executable
    command = [SCRIPTS / name, "--help"]
    check_help(
        name, subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    )


@pytest.mark.parametrize(
    ("file", "test", "other"),
    [
        (
            "stalloc/runtime/thresholds.py",
            "tests/test_decisions.py",
            "tests/test_runtime_heap.py",
        ),
        ("stalloc/replay/bfc.py", "tests/test_replay_models.py", "tests/test_fit.py"),  # loaded by its name
        ("stalloc/cli/top.py", "tests/test_top.py", "tests/test_fit.py"),  # a verb, which tests type
        ("kernels/__init__.py", "tests/test_kernels.py", "tests/test_top.py"),
        ("tests/test_cost.py", "tests/test_cost.py", "tests/test_top.py"),
    ],
)
def test_the_tests_nearest_to_a_file_import_it_or_run_it(file: str, test: str, other: str) -> None:
    root = SCRIPTS.parent
    found = near_tests(root / file)
    assert root / test in found
    assert root / other not in found


def test_what_is_nearest_is_printed_and_what_is_no_module_is_refused() -> None:
    found = run_file(SCRIPTS / "lib" / "near_tests.py", "tests/test_cost.py", folder=SCRIPTS.parent)
    assert (found.returncode, found.stdout) == (0, "tests/test_cost.py\n")
    done = run_file(SCRIPTS / "lib" / "near_tests.py", "README.md", folder=SCRIPTS.parent)
    assert (done.returncode, done.stderr) == (2, "--near README.md: give a Python file of the checkout.\n")
