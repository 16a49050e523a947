"""Damaged recordings of every kind: a Trace or one sentence comes out, never anything else."""

import json
import random

import pytest

from stalloc.errors import BadInputError
from stalloc.trace import load_traces

SEED = 20250
ROUNDS = 400


def _event(size, address, time):
    args = {"Device Type": 1, "Device Id": 0, "Bytes": size, "Addr": address, "Total Allocated": 4096, "Ev Idx": time}
    return {"ph": "i", "name": "[memory]", "ts": time, "args": args}


_EVENTS = [_event(512, 64, 0), _event(1024, 1024, 1), _event(-512, 64, 2), _event(512, 64, 3)]
_STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 1, "dur": 1.5}
KINDS = {
    "trace.json": json.dumps({"deviceProperties": [{"id": 0, "name": "GPU"}], "traceEvents": [_STEP, *_EVENTS]}),
    "old.json": json.dumps({"traceEvents": _EVENTS}).replace('"Addr"', '"Nothing"'),
    "timeline.json": "[[-1, 1, 512, 0], [1, 2, 600, 1], [2, 3, -600, 1], [2, 3, 600, 2], [3, 4, -600, 2]]",
    "page.html": '<html>\nlet alloc_data = {"actions": [0, 1, 0], "elements_size": [5, 6], "initially_allocated": []}',
    "dtr.log": '{"INSTRUCTION":"CONSTANT","NAME":"a"}\n{"INSTRUCTION":"MEMORY","MEMORY":"64","NAME":"a"}\n'
    '{"INSTRUCTION":"COPY","SRC":"a","DST":"b"}\n{"INSTRUCTION":"RELEASE","NAME":"a"}\n'
    '{"INSTRUCTION":"RELEASE","NAME":"b"}\n',
    "rmm.csv": "Thread,Time,Action,Pointer,Size,Stream\n1,10:00:00.000001,allocate,0x100,64,0x0\n"
    "1,10:00:00.000002,allocate,0x200,64,0x1\n1,10:00:00.000003,free,0x100,64,0x0\n",
    "plan.csv": "id,lower,upper,size,offset,stream\n0,1,5,64,0,0\n1,2,3,128,512,1\n",
}
_PIECES = [
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b",",
    b"-",
    b"0",
    b"9" * 25,
    b"1e999",
    b"null",
    b"NaN",
    b"\\",
    b"\n",
    b"\xff",
    b"\0",
]


def _damage(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice([0, 1, 1, 2, 10]))
        piece = rng.choice([*_PIECES, b"", data[rng.randrange(len(data) + 1) :][: rng.randint(1, 60)]])
        data = data[:at] + piece + data[to:]
    return data


@pytest.mark.parametrize("name", KINDS)
def test_damage_ends_in_a_trace_or_in_one_sentence(tmp_path, name):
    print(f"seed {SEED}")
    rng = random.Random(f"{SEED} {name}")
    path = tmp_path / name
    path.write_text(KINDS[name])
    assert load_traces(path)
    refused: list[str] = []
    for _ in range(ROUNDS):
        path.write_bytes(_damage(rng, KINDS[name].encode()))
        try:
            assert all(trace.num_requests for trace in load_traces(path))
        except BadInputError as error:
            refused.append(str(error))
    assert not [sentence for sentence in refused if "\n" in sentence]
    assert len(refused) > ROUNDS // 10
