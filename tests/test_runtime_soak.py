"""scripts/bench/soak in small: threads without end, programs that leave their plans and come back."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_programs import run_file

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

from running.soak_programs import soak_programs  # noqa: E402


def soak(*arguments: str) -> dict[str, Any]:
    """The figures of a soak in a process of its own, which has to find nothing wrong."""
    none = [word for what in ("operations", "programs", "in-order") for word in (f"--{what}", "0")]
    command = [sys.executable, str(BENCH / "soak"), *none, *arguments, "--json", "-"]
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


@pytest.mark.parametrize("operations", [20_000, pytest.param(500_000, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("cupy_installed")
def test_streams_events_and_captures_are_in_order_whatever_is_drawn(operations: int) -> None:
    counts = soak("--in-order", str(operations), "--seed", "6")["in order"]["counts"]
    for what in ("planned steps", "shares", "captures", "captures untold", "streams", "stalloc's waits", "launches"):
        assert counts[what] > 0, what


@pytest.mark.parametrize("fault", ["wait_event", "query_event"])
@pytest.mark.usefixtures("cupy_installed")
def test_a_fault_planted_in_the_same_soak_is_found(fault: str) -> None:
    """stalloc hands memory over without a wait, or takes every event for done."""
    variables = {**os.environ, "STALLOC_VIRTUAL_ORDER": "strict"}
    done = run_file(Path(__file__).parent / "programs" / "soak_with_fault.py", BENCH, fault, variables=variables)
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout.splitlines()[-1])["problems"]
    assert any("may still" in one for one in problems), problems


@pytest.mark.slow
@pytest.mark.usefixtures("cupy_installed")
def test_threads_on_streams_never_share_a_byte_and_lose_nothing() -> None:
    figures = soak("--operations", "4000000", "--seed", "7")["threads"]
    assert figures["problems"] == []
    counts = figures["counts"]
    assert counts["frees"] == counts["allocations"] > 1_500_000
    for what in ("shares", "shares with events", "captures", "plans put in force", "plans given up", "limits"):
        assert counts[what] > 0, what
