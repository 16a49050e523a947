"""stalloc diff: what grew between two files, by class, call site and size, and the guard for CI."""

import json
import pickle

import pytest
from recordings import each, path_of

from stalloc.analysis import summarize
from stalloc.cli import main
from stalloc.trace import load_traces

ADDRESS = 0x7F00_0000_0000


def write(path, *requests, device=0, reserved=1 << 20):
    """A snapshot of requests that all stay, given as (bytes, file name, line, function)."""
    history, blocks, place = [], [], 0
    for size, filename, line, name in requests:
        rounded = -(-size // 512) * 512
        frames = [{"filename": filename, "line": line, "name": name}] if filename else []
        history.append(
            {"action": "alloc", "addr": ADDRESS + place, "size": size, "stream": 0, "time_us": 0, "frames": frames}
        )
        blocks.append({"size": rounded, "requested_size": size, "state": "active_allocated", "frames": frames})
        place += rounded
    blocks.append({"size": reserved - place, "state": "inactive"})
    segment = {"device": device, "address": ADDRESS, "total_size": reserved, "stream": 0, "blocks": blocks}
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[]] * device + [history]}))
    return str(path)


def diff(capsys, *arguments, code=0):
    assert main(["diff", *map(str, arguments), "--json", "-"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def pair(tmp_path):
    first = write(
        tmp_path / "a.pickle",
        (1000, "/x/model.py", 5, "forward"),
        (600, "/x/model.py", 5, "forward"),
        (2000, "/x/train.py", 9, "step"),
        (100, "/x/old.py", 1, "gone"),
        (100, "", 0, ""),
    )
    second = write(
        tmp_path / "b.pickle",
        (1000, "/x/model.py", 7, "forward"),  # the same line of the same function, two lines further down
        (4000, "/x/model.py", 7, "forward"),
        (2000, "/x/train.py", 9, "step"),
        (100, "", 0, ""),
        reserved=3 << 20,
    )
    return first, second


def rows(listed):
    return {row["name"]: (row["first_bytes"], row["second_bytes"], row["change_bytes"]) for row in listed}


def test_json_says_what_grew_most_first(pair, capsys):
    result = diff(capsys, *pair)
    assert (result["first"], result["second"], result["grew_too_much"]) == (*pair, False)
    (device,) = result["devices"]
    assert device["first"]["allocated_peak_bytes"] == 1024 + 1024 + 2048 + 512 + 512
    assert device["second"]["allocated_peak_bytes"] == 1024 + 4096 + 2048 + 512
    assert device["first"]["allocated_peak_requests"] == 5
    assert device["allocated_change_bytes"] == 2560
    assert device["reserved_change_bytes"] == 2 << 20
    assert list(rows(device["by_site"]).items()) == [
        ("model.py:5 forward", (2048, 5120, 3072)),
        ("train.py:9 step", (2048, 2048, 0)),
        ("unknown", (512, 512, 0)),
        ("old.py:1 gone", (512, 0, -512)),
    ]
    assert [(row["name"], row["change_bytes"]) for row in device["by_size"]] == [
        ("4000 bytes", 4096),
        ("2000 bytes", 0),
        ("1000 bytes", 0),
        ("100 bytes", -512),
        ("600 bytes", -1024),
    ]
    assert sum(row["second_requests"] for row in device["by_class"]) == 4


def test_two_changed_lines_of_a_function_are_two_call_sites(tmp_path, capsys):
    first = write(tmp_path / "a.pickle", (512, "m.py", 1, "f"), (512, "m.py", 2, "f"))
    second = write(tmp_path / "b.pickle", (512, "m.py", 3, "f"), (512, "m.py", 2, "f"), (512, "m.py", 4, "f"))
    (device,) = diff(capsys, first, second)["devices"]
    assert rows(device["by_site"]) == {
        "m.py:1 f": (512, 0, -512),
        "m.py:2 f": (512, 512, 0),
        "m.py:3 f": (0, 512, 512),
        "m.py:4 f": (0, 512, 512),
    }


@pytest.mark.parametrize(
    ("growth", "code"),
    [("49.99%", 1), ("50%", 0), ("2559B", 1), ("2560B", 0), ("0", 1), ("2KiB", 1), ("3KiB", 0), ("1MiB", 0)],
)
def test_the_guard_judges_allocated(pair, capsys, growth, code):
    result = diff(capsys, *pair, "--fail-over", growth, code=code)  # allocated grows by 2560 bytes, or 50 %
    assert result["grew_too_much"] is bool(code)
    assert result["devices"][0]["grew_too_much"] is bool(code)


def test_the_guard_never_judges_reserved_nor_what_shrank(tmp_path, pair, capsys):
    more = write(tmp_path / "c.pickle", (1000, "/x/model.py", 5, "forward"), reserved=1 << 30)
    assert diff(capsys, pair[0], more, "--fail-over", "0")["devices"][0]["reserved_change_bytes"] > 0
    assert diff(capsys, pair[1], pair[0], "--fail-over", "0")["devices"][0]["allocated_change_bytes"] == -2560


@pytest.mark.parametrize("growth", ["", "5", "-1", "-5%", "5 %", "nan%", "lots", "%", "1e9%"])
def test_a_growth_is_bytes_or_a_share(pair, capsys, growth):
    assert main(["diff", *pair, f"--fail-over={growth}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("stalloc: --fail-over is ")
    assert error.count("\n") == 1


def test_text_shows_both_files_what_changed_and_the_next_command(tmp_path, pair, capsys):
    hostile = write(tmp_path / "[red]h.pickle", (5000, "/x/[bold]m.py", 1, "[/]\x1b[31mf"))
    assert main(["diff", pair[0], hostile, "--fail-over", "1%"]) == 0
    shown = capsys.readouterr().out
    assert "[red]h.pickle" in shown
    assert "[bold]m.py:1 [/]\\x1b[31mf" in shown
    assert "\x1b" not in shown
    assert "train.py:9 step" in shown
    assert shown.rstrip().endswith(f"Next: stalloc explain '{hostile}'")
    assert main(["diff", *pair, "--fail-over", "1%", "--top", "1"]) == 1
    shown = capsys.readouterr().out
    assert "model.py:5 forward" in shown
    assert "old.py" not in shown
    assert "more than the" in shown


def test_devices_are_compared_by_number_unless_there_is_one_each(tmp_path, capsys, pair):
    other = write(tmp_path / "c.pickle", (1000, "/x/model.py", 5, "forward"), device=3)
    (device,) = diff(capsys, pair[0], other)["devices"]
    assert (device["first"]["device"], device["second"]["device"]) == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.pickle", "nothing.pickle"], "does not exist"),
        (["a.pickle", "b.pickle", "--device", "1"], "has no device 1"),
        (["a.pickle", "b.pickle", "--top", "-1"], "--top is -1"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(pair, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert main(["diff", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


PAIRS = [
    ("forward.pickle.gz", "step.pickle.gz"),
    ("profile.json.gz", "memory_timeline.json.gz"),
    ("lifespans.csv.gz", "rank1.pickle.gz"),
    ("lm_fwd_ctx200.pickle.gz", "lm_fb_ctx200.pickle.gz"),
    ("lm27b_compiled_fwd.pickle.gz", "lm27b_ctx128_fullstep.pickle.gz"),
    ("resnet50_v100_kineto_nw0.json.gz", "resnet_timeline_hta.json.gz"),
    ("somas_resnet50.csv.gz", "dtr_resnet32.log.gz"),
]


@pytest.mark.parametrize(("first", "second"), each(PAIRS, always=("resnet50", "somas")))
def test_every_list_of_real_traces_adds_up_to_the_peaks(capsys, first, second):
    files = [str(path_of(first)), str(path_of(second))]
    result = diff(capsys, *files)
    (device,) = result["devices"]
    for name in ("by_class", "by_site", "by_size"):
        listed = device[name]
        assert sum(row["first_bytes"] for row in listed) == device["first"]["allocated_peak_bytes"]
        assert sum(row["second_bytes"] for row in listed) == device["second"]["allocated_peak_bytes"]
        changes = [row["change_bytes"] for row in listed]
        assert changes == sorted(changes, reverse=True)
    for side, file in zip(("first", "second"), files, strict=True):
        (trace,) = load_traces(file)
        summary = summarize(trace)
        assert device[side]["allocated_peak_bytes"] == summary.allocated_peak_bytes
        assert device[side]["reserved_peak_bytes"] == summary.reserved_peak_bytes
        for note in trace.info["notes"]:  # a guess is said to be one
            assert any(note in shown for shown in result["notes"])


def test_real_devices_of_one_file(capsys):
    file = path_of("gpus.pickle.gz")
    result = diff(capsys, file, file, "--fail-over", "0")
    assert [device["first"]["device"] for device in result["devices"]] == [0, 1, 2]
    assert all(row["change_bytes"] == 0 for device in result["devices"] for row in device["by_site"])
    (device,) = diff(capsys, file, file, "--device", "1")["devices"]
    assert device["second"]["device"] == 1
    one = path_of("forward.pickle.gz")
    result = diff(capsys, file, one)
    assert len(result["devices"]) == 1
    assert any("has device 1, 2" in note for note in result["notes"])
