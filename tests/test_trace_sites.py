"""Call sites: which frames of a snapshot are kept, what a stack is called, and what a damaged table does."""

import json
import pickle

import numpy as np
import pytest
from recordings import path_of

from stalloc.errors import BadInputError
from stalloc.trace import Action, load_traces, save_traces
from stalloc.trace.sites import Frame, read_sites, site_name, site_names

ADDRESS = 0x7F00_0000_0000
USER, OTHER = ("/home/me/model.py", 57, "forward"), ("/home/me/train.py", 9, "step")
TORCH = ("/usr/lib/python3.12/site-packages/torch/nn/modules/linear.py", 125, "forward")
TRANSFORMERS = ("/usr/lib/python3.12/site-packages/transformers/models/llama/modeling_llama.py", 240, "forward")
STANDARD = ("/usr/lib/python3.12/contextlib.py", 81, "inner")
CPP = ("??", 0, "at::native::empty_cuda(c10::ArrayRef<long>)")


def frames(*parts):
    return [{"filename": filename, "line": line, "name": name} for filename, line, name in parts]


def event(action, place, stack, size=512):
    return {"action": action, "addr": ADDRESS + place, "size": size, "stream": 0, "time_us": 0, "frames": stack}


def load(tmp_path, history, *blocks):
    """A snapshot of one segment with blocks of 512 bytes, given as the frames of each, None for a free one."""
    listed = [
        {"size": 512, "state": "inactive"}
        if stack is None
        else {"size": 512, "requested_size": 512, "state": "active_allocated", "frames": stack}
        for stack in blocks
    ]
    segment = {"device": 0, "address": ADDRESS, "total_size": 512 * len(blocks), "stream": 0, "blocks": listed}
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [history]}))
    return load_traces(path)[0]


def test_each_request_knows_who_asked_for_it(tmp_path):
    history = [
        event("alloc", 0, frames(CPP, USER)),
        event("alloc", 512, frames(CPP, OTHER)),
        event("free_requested", 0, frames(CPP, OTHER)),
        event("free_completed", 0, frames(CPP, OTHER)),
        event("free_requested", 2048, frames(CPP, OTHER)),  # of a request that nobody saw begin
        event("free_completed", 2048, frames(CPP, OTHER)),
        event("alloc", 0, frames(CPP, USER)),
    ]
    old = frames(CPP, ("/home/me/train.py", 3, "build"))
    trace = load(tmp_path, history, frames(CPP, USER), frames(CPP, OTHER), old, None, None)
    named = dict(zip(trace.start.tolist(), site_names(trace, range(trace.num_requests)), strict=False))
    assert {start: named[start] for start in (0, 1, 6)} == {
        0: "model.py:57 forward",
        1: "train.py:9 step",
        6: "model.py:57 forward",
    }
    before = sorted(site_names(trace, np.flatnonzero(trace.start < 0)))
    assert before == ["train.py:3 build", "unknown"]
    sites = read_sites(trace)
    assert sites.num_stacks == 3  # equal stacks are kept once
    assert sites.stack(int(sites.site[-1])) == [Frame(*CPP), Frame(*USER)]
    assert sites.event_site.tolist()[2:6] == [-1] * 4


def test_frames_that_stacks_share_count_like_copies_of_them(tmp_path):
    """torch shares them; files that went through other tools may not."""
    cpp, user, other = frames(CPP, USER, OTHER)
    stacks = [[cpp, user], [cpp, other], [cpp, user, other], [cpp, user]]
    copies = [[dict(frame) for frame in stack] for stack in stacks]

    def read(given):
        return load(tmp_path, [event("alloc", 512 * i, stack) for i, stack in enumerate(given)], *given)

    shared, copied = read(stacks * 600), read(copies * 600)
    for name in ("site", "event_site", "site_begin", "site_frame", "site_text"):
        assert np.array_equal(shared.extra[name], copied.extra[name]), name
    assert read_sites(shared).num_stacks == 3


def test_sites_are_the_same_after_saving(tmp_path):
    trace = load(tmp_path, [event("alloc", 0, frames(USER))], frames(USER))
    save_traces(tmp_path / "s.trace.npz", [trace])
    (again,) = load_traces(tmp_path / "s.trace.npz")
    assert site_names(again, [0]) == site_names(trace, [0]) == ["model.py:57 forward"]


def test_a_source_without_frames_has_no_sites(tmp_path):
    trace = load(tmp_path, [event("alloc", 0, [])], [])
    assert read_sites(trace) is None
    assert site_names(trace, [0]) == ["unknown"]


@pytest.mark.parametrize(
    ("stack", "depth", "name"),
    [
        ([CPP, TORCH, STANDARD, USER, OTHER], 1, "model.py:57 forward"),
        ([CPP, TORCH, STANDARD, USER, OTHER], 2, "model.py:57 forward from train.py:9 step"),
        ([CPP, TORCH, TRANSFORMERS, USER], 1, "modeling_llama.py:240 forward"),
        ([CPP, TORCH, STANDARD], 1, "linear.py:125 forward"),  # torch itself is better than nothing
        ([TORCH, USER, ("/x/stalloc/sandbox/forked_child.py", 9, "fork")], 2, "model.py:57 forward"),  # not what ran it
        ([TORCH, ("/x/stalloc/sizing/model_program.py", 9, "_run")], 1, "model_program.py:9 _run"),  # a program too
        ([("functional.py", 5, "relu"), ("mine.py", 6, "act")], 1, "mine.py:6 act"),  # directories were cut
        ([CPP, ("??", 0, "torch::autograd::generated::MulBackward0::apply(x)")], 1, "MulBackward0 (autograd)"),
        ([CPP, ("??", 0, "at::_ops::sum::call(at::Tensor const&)")], 1, "at::_ops::sum::call"),
        ([("<string>", 1, "<module>")], 1, "<string>:1 <module>"),
        ([], 1, "unknown"),
        ([("a.py", 1, "\x1b[2Jf\n")], 1, "a.py:1 \\x1b[2Jf\\n"),
    ],
)
def test_the_name_of_a_stack_is_its_innermost_frame_of_the_user(stack, depth, name):
    assert site_name([Frame(*parts) for parts in stack], depth) == name


@pytest.mark.parametrize(
    "stack",
    [
        [{"filename": "a.py", "line": 1}],
        [{"filename": "a.py", "line": [], "name": "f"}],
        [{"filename": 3, "line": 1, "name": "f"}],
        [7],
        "frames",
        {"a": 1},
    ],
)
def test_frames_that_torch_does_not_write_are_left_out(tmp_path, stack):
    trace = load(tmp_path, [event("alloc", 0, stack), event("alloc", 512, frames(USER))], stack, frames(USER))
    assert site_names(trace, [0, 1]) == ["unknown", "model.py:57 forward"]


def test_what_is_kept_of_a_stack_is_bounded(tmp_path):
    deep = frames(*(("/x/" + "y" * 5000, line, "n" * 5000) for line in range(2000)))
    trace = load(tmp_path, [event("alloc", 0, deep)], deep)
    (stack,) = [read_sites(trace).stack(0)]
    assert len(stack) == 512
    assert max(len(frame.filename) + len(frame.name) for frame in stack) == 2000


@pytest.mark.parametrize(
    "change",
    [
        {"site": np.array([7], np.int32)},
        {"site": np.array([0, 0], np.int32)},
        {"site": np.array([0], np.int64)},
        {"event_site": np.array([-2], np.int32)},
        {"site_begin": np.array([0, 5], np.int64)},
        {"site_begin": np.array([], np.int64)},
        {"site_frame": np.array([9], np.int32)},
        {"site_text": np.frombuffer(b"[[1, 2]]", np.uint8)},
        {"site_text": np.frombuffer(b"\xff", np.uint8)},
        {"site_text": np.frombuffer(json.dumps([["a", float("inf"), "b"]]).encode(), np.uint8)},
        {"site_text": np.frombuffer(b"[" * 100_000, np.uint8)},
    ],
)
def test_a_table_that_contradicts_itself_is_refused(tmp_path, change):
    trace = load(tmp_path, [event("alloc", 0, frames(USER))], frames(USER))
    damaged = trace.replace(extra=trace.extra | change)
    with pytest.raises(BadInputError, match="table of call sites is damaged") as caught:
        site_names(damaged, [0])
    assert "\n" not in str(caught.value)


def test_our_snapshots_name_lines_of_their_programs():
    (trace,) = load_traces(path_of("training.pickle.gz"))
    names = site_names(trace, range(trace.num_requests))
    assert {name.split(":")[0] for name in names} >= {"model.py", "train.py"}
    trace = load_traces(path_of("gpus.pickle.gz"))[1]
    sites = read_sites(trace)
    failed = int(sites.event_site[np.flatnonzero(trace.action == Action.OOM)[0]])
    assert site_name(sites.stack(failed)) == "blocks.py:68 gpus"


def test_real_snapshots_name_lines_of_their_programs(shared_traces):
    (trace,) = load_traces(shared_traces / "llama3_8b_fsdp4_oom_rank0.pickle.gz")
    names = site_names(trace, range(trace.num_requests))
    assert names.count("unknown") < trace.num_requests // 4  # what was there before has no frames
    assert {name.split(":")[0] for name in names} >= {"model.py", "train.py"}
    sites = read_sites(trace)
    failed = int(sites.event_site[-1])  # the out-of-memory error
    assert site_name(sites.stack(failed)) != "unknown"
    assert sum(column.nbytes for column in trace.extra.values()) < 1 << 20
