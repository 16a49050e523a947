"""The files that are mutated: a small file of each kind, made here, and recorded traces cut to a few events.

Contract: a seed made here is read without an error as it is; of the recorded ones those that the whole file is.
"""

import base64
import gzip
import io
import json
import pickle
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.errors import BadInputError
from stalloc.planner import plan, save_plans
from stalloc.trace import load_traces, save_traces
from stalloc.trace.operations import ModuleName, Operations, RangeKind, Role

from .mutations import members_of, mutate_archive, mutate_json, mutate_lines, mutate_page, mutate_pickle, opcodes

Mutator = Callable[[random.Random, bytes, bytes], bytes]
MUTATORS: dict[str, tuple[str, Mutator]] = {
    "snapshot": (".pickle", mutate_pickle),
    "kineto": (".json", mutate_json),
    "timeline": (".json", mutate_json),
    "page": (".html", mutate_page),
    "dtr": (".log", mutate_lines),
    "rmm": (".csv", mutate_lines),
    "csv": (".csv", mutate_lines),
    "trace": (".trace.npz", mutate_archive),
    "plan": (".plan.npz", mutate_archive),
    "fixed": (".csv", mutate_lines),
}
"""By kind of file: how names end, and what mutates it."""
KEPT_EVENTS, KEPT_FRAMES = 80, 3
ADDRESS, MIB = 0x7F00_0000_0000, 1 << 20


@dataclass(frozen=True)
class Seed:
    name: str
    kind: str
    data: bytes  #: never packed by gzip
    partner: str = ""  #: of a plan or of places to keep: the seed that has the requests


def own_seeds() -> list[Seed]:
    snapshot, sizes = _snapshot(), [5, 600, 4096, 70]
    elements = {"actions": [0, 1, 0, 1, 2, 3, 2, 3] * 2, "elements_size": sizes, "initially_allocated": [3]}
    seeds = [
        Seed("snapshot", "snapshot", pickle.dumps(snapshot, protocol=4)),
        Seed("snapshot, protocol 2", "snapshot", pickle.dumps(snapshot, protocol=2)),
        Seed("kineto", "kineto", json.dumps(_kineto()).encode()),
        Seed("timeline", "timeline", json.dumps(_timeline()).encode()),
        Seed("page", "page", b"<html>\nlet alloc_data = " + json.dumps(elements).encode() + b"\n</html>\n"),
        Seed("page of a snapshot", "page", _page(pickle.dumps(snapshot, protocol=4))),
        Seed("dtr", "dtr", _dtr()),
        Seed("rmm", "rmm", _rmm()),
        Seed("csv", "csv", _csv()),
        Seed("fixed", "fixed", b"id,offset\n1,0\n3,4096\n", partner="csv"),
    ]
    made = []
    for seed in (seeds[0], seeds[2], seeds[8]):
        made.append(Seed(f"trace of {seed.name}", "trace", _as_trace(seed)))
        made.append(Seed(f"plan of {seed.name}", "plan", _as_plan(seed), seed.name))
    return [*seeds, *made, Seed("trace with operations", "trace", _with_operations(seeds[0]))]


def shared_seeds(folder: Path) -> list[Seed]:
    """The recorded traces of a folder, cut to a few events, and snapshots also as traces and plans of stalloc."""
    seeds = []
    for path in sorted([*folder.glob("*.gz"), *folder.glob("*/*.gz")]):
        name = str(path.relative_to(folder))
        kind, cut = _cut(name, gzip.decompress(path.read_bytes()))
        seed = Seed(name, kind, cut)
        seeds.append(seed)
        if kind == "snapshot":
            try:
                trace, made = _as_trace(seed), _as_plan(seed)
            except BadInputError:
                continue  # one that is there to be refused
            seeds += [Seed(f"{name}, trace", "trace", trace), Seed(f"{name}, plan", "plan", made, name)]
    return seeds


def parse(kind: str, data: bytes) -> None:
    """Take a file apart here, so that children need not."""
    if kind == "snapshot":
        opcodes(data)
    elif kind in ("trace", "plan"):
        members_of(data)


def load(seed: Seed) -> Any:
    with tempfile.TemporaryDirectory(prefix="stalloc-") as folder:
        path = Path(folder) / f"seed{MUTATORS[seed.kind][0]}"
        path.write_bytes(seed.data)
        return load_traces(path)


def _written(kind: str, write: Callable[[Path], None]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="stalloc-") as folder:
        path = Path(folder) / f"seed{MUTATORS[kind][0]}"
        write(path)
        return path.read_bytes()


def _as_trace(seed: Seed) -> bytes:
    return _written("trace", lambda path: save_traces(path, load(seed)))


def _as_plan(seed: Seed) -> bytes:
    return _written("plan", lambda path: save_plans(path, [plan(trace) for trace in load(seed)]))


def _with_operations(seed: Seed) -> bytes:
    """The traces of a seed, with a module that makes every request in an operation of its own."""
    traces = []
    for trace in load(seed):
        rows = np.flatnonzero(trace.start >= 0)
        begin = np.concatenate([[0], trace.start[rows]])
        end = np.concatenate([[trace.num_events], trace.start[rows] + 1])
        ones = np.ones(len(rows), np.int64)
        made_by = np.full(trace.num_requests, -1)
        made_by[rows] = np.arange(len(rows)) + 1
        tensor, roles = {"tensor": ["float32", [2, 3], [3, 1]]}, np.arange(trace.num_requests) % len(Role)
        kinds = {"kind": np.concatenate([[int(RangeKind.MODULE)], 0 * ones]), "role": roles, "made_by": made_by}
        of_none = np.concatenate([[-1], 0 * ones])
        ranges = {"parent": of_none, "shape": of_none, "module": np.concatenate([[1], -ones])}
        ranges |= {"begin": begin, "end": end, "thread": np.zeros(len(begin)), "sequence": np.arange(len(begin))}
        accesses = {"access_op": np.arange(len(rows)) + 1, "access_request": rows, "access_kind": rows % 2}
        shapes = {"shape_flops": 6, "shape_read_bytes": 48, "shape_written_bytes": 24, "shape_ns": 0}
        modules = (ModuleName("", "Model"), ModuleName("layers.0", "Layer"))
        operations = Operations(
            **ranges,
            **kinds,
            **accesses,
            **{name: np.array([value]) for name, value in shapes.items()},
            name=np.concatenate([[0], ones]),
            names=("module", "aten::mul"),
            shapes=(["aten::mul", "Tensor", [tensor, tensor]],),
            modules=modules,
            module_parent=np.array([-1, 0]),
            module_is_block=np.array([0, 1]),
        )
        traces.append(trace.replace(extra=trace.extra | operations.columns()))
    return _written("trace", lambda path: save_traces(path, traces))


def _cut(name: str, data: bytes) -> tuple[str, bytes]:
    if ".pickle" in name:
        return "snapshot", _cut_snapshot(data)
    if ".csv" in name:
        return "csv", b"\n".join(data.split(b"\n")[: KEPT_EVENTS + 1])
    if ".log" in name:
        return "dtr", b"\n".join(data.split(b"\n")[:KEPT_EVENTS])
    if ".html" in name:
        return "page", data
    content = json.loads(data)
    if isinstance(content, list) and content and isinstance(content[0], list):
        first = next(number for number, row in enumerate(content) if row[0] >= 0)
        return "timeline", json.dumps(content[first : first + KEPT_EVENTS]).encode()
    events = content["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]" and event["args"].get("Device Type") != 0]
    others = [event for event in events if event.get("cat") == "user_annotation"]
    content = {name: value for name, value in content.items() if name in ("deviceProperties", "schemaVersion")}
    return "kineto", json.dumps(content | {"traceEvents": others[:5] + memory[-KEPT_EVENTS:]}).encode()


def _cut_snapshot(data: bytes) -> bytes:
    """The last events of each device, with short stacks; what was allocated before is then live from the beginning."""
    snapshot = pickle.loads(data)
    for history in snapshot["device_traces"]:
        del history[:-KEPT_EVENTS]
        for event in history:
            event["frames"] = event.get("frames", [])[:KEPT_FRAMES]
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            block.pop("history", None)
            if "frames" in block:
                block["frames"] = block["frames"][:KEPT_FRAMES]
    snapshot["external_annotations"] = (snapshot.get("external_annotations") or [])[-10:]
    return pickle.dumps(snapshot, protocol=4)


def _event(action: str, place: int, size: int, time: int, stream: int = 0) -> dict[str, Any]:
    frames = [
        {"filename": "/home/me/model.py", "line": 57 + size % 3, "name": "forward"},
        {"filename": "??", "line": 0, "name": "at::native::empty_cuda(c10::ArrayRef<long>)"},
    ]
    told = {"action": action, "addr": ADDRESS + place, "size": size, "stream": stream}
    return told | {"time_us": 10**15 + time, "frames": frames}


def _snapshot() -> dict[str, Any]:
    """Four steps on two streams, a failure at the end, private and expandable segments; a second device."""
    history = [_event("segment_alloc", 0, 4 * MIB, 0), _event("segment_map", 8 * MIB, 2 * MIB, 1, 7)]
    for step in range(4):
        time = 10 * step + 2
        for number, size in enumerate((600_000, 1 << 20, 3000)):
            history.append(_event("alloc", number * MIB, size, time + number))
        history.append(_event("alloc", 8 * MIB, 2048, time + 3, 7))
        for number, size in ((2, 3000), (1, 1 << 20), (0, 600_000)):
            history.append(_event("free_requested", number * MIB, size, time + 5))
            history.append(_event("free_completed", number * MIB, size, time + 6))
        history += [_event(f"free_{how}", 8 * MIB, 2048, time + 7, 7) for how in ("requested", "completed")]
    history.append(_event("alloc", 3 * MIB, 100_000, 60))
    history.append(_event("oom", 0, 1 << 33, 61) | {"device_free": 1 << 20})
    block = {"size": MIB, "requested_size": 900_000, "state": "active_allocated", "frames": history[2]["frames"]}
    free = {"size": 3 * MIB, "requested_size": 0, "state": "inactive", "frames": []}
    last = block | {"requested_size": 100_000, "size": MIB}
    marks = [
        {"stage": stage, "name": name, "device": 0, "time_us": 10**15 + time}
        for stage, name, time in (("START", "ProfilerStep#1", 2), ("START", "forward", 3), ("END", "forward", 5))
    ]
    segments = [
        _segment(0, 0, [free, last]),
        _segment(0, 8 * MIB, [free | {"size": 2 * MIB}], stream=7, is_expandable=True),
        _segment(0, 64 * MIB, [block, free | {"size": MIB}], segment_pool_id=(0, 3)),
        _segment(1, 128 * MIB, [block]),
    ]
    other = [_event("alloc", 128 * MIB, 900_000, 4)]
    return {
        "segments": segments,
        "device_traces": [history, other],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128", "expandable_segments": False},
        "external_annotations": marks,
    }


def _segment(device: int, place: int, blocks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    at, listed = ADDRESS + place, []
    for block in blocks:
        listed.append(block | {"address": at})
        at += block["size"]
    size = sum(block["size"] for block in blocks)
    common = {"stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
    return {"device": device, "address": ADDRESS + place, "total_size": size, "blocks": listed} | common | more


def _kineto() -> dict[str, Any]:
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 1, "dur": 20.5}
    ]
    copy = {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 4096}}
    for number, work in enumerate(
        ({"cat": "kernel", "name": "k", "args": {}}, copy, {"cat": "gpu_memset", "args": {}})
    ):
        shared, call = {"device": 0, "correlation": number}, {"cat": "cuda_runtime", "name": "cudaLaunchKernel"}
        events.append({"ph": "X", "pid": 1, "tid": 1, "ts": number, "dur": 1, "args": {"correlation": number}} | call)
        events.append({"ph": "X", "name": "s", "ts": 2 * number, "dur": 3} | work | {"args": work["args"] | shared})
    total, time = 4096, 0
    for step in range(4):
        for size, address in ((512, 64), (1 << 20, 4096), (-512, 64), (2048, 64), (-(1 << 20), 4096), (-2048, 64)):
            total, time = total + size, time + 1
            args = {"Device Type": 1, "Device Id": 0, "Bytes": size, "Addr": address, "Ev Idx": time}
            totals = {"Total Allocated": total, "Total Reserved": 2 << 20 if step else 1 << 21}
            events.append({"ph": "i", "name": "[memory]", "ts": time, "args": args | totals})
    properties = [{"id": 0, "name": "GPU", "totalGlobalMem": 1 << 33}]
    return {"schemaVersion": 1, "stalloc_notes": ["made up"], "deviceProperties": properties, "traceEvents": events}


def _timeline() -> list[list[int]]:
    rows = [[-1, 1, 512, 0]]
    for step in range(4):
        for number, size in enumerate((600, 4096, -600, -4096)):
            rows.append([10 * step + number, 2 if size > 0 else 4, size, step % 3])
        rows += [[10 * step + 5, 3, -512, 0], [10 * step + 5, 3, 512, 0]]
    return rows


def _page(snapshot: bytes) -> bytes:
    encoded = base64.b64encode(snapshot).decode()
    return f'<html>\nadd_local_files([{{"name": "s.pickle", "base64": "{encoded}"}}])\n</html>\n'.encode()


def _dtr() -> bytes:
    lines = [{"INSTRUCTION": "CONSTANT", "NAME": "w"}, {"INSTRUCTION": "MEMORY", "MEMORY": "4096", "NAME": "w"}]
    for step in range(4):
        name = f"t{step}"
        lines += [
            {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "FORWARD"},
            {"INSTRUCTION": "CALL", "NAME": "add", "ARGS": ["w"], "TIME": "12", "RESULT": [name]},
            {"INSTRUCTION": "MEMORY", "MEMORY": "600", "NAME": name},
            {"INSTRUCTION": "ALIAS", "ALIAS": "-1", "NAME": name},
            {"INSTRUCTION": "COPY", "SRC": name, "DST": f"{name}b"},
            {"INSTRUCTION": "RELEASE", "NAME": name},
            {"INSTRUCTION": "RELEASE", "NAME": f"{name}b"},
        ]
    return "\n".join(json.dumps(line, separators=(",", ":")) for line in lines).encode()


def _rmm() -> bytes:
    out = io.StringIO("Thread,Time,Action,Pointer,Size,Stream\n")
    out.seek(0, io.SEEK_END)
    for step in range(4):
        for number, (action, place, size) in enumerate(
            (("allocate", 256, 600), ("allocate", 4096, 70_000), ("free", 256, 600), ("free", 4096, 70_000))
        ):
            out.write(f"1,10:00:{step:02}.{number:06},{action},0x{place:x},{size},0x{number % 2}\n")
    out.write("1,10:00:09.000001,allocate failure,(nil),8589934592,0x0\n")
    return out.getvalue().encode()


def _csv() -> bytes:
    rows = ["id,lower,upper,size,offset,stream"]
    rows += [f"{n},{n},{n + 2 + n % 5},{512 + 100 * (n % 3)},{4096 * n},{n % 2}" for n in range(24)]
    return "\n".join(rows).encode()
