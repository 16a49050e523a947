"""scripts/bench/hostile in small: whatever a file holds, a verb ends with a result or one sentence, within bounds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recordings import OURS, shared_folder

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
KINDS = {"snapshot", "kineto", "timeline", "page", "dtr", "rmm", "csv", "trace", "plan", "fixed"}


def hostile(keep: Path, *arguments: str) -> dict[str, Any]:
    """The figures of a campaign in a process of its own, which has to find nothing."""
    command = [sys.executable, str(BENCH / "hostile"), *arguments, "--plans", "100", "--keep", str(keep), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout)
    assert (done.returncode, figures["findings"]) == (0, []), done.stderr
    return figures


def check_variety(figures: dict[str, Any]) -> None:
    """A campaign that only makes what is refused at once would find nothing either."""
    cells = figures["cells"]
    assert {cell["kind"] for cell in cells} == KINDS
    runs = sum(cell["runs"] for cell in cells)
    assert runs == figures["mutations"]
    assert runs * 0.3 < sum(cell["refused"] for cell in cells) < runs * 0.95
    assert {cell["kind"] for cell in cells if cell["accepted"]} == KINDS
    assert figures["kept"] > runs * 0.05


@pytest.mark.slow
def test_no_damage_to_a_file_does_more_than_one_sentence(tmp_path: Path) -> None:
    check_variety(hostile(tmp_path, "--mutations", "250", "--traces", "-", "--jobs", "1", "--seed", "5"))


@pytest.mark.slow
def test_no_damage_to_recorded_traces_does_more_than_one_sentence(tmp_path: Path) -> None:
    check_variety(
        hostile(tmp_path, "--mutations", "400", "--traces", str(shared_folder("traces") or OURS), "--seed", "6")
    )
