"""stalloc simulate: a ranked table of what each allocator would have reserved, held against the file's own record."""

import json
import os
from pathlib import Path

import pytest
from recordings import each, path_of
from warm_programs import run_stalloc

from stalloc.analysis import explain, summarize
from stalloc.cli import main
from stalloc.replay.registry import ALLOCATORS
from stalloc.replay.simulation import SWEEP, Candidate, simulate
from stalloc.trace import load_traces

WITHOUT_CACHE = os.environ | {"STALLOC_CACHE": "off"}
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


@pytest.mark.parametrize(
    "name", each(["fragmented.pickle.gz", "octree_nca_train.pickle.gz", "llm_quantize_sqattn.pickle.gz"])
)
def test_what_only_fragmentation_stops_completes_with_compaction(name, capsys):
    file = str(path_of(name))
    (free,) = simulated(capsys, file, "--allocator", "compacting:move:0")["devices"]
    (planned,) = simulated(capsys, file, "--allocator", "stalloc:mode:plan")["devices"]
    peak = planned["results"][0]["peak_reserved_bytes"]
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
    assert {r["settings"] for r in device["results"] if r["allocator"] == "stalloc"} == {"", "mode:plan"}
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


@pytest.mark.parametrize("capacity", [(), ("--capacity", "64TiB")])
def test_claims_beyond_every_gpu_fit_on_no_device_of_ours(tmp_path, capsys, capacity):
    """A file that claims terabytes is not counted page by page, nor a device that has as many."""
    file = tmp_path / "claims.csv"
    file.write_text(f"id,lower,upper,size\na,0,3,1048576\nb,1,3,{30 << 40}\n")
    (device,) = simulated(capsys, str(file), "--allocator", "stalloc", *capacity)["devices"]
    (result,) = device["results"]
    assert not result["fits"]
    assert result["device_allocs"] < 1_000


def test_a_snapshot_is_replayed_as_its_file_records(capsys):
    files = [str(path_of(f"{name}.pickle.gz")) for name in ("training", "streams")]
    devices = simulated(capsys, *files)["devices"]
    assert [device["file"] for device in devices] == files
    for device in devices:
        (recorded,) = [result for result in device["results"] if result["exact"] is not None]
        assert (recorded["allocator"], recorded["settings"]) == ("torch", device["recorded_settings"])
        assert (recorded["exact"], recorded["first_difference"]) == (True, None)


def test_replaying_again_gives_the_same_figures():
    (trace,) = load_traces(path_of("fragmented.pickle.gz"))
    candidates = [Candidate("torch"), Candidate("torch", "garbage_collection_threshold:0.8"), Candidate("stalloc")]

    def figures():
        results = simulate(trace, candidates, capacity_bytes=4 << 30)
        return [(r.allocator, r.settings, r.peak_reserved_bytes, r.device_allocs, r.device_frees) for r in results]

    assert figures() == figures()


RECORDED = (
    *("fragmented.pickle.gz", "stale_cache.pickle.gz", "streams.pickle.gz", "octree_nca_train.pickle.gz"),
    *("resnet50_pytorch_blog.pickle.gz", "lm27b_compiled_fwd.pickle.gz", "llama_offload_10streams.pickle.gz"),
)


@pytest.mark.parametrize("name", each(RECORDED, always=("octree",)))
def test_stats_explain_and_simulate_say_the_same_of_one_file(capsys, name):
    file = str(path_of(name))
    (trace,) = load_traces(file)
    summary, explanation = summarize(trace), explain(trace)
    (device,) = simulated(capsys, file)["devices"]
    told = device["recorded"]
    expected = summary.reserved_peak_bytes, summary.allocated_peak_bytes, summary.fragmentation
    assert (told["reserved_peak_bytes"], told["allocated_peak_bytes"], told["fragmentation"]) == expected
    assert summary.fragmentation == pytest.approx(1 - expected[1] / expected[0], abs=1e-6)
    assert (explanation.record_reserved_peak_bytes, explanation.record_allocated_peak_bytes) == expected[:2]
    assert explanation.record_fragmentation == summary.fragmentation
    for result in device["results"]:
        assert result["peak_allocated_bytes"] == summary.allocated_peak_bytes
        wanted = 1 - result["peak_allocated_bytes"] / result["peak_reserved_bytes"]
        assert result["fragmentation"] == pytest.approx(wanted, abs=1e-6)


RAN_OUT = [
    ("out_of_memory.pickle.gz", "4000MiB", 5134, "4.2GiB"),
    ("llama3_8b_fsdp4_oom_rank0.pickle.gz", "40GB", 3273, "80GB"),
]


@pytest.mark.parametrize(("name", "capacity", "event", "enough"), each(RAN_OUT))
def test_a_recording_that_ran_out_of_memory_does_not_fit_its_device(capsys, name, capacity, event, enough):
    file = str(path_of(name))
    (device,) = simulated(capsys, file, "--capacity", capacity)["devices"]
    (of_record,) = [result for result in device["results"] if result["exact"] is not None]
    assert not of_record["fits"]
    assert of_record["failed_event"] == device["recorded"]["out_of_memory_event"] == event
    assert of_record["failed_bytes"] == device["recorded"]["out_of_memory_bytes"]
    (device,) = simulated(capsys, file, "--capacity", enough)["devices"]
    assert all(result["fits"] for result in device["results"])


def test_what_stalloc_recorded_itself_is_not_held_against_torchs_addresses(
    tmp_path, capsys, cuda_torch, cupy_installed
):
    file = tmp_path / "own.pickle"
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\n"
        "torch.cuda.memory._record_memory_history()\n"
        "kept = [torch.empty(1 << 20, device='cuda') for _ in range(9)]\n"
        "del kept[3:7]\n"
        "torch.cuda.memory._dump_snapshot(sys.argv[1])\n"
    )
    done = run_stalloc("run", "--device", "virtual", program, file, variables=WITHOUT_CACHE)
    assert done.returncode == 0, done.stderr
    for wanted in (file, tmp_path / "again.trace.npz"):
        if wanted != file:
            assert main(["convert", str(file), str(wanted)]) == 0
            capsys.readouterr()
        (device,) = simulated(capsys, str(wanted))["devices"]
        assert device["recorded"]["reserved_peak_bytes"] >= 9 << 22
        assert {result["exact"] for result in device["results"]} == {None}


def test_what_is_promised_for_stalloc_is_what_a_run_reserves(tmp_path, capsys, cuda_torch, cupy_installed):
    """The steps that are watched included; what hindsight would reserve is a row of its own."""
    train = Path(__file__).parents[1] / "examples" / "train_gpt.py"
    options = ("--device", "virtual", str(train), "--steps", "8", "--accumulate", "2")
    trace, report = tmp_path / "t.trace.npz", tmp_path / "run.json"
    for verb in (["record", "-o", str(trace)], ["run", "--json", str(report)]):
        done = run_stalloc(*verb, *options, variables=WITHOUT_CACHE)
        assert done.returncode == 0, done.stderr
    ran = json.loads(report.read_text())
    (device,) = simulated(capsys, str(trace))["devices"]
    results = {(r["allocator"], r["settings"]): r for r in device["results"]}
    promised, hindsight = results["stalloc", ""], results["stalloc", "mode:plan"]
    reserved = max(ran["reserved_peak_bytes"], ran["observed_reserved_peak_bytes"])
    assert promised["counts"]["plans"] >= 1
    assert abs(promised["peak_reserved_bytes"] - reserved) <= 16 << 20
    assert hindsight["peak_reserved_bytes"] < promised["peak_reserved_bytes"]
