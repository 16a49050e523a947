"""Files that users name: pipes, devices and sockets are refused, standard input is read where it is asked for."""

import gzip
import io
import json
import os
import pickle
import socket
import subprocess
from pathlib import Path

import pytest
from properties import variants
from warm_programs import run_stalloc

from stalloc.cli import main
from stalloc.errors import BadInputError
from stalloc.planner import load_plans
from stalloc.trace import load_traces

CSV = b"id,lower,upper,size\n0,0,5,512\n1,2,7,1024\n"


@pytest.fixture
def other_kinds(tmp_path, monkeypatch):
    """Names of things that are no files, by what a sentence calls them."""
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("bound")
        yield {"a pipe": "fifo", "a socket": "bound", "a device": "/dev/zero", "a directory": "."}


def verbs(name: str, good: str) -> list[list[str]]:
    return [
        ["stats", name],
        ["explain", name],
        ["plan", name],
        ["plan", good, "--fixed", name],
        ["simulate", name],
        ["diff", good, name],
        ["convert", name, "out.json"],
        ["validate", name, good],
        ["validate", "x.plan.npz", name],
    ]


@pytest.mark.parametrize("number", range(9))
def test_no_verb_waits_for_what_is_no_file(other_kinds, capsys, number):
    Path("good.csv").write_bytes(CSV)
    assert main(["plan", "good.csv", "-o", "x.plan.npz"]) == 0
    for kind, name in other_kinds.items():
        capsys.readouterr()
        assert main(verbs(name, "good.csv")[number]) == 2
        said = capsys.readouterr().err
        assert f"is {kind}: give " in said
        assert said.count("\n") == 1


def test_a_link_to_a_pipe_and_names_that_no_file_has_are_refused(other_kinds):
    Path("link").symlink_to("fifo")
    with pytest.raises(BadInputError, match="is a pipe"):
        load_traces("link")
    for name in ("a\0b", "x" * 5000, "\ud800"):
        for read in (load_traces, load_plans):
            with pytest.raises(BadInputError):
                read(name)


def run_with_input(tmp_path, data: bytes, *arguments: str) -> subprocess.CompletedProcess[str]:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as file:
        file.write(data)  # a pipe holds 64 KiB
    with os.fdopen(reading) as pipe:
        return run_stalloc(*arguments, folder=tmp_path, stdin=pipe.fileno())


@variants("name", ["-", "/dev/stdin"])
def test_standard_input_is_read_where_it_is_asked_for(tmp_path, name):
    done = run_with_input(tmp_path, gzip.compress(CSV), "plan", name, "-o", "x.plan.npz", "--json", "-")
    assert done.returncode == 0, done.stderr
    (device,) = json.loads(done.stdout)["devices"]
    assert device["requests"] == 2
    assert load_plans(tmp_path / "x.plan.npz")[0].provenance["file"] == "standard input"


def test_standard_input_may_be_a_recording_and_may_be_named_twice(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.csv").write_bytes(CSV)
    assert main(["convert", str(tmp_path / "x.csv"), str(tmp_path / "x.trace.npz")]) == 0
    done = run_with_input(tmp_path, (tmp_path / "x.trace.npz").read_bytes(), "diff", "-", "-", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["devices"][0]["allocated_change_bytes"] == 0


def test_an_empty_or_wrong_standard_input_ends_in_one_sentence(tmp_path):
    for data in (b"", b"nonsense"):
        done = run_with_input(tmp_path, data, "stats", "-")
        assert done.returncode == 2
        assert done.stderr.startswith("stalloc: standard input")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        b"\0",
        *(pytest.param(content, marks=pytest.mark.slow) for content in (b"{}", b"\n", b"[", b"id,lower,upper,size\n")),
    ],
)
def test_a_small_gzip_file_may_not_become_gigabytes(tmp_path, content):
    path = tmp_path / "bomb.gz"
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file:
        for _ in range(200):
            file.write(content * ((1 << 20) // len(content)))
    path.write_bytes(packed.getvalue())
    assert len(packed.getvalue()) < 1 << 20
    with pytest.raises(BadInputError, match=r"holds more than \d+ MiB"):
        load_traces(path)


@pytest.mark.parametrize("rest", [b"\0\0\0\0", b"trailing garbage", gzip.compress(b"more", mtime=0)[:-3]])
def test_what_follows_a_gzip_file_ends_in_a_trace_or_one_sentence(tmp_path, rest):
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(CSV) + rest)
    said = ""
    try:
        load_traces(path)
    except BadInputError as error:
        said = str(error)
    assert "\n" not in said


def test_a_pickle_from_standard_input_is_known_by_its_content(tmp_path):
    done = run_with_input(tmp_path, pickle.dumps({"segments": [], "device_traces": []}), "stats", "-")
    assert done.returncode == 2
    assert "holds no allocation events" in done.stderr
