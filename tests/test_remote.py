"""Recordings on other machines, by the in-memory file system of fsspec, which stands for any bucket."""

import json
import subprocess
import sys

import pytest
from recordings import path_of

from stalloc.cli import main

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def bucket():
    files = fsspec.filesystem("memory")
    for rank in range(3):
        files.pipe(f"/job/rank{rank}/snapshot.pickle", path_of("forward.pickle.gz").read_bytes())
    yield "memory://job"
    files.rm("/job", recursive=True)


def test_a_recording_in_a_bucket_is_read_as_one_here(bucket, capsys):
    told = []
    for name in (f"{bucket}/rank0/snapshot.pickle", str(path_of("forward.pickle.gz"))):
        assert main(["stats", name]) == 0
        told.append(capsys.readouterr().out.replace(name, "FILE").splitlines()[1:])
    assert told[0] == told[1]
    assert len(told[0]) > 3


def test_a_pattern_finds_the_ranks_of_a_job_in_a_bucket(bucket, capsys):
    assert main(["stats", "--ranks", f"{bucket}/*/snapshot.pickle", "--json", "-"]) == 0
    assert [one["rank"] for one in json.loads(capsys.readouterr().out)["ranks"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("memory://job/nothing.pickle", "does not exist: check the name"),
        ("nosuchscheme://job/x.pickle", "nosuchscheme"),
        ("memory://job/*/nothing.pickle", "no file matches"),
    ],
)
def test_what_is_not_there_is_one_sentence(name, said, bucket, capsys):
    assert main(["stats", name]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert "memory:/job" not in told, "the name as it was given, and once"


def test_fsspec_is_not_imported_for_files_here(tmp_path):
    code = "import sys, stalloc.cli as c; c.main(sys.argv[1:]); sys.exit('fsspec' in sys.modules)"
    command = [sys.executable, "-P", "-c", code, "stats", str(path_of("forward.pickle.gz"))]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, cwd=tmp_path, check=False).returncode == 0
