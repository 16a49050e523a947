"""What every verb does alike: an option that is nearly right is named, and JSON says which version it is of."""

import json
import os
import pickle

import pytest

from stalloc.cli import main
from stalloc.device.known_gpus import find_gpu
from stalloc.fitting.candidates import steps_to_try

TRACE = "id,lower,upper,size\n0,0,3,1024\n1,1,2,2048\n"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("stats", "--aling", "64"), "--align"),
        (("simulate", "--capcity=4GiB"), "--capacity"),
        (("top", "--jsn", "-"), "--json"),
    ],
)
def test_an_option_that_is_nearly_right_is_named(tmp_path, capsys, words, meant):
    (tmp_path / "a.csv").write_text(TRACE)
    with pytest.raises(SystemExit) as ended:
        main([words[0], str(tmp_path / "a.csv"), *words[1:]])
    assert ended.value.code == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["stats", "top", "explain", "simulate"])
def test_json_says_which_version_it_is(tmp_path, capsys, verb):
    (tmp_path / "a.csv").write_text(TRACE)
    assert main([verb, str(tmp_path / "a.csv"), "--json", "-"]) == 0
    assert next(iter(json.loads(capsys.readouterr().out).items())) == ("json_version", 1)


@pytest.mark.parametrize(
    ("name", "gib", "capability"),
    [
        ("rtx pro 6000", 95, (12, 0)), ("gb10", 120, (12, 1)), ("gb200", 185, (10, 0)), ("gb300", 278, (10, 3)),
        ("b300", 269, (10, 3)), ("l20", 44.5, (8, 9)), ("a800", 79.3, (8, 0)), ("h800", 79.2, (9, 0)),
        ("rtx 5060", 8, (12, 0)), ("rtx 5070", 12, (12, 0)),
    ],
)  # fmt: skip
def test_cards_of_today_are_known(name, gib, capability):
    gpu = find_gpu(name)
    assert gpu.compute_capability == capability
    assert gpu.total_bytes == pytest.approx(gib * (1 << 30), rel=0.01)


def test_stats_of_an_out_of_memory_file_asks_why(tmp_path, capsys):
    segments = [{"device": 0, "address": 1 << 30, "total_size": 4 << 20, "stream": 0, "blocks": []}]
    ended = {"addr": 1 << 30, "size": 1 << 20, "stream": 0, "time_us": 1}
    events = [{"action": action, **ended} for action in ("alloc", "free_requested", "free_completed")]
    events.append({"action": "oom", "device_free": 1 << 20, "size": 9 << 20, "stream": 0, "time_us": 2})
    (tmp_path / "oom.pickle").write_bytes(pickle.dumps({"segments": segments, "device_traces": [events]}))
    assert main(["stats", str(tmp_path / "oom.pickle")]) == 0
    assert "Next: stalloc explain" in capsys.readouterr().out
    (tmp_path / "a.csv").write_text(TRACE)
    assert main(["stats", str(tmp_path / "a.csv")]) == 0
    assert "Next: stalloc plan" in capsys.readouterr().out


def test_what_comes_after_the_last_step_is_no_step():
    alike = [(10, 100)] * 4
    ahead = steps_to_try([*alike, (2, 50)], 3, is_whole=True, has_rest=True)
    assert "all 4 steps and what follows were looked at" in ahead.note
    assert "all 4 steps were looked at" in steps_to_try(alike, 3, is_whole=True).note


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (("tree", "a.csv", "--depth", "1"), ("top", "--tree", "--at", "peak", "a.csv", "--depth", "1")),
        (("advise", "a.csv", "--torch", "2.8"), ("simulate", "--advise", "a.csv", "--torch", "2.8")),
        (("check", "a.csv", "--max", "1KiB"), ("diff", "--check", "a.csv", "--max", "1KiB")),
    ],
)
def test_an_older_verb_says_what_it_is_now_and_does_it(tmp_path, capsys, monkeypatch, older, newer):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text(TRACE)
    (tmp_path / "pyproject.toml").write_text(f"[tool.stalloc.{older[0]}]\njson = 1\n")
    assert main(older) == 2, "the table of an older verb is read"
    assert f"[tool.stalloc.{older[0]}] has no option 'json'" in capsys.readouterr().err
    assert main(["stats", "a.csv"]) == 0, "and is no mistake"
    (tmp_path / "pyproject.toml").unlink()
    capsys.readouterr()
    code = main(older)
    shown, said = capsys.readouterr()
    assert f"`stalloc {older[0]}` is now `stalloc {newer[0]} --" in said
    assert (main(newer), *capsys.readouterr()) == (code, shown, "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["stats", "a.csv"], 'json = "a.csv"'),
        (["diff", "--check", "a.csv", "--max", "1GiB"], 'junit = "a.csv"'),
        (["diff", "--check", "a.csv", "--baseline", "b.json"], "update = true"),
        (["run", "--device", "virtual", "train.py"], 'report = "page.html"'),
        (["dryrun", "train.py"], "keep-files = true"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_the_file_of_a_folder_does_not_say_what_is_written(tmp_path, capsys, monkeypatch, words, line):
    """It may be that of a checkout by somebody else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text(TRACE)
    (tmp_path / "train.py").write_text("open('a.csv', 'w').close()\n")
    before = sorted([*os.listdir(tmp_path), "pyproject.toml"])
    (tmp_path / "pyproject.toml").write_text(f"[tool.stalloc]\n{line}\n")
    assert main(words) in (2, 125)
    assert "what is written is said on the command line only" in capsys.readouterr().err
    assert (tmp_path / "a.csv").read_text() == TRACE
    assert sorted(os.listdir(tmp_path)) == before
