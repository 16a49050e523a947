"""scripts/bench/ablate: rules are switched off in copies, programs run without them, and what gets worse is told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

from ablation.judging import judge  # noqa: E402
from ablation.rules import PROBES, RULES  # noqa: E402
from ablation.trials import CHANGED_IN_PLACE  # noqa: E402
from changed import Checkout  # noqa: E402

FIGURES = {"completes": True, "peak_bytes": 100 << 20, "known_hit_rate": 1.0, "steady_calls": 0, "steps": 20}
MIB = 1 << 20
RULE = "pages ahead"  # without probes: it decides something in every program


def test_every_rule_fits_the_sources() -> None:
    checkout = Checkout(ROOT)
    checkout.root = ROOT
    checkout.check(*(change for rule in RULES for change in rule.changes))
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_every_probe_is_where_changes_need_no_copy_so_that_all_are_in_force_at_once() -> None:
    checkout = Checkout(ROOT)
    checkout.root = ROOT
    checkout.check(*PROBES)
    assert all(probe.file.startswith(CHANGED_IN_PLACE) for probe in PROBES)


@pytest.mark.slow
def test_one_rule_and_one_program(tmp_path: Path) -> None:
    def ablate(*more: str) -> list[str]:
        command = [sys.executable, "-P", str(BENCH / "ablate"), "--rules", RULE, "--only", "waves", "--random", "0"]
        folders = ["--json", str(tmp_path / "results"), "--recordings", str(tmp_path / "recordings")]
        done = subprocess.run([*command, *folders, *more], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    _, row, _, said = ablate()
    assert row.startswith(RULE)
    assert row.split()[-1] == "goes"
    assert "; 2 of 2 trials): " in said
    found = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert [(one["rule"], one["trial"]) for one in found] == [
        (rule, f"program waves {size}") for rule in ("none", RULE) for size in ("ample", "in 200 MiB")
    ]
    assert all(one["completes"] and one["peak_bytes"] == 196 * MIB for one in found)
    assert ablate("--table")[1] == row


def trials_of(**changes: object) -> dict[str, dict[str, object]]:
    """Figures of five programs, two of which changes are made to each."""
    names = [f"program p{number} ample" for number in range(5)]
    return {name: FIGURES | (changes if number < 3 else {}) for number, name in enumerate(names)}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "goes"),
        ({"peak_bytes": 101 * MIB}, "goes"),
        ({"peak_bytes": 102 * MIB}, "stays (b)"),
        ({"peak_bytes": 98 * MIB}, "goes"),
        ({"completes": False}, "stays (a)"),
        ({"step_ms": 1.09}, "goes"),
        ({"step_ms": 1.11}, "stays (c)"),
        ({"steady_calls": 2}, "stays (d)"),
        ({"known_hit_rate": 0.5}, "goes"),
        ({"error": "ended with -6"}, "errs"),
    ],
)
def test_what_gets_worse_decides(changes: dict[str, object], verdict: str) -> None:
    native = {f"p{number}": 10.0 for number in range(5)}
    before = trials_of()
    for one in before.values():
        one["step_ms"] = 0.1
    now = trials_of(step_ms=0.1)
    for one in list(now.values())[:3]:
        one.update(changes)
    for one in list(now.values())[3:]:
        one["step_ms"] = 0.1
    assert judge(before, now, native, {}, set()).verdict == verdict


@pytest.mark.parametrize(("completing", "verdict"), [(197, "goes"), (196, "stays (a)")])
def test_of_random_programs_few_may_fail(completing: int, verdict: str) -> None:
    before = {f"tight {seed} in 256 MiB": FIGURES for seed in range(200)}
    now = {key: FIGURES | {"completes": number < completing} for number, key in enumerate(before)}
    assert judge(before, now, {}, {}, set()).verdict == verdict
