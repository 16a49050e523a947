"""Chrome's trace format as JSON, which Perfetto and chrome://tracing show: counters, a slice for each request, marks.

Allocated and reserved are counters; a request is an asynchronous slice from alloc to free_completed; steps and phases
are annotations. The `[memory]` events that torch.profiler writes are there too, so that readers of its traces, stalloc
among them, get every request back: whatever dies or is born in the record has an address, made up where the source has
none. Times are microseconds from the first event, or event indices where the source has no times.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.trace import MARK_PHASE_BEGIN, MARK_STEP, Action, Trace
from stalloc.trace.sites import UNKNOWN, site_names
from stalloc.writers.placing import Places, places_of
from stalloc.writers.writing import write_chunks

_CUDA = 1  # the device type, as torch counts them
_STEP = "ProfilerStep#"
_BATCH = 1000


def write_perfetto(path: Path, traces: Sequence[Trace]) -> list[str]:
    """Write the traces, a process each; returns what had to be made up or left out, a sentence each."""
    placed = [(trace, places_of(trace)) for trace in traces]
    notes = list(dict.fromkeys(note for trace, places in placed for note in _notes(trace, places)))
    write_chunks(path, _chunks(placed, notes))
    return notes


def _chunks(placed: Sequence[tuple[Trace, Places]], notes: list[str]) -> Iterator[bytes]:
    traces = [trace for trace, _ in placed]
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "stalloc_notes": notes,
        "otherData": {
            "written_by": "stalloc convert",
            "devices": {
                str(trace.device): {
                    "source": str(trace.info.get("source", "")),
                    "file": str(trace.info.get("file", "")),
                    "clock": "microseconds" if _has_clock(trace) else "event index",
                    "notes": [str(note) for note in trace.info.get("notes", [])],
                }
                for trace in traces
            },
        },
        "deviceProperties": [
            {"id": trace.device, "name": trace.info["device_name"], "totalGlobalMem": trace.info.get("total_bytes", 0)}
            for trace in traces
            if isinstance(trace.info.get("device_name"), str)
        ],
    }
    yield json.dumps(head, separators=(",", ":"))[:-1].encode() + b',"traceEvents":['
    separator = b"\n"
    for trace, places in placed:
        events = _trace_events(trace, places)
        while batch := list(itertools.islice(events, _BATCH)):  # half the time of one by one
            yield separator + json.dumps(batch, separators=(",", ":"))[1:-1].encode()
            separator = b",\n"
    yield b"\n]}\n"


def _trace_events(trace: Trace, places: Places) -> Iterator[dict[str, Any]]:
    pid = trace.device
    source = f"device {trace.device}, {trace.info.get('source', '')}"
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": source}}
    clock = _clock(trace)
    yield from _marks(trace, clock)
    yield from _slices(trace, clock.at(np.maximum(trace.start, 0)), clock.at(trace.end))
    yield from _memory_events(trace, places.address, clock)


class _Clock(NamedTuple):
    """Microseconds at which events are; where the source has no times, an event takes one."""

    at: Callable[[Column], Column]  #: of (k,) events, each from 0 to the end of the record
    end: float


def _clock(trace: Trace) -> _Clock:
    count = trace.num_events
    if not _has_clock(trace):
        return _Clock(lambda events: events.astype(np.float64), float(count))
    since = (trace.time_us - trace.time_us[0]).astype(np.float64)
    same = np.concatenate([[True], np.diff(trace.time_us) != 0])
    index = np.arange(count)
    since += np.minimum(index - np.maximum.accumulate(np.where(same, index, 0)), 900) / 1000  # keeps their order
    times = np.append(since, since[-1] + 1)
    return _Clock(times.__getitem__, float(times[-1]))


def _has_clock(trace: Trace) -> bool:
    return bool(len(trace.time_us) and trace.time_us[0] > 0 and np.all(np.diff(trace.time_us) >= 0))


def _marks(trace: Trace, clock: _Clock) -> Iterator[dict[str, Any]]:
    """Steps and phases as slices: a phase ends with its own end, a step where the next begins, or with the record."""
    spans: list[tuple[float, float, str]] = []
    open_phases: list[tuple[float, str]] = []
    times = clock.at(trace.mark_event)
    steps = [*times[trace.mark_kind == MARK_STEP].tolist(), clock.end]
    num_steps = 0
    for at, kind, index in zip(times.tolist(), trace.mark_kind.tolist(), trace.mark_name.tolist(), strict=True):
        name = trace.names[index]
        if kind == MARK_STEP:
            num_steps += 1
            spans.append((at, steps[num_steps], name if name.startswith(_STEP) else f"{_STEP}{num_steps - 1}"))
        elif kind == MARK_PHASE_BEGIN:
            open_phases.append((at, name))
        else:
            opened = next((i for i in reversed(range(len(open_phases))) if open_phases[i][1] == name), None)
            if opened is not None:
                spans.append((open_phases.pop(opened)[0], at, name))
    spans += [(began, clock.end, name) for began, name in open_phases]
    for began, ended, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        common = {"ph": "X", "cat": "user_annotation", "name": name, "pid": trace.device, "tid": 0}
        yield common | {"ts": round(began, 3), "dur": round(ended - began, 3)}


def _slices(trace: Trace, begin: Column, end: Column) -> Iterator[dict[str, Any]]:
    names = site_names(trace, np.arange(trace.num_requests))
    columns = (begin, end, trace.size, trace.stream, trace.start, trace.end)
    for row, (began, ended, size, stream, start, stop) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        name = f"{size} bytes" if names[row] == UNKNOWN else names[row]
        common = {"cat": "request", "name": name, "id2": {"local": hex(row)}, "pid": trace.device, "tid": 0}
        args = {"bytes": size, "stream": trace.streams[stream], "event": start, "end_event": stop}
        yield common | {"ph": "b", "ts": round(began, 3), "args": args}
        yield common | {"ph": "e", "ts": round(ended, 3)}


def _memory_events(trace: Trace, address: Column, clock: _Clock) -> Iterator[dict[str, Any]]:
    """The counters, and what torch.profiler writes of allocs, frees and failures, with totals after each."""
    unseen = trace.info.get("unseen_bytes", 0)
    allocated = int(trace.size[trace.start < 0].sum()) + (unseen if isinstance(unseen, int) else 0)
    if len(trace.action):
        event, action, row, size = np.arange(trace.num_events), trace.action, trace.event_request, trace.event_size
        reserved: Column | None = trace.reserved_bytes()
        if not np.any(reserved):
            reserved = None
    else:
        freed, born = np.flatnonzero(trace.end < trace.num_events), np.flatnonzero(trace.start >= 0)
        event = np.concatenate([trace.end[freed], trace.start[born]])
        order = np.argsort(event, kind="stable")
        row = np.concatenate([freed, born])[order]
        action = np.repeat([Action.FREE_COMPLETED, Action.ALLOC], [len(freed), len(born)])[order]
        event, size, reserved = event[order], trace.size[row], None
    shown_reserved = trace.reserved_start_bytes
    yield _counter(trace, "allocated", 0.0, allocated)
    if reserved is not None:
        yield _counter(trace, "reserved", 0.0, shown_reserved)
    columns = (clock.at(event).tolist(), action.tolist(), row.tolist(), size.tolist())
    for place, (at, kind, request, num_bytes) in enumerate(zip(*columns, strict=True)):
        time = round(at, 3)
        if reserved is not None and int(reserved[place]) != shown_reserved:
            shown_reserved = int(reserved[place])
            yield _counter(trace, "reserved", time, shown_reserved)
        if kind not in (Action.ALLOC, Action.FREE_COMPLETED, Action.OOM):
            continue
        args: dict[str, Any] = {"Device Type": _CUDA, "Device Id": trace.device, "Ev Idx": place, "Bytes": num_bytes}
        if kind != Action.OOM:
            num_bytes = int(trace.size[request])
            args |= {"Bytes": num_bytes if kind == Action.ALLOC else -num_bytes, "Addr": int(address[request])}
            allocated += args["Bytes"]
            yield _counter(trace, "allocated", time, allocated)
        args["Total Allocated"] = allocated
        if reserved is not None:
            args["Total Reserved"] = shown_reserved
        name = "[OutOfMemory]" if kind == Action.OOM else "[memory]"
        common = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": name, "pid": trace.device, "tid": 0}
        yield common | {"ts": time, "args": args}


def _counter(trace: Trace, name: str, time: float, num_bytes: int) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": trace.device, "ts": time, "args": {"bytes": num_bytes}}


def _notes(trace: Trace, places: Places) -> list[str]:
    notes = [note for note in places.notes if note.startswith("addresses")]
    if not _has_clock(trace):
        notes.append("the source has no times: a microsecond in the file is one event")
    lasting = int(np.count_nonzero((trace.start < 0) & (trace.end == trace.num_events)))
    if lasting:
        notes.append(
            f"{lasting} requests were live before the record and to its end: they have slices, and readers of the "
            f"`[memory]` events see them in the totals only"
        )
    if len(trace.streams) > 1:
        notes.append("the `[memory]` events have no streams, slices have them")
    return notes
