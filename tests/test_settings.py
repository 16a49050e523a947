"""Settings of torch's allocator: `stalloc.alloc_conf` merges and puts back, `stalloc simulate --advise` ranks."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recordings import path_of

import stalloc
from stalloc.allocator_conf import VARIABLES, variables_read
from stalloc.cli import main
from stalloc.errors import BadInputError

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("release", "variable"),
    [("2.11.0+cu130", NEW), ("2.9.0", NEW), ("2.8.1", OLD), ("1.13.1+cu117", OLD), ("", NEW), ("nightly", NEW)],
)
def test_each_release_reads_its_variable(release: str, variable: str) -> None:
    assert variables_read(release)[0] == variable


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No settings, put back at the end."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def test_before_torch_is_imported_the_variable_is_merged_and_put_back(clean: pytest.MonkeyPatch) -> None:
    clean.setenv(OLD, "garbage_collection_threshold:0.8,max_split_size_mb:64")
    with stalloc.alloc_conf(max_split_size_mb=128, expandable_segments=True) as conf:
        text = "garbage_collection_threshold:0.8,max_split_size_mb:128,expandable_segments:True"
        assert (os.environ[conf.variable], str(conf)) == (text, f"{conf.variable}={text}")
        with stalloc.alloc_conf(garbage_collection_threshold=None):
            assert os.environ[conf.variable] == "max_split_size_mb:128,expandable_segments:True"
        assert os.environ[conf.variable] == text
    assert os.environ.get(NEW) is None
    assert os.environ[OLD] == "garbage_collection_threshold:0.8,max_split_size_mb:64"


def test_what_torch_would_refuse_changes_nothing(clean: pytest.MonkeyPatch) -> None:
    clean.setenv(OLD, "max_split_size_mb:64")
    with pytest.raises(BadInputError, match="max_split_size_mb"):
        stalloc.alloc_conf(max_split_size_mb="lots")
    with pytest.raises(BadInputError, match="nonsense"):
        stalloc.alloc_conf(nonsense=1)
    assert (os.environ.get(NEW), os.environ[OLD]) == (None, "max_split_size_mb:64")


_IN_TORCH = """
import json, os
from stalloc import device
device.activate("virtual")
import stalloc, torch

def now():
    found = torch.cuda.memory._snapshot()["allocator_settings"]
    return [found["max_split_size"] >> 20, found["garbage_collection_threshold"], found["expandable_segments"]]

seen = [now()]
torch.empty(10, device="cuda")
with stalloc.alloc_conf(max_split_size_mb=128, expandable_segments=True):
    seen.append(now())
seen.append(now())
try:
    stalloc.alloc_conf(backend="cudaMallocAsync")
except stalloc.SetupError as error:
    seen.append(str(error))
seen.append(now())
print(json.dumps(seen))
"""


@pytest.mark.usefixtures("cuda_torch")
def test_torch_itself_has_them_and_has_the_old_ones_back(run_checks: Callable[..., Any]) -> None:
    seen = run_checks(_IN_TORCH, **{NEW: "max_split_size_mb:64,garbage_collection_threshold:0.5", OLD: None})
    before = [64, 0.5, False]
    late = "backend is chosen when torch is imported: set it before, or by PYTORCH_ALLOC_CONF."
    assert seen == [before, [128, 0.5, True], before, late, before]


def test_advice_is_the_line_to_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = path_of("out_of_memory.pickle.gz")
    assert main(["simulate", "--advise", str(file), "--torch", "2.8", "--json", str(tmp_path / "advice.json")]) == 0
    shown = capsys.readouterr().out
    advice = json.loads((tmp_path / "advice.json").read_text())
    ranking = advice["ranking"]
    assert advice["variable"] == OLD
    assert advice["export"] == f"export {OLD}={advice['best_settings']}"
    assert f"\n{advice['export']}\n" in shown
    assert ranking[0]["settings"] == advice["best_settings"]
    recorded = next(one for one in ranking if one["settings"] == advice["recorded_settings"])
    assert not recorded["fits"] or ranking[0]["reserved_peak_bytes"] < recorded["reserved_peak_bytes"]


def test_where_nothing_is_better_nothing_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.csv").write_text("id,lower,upper,size\n0,0,9,2097152\n1,1,8,2097152\n")
    assert main(["simulate", "--advise", str(tmp_path / "p.csv")]) == 0
    shown = capsys.readouterr().out
    assert "export" not in shown
    assert "nothing that was tried is better than what was recorded" in shown


def test_what_a_program_returns_by_itself_is_no_gain_of_a_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It calls empty_cache() between two requests: a replay keeps the first one's segment, the file does not."""
    events, at = [], 1 << 30
    for size in (30 << 20, 40 << 20):
        actions = ["segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"]
        events += [{"action": action, "addr": at, "size": size, "stream": 0} for action in actions]
        at += 64 << 20
    timed = [event | {"time_us": number} for number, event in enumerate(events, start=1)]
    file = tmp_path / "returns.pickle"
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": [timed]}))
    assert main(["simulate", "--advise", str(file), "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["export"], said["recorded_reserved_peak_bytes"]) == (None, 40 << 20)
    assert main(["simulate", "--advise", str(file)]) == 0
    assert "without what the program returned by itself" in " ".join(capsys.readouterr().out.split())


def test_a_history_too_short_to_tell_gives_no_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is held was there before: the only event is a free."""
    blocks = [{"address": 1 << 30, "size": 20 << 20, "requested_size": 20 << 20, "state": "active_allocated"}]
    segments = [{"device": 0, "address": 1 << 30, "total_size": 30 << 20, "stream": 0, "blocks": blocks}]
    events = [{"action": "free_completed", "addr": (1 << 30) + (22 << 20), "size": 1 << 20, "stream": 0, "time_us": 1}]
    file = tmp_path / "short.pickle"
    file.write_bytes(pickle.dumps({"segments": segments, "device_traces": [events]}))
    assert main(["simulate", "--advise", str(file), "--json", "-"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["ranking"], said["export"], said["recorded_reserved_peak_bytes"]) == ([], None, 30 << 20)
    assert said["variable"] == "PYTORCH_CUDA_ALLOC_CONF", "which all releases read"
    assert main(["simulate", "--advise", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "too short to rank settings" in shown
    assert "export" not in shown


def test_a_release_is_advised_what_it_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("id,lower,upper,size\n0,0,3,30000000\n1,1,2,50000000\n2,3,4,90000000\n")
    for release, is_known in (("2.0", False), ("2.1", True)):
        assert main(["simulate", "--advise", str(tmp_path / "a.csv"), "--torch", release, "--json", "-"]) == 0
        tried = [one["settings"] for one in json.loads(capsys.readouterr().out)["ranking"]]
        assert any("expandable_segments" in settings for settings in tried) == is_known


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--advise", "p.csv", "p.csv"], "--advise takes one file: 2 were given"),
        (["--advise", "p.csv", "--sweep"], "--sweep does not go with --advise"),
        (["p.csv", "--torch", "2.8"], "--torch is of --advise"),
        (["--advise", "p.csv", "--torch", "newest"], "--torch is 'newest': give a release of PyTorch, such as 2.8"),
    ],
)
def test_options_of_one_use_are_refused_in_the_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.csv").write_text("id,lower,upper,size\n0,0,9,2097152\n")
    assert main(["simulate", *options]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
