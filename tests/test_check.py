"""`stalloc diff --check`: a limit and a baseline for a trace, JUnit reports and annotations for GitHub."""

import json
import pickle
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from stalloc.cli import main

MIB = 1 << 20


def snapshot(*mebibytes: int, line: int = 5, file: str = "model.py") -> bytes:
    """Blocks of so many MiB, all live at the end, requested by one line."""
    frames = [{"filename": file, "line": line, "name": "forward"}]
    events, blocks, at = [], [], 1 << 30
    total = sum(mebibytes) * MIB
    for size in mebibytes:
        event = {"addr": at, "size": size * MIB, "stream": 0, "frames": frames, "time_us": 0}
        events.append({"action": "alloc", **event})
        blocks.append({"address": at, "size": size * MIB, "requested_size": size * MIB, "state": "active_allocated"})
        at += size * MIB
    segment = {"device": 0, "address": 1 << 30, "total_size": total, "stream": 0, "blocks": blocks}
    first = {"action": "segment_alloc", "addr": 1 << 30, "size": total, "stream": 0, "frames": [], "time_us": 0}
    return pickle.dumps({"segments": [segment], "device_traces": [[first, *events]]})


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace with a peak of 30 MiB, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    (tmp_path / "step.pickle").write_bytes(snapshot(10, 20))
    return tmp_path / "step.pickle"


def test_a_limit_is_kept_to_the_byte(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--check", "step.pickle", "--max", "30MiB"]) == 0
    assert "fine" in capsys.readouterr().out
    assert main(["diff", "--check", "step.pickle", "--max", f"{30 * MIB - 1}"]) == 1
    shown = capsys.readouterr().out
    assert "stalloc: 30.00 MiB allocated at the peak, 1 B more than --max 31457279" in shown
    assert "30.00 MiB  model.py:5 forward" in shown
    assert shown.count("next: stalloc top step.pickle") == 1
    assert "::error" not in shown


def test_a_baseline_fails_with_what_grew_and_the_update_accepts_it(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["diff", "--check", "step.pickle", "--baseline", "memory.json"]
    assert main(options) == 2
    assert main([*options, "--update"]) == 0
    assert main(options) == 0
    trace.write_bytes(snapshot(10, 20, 4, line=9))
    capsys.readouterr()
    assert main([*options, "--json", "out.json", "--junit", "junit.xml", "--github"]) == 1
    shown = capsys.readouterr().out
    assert "34.00 MiB allocated at the peak, 4.00 MiB more than the baseline's 30.00 MiB (tolerance 5%)" in shown
    row = next(line for line in shown.splitlines() if line.endswith("  model.py:9 forward"))  # the line has moved
    assert row.split()[:6] == ["4.00", "MiB", "30.00", "MiB", "34.00", "MiB"]
    (entry,) = json.loads(Path("out.json").read_text())["entries"]
    assert (entry["allocated_peak_bytes"], entry["baseline_bytes"]) == (34 * MIB, 30 * MIB)
    suite = ET.parse("junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.text == entry["failure"]
    assert main([*options, "--tolerance", "15%"]) == 0
    assert main([*options, "--update"]) == 0
    assert main(options) == 0


def test_an_annotation_is_at_the_line_that_holds_most_and_breaks_out_of_nothing(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    trace.write_bytes(snapshot(10, file=f"{trace.parent}/sub/a,b.py", line=7))
    assert main(["diff", "--check", "step.pickle", "--max", "1MiB"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::error")]
    head, _, message = line.removeprefix("::error ").partition("::")
    assert head == "file=sub/a%2Cb.py,line=7,title=GPU memory of step.pickle"
    assert message.startswith("stalloc: 10.00 MiB allocated at the peak, 9.00 MiB more than --max 1MiB%0A")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "nothing to check against"),
        (["--update", "--max", "1GiB"], "--update needs a baseline"),
        (["--max", "20"], "--max is 20 without a unit"),
        (["--baseline", "step.pickle"], "step.pickle is not JSON"),
        (["--baseline", "absent.json"], "absent.json does not exist"),
        (["--max", "1GiB", "--fail-over", "5%"], "--fail-over does not go with --check"),
        (["step.pickle", "--max", "1GiB"], "two of the files are called step.pickle"),
    ],
)
def test_mistakes_are_one_sentence(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert main(["diff", "--check", "step.pickle", *options]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_options_of_the_check_alone_and_a_trace_alone_are_refused(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", "step.pickle", "step.pickle", "--max", "1GiB"]) == 2
    assert "--max is of --check" in capsys.readouterr().err
    assert main(["diff", "step.pickle"]) == 2
    assert "two traces are compared, and 1 given" in capsys.readouterr().err
