"""scripts/bench/soak in small: threads without end, programs that leave their plans and come back."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

from running.soak_programs import soak_programs  # noqa: E402


def soak(*arguments: str) -> dict[str, Any]:
    """The figures of a soak in a process of its own, which has to find nothing wrong."""
    command = [sys.executable, str(BENCH / "soak"), *arguments, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("seed", [1, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_programs_that_left_their_plan_are_served_from_it_again(seed: int) -> None:
    print(f"seeds from {seed}")
    figures = soak_programs(300, seed)
    assert figures["problems"] == []
    assert figures["counts"]["missed"] > 3000, "they leave their plans"
    assert figures["counts"]["planned again"] > 20
    print(figures["exceptions"])
    # a step of two sizes in random order without marks can be mistaken for itself for long
    assert len(figures["exceptions"]) <= 3


@pytest.mark.slow
@pytest.mark.usefixtures("cupy_installed")
def test_threads_on_streams_never_share_a_byte_and_lose_nothing() -> None:
    figures = soak("--operations", "4000000", "--programs", "0", "--seed", "7")["threads"]
    assert figures["problems"] == []
    counts = figures["counts"]
    assert counts["frees"] == counts["allocations"] > 1_500_000
    for what in ("shares", "shares with events", "captures", "plans put in force", "plans given up", "limits"):
        assert counts[what] > 0, what
