"""Pinned host memory in newer snapshots of torch (host_segments, host_traces): told by stats, top and report."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from stalloc.cli import main
from stalloc.errors import BadInputError
from stalloc.trace import Trace, load_traces

MIB = 1 << 20
STACK = [{"filename": "/home/me/swap.py", "line": 7, "name": "make_swap_space"}]
SEGMENT = {
    "device": 0,
    "address": 1 << 30,
    "total_size": 2 * MIB,
    "stream": 0,
    "blocks": [{"address": 1 << 30, "size": 2 * MIB, "state": "active_allocated", "requested_size": 2 * MIB}],
}
EVENTS = [
    {"action": "segment_alloc", "addr": 1 << 30, "size": 2 * MIB, "stream": 0},
    {"action": "alloc", "addr": 1 << 30, "size": 2 * MIB, "stream": 0},
]


def pinned_block(address: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
    block = {"address": address, "size": size, "requested_size": size - 100, "state": state, "frames": STACK}
    return {"address": address, "total_size": size, "blocks": [block]}


HOST = {
    "host_segments": [pinned_block(4096, 4 * MIB), pinned_block(1 << 25, 8 * MIB, "inactive")],
    "host_traces": [
        {"action": "segment_alloc", "addr": 1 << 25, "size": 8 * MIB},
        {"action": "alloc", "addr": 1 << 25, "size": 8 * MIB, "frames": STACK},
        {"action": "alloc", "addr": 4096, "size": 4 * MIB, "frames": STACK},
        {"action": "free_requested", "addr": 1 << 25, "size": 8 * MIB},
        {"action": "free_completed", "addr": 1 << 25, "size": 8 * MIB},
    ],
}


def snapshot(path: Path, **more: Any) -> Path:
    path.write_bytes(pickle.dumps({"segments": [SEGMENT], "device_traces": [EVENTS], **more}))
    return path


def one(path: Path) -> Trace:
    (trace,) = load_traces(path)
    return trace


def test_what_is_pinned_is_told_beside_an_unchanged_trace(tmp_path: Path) -> None:
    with_host, without = one(snapshot(tmp_path / "a.pickle", **HOST)), one(snapshot(tmp_path / "b.pickle"))
    assert with_host.info["pinned_host"] == {
        "num_blocks": 2,
        "bytes": 12 * MIB,
        "used_bytes": 4 * MIB,
        "num_events": 3,
        "used_peak_bytes": 12 * MIB,
        "sites": [["swap.py:7 make_swap_space", 4 * MIB]],
    }
    assert "pinned_host" not in without.info
    assert with_host.size.tolist() == without.size.tolist()
    assert with_host.num_events == without.num_events
    kept = set(with_host.info) - {"pinned_host"}
    assert all(with_host.info[key] == without.info[key] for key in kept - {"notes", "file"})


@pytest.mark.parametrize("verb", ["stats", "top"])
def test_verbs_say_it(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, str(snapshot(tmp_path / "a.pickle", **HOST))]) == 0
    shown = capsys.readouterr().out
    assert "pinned host memory: 12.00 MiB in 2 blocks, 4.00 MiB in use, 12.00 MiB at the most" in shown
    assert "swap.py:7 make_swap_space" in shown


def test_the_json_of_stats_has_all_of_it(tmp_path: Path) -> None:
    out = tmp_path / "stats.json"
    assert main(["stats", str(snapshot(tmp_path / "a.pickle", **HOST)), "--json", str(out)]) == 0
    (told,) = json.loads(out.read_text())["devices"]
    assert told["pinned_host"]["used_bytes"] == 4 * MIB


def test_the_page_says_it(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(snapshot(tmp_path / "a.pickle", **HOST)), "-o", str(page)]) == 0
    assert "pinned host memory: 12.00 MiB in 2 blocks" in page.read_text(encoding="utf-8")


def test_events_may_be_of_one_list_or_of_several_and_stand_alone(tmp_path: Path) -> None:
    nested = {"host_traces": [HOST["host_traces"]]}
    found = one(snapshot(tmp_path / "a.pickle", **nested)).info["pinned_host"]
    assert found["used_peak_bytes"] == 12 * MIB
    assert found["sites"] == [["swap.py:7 make_swap_space", 4 * MIB]]
    as_json = tmp_path / "b.json"
    as_json.write_text(json.dumps({"host_segments": HOST["host_segments"], "segments": [SEGMENT]}))
    (state,) = load_traces(as_json, history=False)
    assert state.info["pinned_host"]["bytes"] == 12 * MIB


STRANGE = [
    {"host_segments": 7},
    {"host_segments": [{"size": "much", "blocks": []}]},
    {"host_segments": [{"blocks": [{"size": 5}]}]},
    {"host_segments": [{"size": 5, "blocks": [{"size": 5}]}]},
    {"host_segments": [{"size": -5}]},
    {"host_segments": [{"size": 1 << 70}]},
    {"host_segments": [{"size": 5, "blocks": [{"size": 5, "state": "active", "frames": [{"line": 1}]}]}]},
    {"host_traces": [{"action": "alloc"}]},
    {"host_traces": ["alloc"]},
    {"host_traces": [{"action": "alloc", "addr": "there", "size": 5}]},
    {"host_traces": {"action": "alloc"}},
]


@pytest.mark.parametrize("strange", STRANGE)
def test_what_is_not_as_known_is_left_out_with_a_sentence(strange: dict[str, Any], tmp_path: Path) -> None:
    trace = one(snapshot(tmp_path / "a.pickle", **strange))
    assert trace.num_requests == 1
    assert "pinned_host" not in trace.info
    (note,) = trace.info["notes"]
    assert note.startswith("pinned host memory is left out: host_segments and host_traces are not as known here (")
    assert "\n" not in note


@pytest.mark.parametrize("nothing", [{"host_segments": [], "host_traces": []}, {"host_segments": None}])
def test_a_snapshot_without_any_says_nothing(nothing: dict[str, Any], tmp_path: Path) -> None:
    assert one(snapshot(tmp_path / "a.pickle", **nothing)).info["notes"] == []


def test_lists_that_are_repeated_without_end_are_refused(tmp_path: Path) -> None:
    block = [{"size": 5, "state": "inactive"}] * 1000
    segments = [{"size": 5, "blocks": block}] * 1000
    path = snapshot(tmp_path / "a.pickle", host_segments=[*segments])
    with pytest.raises(BadInputError, match="repeats its contents"):
        load_traces(path)


def test_a_snapshot_of_the_host_alone_says_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [], **HOST}))
    with pytest.raises(BadInputError, match=r"of a GPU.*pinned host memory: 12\.00 MiB in 2 blocks"):
        load_traces(path, history=False)


def test_names_of_others_stay_on_their_line(tmp_path: Path) -> None:
    stack = [{"filename": "/x/a\n\x1b[31m.py", "line": 1, "name": "<b>\n"}]
    segments = [{"size": 5, "blocks": [{"size": 5, "state": "active_allocated", "frames": stack}]}]
    (note,) = one(snapshot(tmp_path / "a.pickle", host_segments=segments)).info["notes"]
    assert "\n" not in note
    assert "\x1b" not in note
