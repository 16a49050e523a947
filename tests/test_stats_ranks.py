"""stalloc stats over the ranks of a job: what differs, who stands out, who decides, and what could not be read."""

import json
import pickle

import pytest
from recordings import path_of

from stalloc.cli import main

MIB = 1 << 20
ADDRESS = 0x7F00_0000_0000


def write_rank(path, allocated_mib, reserved_mib):
    """A request of so many MiB in a segment of so many."""
    history = [
        {"action": action, "addr": ADDRESS, "size": size * MIB, "stream": 0, "time_us": 0}
        for action, size in (("segment_alloc", reserved_mib), ("alloc", allocated_mib))
    ]
    blocks = [
        {"size": allocated_mib * MIB, "requested_size": allocated_mib * MIB, "state": "active_allocated"},
        {"size": (reserved_mib - allocated_mib) * MIB, "state": "inactive"},
    ]
    segments = [{"device": 0, "address": ADDRESS, "total_size": reserved_mib * MIB, "stream": 0, "blocks": blocks}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [history]}))


def told(capsys, *arguments):
    assert main(["stats", *map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_job_in_folders_is_compared_by_rank(tmp_path, capsys):
    for rank in range(12):
        write_rank(tmp_path / f"{rank}" / "snapshot.pickle", 100 + 4 * (rank == 10), 200 + 100 * (rank == 7))
    result = told(capsys, tmp_path / "*" / "snapshot.pickle")
    assert [one["rank"] for one in result["ranks"]] == list(range(12))
    reserved = result["spreads"]["reserved_peak_bytes"]
    assert (reserved["median_bytes"], reserved["most"]["bytes"], reserved["most"]["rank"]) == (200 * MIB, 300 * MIB, 7)
    assert reserved["imbalance"] == 1.5
    assert result["deciding"]["rank"] == 10
    assert {(one["rank"], one["figure"]) for one in result["outliers"]} >= {
        (7, "reserved_peak_bytes"),
        (10, "allocated_peak_bytes"),
    }
    assert main(["stats", str(tmp_path / "*" / "snapshot.pickle")]) == 0
    shown = capsys.readouterr().out
    assert "12 ranks read" in shown
    assert "rank 7: reserved" in shown
    assert "decided by rank 10" in shown


@pytest.mark.parametrize(("more_mib", "stands_out"), [(0, False), (9, False), (11, True)])
def test_from_a_hundredth_of_the_peak_on_one_rank_among_equals_stands_out(tmp_path, capsys, more_mib, stands_out):
    for rank in range(9):
        write_rank(tmp_path / f"rank{rank}.pickle", 1000 + more_mib * (rank == 3), 2000)
    outliers = told(capsys, tmp_path / "rank*.pickle")["outliers"]
    assert {one["rank"] for one in outliers} == ({3} if stands_out else set())


@pytest.mark.parametrize(("peak_mib", "stands_out"), [(1510, False), (1530, True)])
def test_where_ranks_differ_only_what_is_far_from_all_stands_out(tmp_path, capsys, peak_mib, stands_out):
    """The median deviation is 100 MiB, so that a score of 3.5 is reached 519 MiB from the median."""
    for rank, peak in enumerate((800, 900, 900, 1000, 1000, 1000, 1100, 1100, peak_mib)):
        write_rank(tmp_path / f"rank{rank}.pickle", peak, 2000)
    outliers = told(capsys, tmp_path / "rank*.pickle")["outliers"]
    assert (8 in {one["rank"] for one in outliers if one["figure"] == "allocated_peak_bytes"}) is stands_out


def test_files_that_cannot_be_read_are_named_and_the_rest_is_compared(tmp_path, capsys):
    for rank in range(9):
        write_rank(tmp_path / f"rank{rank}.pickle", 100, 200)
    (tmp_path / "rank4.pickle").write_bytes(b"\x80\x04 cut")
    result = told(capsys, tmp_path / "rank*.pickle")
    assert len(result["ranks"]) == 8
    ((file, sentence),) = result["unread"].items()
    assert file.endswith("rank4.pickle")
    assert "rank4.pickle" in sentence
    assert main(["stats", str(tmp_path / "rank*.pickle")]) == 0
    assert "8 ranks read of 9 files" in capsys.readouterr().out


def test_two_real_ranks_are_compared_when_asked(capsys):
    result = told(capsys, "--ranks", path_of("rank0.pickle.gz"), path_of("rank1.pickle.gz"))
    assert [one["rank"] for one in result["ranks"]] == [0, 1]
    alone = told(capsys, path_of("rank1.pickle.gz"))["devices"][0]
    for name in ("allocated_peak_bytes", "reserved_peak_bytes", "requests"):
        assert result["ranks"][1][name] == alone[name]


def test_many_files_are_read_by_several_processes_with_the_same_answer(tmp_path, capsys):
    for rank in range(33):
        write_rank(tmp_path / f"rank{rank}.pickle", 100 + rank, 200)
    result = told(capsys, tmp_path / "rank*.pickle")
    assert [one["allocated_peak_bytes"] for one in result["ranks"]] == [(100 + rank) * MIB for rank in range(33)]


def test_a_pattern_without_a_file_and_options_of_one_file_are_refused(tmp_path, capsys):
    assert main(["stats", str(tmp_path / "*.pickle")]) == 2
    assert "no file matches" in capsys.readouterr().err
    write_rank(tmp_path / "rank0.pickle", 100, 200)
    assert main(["stats", "--ranks", "--order", str(tmp_path / "rank0.pickle")]) == 2
    assert "--order describes each file by itself" in capsys.readouterr().err
