"""The trace file: what is saved comes back, the same traces give the same bytes, damage ends in one sentence."""

import json
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalloc.errors import BadInputError
from stalloc.trace import Action, Trace, load_traces, save_traces
from stalloc.trace.packing import KeptTrace
from stalloc.trace.record import COLUMNS, DTYPES
from stalloc.trace.recorder import from_recorded


@st.composite
def recordings(draw, device=0):
    """A Trace of random allocations and frees, with segments, marks, two streams and a table nobody knows."""
    steps = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 1 << 40), st.integers(0, 1)), max_size=40))
    live: dict[int, tuple[int, int]] = {}
    events = []
    for place, size, stream in steps:
        address = 0x7F00_0000_0000 + place
        if address in live:
            events.append((Action.FREE_REQUESTED, address, *live[address]))
            events.append((Action.FREE_COMPLETED, address, *live.pop(address)))
        else:
            live[address] = (size, stream)
            events.append((Action.ALLOC, address, size, stream))
    action, address, size, stream = zip(*events, strict=True) if events else ((), (), (), ())
    marks = draw(st.lists(st.tuples(st.integers(0, len(events)), st.integers(0, 2), st.text(max_size=5)), max_size=4))
    trace = from_recorded(
        device,
        np.array(action, np.int8),
        np.array(address, np.uint64),
        np.array(size, np.int64),
        np.array(stream, np.int64),
        np.arange(len(events)) * 1000,
        marks,
        (0, 94487466655008),
        reserved_start_bytes=draw(st.integers(0, 1 << 40)),
        segments=(np.array([1 << 63], np.uint64), np.array([1 << 21]), np.array([0])),
    )
    return trace.replace(extra={"accesses": np.array(draw(st.lists(st.integers(0, 9))), np.int64)})


def assert_same(one: Trace, other: Trace) -> None:
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        assert getattr(other, name).dtype == DTYPES[name]
    assert one.extra.keys() == other.extra.keys()
    for name, table in one.extra.items():
        np.testing.assert_array_equal(table, other.extra[name])
    for name in ("device", "streams", "names", "reserved_start_bytes", "info"):
        assert getattr(one, name) == getattr(other, name), name


@settings(deadline=None, max_examples=25)
@given(one=recordings(device=0), other=recordings(device=3))
def test_what_is_saved_comes_back(tmp_path_factory, one, other):
    path = tmp_path_factory.mktemp("trace") / "two.trace.npz"
    save_traces(path, [one, other])
    loaded = load_traces(path)
    assert len(loaded) == 2
    assert_same(one, loaded[0])
    assert_same(other, loaded[1])


@settings(deadline=None, max_examples=50)
@given(trace=recordings())
def test_a_trace_that_is_packed_in_memory_comes_back(trace):
    kept = KeptTrace(trace)
    kept.pack()
    assert_same(trace, kept.trace())


@settings(deadline=None, max_examples=10)
@given(trace=recordings())
def test_the_same_trace_gives_the_same_bytes(tmp_path_factory, trace):
    folder = tmp_path_factory.mktemp("trace")
    save_traces(folder / "a.trace.npz", [trace])
    save_traces(folder / "b.trace.npz", load_traces(folder / "a.trace.npz"))
    assert (folder / "a.trace.npz").read_bytes() == (folder / "b.trace.npz").read_bytes()


def one_request(**changes) -> Trace:
    trace = from_recorded(
        0, np.array([0, 2]), np.array([64, 64]), np.array([8, 8]), np.array([0, 0]), np.array([0, 1]), [], [0]
    )
    return trace.replace(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"end": np.array([0])}, "ends before it starts"),
        ({"stream": np.array([1])}, "column stream points outside"),
        ({"event_request": np.array([0, 1])}, "column event_request points outside"),
        ({"size": np.array([8, 8])}, "differ in length"),
        ({"size": np.array(["8"])}, "column size holds"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(changes, said):
    with pytest.raises(BadInputError, match=said):
        one_request(**changes)


def rewrite(path, name, content: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {entry: archive.read(entry) for entry in archive.namelist()}
    members[name] = content
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in members.items():
            archive.writestr(entry, data)


def npy(array: np.ndarray, tmp_path) -> bytes:
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    return (tmp_path / "x.npy").read_bytes()


def test_a_newer_schema_is_named(tmp_path):
    path = tmp_path / "new.trace.npz"
    save_traces(path, [one_request()])
    header = np.frombuffer(json.dumps({"format": "stalloc trace", "schema": 99, "devices": []}).encode(), np.uint8)
    rewrite(path, "header.npy", npy(header, tmp_path))
    with pytest.raises(BadInputError, match="schema 99"):
        load_traces(path)


def test_a_pickled_column_is_not_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    path = tmp_path / "trap.trace.npz"
    save_traces(path, [one_request()])
    rewrite(path, "d0.size.npy", npy(np.array([Trap()], object), tmp_path))
    (tmp_path / "sprung").unlink(missing_ok=True)
    with pytest.raises(BadInputError, match="damaged trace file"):
        load_traces(path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("keep", [30, 0.5, 0.9])
def test_a_file_cut_short_is_refused(tmp_path, keep):
    path = tmp_path / "cut.trace.npz"
    save_traces(path, [one_request()])
    data = path.read_bytes()
    path.write_bytes(data[: keep if keep > 1 else int(len(data) * keep)])
    with pytest.raises(BadInputError, match="damaged trace file"):
        load_traces(path)


def test_saving_refuses_another_suffix_and_an_unwritable_place(tmp_path):
    with pytest.raises(BadInputError, match=r"\.trace\.npz"):
        save_traces(tmp_path / "trace.npy", [one_request()])
    with pytest.raises(BadInputError, match="cannot write"):
        save_traces(tmp_path / "missing" / "x.trace.npz", [one_request()])
    with pytest.raises(BadInputError, match="same device"):
        save_traces(tmp_path / "x.trace.npz", [one_request(), one_request()])
