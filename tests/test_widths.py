"""Every verb at 60, 80 and 120 columns and off a terminal: no number is cut, and every figure of its JSON is there."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recordings import path_of

from stalloc.cli import main
from stalloc.figures import human_bytes
from stalloc.trace import load_traces, save_traces

#: where a figure of JSON is not one that people are shown: places in files, and what is told in other words
_NOT_SHOWN = re.compile(
    r"address|_event\b|sites|tree|seconds|proven|counts|fail_over|allowed|unknown|dynamic|static|peak_requests|"
    r"[.]node[.]|avoided_by|[.]hits|[.]run_hits|end_allocated|observed_allocated|native_reserved|record_|device_free_bytes|same_stream|whole_segments"
)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_WIDTHS = (60, 80, 120, None)

PROGRAM = """
import cupy
import stalloc
kept = cupy.empty(3 << 20, "u1")
for _ in range(150):
    one, two = cupy.empty(5 << 20, "u1"), cupy.empty(7 << 20, "u1")
    del one
    three = cupy.empty(6 << 20, "u1")
    del two, three
    stalloc.step()
"""
#: several calls of one verb in a process of their own, each at a width, with its JSON
RENDER = """
import os, sys
from stalloc.cli import main
file, *words = sys.argv[1:]
for width in WIDTHS:
    if width is not None:
        os.environ |= {"FORCE_COLOR": "1", "COLUMNS": str(width)}
    code = main([words[0], "--json", f"{file}.{width}", *words[1:]])
    assert code == 0, code
    print("=" * 10, flush=True)
    for name in ("FORCE_COLOR", "COLUMNS"):
        os.environ.pop(name, None)
"""

Render = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def render(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Render:
    """What a verb prints at a width (None: into a pipe), and its JSON."""

    def shown(width: int | None, *arguments: str) -> tuple[str, dict[str, Any]]:
        for name in ("FORCE_COLOR", "COLUMNS", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        if width is not None:
            monkeypatch.setenv("FORCE_COLOR", "1")
            monkeypatch.setenv("COLUMNS", str(width))
        file = tmp_path / "result.json"
        assert main([*arguments, "--json", str(file)]) in (0, 1)
        return capsys.readouterr().out, json.loads(file.read_text())

    return shown


def figures(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every figure of a JSON object that people are shown, as they read it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value[:3]:  # of lists the first are shown: what holds or grew most
            yield from figures(inner, path)
    elif isinstance(value, int) and not isinstance(value, bool) and not _NOT_SHOWN.search(path):
        if path.endswith("bytes") or ".causes." in path:
            if value:  # else "no change", "none", or nothing at all
                yield path, human_bytes(abs(value))
        elif abs(value) > 99:
            yield path, f"{value:,}"


def figures_of_text(text: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?(?: ?(?:GiB|MiB|B|%)\b|%)?", " ".join(text.split())))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Traces of several kinds, by the names that commands use below."""
    folder = tmp_path_factory.mktemp("traces")
    plan, csv, oom = folder / "p.plan.npz", folder / "p.csv", folder / "out_of_memory.trace.npz"
    save_traces(oom, load_traces(path_of("out_of_memory.pickle.gz")))  # this is read sooner
    csv.write_text("id,lower,upper,size\n" + "".join(f"{i},{i},{i + 7},{i * 999_999 + 1}\n" for i in range(50)))
    assert main(["plan", str(path_of("training.pickle.gz")), "-o", str(plan)]) == 0
    return {
        "TINY": str(path_of("training.pickle.gz")),
        "OTHER": str(path_of("forward.pickle.gz")),
        "OOM": str(oom),
        "UNSEEN": str(path_of("profile.json.gz")),
        "PLAN": str(plan),
        "CSV": str(csv),
        "OUT": str(folder / "converted.trace.npz"),
    }


COMMANDS = (
    "stats OOM UNSEEN CSV",
    "top OOM --no-tree",
    "top TINY --at end",
    "plan TINY",
    "plan CSV",
    "validate PLAN TINY",
    "convert --force TINY OUT",
    "diff TINY OTHER",
    "simulate TINY",
    pytest.param("simulate OOM --capacity 4000MiB", marks=pytest.mark.slow),
    "explain OOM",
    "explain CSV",
    "info",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_figure_is_there_whole_at_every_width(
    command: str, render: Render, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    words = [files.get(word, word) for word in command.split()]
    plain, result = render(None, *words)
    assert "\x1b" not in plain
    for path, figure in figures(result):
        assert figure in plain, f"{path}: {figure} is not there"
    wanted = figures_of_text(_without_seconds(plain))
    for width in _WIDTHS[:3]:
        text = _ESCAPE.sub("", render(width, *words)[0])
        assert "…" not in text.replace("file records …", "")
        assert figures_of_text(_without_seconds(text)) == wanted, f"at {width} columns"
        copied = [line for line in text.splitlines() if line.startswith(("Next: ", "next: ", "Written: "))]
        assert copied == [line for line in plain.splitlines() if line.startswith(("Next: ", "next: ", "Written: "))]


def _without_seconds(text: str) -> str:
    """How long it took differs from time to time."""
    return re.sub(r"\b0\.\d{3}\b", "", text)


@pytest.mark.parametrize(
    ("words", "widths"),
    [
        ("run --device virtual", (60, None)),
        pytest.param("run --compare-native --device virtual", _WIDTHS, marks=pytest.mark.slow),
        pytest.param("record --device virtual -o OUT", _WIDTHS, marks=pytest.mark.slow),
        pytest.param("dryrun", _WIDTHS, marks=pytest.mark.slow),
    ],
)
def test_every_figure_of_a_verb_that_runs_a_program_is_there(
    words: str, widths: tuple[int | None, ...], run_program, tmp_path: Path, cupy_installed: None
) -> None:
    program, out, file = tmp_path / "steps.py", tmp_path / "steps.trace.npz", tmp_path / "result.json"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [str(out) if word == "OUT" else word for word in words.split()]
    source = RENDER.replace("WIDTHS", repr(widths))
    done = run_program(source, str(file), *command, str(program), STALLOC_CACHE="off", NO_COLOR=None)
    assert done.returncode == 0, done.stderr
    for width, text in zip(widths, _ESCAPE.sub("", done.stdout).split("=" * 10 + "\n"), strict=False):
        result = json.loads(Path(f"{file}.{width}").read_text(encoding="utf-8"))
        told = list(figures(result))
        assert len(told) > 2
        shown = " ".join(text.split())
        for path, figure in told:
            assert figure in shown, f"at {width} columns {path}: {figure} is not there"
        assert "…" not in shown


@pytest.mark.parametrize("width", [60, *(pytest.param(width, marks=pytest.mark.slow) for width in (80, 120))])
def test_lines_other_than_what_is_copied_fit_the_terminal(
    width: int, render: Render, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for command in (
        "stats OOM",
        "explain OOM",
        "simulate OOM --capacity 4000MiB",
        "top OOM --no-tree",
        "diff TINY OTHER",
    ):
        text = _ESCAPE.sub("", render(width, *(files.get(word, word) for word in command.split()))[0])
        for line in text.splitlines():
            is_one_word = len(line.split()) <= 3  # a long name or setting is shown whole
            is_copied = line.startswith("Next: ") or "_ALLOC_CONF=" in line
            assert len(line) <= width or is_copied or is_one_word, line


def test_no_color_means_no_escapes(render: Render, files: dict[str, str], monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    capsys.readouterr()
    assert main(["explain", files["TINY"]]) == 0
    assert "\x1b" not in capsys.readouterr().out
