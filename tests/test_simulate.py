"""stalloc simulate: a ranked table of what each allocator would have reserved, held against the file's own record."""

import json
import os

import pytest

from stalloc.cli import main
from stalloc.replay.registry import ALLOCATORS
from stalloc.replay.simulation import SWEEP, Candidate, simulate
from stalloc.trace import load_traces

KEYS = {
    "allocator",
    "settings",
    "peak_reserved_bytes",
    "peak_allocated_bytes",
    "fragmentation",
    "device_allocs",
    "device_frees",
    "retries",
    "fits",
    "failed_event",
    "exact",
    "first_difference",
}


@pytest.fixture
def csv(tmp_path):
    """Two requests of 3 MiB that take turns, and one of 1 MiB throughout."""
    file = tmp_path / "turns.csv"
    file.write_text("id,lower,upper,size\na,0,4,3145728\nb,4,8,3145728\nc,0,8,1048576\n")
    return str(file)


def simulated(capsys, *arguments):
    assert main(["simulate", *arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_result_holds_what_each_allocator_would_have_done(csv, capsys):
    (device,) = simulated(capsys, csv, "--all")["devices"]
    assert {result["allocator"] for result in device["results"]} == set(ALLOCATORS)
    for result in device["results"]:
        assert result.keys() >= KEYS
        assert result["peak_allocated_bytes"] == 4 << 20
        assert result["peak_reserved_bytes"] >= 4 << 20
        assert result["fits"]
        assert result["exact"] is None  # a planning CSV does not say what its allocator did


@pytest.mark.parametrize("name", ["octree_nca_train.pickle.gz", "llm_quantize_sqattn.pickle.gz"])
def test_what_only_fragmentation_stops_completes_with_compaction(name, shared_traces, capsys):
    file = str(next(shared_traces.rglob(name)))
    (free,) = simulated(capsys, file, "--allocator", "compacting:move:0")["devices"]
    peak = simulated(capsys, file, "--allocator", "stalloc")["devices"][0]["results"][0]["peak_reserved_bytes"]
    capacity = -(-peak // (2 << 20)) * (2 << 20)  # what a plan that knows the whole program needs
    assert free["results"][0]["peak_reserved_bytes"] > capacity
    arguments = (file, "--allocator", "compacting", "--allocator", "compacting:move:0", "--capacity", str(capacity))
    moving, still = simulated(capsys, *arguments)["devices"][0]["results"]
    assert (moving["settings"], moving["fits"]) == ("", True)
    assert moving["counts"]["compactions"] > 0
    assert moving["counts"]["moved_bytes"] > 0
    assert moving["peak_reserved_bytes"] <= capacity
    assert (still["settings"], still["fits"]) == ("move:0", False)
    assert still["counts"] == {"compactions": 0, "moved_bytes": 0}


def test_those_that_fit_come_first_and_the_least_reserved_of_them(csv, capsys):
    (device,) = simulated(capsys, csv, "--all", "--capacity", "22MiB")["devices"]
    order = [(not result["fits"], result["peak_reserved_bytes"]) for result in device["results"]]
    assert order == sorted(order)
    by_name = {result["allocator"]: result for result in device["results"]}
    # torch takes 20 MiB for the large request and 2 MiB for the small one
    assert by_name["torch"]["peak_reserved_bytes"] == 22 << 20
    assert by_name["stalloc"]["peak_reserved_bytes"] < 22 << 20


def test_what_does_not_fit_says_where_it_runs_out(csv, capsys):
    (device,) = simulated(capsys, csv, "--allocator", "torch", "--capacity", "21MiB")["devices"]
    (result,) = device["results"]
    assert not result["fits"]
    assert (result["failed_event"], result["failed_bytes"]) == (0, 1 << 20)
    assert main(["simulate", csv, "--capacity", "21MiB"]) == 0
    assert "does not fit: 1.00 MiB wanted at event 0" in capsys.readouterr().out


def test_a_sweep_names_the_setting_that_reserves_least(csv, capsys):
    (device,) = simulated(capsys, csv, "--sweep")["devices"]
    assert {result["settings"] for result in device["results"]} == set(SWEEP)
    least = min(result["peak_reserved_bytes"] for result in device["results"])
    (best,) = [result for result in device["results"] if result["settings"] == device["best"]["settings"]]
    assert best["peak_reserved_bytes"] == least


def test_settings_are_written_as_torch_takes_them(csv, capsys):
    (device,) = simulated(
        capsys, csv, "--conf", "max_split_size_mb:128", "--allocator", "torch:expandable_segments:True"
    )["devices"]
    said = {(result["allocator"], result["settings"]) for result in device["results"]}
    assert said == {("torch", ""), ("torch", "max_split_size_mb:128"), ("torch", "expandable_segments:True")}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--allocator", "jemalloc"], "jemalloc"),
        (["--conf", "max_split_size:128"], "max_split_size"),
        (["--conf", "max_split_size_mb:much"], "much"),
        (["--capacity", "plenty"], "plenty"),
    ],
)
def test_what_does_not_exist_is_one_sentence(csv, capsys, arguments, named):
    assert main(["simulate", csv, *arguments]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


def test_more_than_any_device_holds_is_one_sentence_and_not_mapped_page_by_page(tmp_path, capsys):
    file = tmp_path / "vast.csv"
    file.write_text(f"id,lower,upper,size\na,0,4,{1 << 55}\nb,4,8,4096\n")
    assert main(["simulate", str(file), "--conf", "expandable_segments:True"]) == 2
    said = capsys.readouterr().err
    assert str(1 << 55) in said
    assert said.count("\n") == 1


def test_claims_beyond_every_gpu_fit_on_no_device_of_ours(tmp_path, capsys):
    """A file that claims terabytes is not counted page by page."""
    file = tmp_path / "claims.csv"
    file.write_text(f"id,lower,upper,size\na,0,3,1048576\nb,1,3,{30 << 40}\n")
    (device,) = simulated(capsys, str(file), "--allocator", "stalloc")["devices"]
    (result,) = device["results"]
    assert not result["fits"]
    assert result["device_allocs"] < 1_000


def test_a_snapshot_is_replayed_as_its_file_records(shared_traces, capsys):
    files = [str(shared_traces / f"{name}.pickle.gz") for name in ("tiny_transformer", "lm_fwd_ctx200")]
    devices = simulated(capsys, *files)["devices"]
    assert [device["file"] for device in devices] == files
    for device in devices:
        (recorded,) = [result for result in device["results"] if result["exact"] is not None]
        assert (recorded["allocator"], recorded["settings"]) == ("torch", device["recorded_settings"])
        assert (recorded["exact"], recorded["first_difference"]) == (True, None)


def test_replaying_again_gives_the_same_figures(shared_traces):
    (trace,) = load_traces(os.fspath(shared_traces / "octree_nca_train.pickle.gz"))
    candidates = [Candidate("torch"), Candidate("torch", "garbage_collection_threshold:0.8"), Candidate("stalloc")]

    def figures():
        results = simulate(trace, candidates, capacity_bytes=24 << 30)
        return [(r.allocator, r.settings, r.peak_reserved_bytes, r.device_allocs, r.device_frees) for r in results]

    assert figures() == figures()
