"""`stalloc timeline`: where the time goes between device and host, to the nanosecond and the byte."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import each, path_of

from stalloc import BadInputError
from stalloc.analysis.offload_study import NO_PHASE, study
from stalloc.cli import main
from stalloc.trace import DeviceRecord, load_traces, save_traces
from stalloc.trace.activity import Held, Link, MemoryKind, PhaseRun, Work, activity_of, read_activity

MIB = 1 << 20
H2D, D2H = "host to device", "device to host"

#: an iteration with offloaded gradients and an update in two subgroups, in microseconds
ITERATION = """start_us,end_us,link,bytes,phase,waited_us,pinned
0,100,phase,0,forward
100,300,phase,0,backward
300,400,phase,0,update/0
400,500,phase,0,update/1
10,90,compute,0,forward
100,250,compute,0,backward
240,290,to_host,4194304,backward,50,0
300,340,to_device,2097152,update/0,0,1
320,360,host_compute,0,update/0
400,440,to_device,2097152,update/1,0,1
430,460,compute,0,update/1
480,490,disk_write,1000,update/1,,
0,0,allocated,1000,
120,120,allocated,5000,
350,350,allocated,700,
0,0,reserved,6000,
50,50,host_memory,64,
310,310,host_memory,512,
"""


def timeline(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """What the verb says of each device, as JSON."""
    capsys.readouterr()
    assert main(["timeline", *words, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)["devices"]


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "iteration.csv"
    file.write_text("\n".join(line + "," * (6 - line.count(",")) for line in text.strip().splitlines()) + "\n")
    return str(file)


def test_an_iteration_of_offloading_is_divided_by_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (device,) = timeline(capsys, written(tmp_path, ITERATION))
    phases = {phase["name"]: phase for phase in device["phases"]}
    parts = ("seconds", "compute_seconds", "copy_seconds", "overlap_seconds", "idle_seconds", "host_compute_seconds")
    us = {name: [round(phase[part] * 1e6) for part in parts] for name, phase in phases.items()}
    assert us == {
        "forward": [100, 80, 0, 0, 20, 0],
        "backward": [200, 140, 40, 10, 10, 0],
        "update": [200, 20, 80, 10, 90, 40],
    }
    assert phases["backward"]["moved_bytes"] == {D2H: 4 * MIB}
    assert phases["update"]["moved_bytes"] == {H2D: 4 * MIB, "disk write": 1000}
    assert [phases[name]["allocated_bytes"] for name in phases] == [1000, 5000, 5000]
    assert [phases[name]["host_bytes"] for name in phases] == [64, 64, 512]
    assert phases["update"]["link_used"][H2D] == pytest.approx(2 * 40 / 200)
    assert device["blocking"] == {
        "copies": 1,
        "num_bytes": 4 * MIB,
        "copy_seconds": 50e-6,
        "pageable_bytes": 4 * MIB,
        "stood_seconds": 50e-6,
    }
    assert device["missed_overlap_seconds"] == pytest.approx(40e-6 + 20e-6)
    assert device["missed_across_seconds"] == pytest.approx(40e-6 + 80e-6), "all that copied alone"
    assert device["as_ready"] is None, "nothing says what needs what"
    assert [(part["phase"], part["name"], round(part["seconds"] * 1e6)) for part in device["parts"]] == [
        ("update", "0", 100),
        ("update", "1", 100),
    ]
    assert device["parts"][0]["moved_bytes"] == {H2D: 2 * MIB}
    assert any("stood still for 1 copy of 4.00 MiB" in sentence for sentence in device["findings"])
    assert device["missing"] == [
        "the file does not say how much memory the device has, so headroom is not known",
    ]


def test_people_read_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, ITERATION)
    assert main(["timeline", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "iteration.csv, device 0: 500 us"
    backward = next(line.split() for line in lines if line.startswith("backward  "))
    assert backward[:10] == ["backward", "1", "200", "us", "140", "us", "40", "us", "10", "us"]
    assert any(line.split()[:4] == ["update/0", "1", "300", "us"] for line in lines)
    assert lines[-1] == f"Next: stalloc report {file}"


def series_of(device: dict[str, Any]) -> dict[str, Any]:
    """The series of a device, after a check that they are whole."""
    series = device["series"]
    parts = (series[name] for name in ("memory_bytes", "link_bytes_per_second", "computing_share"))
    (width,) = {len(values) for part in parts for values in part.values()}
    assert width * series["stretch_seconds"] == pytest.approx(device["seconds"])
    return series


def test_the_series_add_up_to_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (device,) = timeline(capsys, written(tmp_path, ITERATION))
    series, phases = series_of(device), device["phases"]
    stretch = series["stretch_seconds"]
    moved = {link: stretch * sum(rates) for link, rates in series["link_bytes_per_second"].items()}
    assert moved == {one["link"]: pytest.approx(one["num_bytes"]) for one in device["links"]}
    computed = sum(phase["compute_seconds"] + phase["overlap_seconds"] for phase in phases)
    assert stretch * sum(series["computing_share"]["device"]) == pytest.approx(computed, rel=1e-3)
    assert stretch * sum(series["computing_share"]["host"]) == pytest.approx(40e-6, rel=1e-3)
    allocated, host = series["memory_bytes"]["allocated"], series["memory_bytes"]["host"]
    assert (allocated[0], max(allocated), allocated[-1]) == (1000, 5000, 700)
    assert (host[0], host[-1]) == (None, 512), "not known before the file says so"


def test_copies_of_one_phase_beside_the_computing_of_another_are_at_most_what_could_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "start_us,end_us,link,bytes,phase",
        "0,100,compute,0,backward",
        "100,105,compute,0,update",
        "105,165,to_device,4194304,update",
    ]
    file = tmp_path / "iteration.csv"
    file.write_text("\n".join(lines))
    (device,) = timeline(capsys, str(file))
    assert device["missed_overlap_seconds"] == pytest.approx(5e-6)
    assert device["missed_across_seconds"] == pytest.approx(60e-6)
    told = " ".join(device["findings"])
    assert "Nothing of 60 us of copying ran beside computing; at most 60 us could have" in told
    assert "update only copies for 60 us, backward only computes for 100 us" in told
    assert "does not say which work needs the results of which" in told
    file.write_text("\n".join([*lines[:1], "0,30,compute,0,backward", *lines[2:]]))
    (device,) = timeline(capsys, str(file))
    assert device["missed_across_seconds"] == pytest.approx(35e-6), "not more than there is of computing"


@pytest.mark.parametrize(("total", "said"), [
    (8, "All of the 4.00 GiB that the program holds in host memory would fit into that"),
    (5, "2.00 GiB of the 4.00 GiB that the program holds in host memory would fit into that"),
])  # fmt: skip
def test_what_would_fit_into_the_headroom_is_said(
    total: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trace,) = load_traces(path_of("training.pickle.gz"))
    begin = int(trace.time_us.min()) * 1000
    held = [Held(begin, MemoryKind.HOST, 4 << 30), Held(begin, MemoryKind.RESERVED, 3 << 30)]
    work = [Work(begin, begin + 2000, Link.TO_DEVICE, 3 * MIB, "forward"), Work(begin, begin + 900, Link.COMPUTE)]
    made = activity_of(work, held=held)
    file = tmp_path / "with.trace.npz"
    bare = trace.replace(time_us=np.zeros_like(trace.time_us), info=trace.info | {"total_bytes": total << 30})
    save_traces(file, [bare.replace(extra=made.columns())])
    (device,) = timeline(capsys, str(file))
    assert any(sentence.startswith(said) for sentence in device["findings"]), device["findings"]


PEAKS = [("training.pickle.gz", 262352384), ("tiny_transformer.pickle.gz", 18099712)]


@pytest.mark.parametrize(("name", "peak_bytes"), each(PEAKS))
def test_tables_travel_in_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, peak_bytes: int
) -> None:
    (trace,) = load_traces(path_of(name))
    begin = int(trace.time_us.min()) * 1000
    work = [Work(begin, begin + 2000, Link.TO_DEVICE, 3 * MIB, "forward", 0, 1), Work(begin, begin + 9, Link.COMPUTE)]
    held = [Held(begin, MemoryKind.HOST, 77)]
    made = activity_of(work, [PhaseRun(begin, begin + 3000, "forward")], held)
    file = tmp_path / "with.trace.npz"
    save_traces(file, [trace.replace(extra=trace.extra | made.columns())])
    again = read_activity(load_traces(file)[0])
    assert again is not None
    assert again.names == made.names
    for name, column in made.columns().items():
        assert np.array_equal(again.columns()[name], column), name
    (device,) = timeline(capsys, str(file))
    assert device["phases"][0]["moved_bytes"] == {H2D: 3 * MIB}
    assert max(phase["allocated_bytes"] for phase in device["phases"]) == peak_bytes


DAMAGE = {
    "activity_link": np.array([9, 0], np.int8),
    "activity_end": np.array([-5, 0], np.int64),
    "activity_phase": np.array([0, 7], np.int32),
    "activity_bytes": np.array([1], np.int64),
    "memory_kind": np.array([3], np.int8),
    "activity_text": np.frombuffer(b"[1]", np.uint8),
    "phase_name": np.zeros((1, 1), np.int32),
    "activity_start": None,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_tables_are_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trace,) = load_traces(path_of("training.pickle.gz"))
    held = [Held(0, MemoryKind.HOST, 1)]
    work = [Work(0, 5, Link.TO_HOST, 1, "a"), Work(1, 2, Link.COMPUTE, 0, "a")]
    columns = activity_of(work, [PhaseRun(0, 1, "a")], held).columns()
    damaged = columns | {name: DAMAGE[name]} if DAMAGE[name] is not None else columns
    if DAMAGE[name] is None:
        del damaged[name]
    file = tmp_path / "bad.trace.npz"
    save_traces(file, [trace.replace(extra=damaged)])
    for verb in ("timeline", "stats"):
        assert main([verb, str(file)]) == 2
        error = capsys.readouterr().err
        assert "table of activity is damaged" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("5,1,compute,0,,,", "line 2 ends before it starts"),
        ("a,1,compute,0,,,", "line 2: start_us is 'a'"),
        ("0,nan,compute,0,,,", "line 2: end_us is 'nan'"),
        ("0,1,pigeon,0,,,", "line 2: 'pigeon' is no link"),
        ("0,1,to_host,-1,,,", "line 2: bytes is '-1'"),
        ("0,1,to_host,99999999999999999,,,", "impossible"),
        ("0,1", "another number of cells"),
        ("", "does not say when things happened"),
    ],
)
def test_a_bad_line_is_one_sentence(line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(f"start_us,end_us,link,bytes,phase,waited_us,pinned\n{line}\n")
    assert main(["timeline", str(file)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_other_verbs_say_what_a_table_of_copies_is_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", written(tmp_path, ITERATION)]) == 2
    assert "stalloc timeline shows it" in capsys.readouterr().err


def test_bytes_and_seconds_are_those_of_a_naive_count() -> None:
    """Random work on few nanoseconds, counted nanosecond by nanosecond."""
    rng = random.Random(7)
    for _ in range(30):
        links = (Link.COMPUTE, Link.TO_DEVICE, Link.TO_HOST, Link.DISK_READ)
        work = []
        for _ in range(rng.randint(1, 12)):
            start, link = rng.randint(0, 60), rng.choice(links)
            size = rng.randint(0, 5000) if link.moves else 0
            work.append(Work(start, start + rng.randint(1, 20), link, size, rng.choice("ab")))
        cuts = sorted(rng.sample(range(1, 80), 3))
        runs = [PhaseRun(0, cuts[0], "a"), PhaseRun(cuts[0], cuts[1], "b"), PhaseRun(cuts[2], 90, "a")]
        found = study(DeviceRecord(0, None, activity_of(work, runs), {}))
        told = {phase.name: phase for phase in found.phases}
        counted = {name: [0, 0, 0, 0] for name in told}
        for ns in range(90):
            name = next((run.name for run in runs if run.start_ns <= ns < run.end_ns), NO_PHASE)
            open_links = {row.link for row in work if row.start_ns <= ns < row.end_ns}
            computes, copies = Link.COMPUTE in open_links, bool(open_links - {Link.COMPUTE})
            counted[name][2 if computes and copies else 0 if computes else 1 if copies else 3] += 1
        for name, phase in told.items():
            split = (phase.compute_seconds, phase.copy_seconds, phase.overlap_seconds, phase.idle_seconds)
            assert [round(part * 1e9) for part in split] == counted[name]
            assert phase.seconds == pytest.approx(sum(split))
        for link in links[1:]:
            moved = sum(phase.moved_bytes.get(link.text, 0) for phase in found.phases)
            assert moved == sum(row.num_bytes for row in work if row.link == link)
            assert moved == sum(one.num_bytes for one in found.sizes if one.link == link.text)


def kineto(events: list[dict[str, Any]]) -> bytes:
    """A trace of torch.profiler, with the thread 1 of the host."""
    shared = {"ph": "X", "pid": 10, "tid": 1, "args": {}}
    listed = [shared | event for event in events]
    properties = [{"id": 0, "name": "H100", "totalGlobalMem": 1 << 30}]
    return json.dumps({"deviceProperties": properties, "traceEvents": listed}).encode()


def launched(number: int, at: float, call: float, start: float, lasts: float, **kind: Any) -> list[dict[str, Any]]:
    """A call of the host and what it has the device do."""
    device = {"device": 0, "stream": 7, "correlation": number, **kind.pop("args", {})}
    name = "cudaMemcpyAsync" if "cat" in kind else "cudaLaunchKernel"
    return [
        {"cat": "cuda_runtime", "name": name, "ts": at, "dur": call, "args": {"correlation": number}},
        {"cat": "kernel", "name": "k", "ts": start, "dur": lasts, "args": device} | kind,
    ]


def test_phases_of_a_profile_are_those_the_host_was_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 2 * MIB}}
    back = {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 4}}
    events = [
        {"cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 1000},
        {"cat": "cpu_op", "name": "autograd::engine::evaluate_function: Mm", "ts": 200, "dur": 80, "tid": 2},
        {"cat": "user_annotation", "name": "Optimizer.step#Adam.step", "ts": 300, "dur": 100},
        {"cat": "user_annotation", "name": "group 0", "ts": 310, "dur": 20},
        {"cat": "user_annotation", "name": "group 1", "ts": 340, "dur": 20},
        *launched(1, 10, 30, 20, 20, **copy),
        *launched(2, 50, 5, 60, 100),
        *(event | {"tid": 2} if event["cat"] == "cuda_runtime" else event for event in launched(3, 210, 5, 220, 70)),
        *launched(4, 315, 5, 320, 10),
        *launched(5, 345, 5, 350, 10),
        *launched(6, 380, 2, 390, 4, **back),
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 382, "dur": 20, "args": {}},
    ]
    file = tmp_path / "profile.json.gz"
    file.write_bytes(gzip.compress(kineto(events)))
    (device,) = timeline(capsys, str(file))
    assert [(phase["name"], phase["runs"], round(phase["seconds"] * 1e6)) for phase in device["phases"]] == [
        ("forward", 1, 200),
        ("backward", 1, 100),
        ("update", 1, 74),
    ]
    assert [(part["name"], round(part["compute_seconds"] * 1e6)) for part in device["parts"]] == [
        ("group 0", 10),
        ("group 1", 10),
    ]
    assert device["blocking"]["copies"] == 2
    assert round(device["blocking"]["stood_seconds"] * 1e6) == 30 + 14
    assert device["blocking"]["pageable_bytes"] == 2 * MIB
    assert device["total_bytes"] == 1 << 30
    assert main(["stats", str(file)]) == 2
    assert "no memory events of a GPU" in capsys.readouterr().err


ODD = (None, -1, 1 << 70, 1e308, "x", [], {}, True, 1 << 50, "gpu_memcpy", "Memcpy DtoH", "Optimizer.step#")


def test_odd_values_in_a_profile_are_passed_over_or_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, file = random.Random(19), tmp_path / "odd.json"
    copy = {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 2 * MIB}}
    codes = set()
    for _ in range(60):
        events = json.loads(kineto([*launched(1, 10, 30, 20, 20, **copy), *launched(2, 50, 5, 60, 100)]))
        event = rng.choice(events["traceEvents"])
        changed = rng.choice([event, event["args"]])
        changed[rng.choice(list(changed))] = rng.choice(ODD)
        file.write_text(json.dumps(events))
        codes.add(main(["timeline", str(file)]))
        assert capsys.readouterr().err.count("\n") <= 1
    assert codes == {0, 2}


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("timesformer", {H2D: (1, 38535168), D2H: (1, 800)}),
        pytest.param("owlv2", {H2D: (25, 30897080), D2H: (55, 146418600)}, marks=pytest.mark.slow),
        pytest.param("resnet50_train_v100", {H2D: (12, 115607040)}, marks=pytest.mark.slow),
    ],
)
def test_real_profiles_have_their_copies(
    name: str, links: dict[str, tuple[int, int]], shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (device,) = timeline(capsys, str(shared_traces / "h100" / f"{name}.json.gz"))
    assert {one["link"]: (one["copies"], one["num_bytes"]) for one in device["links"]} == links
    for link, (copies, size) in links.items():
        assert sum(one["copies"] for one in device["sizes"] if one["link"] == link) == copies
        assert sum(phase["moved_bytes"].get(link, 0) for phase in device["phases"]) == size
    for phase in device["phases"]:
        parts = ("compute_seconds", "copy_seconds", "overlap_seconds", "idle_seconds")
        assert sum(phase[part] for part in parts) == pytest.approx(phase["seconds"])
    if name == "resnet50_train_v100":
        assert [(phase["name"], phase["runs"]) for phase in device["phases"]] == [
            *(("forward", 6), ("backward", 6), ("update", 6))
        ]


@pytest.mark.parametrize("name", each(["profile.json.gz", "h100/qwen05b.json.gz"], always=("h100",)))
def test_memory_by_phase_is_that_of_stats(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(path_of(name))
    (device,) = timeline(capsys, file)
    assert main(["stats", file, "--json", "-"]) == 0
    (stats,) = json.loads(capsys.readouterr().out)["devices"]
    assert max(phase["allocated_bytes"] for phase in device["phases"]) == stats["allocated_peak_bytes"]
    assert max(phase["reserved_bytes"] for phase in device["phases"]) == stats["reserved_peak_bytes"]
    least = min(phase["headroom_bytes"] for phase in device["phases"])
    assert least == device["total_bytes"] - stats["reserved_peak_bytes"]


def test_impossible_rows_are_refused() -> None:
    for row in (Work(5, 1, Link.COMPUTE), Work(0, 1, Link.TO_HOST, -1), Work(0, 1 << 62, Link.COMPUTE)):
        with pytest.raises(BadInputError, match="impossible"):
            activity_of([row])


DATE = "[2023-10-17 22:41:{:06.3f}] [INFO] "
LOGGED = DATE + "[logging.py:96:log_dist] [Rank {}] time (ms) | "
MEMORY = DATE + "[utils.py:803:see_memory_usage] "


def deepspeed_lines() -> list[str]:
    """Three steps as DeepSpeed prints them: memory, the optimizer, the microstep, the whole step."""
    lines = ["Loading extension module cpu_adam...", "[2/3] c++ -MMD -MF cpu_adam.o.d [Rank x] time (ms) | nothing"]
    for step in range(3):
        second = 10 + step
        lines += [
            MEMORY.format(second) + "before forward",
            MEMORY.format(second)
            + f"MA {step}.25 GB         Max_MA {step + 3}.5 GB         CA 6.0 GB         Max_CA 6 GB ",
            MEMORY.format(second) + "CPU Virtual Memory:  used = 50.5 GB, percent = 40.2%",
            LOGGED.format(second + 0.9, 0)
            + "optimizer_allgather: 7.96 | optimizer_gradients: 0.02 | optimizer_step: 60.64",
            LOGGED.format(second + 0.9, 0)
            + "fwd_microstep: 27.48 | bwd_microstep: 73.59 | bwd_inner_microstep: 51.05 | "
            "bwd_allreduce_microstep: 22.49 | step_microstep: 72.59",
            LOGGED.format(second + 0.9, 0)
            + "fwd: 999.00 | bwd: 999.00 | bwd_inner: 1.00 | bwd_allreduce: 1.00 | step: 9.00",
        ]
    return [line.replace(".000]", ",000]").replace(".900]", ",900]") for line in lines]


def test_a_log_of_deepspeed_is_divided_to_the_printed_digit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.log"
    file.write_text("\n".join(deepspeed_lines()) + "\n")
    assert main(["timeline", str(file), "--json", "-"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["devices"]
    seconds = {one["name"]: one["seconds"] for one in told["phases"]}
    assert seconds["forward"] == pytest.approx(3 * 0.02748, abs=1e-12)
    assert seconds["backward"] == pytest.approx(3 * 0.07359, abs=1e-12)
    assert seconds["update"] == pytest.approx(3 * 0.07259, abs=1e-12)
    parts = {(one["phase"], one["name"]): (one["runs"], one["seconds"]) for one in told["parts"]}
    assert parts["backward", "allreduce"] == (3, pytest.approx(3 * 0.02249, abs=1e-12))
    assert parts["update", "step"] == (3, pytest.approx(3 * 0.06064, abs=1e-12))
    assert told["seconds"] == pytest.approx(2.9)  # from the first line of memory to the last of times
    forward = next(one for one in told["phases"] if one["name"] == "forward")
    assert forward["allocated_bytes"] == round(5.5 * 2**30)  # the peak that the next line tells of
    assert forward["reserved_bytes"] == 6 << 30
    assert forward["host_bytes"] == round(50.5 * 2**30)
    assert "Allreduce takes 67.5 ms of the 221 ms of backward (30.6%)." in told["findings"]


def test_a_log_of_deepspeed_that_says_nothing_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.log"
    file.write_text(deepspeed_lines()[2] + "\n")
    assert main(["timeline", str(file)]) == 2
    assert "set wall_clock_breakdown in its configuration" in capsys.readouterr().err


def test_logs_of_older_and_newer_versions_and_of_several_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.log"
    older = DATE.format(15.649).replace(".649", ",649") + "[logging.py:68:log_dist] [Rank 0] rank=0 time (ms) | "
    file.write_text(
        f"  0%| | 0/1000 [00:00<?, ?it/s]{older}forward: 435.67 | backward: 744.11 | backward_inner: 513.92 | "
        "backward_allreduce: 230.11 | step: 0.98\n"
        + "".join(
            f"[Rank 1] time (ms) | fwd_microstep: 1.50 | bwd_microstep: 2.50 | bwd_inner_microstep: {inner} | "
            "step_microstep: 0.25\n"
            for inner in ("9.99", "1.00")
        )
    )
    assert main(["timeline", str(file), "--json", "-"]) == 0
    first, second = json.loads(capsys.readouterr().out)["devices"]
    seconds = [{one["name"]: one["seconds"] for one in told["phases"]} for told in (first, second)]
    assert seconds[0] == {"forward": 0.43567, "backward": pytest.approx(0.74411), "update": pytest.approx(0.00098)}
    assert second["device"] == 1
    assert seconds[1] == {name: pytest.approx(2 * value) for name, value in
                          {"forward": 0.0015, "backward": 0.0025, "update": 0.00025}.items()}  # fmt: skip


def test_phases_alone_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "phases.csv"
    file.write_text("start_us,end_us,link,bytes,phase\n0,100,phase,0,forward\n100,300,phase,0,backward\n")
    assert main(["timeline", str(file), "--json", "-"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["devices"]
    assert [(one["name"], one["seconds"]) for one in told["phases"]] == [("forward", 1e-4), ("backward", 2e-4)]


def profile(tmp_path: Path, copy: dict[str, Any], memory: dict[str, Any]) -> str:
    """A profile of one kernel, one copy, and one piece of memory that is taken and given back."""
    at = {"device": 0, "stream": 7}
    events = [
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1000, "dur": 500, "args": at},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Host -> Device)", "pid": 0, "tid": 7, "ts": 1600}
        | {"dur": 100, "args": at | copy},
    ]
    for time, size in ((1100, 3 << 30), (1400, -(3 << 30))):
        told = {"Device Type": 1, "Device Id": 0, "Bytes": size, "Addr": 4096} | memory
        events.append({"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": time, "args": told})
    whole = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "X", "totalGlobalMem": 16 << 30}]}
    (tmp_path / "profile.json").write_text(json.dumps(whole | {"traceEvents": events}))
    return str(tmp_path / "profile.json")


def test_headroom_without_totals_is_at_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = profile(tmp_path, {"bytes": MIB}, {})
    assert main(["timeline", file]) == 0
    shown = capsys.readouterr().out
    assert "had at most 13.00 GiB left" in shown
    assert "does not say what was reserved" in shown
    file = profile(tmp_path, {"bytes": MIB}, {"Total Allocated": 3 << 30, "Total Reserved": 4 << 30})
    assert main(["timeline", file]) == 0
    assert "had at least 12.00 GiB left" in capsys.readouterr().out


def test_copies_without_bytes_moved_an_unknown_amount(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = profile(tmp_path, {"kind": "HtoD"}, {})
    assert main(["timeline", file, "--json", "-"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert (device["links"][0]["num_bytes"], device["links"][0]["rate"], device["sizes"][0]["size"]) == (
        None,
        None,
        "unknown",
    )
    assert main(["timeline", file]) == 0
    shown = capsys.readouterr().out
    assert "does not say how many bytes its copies moved" in shown
    assert "0 B" not in shown
    assert main(["report", file, "-o", str(tmp_path / "page.html")]) == 0
