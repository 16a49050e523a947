"""Snapshots of torch: real ones give the published figures, tiny ones show each rule, bad ones end in one sentence."""

import gzip
import os
import pickle

import numpy as np
import pytest
from recordings import STREAMS, counted, each, path_of

from stalloc.errors import BadInputError
from stalloc.lifespans import find_period, load_curve, lower_bound, peak_load, sequence_keys, sequence_rows
from stalloc.trace import MARK_PHASE_BEGIN, MARK_STEP, load_traces

# name, device: events, requests, peak of requested bytes, the same rounded up to 512, peak reserved, streams, period
FIGURES = {
    ("cnn_counterfactuals", 0): (5803, 1966, 108258676, 108275712, 134217728, 1, 193),
    ("gnn_llm_3gpu_expandable_oom", 0): (6445, 2434, 8456473388, 8456489984, 8541700096, 1, 106),
    ("gnn_llm_3gpu_expandable_oom", 1): (596, 199, 84063351764, 84063358976, 84202749952, 1, None),
    ("gnn_llm_3gpu_expandable_oom", 2): (882, 392, 21564645800, 21564660224, 21883781120, 1, 106),
    ("llama3_8b_fsdp4_oom_rank0", 0): (3274, 1523, 36227688704, 36227704832, 40907046912, 2, None),
    ("llama_offload_10streams", 0): (10327, 3253, 20802383104, 20802387456, 22519218176, 10, None),
    ("llm_quantize_sqattn", 0): (9576, 2917, 4351237120, 4351237120, 5802819584, 1, 104),
    ("lm27b_compiled_fwd", 0): (8694, 4218, 33895840260, 33895890432, 51849986048, 1, None),
    ("lm27b_ctx128_fullstep", 0): (19342, 7095, 54802667524, 54802668032, 61111009280, 1, None),
    ("lm_fb_ctx200", 0): (11480, 3907, 1229753640, 1229761024, 1390411776, 1, None),
    ("lm_fwd_ctx200", 0): (2321, 785, 879662288, 879668224, 945815552, 1, None),
    ("lm_step_steady", 0): (19464, 7801, 22827925508, 22827926016, 23842521088, 1, None),
    ("octree_nca_train", 0): (3797, 1528, 14401221632, 14401229824, 20860370944, 1, None),
    ("resnet50_pytorch_blog", 0): (6111, 2523, 521788880, 521831936, 589299712, 1, 679),
    ("resnet_adam_npu_expandable", 0): (8092, 3219, 597327488, 597380608, 643825664, 1, None),
    ("tiny_transformer", 0): (713, 246, 18097348, 18099712, 23068672, 1, 42),
}


#: several devices, an error, another vendor's, and a small one
ALWAYS = ("gnn_llm_3gpu_expandable_oom", "cnn_counterfactuals", "resnet_adam_npu_expandable", "tiny_transformer")
ROWS = [(f"{name}.pickle.gz", device) for name, device in FIGURES]


@pytest.mark.parametrize(("file", "device"), each(ROWS, always=ALWAYS))
def test_real_snapshots_give_the_published_figures(shared_traces, file, device):
    traces = load_traces(shared_traces / file)
    (trace,) = [trace for trace in traces if trace.device == device]
    # the published period is that of the end of the sequence, at least 32 long and seen three times
    keys = sequence_keys(trace, sequence_rows(trace, 0))
    period = find_period(keys, min_repeats=3, min_length=32, at_end=True)
    assert FIGURES[file.removesuffix(".pickle.gz"), device] == (
        trace.num_events,
        trace.num_requests,
        peak_load(trace.start, trace.end, trace.size),
        lower_bound(trace, 512),
        int(trace.reserved_bytes().max(initial=trace.reserved_start_bytes)),
        len(trace.streams),
        period.length if period else None,
    )


@pytest.mark.parametrize("name", STREAMS)
def test_our_snapshots_give_what_torch_counted(name):
    traces = {trace.device: trace for trace in load_traces(path_of(f"{name}.pickle.gz"))}
    told = counted(name)
    assert traces.keys() == told.keys()
    for device, trace in traces.items():
        assert told[device] == {
            "requests": trace.num_requests,
            "requested_peak_bytes": peak_load(trace.start, trace.end, trace.size),
            "reserved_peak_bytes": int(trace.reserved_bytes().max(initial=trace.reserved_start_bytes)),
        }, device
        assert len(trace.streams) == STREAMS[name]


def test_a_snapshot_without_history_is_no_trace():
    with pytest.raises(BadInputError, match="history was switched off") as caught:
        load_traces(path_of("no_history.pickle.gz"))
    assert "\n" not in str(caught.value)


def test_every_real_snapshot_is_in_the_table(shared_traces):
    names = {path.name.split(".")[0] for path in shared_traces.glob("*.pickle.gz")}
    assert names == {name for name, _ in FIGURES}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one_event_blockzero", "history was switched off"),
        ("oom_no_history_flexgen", "history was switched off"),
        ("synthetic_mosaic", "more bytes are live than its segments hold"),
        ("trimmed_nuggets", "24 requests are live at the end by the events and not by the segments"),
    ],
)
def test_real_bad_snapshots_are_refused(shared_traces, name, said):
    with pytest.raises(BadInputError, match=said) as caught:
        load_traces(shared_traces / "bad" / f"{name}.pickle.gz")
    assert "\n" not in str(caught.value)


ADDRESS = 0x7F00_0000_0000


def event(action, place, size, time=0, stream=0):
    return {"action": action, "addr": ADDRESS + place, "size": size, "stream": stream, "time_us": time, "frames": []}


def segment(*blocks, place=0, stream=0, device=0):
    """A segment of (size, requested size or None for a free block)."""
    return {
        "device": device,
        "address": ADDRESS + place,
        "total_size": sum(size for size, _ in blocks),
        "stream": stream,
        "blocks": [
            {"size": size, "state": "inactive"}
            if requested is None
            else {"size": size, "requested_size": requested, "state": "active_allocated"}
            for size, requested in blocks
        ],
    }


def snapshot(*histories, segments=(), **more):
    return {"segments": list(segments), "device_traces": [list(history) for history in histories], **more}


def load(tmp_path, content, name="snapshot.pickle"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return load_traces(path)


def test_what_was_live_before_recording_is_reconstructed(tmp_path):
    history = [
        event("alloc", 1024, 500),
        event("free_requested", 0, 300),
        event("free_completed", 0, 300),
        event("free_requested", 1024, 500),
        event("free_completed", 1024, 500),
    ]
    # the second block of the segment has no event at all, and as in old snapshots no address of its own
    (trace,) = load(tmp_path, snapshot(history, segments=[segment((512, None), (512, 400), (1024, None))]))
    lifespans = sorted(zip(trace.start, trace.end, trace.size, strict=True))
    assert lifespans == [(-1, 2, 300), (-1, 5, 400), (0, 4, 500)]
    events, live = load_curve(np.maximum(trace.start, 0), trace.end, trace.size)
    assert dict(zip(events.tolist(), live.tolist(), strict=True)) == {0: 1200, 2: 900, 4: 400, 5: 0}
    assert trace.reserved_start_bytes == 2048
    assert not trace.info["complete"]


def test_reserved_at_the_start_is_worked_backwards(tmp_path):
    history = [
        event("segment_free", 1 << 30, 4096),
        event("segment_map", 1 << 20, 1000),
        event("alloc", 0, 10),
        event("segment_unmap", 1 << 20, 600),
        event("oom", 0, 1 << 40),
        event("segment_alloc", 1 << 25, 2048),
        event("snapshot", 0, 0),
    ]
    segments = [segment((512, 10)), segment((400, None), place=1 << 20), segment((2048, None), place=1 << 25)]
    (trace,) = load(tmp_path, snapshot(history, segments=segments))
    assert trace.reserved_start_bytes == 512 + 4096
    assert trace.reserved_bytes().tolist() == [512, 1512, 1512, 912, 912, 2960, 2960]


def test_each_device_with_events_is_a_trace(tmp_path):
    traces = load(
        tmp_path,
        snapshot(
            [],
            [event("alloc", 0, 10, stream=77)],
            segments=[segment((512, 10), device=1, stream=77), segment((512, 1), device=0)],
        ),
    )
    assert [(trace.device, trace.streams) for trace in traces] == [(1, (77,))]
    assert "devices 0 have segments but no events" in traces[0].info["notes"]


def test_annotations_become_marks(tmp_path):
    notes = [
        {"stage": "START", "name": "ProfilerStep#1", "device": 0, "time_us": 15},
        {"stage": "START", "name": "forward", "device": 0, "time_us": 25},
        {"stage": "START", "name": "elsewhere", "device": 1, "time_us": 25},
    ]
    history = [event("alloc", 512 * i, 10, time=10 * (i + 1)) for i in range(3)]
    blocks = segment(*[(512, 10)] * 3)
    (trace,) = load(tmp_path, snapshot(history, segments=[blocks], external_annotations=notes))
    assert trace.mark_event.tolist() == [1, 2]
    assert trace.mark_kind.tolist() == [MARK_STEP, MARK_PHASE_BEGIN]
    assert [trace.names[i] for i in trace.mark_name] == ["ProfilerStep#1", "forward"]


def good() -> bytes:
    return pickle.dumps(snapshot([event("alloc", 0, 10)], segments=[segment((512, 10))]))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ["s.pickle", "s.pkl", "s.pickle.gz"])
def test_every_protocol_and_name_is_read(tmp_path, protocol, name):
    data = pickle.dumps(pickle.loads(good()), protocol)
    (trace,) = load(tmp_path, gzip.compress(data) if name.endswith("gz") else data, name)
    assert trace.num_requests == 1


class Runs:
    def __reduce__(self):
        return (os.mkdir, ("sprung",))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_something_is_named_and_not_run(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError, match=r"asks for '(posix|os)\.mkdir'"):
        load(tmp_path, pickle.dumps({"segments": [], "device_traces": [Runs()]}, protocol))
    assert not (tmp_path / "sprung").exists()


NESTED_TUPLES = b"\x80\x04)" + b"\x85" * 1_000_000 + b"."
DEEP_KEY = b"\x80\x04})" + b"\x85" * 1_000_000 + b"K\x01s."


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (good()[:-9], "cut short"),
        (gzip.compress(good(), mtime=0)[:-9], "damaged or cut short"),
        (gzip.compress(good(), mtime=0)[:30] + b"\x00" * 40, "damaged or cut short"),
        (b"Dear diary,\nno snapshot here.\n", "not a pickle|damaged pickle"),
        (pickle.dumps([1, 2, 3]), "not a torch.cuda.memory snapshot"),
        (pickle.dumps({"segments": 3, "device_traces": [[]]}), "lacks what torch writes"),
        (pickle.dumps(snapshot([{"action": "alloc"}])), "lacks what torch writes"),
        (pickle.dumps(snapshot([event("teleport", 0, 1), event("alloc", 0, 1)])), "unknown event 'teleport'"),
        (b"\x80\x04Nr\xff\xff\xff\xff.", "more objects than it holds"),
        (b"\x80\x04Np9999999999999\n.", "more objects than it holds"),
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.", "cut short"),
        (NESTED_TUPLES, "kinds of objects that no snapshot has"),
        (DEEP_KEY, "kinds of objects that no snapshot has"),
    ],
)
def test_damaged_and_hostile_files_end_in_one_sentence(tmp_path, content, said):
    with pytest.raises(BadInputError, match=said) as caught:
        load(tmp_path, content)
    assert "\n" not in str(caught.value)


def test_a_pickle_that_repeats_its_contents_endlessly_is_refused(tmp_path):
    many = [event("snapshot", 0, 0)] * 1000
    with pytest.raises(BadInputError, match="repeats its contents endlessly"):
        load(tmp_path, pickle.dumps({"segments": [], "device_traces": [many] * 1000}))


def test_a_directory_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(BadInputError, match="is a directory"):
        load_traces(tmp_path)
    with pytest.raises(BadInputError, match="does not exist"):
        load_traces(tmp_path / "nothing.pickle")


@pytest.mark.parametrize("content", [b"Dear diary,\nno trace.\n", b"a,b,c\n1,2,3\n", b"\x00\x01\x02\x03" * 99])
def test_a_file_of_no_known_kind_says_what_is_expected(tmp_path, content):
    with pytest.raises(BadInputError, match=r"expected a \.trace\.npz, a snapshot pickle"):
        load(tmp_path, content, "notes.txt")
