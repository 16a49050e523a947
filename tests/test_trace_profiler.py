"""Traces and memory timelines of torch.profiler: real ones give the published figures, tiny ones show each rule."""

import gzip
import json

import numpy as np
import pytest
from recordings import each, path_of

from stalloc.analysis import summarize
from stalloc.errors import BadInputError
from stalloc.lifespans import find_period, find_step_period, lower_bound, peak_load, sequence_keys, sequence_rows
from stalloc.planner import plan, validate
from stalloc.trace import MARK_PHASE_BEGIN, MARK_PHASE_END, MARK_STEP, Action, load_traces, save_traces

# name: device, events, requests, peak of requested bytes, the same rounded up to 512, peak reserved, period
FIGURES = {
    "ddp_sgd_v100_kineto": (1, 26770, 13385, 2532893696, 2532893696, 12782141440, 2677),
    "qwen05b_h100": (0, 2250, 1125, 1103766016, 1103766016, 2629828608, 46),
    "resnet50_v100_kineto_nw0": (0, 8220, 4110, 2791636480, 2791636480, 0, 685),
    # the publication counts the 645 that were there before as events too: 7335
    "resnet_timeline_hta": (0, 7335 - 645, 3990, 3082832104, 3082870272, 0, 669),
}


@pytest.mark.parametrize("file", each([f"{name}.json.gz" for name in FIGURES]))
def test_real_files_give_the_published_figures(shared_traces, file):
    (trace,) = load_traces(shared_traces / file)
    period = find_period(sequence_keys(trace, sequence_rows(trace, 0)), min_repeats=3, min_length=32, at_end=True)
    assert FIGURES[file.removesuffix(".json.gz")] == (
        trace.device,
        trace.num_events,
        trace.num_requests,
        peak_load(trace.start, trace.end, trace.size),
        lower_bound(trace, 512),
        int(trace.reserved_bytes().max()),
        period.length,
    )


def test_our_profile_and_its_timeline_tell_of_one_run():
    (trace,), (timeline,) = load_traces(path_of("profile.json.gz")), load_traces(path_of("memory_timeline.json.gz"))
    assert (trace.num_requests, len(timeline.action)) == (875, 1750)  # as many, and what was there before
    assert find_step_period(trace).repeats == find_step_period(timeline).repeats == 5
    assert np.count_nonzero(trace.mark_kind == MARK_STEP) == 5
    # what the model and its optimizer hold was there before: 84 tensors, which the timeline names
    assert trace.info["unseen_bytes"] > 0
    assert np.count_nonzero(timeline.start < 0) == 84


def test_every_real_file_is_in_the_table(shared_traces):
    assert {path.name.removesuffix(".json.gz") for path in shared_traces.glob("*.json.gz")} == set(FIGURES)


PLANNED = ("profile", "memory_timeline", *FIGURES)


@pytest.mark.parametrize("name", each([f"{name}.json.gz" for name in PLANNED]))
def test_real_files_can_be_planned(name):
    (trace,) = load_traces(path_of(name))
    made = plan(trace, alignment=512)
    assert validate(made, trace).ok
    assert made.peak_bytes == lower_bound(trace, 512)


@pytest.mark.slow
def test_marked_steps_and_unseen_memory_of_a_real_trace(shared_traces):
    (trace,) = load_traces(shared_traces / "ddp_sgd_v100_kineto.json.gz")
    assert find_step_period(trace).repeats == 5
    assert trace.info["unseen_bytes"] == 4096614400
    assert trace.info["device_name"] == "Tesla V100-SXM2-32GB"
    # of 12782141440 reserved bytes the program had at most the unseen ones and what the events say
    assert summarize(trace).fragmentation == round(1 - (4096614400 + 2532893696) / 12782141440, 6)


def memory(size, address=None, time=0.0, device=0, kind=1, **more):
    args = {"Device Type": kind, "Device Id": device, "Bytes": size}
    args |= {} if address is None else {"Addr": address}
    args |= {name.replace("_", " "): value for name, value in more.items()}
    return {"ph": "i", "name": "[memory]", "ts": time, "args": args}


def load(tmp_path, content, name="trace.json"):
    path = tmp_path / name
    data = content if isinstance(content, bytes) else json.dumps(content, indent=1).encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    return load_traces(path)


def lifespans(trace):
    return list(zip(trace.start.tolist(), trace.end.tolist(), trace.size.tolist(), strict=True))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "trace"])
@pytest.mark.parametrize("bare", [False, True])
def test_events_are_ordered_by_time_then_index(tmp_path, name, bare):
    events = [
        memory(-512, 64, time=3, Ev_Idx=9),
        {"ph": "X", "cat": "kernel", "name": 'a "[x]" {y}, \\', "ts": 1, "args": {"list": [1, [2, "]"]]}},
        memory(512, 64, time=1, Ev_Idx=2),
        memory(1024, 4096, time=3, Ev_Idx=4),
        memory(8, 77, time=2, device=-1, kind=0),
    ]
    (trace,) = load(tmp_path, events if bare else {"schemaVersion": 1, "traceEvents": events, "x": {"y": []}}, name)
    assert lifespans(trace) == [(0, 2, 512), (1, 3, 1024)]
    assert trace.address.tolist() == [64, 4096, 64]
    assert trace.time_us.tolist() == [1, 3, 3]
    assert trace.info["source"] == "kineto"


def test_without_addresses_a_free_ends_the_newest_of_its_size(tmp_path):
    sizes = [512, 1024, 512, -512, -1024, -2048]
    events = [memory(size, time=i) for i, size in enumerate(sizes)]
    (trace,) = load(tmp_path, {"traceEvents": events})
    assert lifespans(trace) == [(-1, 5, 2048), (0, 6, 512), (1, 4, 1024), (2, 3, 512)]
    assert not trace.address.any()
    assert not trace.info["complete"]
    assert any("newest allocation of its size" in note for note in trace.info["notes"])


def test_each_gpu_is_a_trace_and_rocm_counts(tmp_path):
    events = [memory(512, 64, device=3, kind=6), memory(512, 64, device=1, kind=6), memory(512, 64, kind=0, device=-1)]
    properties = [{"id": 3, "name": "MI300X", "totalGlobalMem": 1 << 37}, {"id": "?"}, 5]
    traces = load(tmp_path, {"deviceProperties": properties, "traceEvents": events})
    assert [trace.device for trace in traces] == [1, 3]
    assert [trace.info.get("total_bytes") for trace in traces] == [None, 1 << 37]


def test_totals_tell_what_was_live_and_reserved(tmp_path):
    def event(size, address, time, allocated, reserved):
        return memory(size, address, time, Total_Allocated=allocated, Total_Reserved=reserved)

    events = [
        event(-512, 64, 0, 4096, 8192),  # older than the recording
        event(512, 128, 1, 4608, 16384),
        event(-512, 128, 2, 4096, 16384),
        event(512, 128, 3, 4608, 10240),
    ]
    (trace,) = load(tmp_path, {"traceEvents": events})
    names = ["FREE_COMPLETED", "SEGMENT_ALLOC", "ALLOC", "FREE_COMPLETED", "SEGMENT_FREE", "ALLOC"]
    assert [Action(action).name for action in trace.action] == names
    assert trace.reserved_bytes().tolist() == [8192, 16384, 16384, 16384, 10240, 10240]
    assert trace.info["unseen_bytes"] == 4096
    assert lifespans(trace) == [(-1, 0, 512), (2, 3, 512), (5, 6, 512)]
    (drifting,) = load(tmp_path, {"traceEvents": [*events, event(512, 512, 4, 9999, 10240)]})
    assert "unseen_bytes" not in drifting.info
    assert any("some events are missing" in note for note in drifting.info["notes"])


def test_annotations_become_marks_and_a_failure_is_out_of_memory(tmp_path):
    def annotation(name, began, lasted):
        return {"ph": "X", "cat": "user_annotation", "name": name, "ts": began, "dur": lasted}

    failure = memory(1 << 40, time=2.5) | {"name": "[OutOfMemory]"}
    events = [memory(512, 512 * i, time=i) for i in range(4)]
    notes = [annotation("forward", 0.5, 2.1), annotation("ProfilerStep#1", 1.5, 9)]
    (trace,) = load(tmp_path, {"traceEvents": [*notes, *events, failure]})
    assert trace.action.tolist() == [Action.ALLOC] * 3 + [Action.OOM, Action.ALLOC]
    marks = zip(trace.mark_event.tolist(), trace.mark_kind.tolist(), trace.mark_name.tolist(), strict=True)
    assert [(event, kind, trace.names[name]) for event, kind, name in marks] == [
        (1, MARK_PHASE_BEGIN, "forward"),
        (2, MARK_STEP, "ProfilerStep#1"),
        (4, MARK_PHASE_END, "forward"),
    ]


def test_what_was_read_is_the_same_after_saving(tmp_path):
    (trace,) = load(tmp_path, {"traceEvents": [memory(512, 64, Total_Allocated=700), memory(-512, 64, 1.5)]})
    save_traces(tmp_path / "x.trace.npz", [trace])
    (again,) = load_traces(tmp_path / "x.trace.npz")
    assert (lifespans(again), again.info, again.address.tolist()) == (
        lifespans(trace),
        trace.info,
        trace.address.tolist(),
    )


GOOD = json.dumps({"traceEvents": [memory(512, 64), memory(-512, 64, time=1)]}).encode()


def test_a_trace_cut_short_anywhere_is_refused(tmp_path):
    for keep in range(1, len(GOOD)):
        with pytest.raises(BadInputError, match="cut short"):
            load(tmp_path, GOOD[:keep])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "without traceEvents"),
        ({"traceEvents": {"a": []}}, "without traceEvents"),
        ({"other": {"traceEvents": [memory(512, 64)]}}, "without traceEvents"),
        ({"traceEvents": []}, "no memory events of a GPU, at all"),
        ([], "no memory events of a GPU, at all"),
        ({"traceEvents": [memory(8, 64, kind=0, device=-1)]}, "of the CPU only"),
        ({"traceEvents": [memory(0, 64)]}, "no allocations and no frees"),
        ({"traceEvents": [memory(512, 64), memory(512, 64)]}, "allocated twice"),
        ({"traceEvents": [memory(-512, 64), memory(-512, 64)]}, "freed twice"),
        ({"traceEvents": [memory(512, 64), memory(512, 64, kind=6)]}, "two kinds of device"),
        ({"traceEvents": [memory("512", 64)]}, "event 0 of traceEvents: Bytes is '512'"),
        ({"traceEvents": [memory(1 << 50, 64)]}, "Bytes is 1125899906842624"),
        ({"traceEvents": [memory(512, -1)]}, "Addr is -1"),
        ({"traceEvents": [memory(512, 64, device=[])]}, "Device Id is a list"),
        ({"traceEvents": [memory(512, 64, time=None)]}, "ts is None"),
        ({"traceEvents": [memory(512, 64, time=float("nan"))]}, "ts is nan"),
        ({"traceEvents": [{"name": "[memory]", "ts": 1}]}, "has no args"),
        ({"traceEvents": ["[memory]"]}, "is not an object"),
        (b'{"traceEvents": [{"name": "[memory]",}]}', "event 0 of traceEvents is not readable as JSON"),
        (b'{"traceEvents": [' + b"[" * 9000 + b'"[memory]"' + b"]" * 9000 + b"]}", "not readable as JSON"),
        (b'{"traceEvents": ["[memory]' + b"x" * (1 << 20) + b'"]}', "longer than recorders write"),
        (b'{"traceEvents": [1,,2]}', "not readable as JSON"),
        (b'{"traceEvents": []} {}', "not readable as JSON"),
    ],
)
def test_what_no_profiler_writes_is_refused_in_one_sentence(tmp_path, content, said):
    with pytest.raises(BadInputError, match=said) as caught:
        load(tmp_path, content)
    assert "\n" not in str(caught.value)


def test_a_timeline_pairs_within_size_and_category(tmp_path):
    rows = [
        [-1, 1, 512, 0],
        [-1, 1, 600, 1],
        [1000, 2, 512, 7],
        [2000, 2, 512, 5],
        [3000, 3, -512, 7],  # the first of 512 bytes becomes category 2
        [3000, 3, 512, 2],
        [4000, 4, -512, 2],
        [5000, 4, -512, 0],
        [6000, 4, -700, 0],
    ]
    (trace,) = load(tmp_path, rows, "timeline.raw.json.gz")
    assert lifespans(trace) == [(-1, 5, 600), (-1, 3, 512), (-1, 4, 700), (0, 2, 512), (1, 5, 512)]
    assert trace.time_us.tolist() == [1, 2, 4, 5, 6]
    assert (trace.info["source"], trace.info["complete"]) == ("memory timeline", False)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[1, 2, 3], [[4, 5], [6, 7]]], "row 0 of the timeline is not time, action, bytes, category"),
        ([[1, 2, 512, 0], [2, 4, 512, 0]], "row 1 of the timeline: action 4 cannot change memory by 512"),
        ([[1, 9, 512, 0]], "action is 9"),
        ([[1, 2, 5.5, 0]], "bytes is 5.5"),
        ([[1, 2, 1 << 60, 0]], "bytes is 1152921504606846976"),
        ([[]], "row 0 of the timeline is not"),
        ([[-1, 1, 512, 0]], "no allocations and no frees"),
        (b"[[1, 2, 512, 0], [2, 4, -5", "cut short"),
    ],
)
def test_what_is_no_raw_timeline_is_refused(tmp_path, rows, said):
    with pytest.raises(BadInputError, match=said):
        load(tmp_path, rows)
