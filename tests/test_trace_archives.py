"""Archives of columns that somebody built: sizes, shapes, types and headers that lie end in one sentence."""

import io
import json
import struct
import zipfile

import numpy as np
import pytest
from properties import variants

from stalloc.errors import BadInputError
from stalloc.planner import load_plans, plan, save_plans
from stalloc.trace import load_traces, save_traces
from stalloc.trace.record import COLUMNS
from stalloc.trace.recorder import from_recorded


def saved(folder):
    """A trace file and a plan file of three requests."""
    action, address = np.array([0, 0, 2, 0]), np.array([64, 640, 64, 64])
    size, zero = np.array([8, 600, 8, 16]), np.zeros(4, np.int64)
    trace = from_recorded(0, action, address, size, zero, np.arange(4) * 1000, [(1, 0, "step")], [0])
    trace = trace.replace(extra={"id": np.arange(3)})
    save_traces(folder / "x.trace.npz", [trace])
    save_plans(folder / "x.plan.npz", [plan(trace)])
    return folder / "x.trace.npz", folder / "x.plan.npz"


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def raw_npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def rewrite(path, changes: dict[str, bytes | None], method=zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members |= {name: data for name, data in changes.items() if data is not None}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            if name not in changes or changes[name] is not None:
                archive.writestr(name, data)


def change_header(path, change) -> None:
    with zipfile.ZipFile(path) as archive:
        header = json.loads(np.load(io.BytesIO(archive.read("header.npy"))).tobytes())
    change(header)
    rewrite(path, {"header.npy": npy(np.frombuffer(json.dumps(header).encode(), np.uint8))})


def refused(load, path) -> str:
    with pytest.raises(BadInputError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


MEMBERS = {
    "objects": npy(np.zeros(3, "S1")).replace(b"|S1", b"|O "),
    "a structure": npy(np.zeros(3, [("a", "<i8")])),
    "dates": npy(np.zeros(3, "<M8[s]")),
    "big-endian numbers": npy(np.zeros(3, ">i8")),
    "text of no length": raw_npy("{'descr': '<U0', 'fortran_order': False, 'shape': (3,), }"),
    "another length": raw_npy("{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999,), }", bytes(24)),
    "a negative length": raw_npy("{'descr': '<i8', 'fortran_order': False, 'shape': (-3, -1), }", bytes(24)),
    "a length of 5,000 digits": raw_npy("{'descr': '<i8', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",), }"),
    "columns first": raw_npy("{'descr': '<i8', 'fortran_order': True, 'shape': (3, 1), }", bytes(24)),
    "many dimensions": raw_npy(f"{{'descr': '<i8', 'fortran_order': False, 'shape': {(1,) * 33}, }}", bytes(8)),
    "no header": b"\x93NUMPY\x01\x00\xff\xff",
    "brackets": raw_npy("(" * 3000),
    "no array": b"nothing",
    "nothing": b"",
}


@pytest.mark.parametrize("content", MEMBERS.values(), ids=MEMBERS)
def test_columns_that_are_none_are_refused(tmp_path, content):
    trace, made = saved(tmp_path)
    rewrite(trace, {"d0.size.npy": content})
    assert "damaged trace file" in refused(load_traces, trace)
    rewrite(made, {"0.size.npy": content})
    assert "is not a plan" in refused(load_plans, made)


def test_a_member_twice_is_refused(tmp_path):
    for path, load in zip(saved(tmp_path), (load_traces, load_plans), strict=True):
        with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("header.npy", npy(np.zeros(3)))
        assert "one name" in refused(load, path)


@pytest.mark.slow
def test_columns_that_would_fill_the_memory_are_refused_before_they_are_read(tmp_path):
    for path, name, load in zip(
        saved(tmp_path), ("d0.extra.a", "0.schedule_row"), (load_traces, load_plans), strict=True
    ):
        rewrite(path, {f"{name}.npy": npy(np.zeros(40 << 20))}, zipfile.ZIP_DEFLATED)
        assert path.stat().st_size < 1 << 20
        assert "more than the" in refused(load, path)


@pytest.mark.parametrize("stated", [1, 100_000, 0xFFFF_FFF0])
def test_a_directory_that_lies_about_a_size_is_refused(tmp_path, stated):
    trace, _ = saved(tmp_path)
    rewrite(trace, {"d0.size.npy": npy(np.zeros(1 << 20, np.int64))}, zipfile.ZIP_DEFLATED)
    data = bytearray(trace.read_bytes())
    entry = data.rindex(b"d0.size.npy") - 46
    struct.pack_into("<I", data, entry + 24, stated)
    trace.write_bytes(data)
    assert "damaged trace file" in refused(load_traces, trace)


COLUMN_CHANGES = {
    "fractions": np.array([8.0, 600.0, 16.0]),
    "texts": np.array(["8", "600", "16"]),
    "two dimensions": np.array([[8], [600], [16]]),
    "none": np.array(8),
    "too short": np.array([8]),
    "far below": np.array([-(2**62)] * 3),
    "far above": np.array([2**62] * 3),
    "unsigned and far above": np.array([2**64 - 1] * 3, np.uint64),
}


@pytest.mark.parametrize("column", ["start", "end", "size", "stream", "free_requested"])
@pytest.mark.parametrize("change", COLUMN_CHANGES.values(), ids=COLUMN_CHANGES)
def test_columns_of_another_trace_are_refused(tmp_path, column, change):
    trace, _ = saved(tmp_path)
    rewrite(trace, {f"d0.{column}.npy": npy(change)})
    assert str(trace) in refused(load_traces, trace)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_that_is_missing_is_named(tmp_path, name):
    trace, _ = saved(tmp_path)
    rewrite(trace, {f"d0.{name}.npy": None})
    assert f"d0.{name} is missing" in refused(load_traces, trace)


EVENTS = {
    "start": np.array([0, 2, 3]),
    "end": np.array([3, 4, 4]),
    "free_requested": np.array([4, 4, 0]),
    "event_request": np.array([1, 0, 0, 2]),
    "action": np.array([0, 0, 0, 0], np.int8),
    "size": np.array([-8, 600, 16]),
    "event_size": np.array([8, 600, 8, -16]),
    "time_us": np.array([0, -(2**63), 0, 2**63 - 1]),
    "mark_name": np.array([1]),
    "mark_event": np.array([5]),
    "event_stream": np.array([0, 0, 0, 1]),
}


@pytest.mark.parametrize("name", EVENTS)
def test_events_and_requests_that_contradict_each_other_are_refused(tmp_path, name):
    trace, _ = saved(tmp_path)
    rewrite(trace, {f"d0.{name}.npy": npy(EVENTS[name])})
    assert "the file is damaged" in refused(load_traces, trace)


TABLES = {
    "id": np.arange(2),
    "offset": np.array([0, 1, -5]),
    "alignment": np.array([1.0, 2.0, 3.0]),
    "segment_pool": np.zeros((1, 3), np.int64),
    "segment_is_small": np.zeros(1, np.int8),
    "block_request": np.array([7]),
    "block_address": np.array([2**64 - 1], np.uint64),
    "site": np.array([5, 5, 5]),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_do_not_fit_are_refused_by_every_verb_that_reads_them(tmp_path, name, capsys):
    from stalloc.cli import main

    trace, _ = saved(tmp_path)
    changes = {f"d0.extra.{name}.npy": npy(TABLES[name])}
    if name == "block_request":
        changes |= {f"d0.extra.block_{column}.npy": npy(np.array([1])) for column in ("address", "size")}
    if name == "site":
        for other in ("event_site", "site_begin", "site_frame", "site_text"):
            changes[f"d0.extra.{other}.npy"] = npy(np.zeros(1, np.int64))
    rewrite(trace, changes)
    assert main(["diff", str(trace), str(trace)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def _of_device(name, value):
    return lambda header: header["devices"][0].update({name: value})


def _of_info(name, value):
    return lambda header: header["devices"][0]["info"].update({name: value})


HEADERS = {
    "no devices": lambda header: header.update(devices=[]),
    "devices that are none": lambda header: header.update(devices={"a": 1}),
    "a device that is none": lambda header: header.update(devices=[3]),
    "a device twice": lambda header: header.update(devices=header["devices"] * 2),
    "a schema that is true": lambda header: header.update(schema=True),
    "a schema that is a list": lambda header: header.update(schema=[[1]]),
    **{f"device {value}": _of_device("device", value) for value in (float("inf"), float("nan"), -1, 10**30, "0", None)},
    "streams of text": _of_device("streams", ["a"]),
    "no list of streams": _of_device("streams", 0),
    "a stream beyond 64 bits": _of_device("streams", [10**30]),
    "names that are none": _of_device("names", [1]),
    "bytes below zero": _of_device("reserved_start_bytes", -1),
    "bytes beyond 64 bits": _of_device("reserved_start_bytes", 10**30),
    "no info": _of_device("info", [1]),
    "no list of notes": _of_info("notes", 5),
    "notes of lists": _of_info("notes", [[1]]),
    "a source that is a list": _of_info("source", [1]),
    "settings that are no dictionary": _of_info("allocator_settings", "expandable_segments:True"),
    "settings of lists": _of_info("allocator_settings", {"a": [1]}),
    "unseen bytes of text": _of_info("unseen_bytes", "many"),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_headers_that_lie_are_refused(tmp_path, change):
    trace, _ = saved(tmp_path)
    change_header(trace, change)
    assert str(trace) in refused(load_traces, trace)


@pytest.mark.parametrize(
    "text",
    [
        b'{"format": "stalloc trace", "schema": ' + b"1" * 5000 + b"}",
        b'{"format": "stalloc trace", "schema": 1, "devices": [{"device": 1e400}]}',
        b"[" * 100_000,
        b"\xff\xfe\x00",
        b'"stalloc trace"',
        b"[]" + b" " * (17 << 20),
    ],
    ids=range(6),
)
def test_header_texts_that_are_none_are_refused(tmp_path, text):
    for path, load in zip(saved(tmp_path), (load_traces, load_plans), strict=True):
        rewrite(path, {"header.npy": npy(np.frombuffer(text, np.uint8))})
        refused(load, path)


def requests(sizes) -> str:
    return "id,lower,upper,size\n" + "".join(f"{i},0,9,{size}\n" for i, size in enumerate(sizes))


@pytest.mark.parametrize("verb", ["stats", "plan", "simulate", "explain"])
@variants("sizes", [[2**63 - 5] * 4, [2**62] * 2, [2**61 - 1], [1 << 44] * 200_000], always=3)
def test_sums_beyond_64_bits_are_refused_and_not_wrapped(tmp_path, capsys, verb, sizes):
    from stalloc.cli import main

    path = tmp_path / "x.csv"
    path.write_text(requests(sizes))
    assert main([verb, str(path)]) == 2
    said = capsys.readouterr()
    assert "more than 2**61 bytes" in said.err
    assert said.err.count("\n") == 1
    assert not said.out


def test_an_alignment_that_leaves_64_bits_is_refused(tmp_path, capsys):
    from stalloc.cli import main

    path = tmp_path / "x.csv"
    path.write_text(requests([1, 2, 3]))
    for verb in ("stats", "plan"):
        assert main([verb, str(path), "--align", str(1 << 60)]) == 2
        assert "2**61 bytes" in capsys.readouterr().err


def test_what_ran_out_of_memory_may_have_asked_for_more_than_any_device_has():
    action, address, size = np.array([0, 7, 7, 7]), np.array([64, 0, 0, 0]), np.array([8, *[1 << 60] * 3])
    zero = np.zeros(4, np.int64)
    trace = from_recorded(0, action, address, size, zero, zero, [], [0])
    assert trace.event_size.max() == 1 << 60
    with pytest.raises(BadInputError, match="more than 2\\*\\*61 bytes"):
        trace.replace(action=np.array([0, 3, 3, 3]))
