"""Files of every kind with one thing in them that no tool writes: every verb ends by itself, with one sentence or none.

The verbs run on each file; an exit code of 2 comes with one sentence on standard error, any other without a traceback.
"""

import base64
import gzip
import json
import pickle

import pytest

from stalloc.cli import main

DIGITS = "9" * 5000
BLOCK = {"size": 512, "requested_size": 10, "state": "active_allocated", "address": 1 << 47}
SEGMENT = {"device": 0, "address": 1 << 47, "total_size": 512, "stream": 0, "blocks": [BLOCK]}
ALLOC = {"action": "alloc", "addr": 1 << 47, "size": 10, "stream": 0, "time_us": 5}
SNAPSHOT = {"segments": [SEGMENT], "device_traces": [[ALLOC]]}


def snapshot(**changes) -> bytes:
    return pickle.dumps(SNAPSHOT | changes)


def event(**changes) -> bytes:
    return snapshot(device_traces=[[ALLOC | changes]])


def segment(**changes) -> bytes:
    return snapshot(segments=[SEGMENT | changes])


def block(**changes) -> bytes:
    return segment(blocks=[BLOCK | changes])


def kineto(args=(), top=(), **changes) -> bytes:
    known = {"Device Type": 1, "Device Id": 0, "Bytes": 512, "Addr": 64, "Total Allocated": 512, "Total Reserved": 512}
    entry = {"ph": "i", "name": "[memory]", "ts": 1, "args": known | dict(args)} | changes
    return json.dumps({"traceEvents": [entry]} | dict(top)).encode()


def page(text: bytes) -> bytes:
    return b'<html>\n{"base64": "' + text + b'"}'


def elements(**changes) -> bytes:
    data = {"actions": [0, 1, 0], "elements_size": [5, 6], "initially_allocated": []} | changes
    return b"<html>\nlet alloc_data = " + json.dumps(data).encode()


def csv(*rows: str, header="id,lower,upper,size") -> bytes:
    return "\n".join([header, *rows, ""]).encode()


RMM = "Thread,Time,Action,Pointer,Size,Stream"
DTR = '{"INSTRUCTION":"CONSTANT","NAME":"a"}\n{"INSTRUCTION":"MEMORY","MEMORY":%s,"NAME":"a"}\n'
FILES = {
    "csv: a size of 5,000 digits": csv(f"0,0,5,{DIGITS}"),
    "csv: an id of 5,000 digits": csv(f"{DIGITS},0,5,1"),
    "csv: an offset of 5,000 digits": csv(f"0,0,5,1,{DIGITS}", header="id,lower,upper,size,offset"),
    "csv: an end after 10 billion events": csv("0,0,10000000000,512", "1,5,9,512"),
    "csv: an end at the edge of 64 bits": csv(f"0,0,{2**63 - 2},512", f"1,{2**62},{2**63 - 2},64"),
    "csv: a stream at the edge of 64 bits": csv(f"0,0,9,512,{2**63 - 2}", header="id,lower,upper,size,stream"),
    "csv: an alignment that is none": csv("0,0,9,512,3", header="id,lower,upper,size,alignment"),
    "csv: sizes of zero": csv("0,0,9,0", "1,0,9,0"),
    "csv: no lines": csv(),
    "csv: in UTF-16": csv("0,0,9,512").decode().encode("utf-16"),
    "csv: no UTF-8": csv("0,0,9,512") + b"\xff\xfe,,,",
    "csv: a NUL": csv("0,0,9,5\0"),
    "csv: digits of another script": csv("0,0,9,\u0665"),
    "csv: a cell without an end": csv('0,0,9,"5'),
    "csv: the same id": csv("0,0,9,5", "0,0,9,5"),
    "rmm: a size of 5,000 digits": csv(f"1,10:00:00.000001,allocate,0x100,{DIGITS},0x0", header=RMM),
    "rmm: a pointer of 5,000 digits": csv(f"1,10:00:00.000001,allocate,0x{DIGITS},1,0x0", header=RMM),
    "rmm: a stream beyond 64 bits": csv(f"1,10:00:00.000001,allocate,0x100,1,0x{'f' * 17}", header=RMM),
    "rmm: a long line": csv("," * 100_000, header=RMM),
    "dtr: a size of 5,000 digits": (DTR % DIGITS).encode(),
    "dtr: a size without end": (DTR % "1e400").encode(),
    "dtr: a size that is none": (DTR % "NaN").encode(),
    "dtr: nested deeply": (DTR % ("[" * 100_000)).encode(),
    "kineto: bytes as text": kineto({"Bytes": "512"}),
    "kineto: bytes without end": kineto({"Bytes": float("inf")}),
    "kineto: bytes that are none": kineto({"Bytes": float("nan")}),
    "kineto: bytes beyond 64 bits": kineto({"Bytes": 10**30}),
    "kineto: bytes of 5,000 digits": kineto().replace(b"512", DIGITS.encode()),
    "kineto: the smallest number of bytes": kineto({"Bytes": -(2**63)}),
    "kineto: an address as text": kineto({"Addr": "0x100"}),
    "kineto: a device below zero": kineto({"Device Id": -1}),
    "kineto: a device that is true": kineto({"Device Id": True}),
    "kineto: a device beyond all": kineto({"Device Id": 10**9}),
    "kineto: a time that is none": kineto(ts=float("nan")),
    "kineto: a time below zero": kineto(ts=-1),
    "kineto: args that are none": b'{"traceEvents": [{"name": "[memory]", "ts": 1, "args": [1]}]}',
    "kineto: totals beyond 64 bits": kineto({"Total Allocated": 2**64}),
    "kineto: properties that are none": kineto(top={"deviceProperties": 7}),
    "kineto: properties of text": kineto(top={"deviceProperties": [{"id": 0, "name": 3, "totalGlobalMem": "x"}]}),
    "kineto: memory beyond 64 bits": kineto(
        top={"deviceProperties": [{"id": 0, "totalGlobalMem": 10**30, "name": "G"}]}
    ),
    "kineto: notes that are none": kineto(top={"stalloc_notes": {"a": 1}}),
    "kineto: events that are none": b'{"traceEvents": 5}',
    "kineto: events twice": kineto()[:-1] + b', "traceEvents": []}',
    "kineto: nested deeply": b'{"traceEvents": [{"name": "[memory]", "args": ' + b"[" * 100_000,
    "kineto: nested deeply and closed": b'{"traceEvents": ["[memory]"' + b",[" * 50_000 + b"]" * 50_001 + b"}",
    "kineto: brackets that do not match": b'{"traceEvents": [{"name": "[memory]"]]}',
    "kineto: no UTF-8": kineto().replace(b"Addr", b"\xff\xfe"),
    "timeline: a size that is none": b"[[1, 2, NaN, 0]]",
    "timeline: a size without end": b"[[1, 2, 1e999, 0]]",
    "timeline: a time of 5,000 digits": f"[[{DIGITS}, 2, 5, 0]]".encode(),
    "timeline: fractions": b"[[1, 2, 5.5, 0]]",
    "timeline: nested deeply": b"[" * 100_000 + b"]" * 100_000,
    "page: base64 that is none": page(b"%%%%"),
    "page: base64 cut short": page(base64.b64encode(pickle.dumps(SNAPSHOT))[:-3]),
    "page: base64 of nothing": page(b""),
    "page: base64 of something else": page(base64.b64encode(b"PK\x03\x04")),
    "page: an element that is none": elements(actions=[7]),
    "page: elements of text": elements(elements_size=["5", "6"]),
    "page: elements that are no list": elements(actions={"a": 1}),
    "page: an element beyond 64 bits": elements(elements_size=[10**30, 1]),
    "page: no end": elements()[:-20],
    "page: nested deeply": b"<html>\nlet alloc_data = {" + b'"a":[' * 100_000,
    "gzip: garbage after the end": gzip.compress(csv("0,0,9,512")) + b"garbage",
    "gzip: in gzip": gzip.compress(gzip.compress(csv("0,0,9,512"))),
    "snapshot: sizes that add up beyond 64 bits": event(size=2**63 - 1),
    "snapshot: a size below zero": event(size=-5),
    "snapshot: a size beyond 64 bits": event(size=2**64),
    "snapshot: a size that is none": event(size=float("nan")),
    "snapshot: a size without end": event(size=float("inf")),
    "snapshot: a size of text": event(size=DIGITS),
    "snapshot: an address below zero": event(addr=-1),
    "snapshot: an address of None": event(addr=None),
    "snapshot: a stream beyond 64 bits": event(stream=2**64),
    "snapshot: a time beyond 64 bits": event(time_us=2**63 - 1),
    "snapshot: a time below zero": event(time_us=-(2**63)),
    "snapshot: an action that is a list": event(action=[]),
    "snapshot: an action that is None": event(action=None),
    "snapshot: an event that is a text": snapshot(device_traces=[["action"]]),
    "snapshot: devices beyond count": snapshot(device_traces=[[]] * 5000 + [[ALLOC]]),
    "snapshot: a segment below zero": segment(total_size=-512),
    "snapshot: a segment beyond 64 bits": segment(total_size=2**62),
    "snapshot: a segment at the edge of addresses": segment(address=2**64 - 1),
    "snapshot: a segment of no device": segment(device="all"),
    "snapshot: a segment without blocks": segment(blocks=None),
    "snapshot: a pool of three": segment(segment_pool_id=(0, 0, 0)),
    "snapshot: a pool of text": segment(segment_pool_id=("a", "b")),
    "snapshot: a block below zero": block(size=-512),
    "snapshot: a block that asks for more than there is": block(requested_size=2**62),
    "snapshot: a block with another address": block(address=1 << 50),
    "snapshot: a history that is a text": block(history="abc"),
    "snapshot: frames that are numbers": event(frames=[1, 2, 3]),
    "snapshot: frames without names": event(frames=[{"filename": "a"}]),
    "snapshot: annotations that are texts": snapshot(external_annotations=["mark"]),
    "snapshot: annotations without a time": snapshot(external_annotations=[{"stage": "START", "name": "x"}]),
    "snapshot: marks beyond the events": snapshot(external_annotations=[{"mark": (99, 0), "device": 0, "name": "x"}]),
    "snapshot: marks of no kind": snapshot(external_annotations=[{"mark": (0, 300), "device": 0, "name": "x"}]),
    "snapshot: settings that are none": snapshot(allocator_settings=[1]),
    "snapshot: settings of lists": snapshot(allocator_settings={"a": [1], 3: {"b": [1]}}),
    "snapshot: settings that contradict torch": snapshot(allocator_settings={"max_split_size": "many"}),
    "snapshot: settings without end": snapshot(allocator_settings={"max_split_size": float("inf")}),
    "snapshot: settings beyond 64 bits": snapshot(allocator_settings={"max_split_size": 10**30}),
    "snapshot: notes of a converter that is none": snapshot(stalloc={"devices": []}),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.csv").write_bytes(csv("0,0,9,512", "1,3,5,64"))
    assert main(["plan", "good.csv", "-o", "good.plan.npz"]) == 0
    return tmp_path


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_every_verb_ends_with_one_sentence_or_none(folder, said, content):
    (folder / "x").write_bytes(content)
    verbs = [
        ["stats", "x"],
        ["explain", "x"],
        ["plan", "x", "-o", "x.plan.npz"],
        ["simulate", "x", "--all"],
        ["diff", "good.csv", "x"],
        ["diff", "x", "x"],
        ["validate", "good.plan.npz", "x"],
        *(["convert", "x", f"out{suffix}", "--force"] for suffix in (".trace.npz", ".pickle", ".json", ".csv")),
    ]
    for verb in verbs:
        said()
        code = main(verb)
        message = said()
        assert code in (0, 1, 2), verb
        assert message.count("\n") == (code == 2), (verb, message)
        assert len(message) < 1000, verb
    if (folder / "out.trace.npz").exists():  # what was taken is no worse for having been kept
        assert main(["stats", "out.trace.npz"]) == 0, said()
