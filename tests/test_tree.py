"""`stalloc top --tree`: the peak by call site as a tree whose figures are those of `stalloc top`."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from recordings import path_of
from test_top import frames, top, write_leak

from stalloc.cli import main


def tree(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """What the verb says of each device, as JSON."""
    assert main(["top", "--tree", *words, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)["devices"]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines of the tree, from its root."""
    assert main(["top", "--tree", *words]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[-1].startswith("Next: stalloc explain ")
    return [line for line in lines[1:-1] if line]


@pytest.mark.parametrize(("at", "meant"), [("peak", "peak"), (None, "oom"), ("7", "event")])
def test_the_figures_are_those_of_top(tmp_path: Path, capsys: pytest.CaptureFixture[str], at: str, meant: str) -> None:
    file = write_leak(tmp_path / "leak.pickle", oom=True)
    (device,) = tree(capsys, file, *(["--at", at] if at else []))
    (other,) = top(capsys, file, *(["--at", at] if at else []))
    assert device["at"] == meant
    assert {name: other[name] for name in device} == device
    assert device["tree"]["held_bytes"] == device["allocated_bytes"]


def test_common_frames_are_one_branch_and_chains_keep_their_depth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, write_leak(tmp_path / "leak.pickle", steps=2))
    assert lines == [
        " 388.00 MiB 100.0%  all",
        " 288.00 MiB  74.2%  ├ leak.py:9 <module>",
        " 224.00 MiB  57.7%  │ ├ leak.py:5 step",
        "                    │ │   model.py:7 forward",
        "  64.00 MiB  16.5%  │ └ leak.py:6 step",
        " 100.00 MiB  25.8%  └ leak.py:1 <module>",
        "                        model.py:3 __init__",
    ]


def test_what_is_left_out_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_leak(tmp_path / "leak.pickle", steps=2)
    assert shown(capsys, file, "--depth", "1", "--min", "30") == [
        " 388.00 MiB 100.0%  all",
        " 288.00 MiB  74.2%  ├ leak.py:9 <module>",
        " 288.00 MiB  74.2%  │ └ 2 more",
        " 100.00 MiB  25.8%  └ 1 more",
    ]


def test_lines_of_every_level_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Shares of the children of each line, with what is left out, are at most its own: read off the text."""
    lines = shown(capsys, str(path_of("training.pickle.gz")), "--min", "0")
    open_at: list[tuple[int, float, float]] = []  # depth, share, what its children had so far
    for line in lines:
        found = re.match(r"\s*[\d.]+ \w+\s+([\d.]+)%  ([│ ]*)([├└]?)", line)
        if found is None:
            continue
        share, depth = float(found[1]), (len(found[2]) // 2 + 1 if found[3] else 0)
        while open_at and open_at[-1][0] >= depth:
            open_at.pop()
        if open_at:
            above, own, before = open_at[-1]
            assert before + share <= own + 0.6, line
            open_at[-1] = above, own, before + share
        open_at.append((depth, share, 0.0))
    assert len(lines) > 5


@pytest.mark.parametrize("num_frames", [199, 201, 500])
def test_the_stacks_of_a_deep_recursion_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_frames: int
) -> None:
    file = Path(write_leak(tmp_path / "leak.pickle", steps=2))
    snapshot = pickle.loads(file.read_bytes())
    for event in snapshot["device_traces"][0]:
        event["frames"] = frames(*(("tree.py", line, "visit") for line in range(1, num_frames + 1)))
    file.write_bytes(pickle.dumps(snapshot))
    (device,) = tree(capsys, str(file))
    names, branch = [], device["tree"]
    while branch["children"]:
        (branch,) = branch["children"]
        assert branch["held_bytes"] == device["allocated_bytes"]
        names.append(branch["name"])
    assert (names[0], names[-1]) == (f"tree.py:{num_frames} visit", "tree.py:1 visit")
    left_out = max(num_frames - 199, 0)
    assert len(names) == num_frames - left_out + bool(left_out)
    assert (f"{left_out} frames left out" in names) is bool(left_out)
    assert shown(capsys, str(file))[-1].strip() == "tree.py:1 visit"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--depth", "0"], "--depth is 0"),
        (["--min", "101"], "--min is 101"),
        (["--at", "oom"], "no out-of-memory event"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["top", "--tree", write_leak(tmp_path / "leak.pickle"), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
