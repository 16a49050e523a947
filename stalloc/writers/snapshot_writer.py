"""Snapshots as torch.cuda.memory writes them, for its memory_viz page and whatever else reads them.

Contract: plain containers, numbers and strings, pickled by protocol 4; blocks cover their segments without a gap. A
record that came from a snapshot is read back as an equal record. Every other one is written as far as the format goes:
`places_of` says what of its addresses and segments is made up, and so does the file, under the key `stalloc`.
"""

import itertools
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.sizes import ALIGNMENT_BYTES, aligned
from stalloc.trace import MARK_PHASE_END, Action, Trace
from stalloc.trace.sites import read_sites
from stalloc.writers.placing import Places, places_of, recorded_blocks
from stalloc.writers.writing import write_chunks

_NAMES = {int(action): action.name.lower() for action in Action}
_SEGMENT_ACTIONS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
Stack = list[dict[str, Any]]


def write_snapshot(path: Path, traces: Sequence[Trace]) -> list[str]:
    """Write the traces, one a device, as one snapshot; returns what had to be made up or left out, a sentence each."""
    snapshot, notes = snapshot_of(traces)
    write_chunks(path, [pickle.dumps(snapshot, protocol=4)])
    return notes


def snapshot_of(traces: Sequence[Trace]) -> tuple[dict[str, Any], list[str]]:
    """The snapshot of traces, one a device, and what of it is made up or left out."""
    histories: list[list[dict[str, Any]]] = [[] for _ in range(max((trace.device for trace in traces), default=-1) + 1)]
    segments: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    devices: dict[str, Any] = {}
    notes: list[str] = []
    for trace in traces:
        places = places_of(trace)
        stacks = _stacks(trace)
        lost = [*places.notes, *_left_out(trace, places)]
        events = _events(trace, places)
        histories[trace.device] = _history(trace, events, stacks)
        segments += _segments(trace, places, stacks)
        annotations += _annotations(trace, events)
        devices[str(trace.device)] = {
            "source": str(trace.info.get("source", "")),
            "file": str(trace.info.get("file", "")),
            "notes": [*map(str, trace.info.get("notes", [])), *lost],
        }
        notes += [note for note in lost if note not in notes]
    snapshot: dict[str, Any] = {
        "segments": segments,
        "device_traces": histories,
        "external_annotations": annotations,
        "stalloc": {"devices": devices},
    }
    settings = [trace.info["allocator_settings"] for trace in traces if "allocator_settings" in trace.info]
    if settings:
        snapshot["allocator_settings"] = settings[0]
    return snapshot, notes


class _Events(NamedTuple):
    action: Column
    address: Column
    size: Column
    stream: Column
    time_us: Column
    site: Column  #: stack, -1 for none
    row: Column  #: event of the trace that each was; of bare lifespans the moment


def _events(trace: Trace, places: Places) -> _Events:
    if not len(trace.action):
        return _events_of_lifespans(trace, places)
    address = trace.address.copy()
    of_request = trace.event_request >= 0
    address[of_request] = places.address[trace.event_request[of_request]]
    rows = np.flatnonzero(places.segments_recorded | ~np.isin(trace.action, _SEGMENT_ACTIONS))
    unasked = np.flatnonzero(_never_asked(trace)[rows])
    rows = np.insert(rows, unasked, rows[unasked])
    asking = unasked + np.arange(len(unasked))
    action = trace.action[rows]
    action[asking] = Action.FREE_REQUESTED
    sites = read_sites(trace)
    site = _no_stacks(rows) if sites is None else sites.event_site[rows]
    size, stream, time_us = trace.event_size[rows], trace.event_stream[rows], trace.time_us[rows]
    return _Events(action, address[rows], size, stream, time_us, site, rows)


def _no_stacks(rows: Column) -> Column:
    return np.full(len(rows), -1, np.int64)


def _never_asked(trace: Trace) -> Column:
    """(m,) frees that no event asks for: torch has one before each, and its page shows a block as waiting without."""
    asked = np.zeros(trace.num_requests + 1, bool)
    asked[trace.event_request[trace.action == Action.FREE_REQUESTED]] = True
    return (trace.action == Action.FREE_COMPLETED) & (trace.event_request >= 0) & ~asked[trace.event_request]


def _events_of_lifespans(trace: Trace, places: Places) -> _Events:
    """Frees before the allocs of the same moment; what ends last of all stays."""
    freed = np.flatnonzero(trace.end < trace.num_events)
    born = np.flatnonzero(trace.start >= 0)
    count = len(freed)
    row = np.concatenate([freed, freed, born])
    kinds = (Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.ALLOC)
    action = np.repeat(np.array(kinds), [count, count, len(born)])
    at = np.concatenate([trace.end[freed], trace.end[freed], trace.start[born]])
    order = np.lexsort((action, row, action == Action.ALLOC, at))
    row, action, at = row[order], action[order], at[order]
    columns = (places.address[row], trace.size[row], trace.stream[row])
    return _Events(action, *columns, np.zeros(len(row), np.int64), _no_stacks(row), at)


def _stacks(trace: Trace) -> list[Stack]:
    """Each stack once, so that the pickle holds it once; the last one is that of -1."""
    sites = read_sites(trace)
    if sites is None:
        return [[]]
    frames = [{"filename": frame.filename, "line": frame.line, "name": frame.name} for frame in sites.frames]
    bounds = sites.begin.tolist()
    numbers = sites.frame.tolist()
    return [[frames[i] for i in numbers[begin:end]] for begin, end in itertools.pairwise(bounds)] + [[]]


def _history(trace: Trace, events: _Events, stacks: list[Stack]) -> list[dict[str, Any]]:
    columns = zip(*(column.tolist() for column in events[:-1]), strict=True)
    return [
        {
            "action": _NAMES[action],
            "device_free" if action == Action.OOM else "addr": address,
            "size": size,
            "stream": trace.streams[stream],
            "time_us": time_us,
            "frames": stacks[site],
        }
        for action, address, size, stream, time_us, site in columns
    ]


def _segments(trace: Trace, places: Places, stacks: list[Stack]) -> list[dict[str, Any]]:
    found = _blocks(trace, places)
    order = np.argsort(found[0])
    columns = [column[order] for column in found]
    sites = read_sites(trace)
    site = sites.site if sites is not None else np.full(trace.num_requests, -1)
    firsts = np.searchsorted(columns[0], places.segment_address)
    lasts = np.searchsorted(columns[0], places.segment_address + places.segment_size.astype(np.uint64))
    num_segments = len(places.segment_address)
    pool = _told(trace, places, "segment_pool", (num_segments, 2))
    small = _told(trace, places, "segment_is_small", (num_segments,))
    expandable = _told(trace, places, "segment_is_expandable", (num_segments,))
    segments = []
    for i in range(num_segments):
        inside = slice(firsts[i], lasts[i])
        blocks: list[dict[str, Any]] = []
        for at, size, row in zip(*(column[inside].tolist() for column in columns), strict=True):
            block = {"address": at, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
            if row >= 0:
                asked = trace.free_requested[row] < trace.num_events
                block["requested_size"] = int(trace.size[row])
                block["state"] = "active_pending_free" if asked else "active_allocated"
                block["frames"] = stacks[int(site[row])]
            blocks.append(block)
        active = [block for block in blocks if block["state"] != "inactive"]
        segments.append(
            {
                "device": trace.device,
                "address": int(places.segment_address[i]),
                "total_size": int(places.segment_size[i]),
                "allocated_size": sum(block["size"] for block in active if block["state"] == "active_allocated"),
                "active_size": sum(block["size"] for block in active),
                "requested_size": sum(block["requested_size"] for block in active),
                "stream": trace.streams[int(places.segment_stream[i])] if trace.streams else 0,
                "segment_type": "small" if small[i] else "large",
                "segment_pool_id": (int(pool[i, 0]), int(pool[i, 1])),
                "is_expandable": bool(expandable[i]),
                "frames": [],
                "blocks": blocks,
            }
        )
    return segments


def _told(trace: Trace, places: Places, name: str, shape: tuple[int, ...]) -> Column:
    """A table of the source about its segments, zeros where it has none."""
    column = trace.extra.get(name)
    if not places.segments_recorded or column is None or column.shape != shape or column.dtype.kind not in "iu":
        return np.zeros(shape, np.int64)
    return column


def _blocks(trace: Trace, places: Places) -> tuple[Column, Column, Column]:
    """Address, bytes and request (-1: free) of every block at the end."""
    recorded = recorded_blocks(trace)
    if places.segments_recorded and recorded is not None:
        return recorded
    alive = np.flatnonzero(trace.end == trace.num_events)
    alive = alive[np.argsort(places.address[alive])]
    blocks: list[tuple[int, int, int]] = []
    live = [(int(places.address[row]), int(trace.size[row]), int(row)) for row in alive]
    position = 0
    for i in np.argsort(places.segment_address):
        at, end = int(places.segment_address[i]), int(places.segment_address[i]) + int(places.segment_size[i])
        while position < len(live) and live[position][0] < end:
            address_, size_, row_ = live[position]
            position += 1
            following = min(live[position][0], end) if position < len(live) else end
            if address_ > at:
                blocks.append((at, address_ - at, -1))
            rounded = max(aligned(size_), ALIGNMENT_BYTES)
            blocks.append((address_, min(rounded, following - address_), row_))
            at = address_ + blocks[-1][1]
        if at < end:
            blocks.append((at, end - at, -1))
    return (
        np.array([block[0] for block in blocks], np.uint64),
        np.array([block[1] for block in blocks], np.int64),
        np.array([block[2] for block in blocks], np.int64),
    )


def _annotations(trace: Trace, events: _Events) -> list[dict[str, Any]]:
    """Marks as torch's annotations; `mark` holds the event and the kind, since wall times may coincide or be absent."""
    times = [*events.time_us.tolist(), int(events.time_us[-1]) + 1 if len(events.time_us) else 0]
    marks = (np.searchsorted(events.row, trace.mark_event), trace.mark_kind, trace.mark_name)
    return [
        {
            "stage": "END" if kind == MARK_PHASE_END else "START",
            "name": trace.names[name],
            "device": trace.device,
            "time_us": times[event],
            "mark": [event, kind],
        }
        for event, kind, name in zip(*(column.tolist() for column in marks), strict=True)
    ]


def _left_out(trace: Trace, places: Places) -> list[str]:
    notes = []
    if not places.segments_recorded and np.any(np.isin(trace.action, _SEGMENT_ACTIONS)):
        notes.append("the record's events of segments are left out: they belong to segments that it does not list")
    if not len(trace.action):
        notes.append("the record has bare lifespans: its events are made up, in their order")
    elif np.any(_never_asked(trace)):
        notes.append("the record does not say when frees were asked for: that is put right before each, as torch does")
    unseen = trace.info.get("unseen_bytes", 0)
    if isinstance(unseen, int) and unseen > 0:
        notes.append(f"{unseen} bytes that were live throughout are left out: no event names them")
    return notes
