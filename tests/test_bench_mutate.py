"""scripts/bench/mutate: a mutant that tests notice is told from one that they do not."""

import json
import sys
from pathlib import Path

import pytest
from warm_programs import run_file

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

from mutating.trying import halved_and_doubled, relevant_tests  # noqa: E402

MODULE = """\"\"\"Numbers.\"\"\"

_SHARE, _COUNT = 0.25, 3  # of the record; steps
LIMIT_BYTES = 4 << 20
TIMES = 2, 5
NO_STREAM = -1
NAMES = ("a", "b")


class Settings:
    first: int = 8
"""
TABLE = """
@dataclass(frozen=True)
class Thresholds:
    share: float = 1 / 8
    name: str = "of all"

LONG = Threshold("long", 50, unit="steps", why="rare")
"""


def changed_lines(folder: Path, file: str, source: str) -> dict[str, str]:
    """The line that each mutant of a source has in place of another, by name."""
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(source)
    return {change.name: change.new.strip() for change in halved_and_doubled([file], folder)}


def test_each_number_of_a_module_is_halved_and_doubled(tmp_path: Path) -> None:
    assert changed_lines(tmp_path, "stalloc/core/made_up.py", MODULE) == {
        "core/made_up:_SHARE halved": "_SHARE, _COUNT = 0.25 / 2, 3",
        "core/made_up:_SHARE doubled": "_SHARE, _COUNT = 0.25 * 2, 3",
        "core/made_up:_COUNT halved": "_SHARE, _COUNT = 0.25, 3 // 2",
        "core/made_up:_COUNT doubled": "_SHARE, _COUNT = 0.25, 3 * 2",
        "core/made_up:LIMIT_BYTES halved": "LIMIT_BYTES = (4 << 20) // 2",
        "core/made_up:LIMIT_BYTES doubled": "LIMIT_BYTES = (4 << 20) * 2",
        "core/made_up:TIMES[0] halved": "TIMES = 2 // 2, 5",
        "core/made_up:TIMES[0] doubled": "TIMES = 2 * 2, 5",
        "core/made_up:TIMES[1] halved": "TIMES = 2, 5 // 2",
        "core/made_up:TIMES[1] doubled": "TIMES = 2, 5 * 2",
    }


def test_a_table_of_thresholds_has_its_numbers_in_fields_or_entries(tmp_path: Path) -> None:
    assert changed_lines(tmp_path, "stalloc/runtime/thresholds.py", TABLE) == {
        "runtime/thresholds:Thresholds.share halved": "share: float = (1 / 8) / 2",
        "runtime/thresholds:Thresholds.share doubled": "share: float = (1 / 8) * 2",
        "runtime/thresholds:LONG halved": 'LONG = Threshold("long", 50 // 2, unit="steps", why="rare")',
        "runtime/thresholds:LONG doubled": 'LONG = Threshold("long", 50 * 2, unit="steps", why="rare")',
    }


def test_every_change_fits_and_is_asked_about_by_tests(tmp_path: Path) -> None:
    done = run_file(BENCH / "mutate", "--list", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    changes = done.stdout.splitlines()
    files = {line.partition("(")[2].partition(")")[0] for line in changes}
    assert len(changes) > 180
    assert len(files) > 38
    for file in files:
        assert relevant_tests(file, ROOT)


@pytest.mark.slow
def test_what_no_test_notices_survives(tmp_path: Path) -> None:
    tests = ["--tests", "tests/test_error_wordings.py::test_sizes_are_read_to_the_byte"]
    rules = ["--only", "decimal-comma", "innermost-frame"]
    done = run_file(BENCH / "mutate", *rules, *tests, "--jobs", 2, "--json", tmp_path / "found.json", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    caught, survived = json.loads((tmp_path / "found.json").read_text())
    assert caught["name"] == "decimal-comma"
    assert caught["caught_by"].startswith("tests/test_error_wordings.py::")
    assert survived["name"] == "innermost-frame"
    assert survived["caught_by"] == ""
    assert "innermost-frame: SURVIVED: requests are told by the outermost frame of the user" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("1 survived: innermost-frame")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "no-such-rule"], "no mutant is named no-such-rule: --list names them"),
        (["--rules", "--numbers"], "--rules and --numbers leave nothing"),
    ],
)
def test_what_is_not_there_is_refused(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = run_file(BENCH / "mutate", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
