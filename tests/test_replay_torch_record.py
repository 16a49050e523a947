"""Recorded snapshots against the model: real files to the address, and files that say something else."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from properties import variants
from recordings import path_of

from stalloc.errors import BadInputError
from stalloc.replay.protocol import Events, Kind
from stalloc.replay.torch_caching import TorchCaching, check_record, parse_settings
from stalloc.replay.torch_start import recorded_calls, recorded_settings
from stalloc.trace import Trace, load_traces
from stalloc.trace.record import Action

MIB = 1 << 20
#: file, device -> segments and pages taken and given back while it was recorded
SNAPSHOTS = {
    ("training", 0): 42,
    ("step", 0): 0,
    ("forward", 0): 96,
    ("optimizer_step", 0): 40,
    ("out_of_memory", 0): 64,
    ("rank0", 0): 23,
    ("rank1", 0): 21,
    ("fragmented", 0): 24,
    ("leak", 0): 11,
    ("streams", 0): 7,
    ("gpus", 0): 12,
    ("gpus", 1): 15,
    ("gpus", 2): 17,
    ("stale_cache", 0): 20,
    ("cnn_counterfactuals", 0): 7,
    ("gnn_llm_3gpu_expandable_oom", 0): 175,
    ("gnn_llm_3gpu_expandable_oom", 1): 46,
    ("gnn_llm_3gpu_expandable_oom", 2): 78,
    ("llama3_8b_fsdp4_oom_rank0", 0): 176,
    ("llama_offload_10streams", 0): 1163,
    ("llm_quantize_sqattn", 0): 840,
    ("lm27b_compiled_fwd", 0): 920,
    ("lm27b_ctx128_fullstep", 0): 783,
    ("lm_fb_ctx200", 0): 83,
    ("lm_fwd_ctx200", 0): 48,
    ("lm_step_steady", 0): 0,
    ("octree_nca_train", 0): 48,
    ("resnet50_pytorch_blog", 0): 0,
    ("tiny_transformer", 0): 1,
}


@pytest.fixture(scope="module")
def snapshot():
    loaded: dict[str, list[Trace]] = {}

    def load(name: str, device: int = 0) -> Trace:
        if name not in loaded:
            loaded[name] = load_traces(path_of(f"{name}.pickle.gz"))
        (trace,) = [trace for trace in loaded[name] if trace.device == device]
        return trace

    return load


#: the longest, whose settings and kinds of events others have too
LONG = (
    *("lm27b_compiled_fwd", "lm27b_ctx128_fullstep", "lm_fb_ctx200", "lm_step_steady", "octree_nca_train"),
    *("gnn_llm_3gpu_expandable_oom", "llama3_8b_fsdp4_oom_rank0", "llama_offload_10streams", "llm_quantize_sqattn"),
)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (row[0] in LONG))
        for row in SNAPSHOTS
        if path_of(f"{row[0]}.pickle.gz").exists()
    ],
)
def test_real_snapshots_are_replayed_exactly(snapshot, name, device):
    check = check_record(snapshot(name, device))
    assert check.exact, f"event {check.first_difference}: {check.reason}"
    assert check.num_segment_events == SNAPSHOTS[name, device]


ENDS = ("fragmented", "stale_cache", "streams", "octree_nca_train", "lm27b_compiled_fwd", "llama_offload_10streams")


@variants("name", [name for name in ENDS if path_of(f"{name}.pickle.gz").exists()], always=2)
def test_the_model_ends_with_the_blocks_that_the_file_ends_with(snapshot, name):
    trace = snapshot(name)
    model = TorchCaching.from_record(trace)
    model.feed(recorded_calls(trace, recorded_settings(trace))[0])
    blocks = model.blocks()
    order = np.argsort(trace.extra["block_address"])
    assert blocks.address.tolist() == trace.extra["block_address"][order].astype(np.int64).tolist()
    assert blocks.size_bytes.tolist() == trace.extra["block_size"][order].tolist()
    assert blocks.request.tolist() == trace.extra["block_request"][order].tolist()


@pytest.mark.usefixtures("shared_traces")
def test_an_allocator_that_is_not_cudas_is_told_apart(snapshot):
    check = check_record(snapshot("resnet_adam_npu_expandable"))
    assert not check.exact
    assert check.first_difference == 1
    assert "an allocation of 41943040 bytes went to" in check.reason


def test_the_first_event_that_differs_is_named(snapshot):
    trace = snapshot("out_of_memory")
    takes_segment = np.append(False, trace.action[:-1] == Action.SEGMENT_ALLOC) & (trace.action == Action.ALLOC)
    at = int(np.flatnonzero(takes_segment & (trace.event_size >= 10 * MIB))[3])
    sizes = trace.size.copy()
    sizes[trace.event_request[at]] += 4 * MIB
    check = check_record(trace.replace(size=sizes))
    assert not check.exact
    assert check.first_difference == at
    assert "bytes reserved" in check.reason


@pytest.mark.parametrize("settings", ["roundup_power2_divisions:2", "max_split_size_mb:64", "expandable_segments:True"])
def test_a_recorded_start_goes_on_under_other_settings(snapshot, settings):
    trace = snapshot("fragmented")
    parsed = parse_settings(settings)
    model = TorchCaching.from_record(trace, parsed)
    fed = model.feed(recorded_calls(trace, parsed)[0])
    blocks = model.blocks()
    assert fed.failed == -1
    assert np.all(blocks.address[1:] >= (blocks.address + blocks.size_bytes)[:-1])
    assert blocks.size_bytes.sum() == model.counters().reserved_bytes
    assert not check_record(trace, parsed).exact


def test_a_start_can_be_followed_event_by_event(snapshot):
    trace = snapshot("step")
    model = TorchCaching.from_record(trace)
    events, _ = recorded_calls(trace, recorded_settings(trace))
    assert model.counters().reserved_bytes == trace.reserved_start_bytes
    at = 300
    model.feed(Events(events.kind[:at], events.request[:at], events.event[:at], events.size, events.stream))
    until = int(events.event[at - 1])
    live = np.flatnonzero((trace.start <= until) & (until < trace.end))
    blocks = model.blocks()
    assert sorted(blocks.request[blocks.request >= 0].tolist()) == live.tolist()
    assert blocks.size_bytes.sum() == trace.reserved_bytes()[until]
    assert Kind.EMPTY_CACHE not in events.kind


def small_snapshot(file: Path, *more_segments: dict) -> Trace:
    """One small segment with one live request, and what other segments the list at the end holds."""
    address, size = 0x7F00_0000_0000, 2 * MIB
    event = {"action": "alloc", "addr": address, "size": 512, "stream": 0, "time_us": 0}
    blocks = [
        {"size": 512, "requested_size": 512, "state": "active_allocated"},
        {"size": size - 512, "requested_size": 0, "state": "inactive"},
    ]
    segment = {"device": 0, "address": address, "total_size": size, "stream": 0, "blocks": blocks}
    segment |= {"segment_type": "small"}
    file.write_bytes(pickle.dumps({"segments": [segment, *more_segments], "device_traces": [[event]]}))
    (trace,) = load_traces(file)
    return trace


def test_a_segment_of_a_stream_that_asked_for_nothing_has_its_pool(tmp_path):
    """Its free block goes into a tree of free blocks, which compiled code finds by the stream's number."""
    block = {"size": 20 * MIB, "requested_size": 0, "state": "inactive"}
    other = {"device": 0, "address": 0x7F10_0000_0000, "total_size": 20 * MIB, "stream": 7, "blocks": [block]}
    trace = small_snapshot(tmp_path / "s.pickle", other | {"segment_type": "large"})
    model = TorchCaching.from_record(trace)
    assert model.counters().reserved_bytes == 22 * MIB
    assert check_record(trace).exact


def test_segments_that_overlap_are_not_compared(tmp_path):
    block = {"size": 2 * MIB, "requested_size": 0, "state": "inactive"}
    other = {"device": 0, "address": 0x7F00_0010_0000, "total_size": 2 * MIB, "stream": 0, "blocks": [block]}
    trace = small_snapshot(tmp_path / "s.pickle", other | {"segment_type": "small"})
    check = check_record(trace)
    assert (check.exact, check.num_compared) == (False, 0)
    assert check.reason
    with pytest.raises(BadInputError):
        TorchCaching.from_record(trace)


@pytest.mark.parametrize("flag", [-106, 5, 127])
def test_flags_of_segments_are_flags_whatever_a_file_says(tmp_path, flag):
    """They choose a tree of free blocks in compiled code, which checks no index."""
    trace = small_snapshot(tmp_path / "s.pickle")
    changed = trace.replace(extra=trace.extra | {"segment_is_small": np.array([flag], np.int8)})
    models = [TorchCaching.from_record(one) for one in (trace, changed)]
    fed = [model.feed(recorded_calls(trace, recorded_settings(trace))[0]) for model in models]
    assert fed[0].address.tolist() == fed[1].address.tolist() == [0x7F00_0000_0000]
    assert models[0].counters() == models[1].counters()
