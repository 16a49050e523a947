"""stalloc convert: what goes through each format, what is made up and said to be, and what is refused."""

import gzip
import importlib.util
import json
import pickle
import pickletools
from pathlib import Path

import numpy as np
import pytest
from recordings import OUR_OTHERS, OUR_SNAPSHOTS, OURS, SNAPSHOTS, STRANGERS, each, path_of

from stalloc.cli import main
from stalloc.errors import BadInputError
from stalloc.lifespans import peak_load
from stalloc.trace import MARK_PHASE_BEGIN, MARK_PHASE_END, MARK_STEP, Action, load_traces, save_traces
from stalloc.trace.record import COLUMNS
from stalloc.trace.recorder import from_recorded
from stalloc.trace.sites import site_names


def convert(source, output, *options):
    assert main(["convert", str(source), str(output), *options, "--json", str(output) + ".told"]) == 0
    return json.loads(Path(str(output) + ".told").read_text())


def assert_equal(first, second):
    for name in COLUMNS:
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
    for name in ("device", "streams", "names", "reserved_start_bytes"):
        assert getattr(first, name) == getattr(second, name), name
    assert first.extra.keys() == second.extra.keys()
    for name, column in first.extra.items():
        assert np.array_equal(column, second.extra[name]), name


def test_every_shared_trace_is_in_the_table(shared_traces):
    assert {path.name for path in shared_traces.glob("*.gz")} == set(STRANGERS)


def test_every_recording_of_ours_is_in_the_table():
    without = {f"{name}.pickle.gz" for name in ("no_history", "one_event")}
    assert {path.name for path in OURS.glob("*.gz")} - without == {*OUR_SNAPSHOTS, *OUR_OTHERS}


@pytest.mark.parametrize("name", each(SNAPSHOTS))
def test_a_real_snapshot_comes_back_equal(tmp_path, name):
    source = path_of(name)
    told = convert(source, tmp_path / "s.pickle.gz")
    again = load_traces(tmp_path / "s.pickle.gz")
    for first, second in zip(load_traces(source), again, strict=True):
        assert_equal(first, second)
        assert first.info.get("allocator_settings") == second.info.get("allocator_settings")
        assert site_names(first, range(first.num_requests)) == site_names(second, range(second.num_requests))
    assert [entry["device"] for entry in told["devices"]] == [trace.device for trace in again]
    assert not [note for note in told["notes"] if "made up" in note or "left out" in note]


@pytest.mark.parametrize("name", each())
def test_every_real_trace_goes_through_every_format(tmp_path, name):
    originals = load_traces(path_of(name))
    convert(path_of(name), tmp_path / "t.trace.npz")
    for first, second in zip(originals, load_traces(tmp_path / "t.trace.npz"), strict=True):
        assert_equal(first, second)
        assert first.info == second.info

    convert(tmp_path / "t.trace.npz", tmp_path / "s.pkl")
    for first, second in zip(originals, load_traces(tmp_path / "s.pkl"), strict=True):
        assert same_program(first, second)
        assert set(map(str, first.info["notes"])) <= set(second.info["notes"])  # a guess stays known as one
        assert second.info["converted_from"] == first.info["source"]
        assert first.names == second.names
        assert first.mark_kind.tolist() == second.mark_kind.tolist()

    convert(tmp_path / "t.trace.npz", tmp_path / "p.json")
    for first, second in zip(originals, load_traces(tmp_path / "p.json"), strict=True):
        lasting = (first.start < 0) & (first.end == first.num_events)  # has no event, so it is in the totals
        assert second.num_requests == np.count_nonzero(~lasting)
        assert second.size[second.start >= 0].tolist() == first.size[first.start >= 0].tolist()
        if first.info["source"] == "torch snapshot":
            assert set(second.names) == set(first.names)  # of one moment they have no order
            assert np.count_nonzero(second.mark_kind == MARK_STEP) == np.count_nonzero(first.mark_kind == MARK_STEP)
        unseen = second.info["unseen_bytes"]
        assert unseen == first.info.get("unseen_bytes", 0) + int(first.size[lasting].sum())
        assert peak(second) + unseen == peak(first) + first.info.get("unseen_bytes", 0)
        if first.num_events == len(first.action):
            assert second.reserved_bytes().max() <= first.reserved_bytes().max(initial=first.reserved_start_bytes)

    for first in originals:
        convert(tmp_path / "t.trace.npz", tmp_path / "c.csv", "--device", str(first.device), "--force")
        (second,) = load_traces(tmp_path / "c.csv")
        shift = int(first.num_baseline_requests > 0)
        assert np.array_equal(second.start, first.start + shift)
        assert np.array_equal(second.end, first.end + shift)
        assert np.array_equal(second.size, first.size)


def peak(trace):
    return peak_load(trace.start, trace.end, trace.size)


def same_program(first, second):
    """Whether two traces are the same requests in the same order, whatever their clocks."""
    if not len(first.action):  # what happens at one moment has no order
        return first.size.tolist() == second.size.tolist() and peak(first) == peak(second)

    def order(trace):
        both = np.concatenate([trace.end, trace.start])
        kind = np.concatenate([np.zeros(trace.num_requests), np.ones(trace.num_requests)])
        size = np.concatenate([trace.size, trace.size])
        happens = (both >= 0) & ((kind == 1) | (both < trace.num_events))
        by_time = np.lexsort((size, kind, both))
        by_time = by_time[happens[by_time]]
        return list(zip(kind[by_time].tolist(), size[by_time].tolist(), strict=True))

    return order(first) == order(second) and peak(first) == peak(second)


def memory_viz():
    """torch's own module, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("torch is not installed")
    file = Path(next(iter(spec.submodule_search_locations))) / "cuda" / "_memory_viz.py"
    module_spec = importlib.util.spec_from_file_location("memory_viz_of_torch", file)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


WRITTEN = (
    *("out_of_memory.pickle.gz", "gpus.pickle.gz", *OUR_OTHERS),
    *("llama3_8b_fsdp4_oom_rank0.pickle.gz", "gnn_llm_3gpu_expandable_oom.pickle.gz", "qwen05b_h100.json.gz"),
    *("somas_resnet50.csv.gz", "resnet_timeline_hta.json.gz"),
)


@pytest.mark.parametrize("name", each(WRITTEN, always=("qwen", "somas", "resnet_adam")))
def test_the_tools_of_torch_read_what_is_written(tmp_path, name):
    viz = memory_viz()
    convert(path_of(name), tmp_path / "s.pickle")
    pickled = (tmp_path / "s.pickle").read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(pickled)} <= READ_BY_THE_PAGE
    data = pickle.loads(pickled)
    traces = load_traces(path_of(name))
    live = sum(int(trace.size[trace.end == trace.num_events].sum()) for trace in traces)

    def flames(text):
        return sum(
            int(line.rpartition(" ")[2]) for line in text.splitlines() if ";active" in line and "gaps" not in line
        )

    assert flames(viz.memory(data, format_flamegraph=str)) == live
    assert flames(viz.segments(data, format_flamegraph=str)) == live
    assert f"segments: {len(data['segments'])}" in viz.segsum(data)  # it checks itself that blocks fill segments
    assert "entries" in viz.trace(data)
    (tmp_path / "page.html").write_text(viz.trace_plot(data))
    for first, second in zip(load_traces(tmp_path / "s.pickle"), load_traces(tmp_path / "page.html"), strict=True):
        assert_equal(first, second)
    assert "Allocator State History" in viz.segment_plot(data)


ADDRESS = 0x7F00_0000_0000


def recording(**more):
    """Two streams, a step and a phase, one request from before, one that stays, one that is waiting to be freed."""
    actions = [3, 0, 1, 2, 0, 1, 1]
    places = [0, 0, 4096, 4096, 1024, 1024, 0]
    sizes = [8192, 1000, 512, 512, 300, 300, 1000]
    count = len(actions)
    segments = (np.array([ADDRESS, ADDRESS + 65536], np.uint64), np.array([8192, 2048]), np.array([0, 1]))
    return from_recorded(
        2,
        np.array(actions),
        np.array([ADDRESS + place for place in places], np.uint64),
        np.array(sizes),
        np.array([0, 0, 0, 0, 1, 1, 0]),
        np.arange(1, count + 1) * 10**12,
        [(1, MARK_STEP, "step 1"), (2, MARK_PHASE_BEGIN, "forward"), (7, MARK_PHASE_END, "forward")],
        [0, 77],
        reserved_start_bytes=2048,
        segments=segments,
        **more,
    )


@pytest.fixture
def recorded(tmp_path):
    save_traces(tmp_path / "r.trace.npz", [recording()])
    return tmp_path / "r.trace.npz"


def test_a_recording_of_our_own_becomes_a_snapshot(recorded, tmp_path):
    told = convert(recorded, tmp_path / "s.pickle")
    (trace,) = load_traces(tmp_path / "s.pickle")
    (first,) = load_traces(recorded)
    for name in COLUMNS:
        assert np.array_equal(getattr(trace, name), getattr(first, name)), name
    assert (trace.device, trace.streams, trace.names) == (2, (0, 77), first.names)
    assert told["notes"] == []
    data = pickle.loads((tmp_path / "s.pickle").read_bytes())
    assert [len(history) for history in data["device_traces"]] == [0, 0, 7]
    states = [block["state"] for block in data["segments"][0]["blocks"]]
    assert states == ["active_pending_free", "active_pending_free", "inactive"]


# by the unpickler in torch's MemoryViz.js, which knows no others
READ_BY_THE_PAGE = {"PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE"}
READ_BY_THE_PAGE |= {"EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS", "BININT", "BININT1"}
READ_BY_THE_PAGE |= {"BININT2", "LONG1", "BINFLOAT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
READ_BY_THE_PAGE |= {"SHORT_BINUNICODE", "BINUNICODE"}


def test_the_pickle_is_plain_and_of_protocol_4(recorded, tmp_path):
    convert(recorded, tmp_path / "s.pickle")
    opcodes = list(pickletools.genops((tmp_path / "s.pickle").read_bytes()))
    assert opcodes[0][1] == 4
    assert not {opcode.name for opcode, _, _ in opcodes} & {
        "GLOBAL",
        "STACK_GLOBAL",
        "REDUCE",
        "BUILD",
        "NEWOBJ",
        "INST",
    }


@pytest.mark.parametrize("name", ["x.pickle", "x.pickle.gz", "x.json", "x.json.gz", "x.csv", "x.trace.npz"])
def test_the_same_trace_gives_the_same_bytes(recorded, tmp_path, name):
    convert(recorded, tmp_path / name)
    first = (tmp_path / name).read_bytes()
    convert(recorded, tmp_path / name, "--force")
    assert (tmp_path / name).read_bytes() == first
    assert first.startswith(b"\x1f\x8b") == name.endswith(".gz")


def test_what_perfetto_shows(recorded, tmp_path):
    convert(recorded, tmp_path / "p.json")
    content = json.loads((tmp_path / "p.json").read_text())
    events = content["traceEvents"]

    def counter(name):
        return [
            (event["ts"], event["args"]["bytes"]) for event in events if event["ph"] == "C" and event["name"] == name
        ]

    (trace,) = load_traces(recorded)
    assert counter("allocated")[0] == (0, 512)
    assert max(value for _, value in counter("allocated")) == peak(trace) == 1512
    assert counter("reserved") == [(0, 2048), (0, 10240)]
    slices = {kind: {event["id2"]["local"]: event for event in events if event["ph"] == kind} for kind in "be"}
    assert len(slices["b"]) == len(slices["e"]) == trace.num_requests
    by_event = {event["args"]["event"]: event for event in slices["b"].values()}
    assert by_event[4]["args"] == {"bytes": 300, "stream": 77, "event": 4, "end_event": 7}
    assert by_event[4]["ts"] == 4_000_000_000
    notes = [(event["name"], event["ts"], event["dur"]) for event in events if event.get("cat") == "user_annotation"]
    assert notes == [("ProfilerStep#0", 1e9, 5_000_000_001), ("forward", 2e9, 4_000_000_001)]


def test_a_source_without_addresses_gets_those_of_a_plan_and_says_so(tmp_path, capsys):
    (tmp_path / "c.csv").write_text("id,lower,upper,size\na,0,4,1000\nb,1,3,0\nc,2,6,700\nd,4,6,1000\n")
    told = convert(tmp_path / "c.csv", tmp_path / "s.pickle")
    assert "note  addresses are not in the source: they are made up by a plan" in capsys.readouterr().out
    (trace,) = load_traces(tmp_path / "s.pickle")
    assert trace.size.tolist() == [1000, 0, 700, 1000]
    assert told["notes"] == trace.info["notes"]
    assert any("made up by a plan" in note for note in told["notes"])
    place = trace.address[trace.start]
    for i in range(4):
        for j in range(i):
            if trace.start[i] < trace.end[j] and trace.start[j] < trace.end[i]:
                assert place[i] != place[j]
    convert(tmp_path / "c.csv", tmp_path / "p.json")
    (again,) = load_traces(tmp_path / "p.json")
    assert any("made up by a plan" in note for note in again.info["notes"])


def test_offsets_in_the_source_become_addresses(tmp_path):
    (tmp_path / "c.csv").write_text("id,lower,upper,size,offset\n0,0,4,100,28\n1,2,6,10,200\n2,4,6,100,28\n")
    told = convert(tmp_path / "c.csv", tmp_path / "s.pickle")
    (trace,) = load_traces(tmp_path / "s.pickle")
    place = trace.address[trace.start]
    assert (place - place[0]).tolist() == [0, 172, 0]
    assert any("offsets in the source" in note for note in told["notes"])
    convert(tmp_path / "c.csv", tmp_path / "d.csv")
    assert (tmp_path / "d.csv").read_text() == (tmp_path / "c.csv").read_text()


def test_offsets_that_overlap_are_refused(tmp_path, capsys):
    (tmp_path / "c.csv").write_text("id,lower,upper,size,offset\n0,0,4,100,28\n1,2,6,10,100\n")
    assert main(["convert", str(tmp_path / "c.csv"), str(tmp_path / "s.pickle")]) == 2
    assert not (tmp_path / "s.pickle").exists()
    assert capsys.readouterr().err.count("\n") == 1


def test_true_addresses_without_segments_are_kept(tmp_path):
    log = "Thread,Time,Action,Pointer,Size,Stream\n" + "".join(
        f"1,10:00:00.00000{i},{row}\n"
        for i, row in enumerate(
            ["allocate,0x7f0000000000,1000,0", "allocate,0x7f0000001000,10,2", "free,0x7f0000000000,1000,0"]
        )
    )
    (tmp_path / "rmm.dev1.csv").write_text(log)
    told = convert(tmp_path / "rmm.dev1.csv", tmp_path / "s.pickle")
    (trace,) = load_traces(tmp_path / "s.pickle")
    assert trace.device == 1
    assert trace.address.tolist() == [ADDRESS, ADDRESS + 4096, ADDRESS, ADDRESS]
    assert trace.action.tolist() == [Action.ALLOC, Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED]
    assert trace.segment_address.tolist() == [ADDRESS, ADDRESS + 4096]
    assert any("segments are not in the source" in note for note in told["notes"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["r.trace.npz", "x.txt"], "does not tell the format"),
        (["r.trace.npz", "x.npz"], "does not tell the format"),
        (["r.trace.npz", "x.trace.npz.gz"], "does not tell the format"),
        (["r.trace.npz", "x.json", "--device", "0"], "has no device 0, it has 2"),
        (["r.trace.npz", "none/x.json"], "does not exist: make it first"),
        (["r.trace.npz", "."], "is a folder"),
        (["r.trace.npz", "r.trace.npz", "--force"], "is the input"),
        (["r.trace.npz", "there.json"], "exists: name another file, or replace it with --force"),
        (["nothing.pickle", "x.json"], "does not exist: check the name"),
        (["r.trace.npz", "x.bin", "--to", "trace"], "choose a name that ends so"),
        (["both.trace.npz", "x.csv"], "has the devices 0, 2, but a CSV holds only one"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(recorded, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("there.json").write_text("mine")
    save_traces("both.trace.npz", [recording().replace(device=0), recording()])
    arguments[1] = arguments[1] if arguments[1] != "." else str(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["convert", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
    assert Path("there.json").read_text() == "mine"


def test_the_format_can_be_named(recorded, tmp_path):
    told = convert(recorded, tmp_path / "plain", "--to", "csv")
    assert told["format"] == "csv"
    assert (tmp_path / "plain").read_text().splitlines()[0] == "id,lower,upper,size"
    assert told["bytes"] == (tmp_path / "plain").stat().st_size


def test_text_shows_what_was_written_and_the_next_command(recorded, tmp_path, capsys):
    output = tmp_path / "[red] s.json.gz"
    assert main(["convert", str(recorded), str(output)]) == 0
    shown = capsys.readouterr().out
    assert "[red] s.json.gz, perfetto" in shown
    assert "device 2  3 requests, 7 events, from stalloc recorder" in shown
    assert shown.rstrip().endswith(f"Next: stalloc stats '{output}'")
    assert json.loads(gzip.decompress(output.read_bytes()))["traceEvents"]


def test_a_snapshot_with_places_outside_its_record_is_refused(recorded, tmp_path):
    convert(recorded, tmp_path / "s.pickle")
    data = pickle.loads((tmp_path / "s.pickle").read_bytes())
    for mark in ([99, 0], [1, 9], ["x", 0], [1]):
        data["external_annotations"][0]["mark"] = mark
        (tmp_path / "bad.pickle").write_bytes(pickle.dumps(data))
        with pytest.raises(BadInputError):
            load_traces(tmp_path / "bad.pickle")
