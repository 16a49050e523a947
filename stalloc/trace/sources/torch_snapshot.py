"""Snapshots of torch.cuda.memory: events since recording began, segments at the end, and what those two imply.

A snapshot that contradicts itself is refused: what lives at the end by its events must be active in its segments,
and the bytes live may never exceed the bytes reserved. What was live before recording is reconstructed: blocks that
are active at the end without an alloc event, and frees of unknown addresses. Reserved at the start is worked
backwards from the segments at the end.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.inputs import memory_limit_bytes
from stalloc.trace.record import Action, Trace, index_streams, mark_columns
from stalloc.trace.recorder import Pairs, pair_events
from stalloc.trace.sites import StackCollector
from stalloc.trace.sources.snapshot_notes import Budget, SnapshotNotes
from stalloc.trace.sources.unpickle import load_plain_pickle, without_collection
from stalloc.trace.storage import MAX_DEVICE

_ACTIONS = {action.name.lower(): int(action) for action in Action}
_IGNORED_ACTIONS = {"workspace_snapshot", "user_defined"}
_ASKING_ACTIONS = {"alloc", "segment_alloc", "segment_map", "oom"}
_RECORD = "call torch.cuda.memory._record_memory_history() before the step you want to see"
_DECODED_JSON = 20  #: times its text


@dataclass(frozen=True, eq=False)
class _Segments:
    """Segments and active blocks of one device at the end."""

    address: Column
    size: Column
    stream: Column
    block: Column  #: (k,) of _BLOCK
    tables: dict[str, Column]  #: every block, free ones included, and what else is said of segments: see docs/files.md


_BLOCK = np.dtype([("address", np.uint64), ("size", np.int64), ("stream", np.int64), ("site", np.int32)])
"""An active block; the stack that asked for it is -1 where there is none."""


@without_collection()
def read_torch_snapshot(path: Path, data: bytes, *, call_sites: bool = True) -> list[Trace]:
    """The traces of a snapshot, one for each device with events.

    Without history on any device they hold one event, the snapshot, and what lives then: see `has_history`. Nearly all
    of a snapshot is stacks: without `call_sites` most are skipped. Raises BadInputError when it is no snapshot, or it
    contradicts itself.
    """
    return _traces(path, load_plain_pickle(path, data, left_out="" if call_sites else "frames"), len(data))


@without_collection()
def read_json_snapshot(path: Path, data: bytes) -> list[Trace]:
    """The traces of a snapshot that was written as JSON; as `read_torch_snapshot`."""
    if len(data) > memory_limit_bytes() // _DECODED_JSON:
        raise BadInputError(f"{path}: as JSON too large for this machine's memory: pickle it, or record less.")
    try:
        snapshot = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: the JSON of the snapshot is damaged or cut short: write it again.") from error
    return _traces(path, snapshot, len(data))


def _traces(path: Path, snapshot: Any, num_bytes: int) -> list[Trace]:
    if (
        isinstance(snapshot, list) and snapshot and isinstance(snapshot[0], dict) and "blocks" in snapshot[0]
    ):  # what torch.cuda.memory_snapshot() returns
        snapshot = {"segments": snapshot}
    if not isinstance(snapshot, dict) or "segments" not in snapshot:
        raise BadInputError(f"{path}: a pickle, but not a torch.cuda.memory snapshot: give what _snapshot() returned.")
    budget = Budget(path, num_bytes)
    try:
        histories = [budget.spend(history) for history in budget.spend(snapshot.get("device_traces", []))]
        if len(histories) > MAX_DEVICE + 1:
            raise BadInputError(f"{path}: the snapshot is of {len(histories)} devices: give an intact snapshot.")
        said = SnapshotNotes(path, budget, snapshot)
        segments: dict[int, list[dict[str, Any]]] = {}
        for segment in budget.spend(snapshot["segments"]):
            segments.setdefault(int(segment["device"]), []).append(segment)
        telling = ("alloc", "free_completed")
        told = [at for at, history in enumerate(histories) if any(event["action"] in telling for event in history)]
        without_history = sorted(segments.keys() - set(told))
        traces = [
            _read_device(path, budget, said, device, histories[device], segments.get(device, [])) for device in told
        ]
        if not traces:
            traces = [_read_state(path, budget, said, device, segments[device]) for device in without_history]
    except BadInputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise BadInputError(
            f"{path}: the snapshot lacks what torch writes ({type(error).__name__}: {str(error)[:100]}): "
            f"save it again with torch.cuda.memory._dump_snapshot()."
        ) from error
    if not traces:
        besides = f"; {said.of_host}" if said.of_host else ""
        raise BadInputError(f"{path} holds no allocation events of a GPU, and no segments either{besides}: {_RECORD}.")
    if without_history and has_history(traces[0]):
        note = f"devices {', '.join(map(str, without_history))} have segments but no events"
        traces = [trace.replace(info=trace.info | {"notes": [*trace.info["notes"], note]}) for trace in traces]
    return traces


def has_history(trace: Trace) -> bool:
    """Whether a trace tells what happened, and not only what there was when a snapshot was taken."""
    return trace.info.get("history") is not False


def refuse_without_history(path: Path, traces: list[Trace]) -> None:
    """Raise BadInputError if a trace is but the state at one moment."""
    if not all(map(has_history, traces)):
        raise BadInputError(
            f"{path} holds no allocation events, its history was switched off: `stalloc explain`, stats, top, tree and "
            f"report read its segments; for all else {_RECORD}."
        )


def _read_state(path: Path, budget: Budget, said: SnapshotNotes, device: int, segments: list[Any]) -> Trace:
    if not 0 <= device <= MAX_DEVICE:
        raise BadInputError(f"{path}: the snapshot names a device {device}: give an intact snapshot.")
    trace = _read_device(path, budget, said, device, [{"action": "snapshot", "size": 0, "stream": 0}], segments)
    note = "the snapshot has no history: it says what there was at that moment, not how it came to be"
    return trace.replace(info=trace.info | {"history": False, "notes": [*trace.info["notes"], note]})


def _read_device(
    path: Path, budget: Budget, said: SnapshotNotes, device: int, history: list[Any], segments: list[Any]
) -> Trace:
    where = f"{path}: device {device}"
    history = [event for event in history if event["action"] not in _IGNORED_ACTIONS]
    action, address, size, raw_stream, time_us = _event_columns(where, history)
    stacks = StackCollector()
    end_state = _segment_columns(budget, segments, stacks)
    raw = (raw_stream, end_state.stream, end_state.block["stream"])
    streams, index = index_streams(np.concatenate(raw))
    event_stream, segment_stream, block_stream = np.split(index, np.cumsum([len(one) for one in raw[:2]]))
    pairs = pair_events(action, address, size, event_stream, where)
    is_old = _baseline_blocks(where, pairs, end_state, len(action))
    old = end_state.block[is_old]
    event_site = np.fromiter(
        (stacks.add(event.get("frames")) if event["action"] in _ASKING_ACTIONS else -1 for event in history),
        np.int32,
        len(history),
    )
    # the baseline that is still there at the end goes first: it has start -1 as well
    site = np.concatenate([old["site"], np.where(pairs.start >= 0, event_site[pairs.start], -1)])
    names, marks = mark_columns(said.marks(budget, device, time_us))
    trace = Trace(
        device=device,
        **pairs.columns(old["size"], block_stream[is_old]),
        action=action,
        address=address,
        event_size=size,
        event_stream=event_stream,
        time_us=time_us,
        **marks,
        segment_address=end_state.address,
        segment_size=end_state.size,
        segment_stream=segment_stream,
        streams=streams,
        names=names,
        reserved_start_bytes=0,
        info={},
        extra=stacks.columns(site, event_site) | end_state.tables | _block_requests(end_state, pairs, old["address"]),
    )
    return _with_reserved(where, trace, said.info(device))


def _event_columns(where: str, history: list[Any]) -> tuple[Column, Column, Column, Column, Column]:
    unknown = next((event["action"] for event in history if event["action"] not in _ACTIONS), None)
    if unknown is not None:
        shown = repr(unknown[:40]) if isinstance(unknown, str) else f"of a {type(unknown).__name__}"
        raise BadInputError(f"{where}: unknown event {shown}: this torch is newer than stalloc.")
    num = len(history)
    return (
        np.fromiter((_ACTIONS[event["action"]] for event in history), np.int8, num),
        np.fromiter((event.get("addr", event.get("device_free", 0)) for event in history), np.uint64, num),
        np.fromiter((event["size"] for event in history), np.int64, num),
        np.fromiter((event["stream"] for event in history), np.int64, num),
        np.fromiter((event.get("time_us", 0) for event in history), np.int64, num),
    )


def _segment_columns(budget: Budget, segments: list[Any], stacks: StackCollector) -> _Segments:
    blocks: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int]] = []
    for segment in segments:
        address, stream = int(segment["address"]), int(segment.get("stream", 0))
        for block in budget.spend(segment["blocks"]):
            spans.append((int(block.get("address", address)), int(block["size"])))
            if block["state"] != "inactive":
                requested = block.get("requested_size", block["size"])
                frames = block.get("frames") or (block.get("history") or [{}])[0].get("frames")
                blocks.append((int(block.get("address", address)), int(requested), stream, stacks.add(frames)))
            address += int(block["size"])  # old snapshots give blocks no address: they lie one after the other
    pools = [[int(part) for part in segment.get("segment_pool_id", (0, 0))] for segment in segments]
    if any(len(pool) != 2 for pool in pools):
        raise ValueError("an id of a pool that is no pair")
    return _Segments(
        address=np.array([int(segment["address"]) for segment in segments], np.uint64),
        size=np.array([int(segment["total_size"]) for segment in segments], np.int64),
        stream=np.array([int(segment.get("stream", 0)) for segment in segments], np.int64),
        block=np.array(blocks, _BLOCK),
        tables={
            "block_address": np.array([span[0] for span in spans], np.uint64),
            "block_size": np.array([span[1] for span in spans], np.int64),
            "segment_pool": np.array(pools, np.int64).reshape(-1, 2),
            "segment_is_small": np.array([segment.get("segment_type") == "small" for segment in segments], np.int8),
            "segment_is_expandable": np.array([bool(segment.get("is_expandable")) for segment in segments], np.int8),
        },
    )


def _block_requests(end_state: _Segments, pairs: Pairs, old: Column) -> dict[str, Column]:
    """Which request is in each block at the end, -1 for a free one; `old`: addresses of the first requests."""
    alive = np.flatnonzero(pairs.end == len(pairs.event_request))
    address = np.concatenate([old, pairs.address[alive]])
    row = np.concatenate([np.arange(len(old)), alive + len(old)])
    order = np.argsort(address)
    address, row = address[order], row[order]
    block = end_state.tables["block_address"]
    if not len(address):
        return {"block_request": np.full(len(block), -1, np.int64)}
    place = np.minimum(np.searchsorted(address, block), len(address) - 1)
    return {"block_request": np.where(address[place] == block, row[place], -1).astype(np.int64)}


def _baseline_blocks(where: str, pairs: Pairs, end_state: _Segments, num_events: int) -> Column:
    """Which active blocks no event allocated; refuses an end state that contradicts the events."""
    alive = pairs.address[pairs.end == num_events]
    missing = np.count_nonzero(~np.isin(alive, end_state.block["address"]))
    if missing:
        raise BadInputError(
            f"{where}: {missing} requests are live at the end by the events and not by the segments, "
            f"so part of the snapshot was cut away: save it again in one piece."
        )
    return ~np.isin(end_state.block["address"], alive)


def _with_reserved(where: str, trace: Trace, info: dict[str, Any]) -> Trace:
    """The trace with reserved at the start, worked backwards; refuses live bytes that exceed it."""
    reserved_end = int(trace.segment_size.sum())
    change = int(trace.reserved_bytes()[-1])
    start = reserved_end - change
    if start < 0:
        raise BadInputError(
            f"{where}: its events reserve {-start} bytes more than its segments hold at the end, "
            f"so segments were cut away: save the snapshot again in one piece."
        )
    complete = start == 0 and trace.num_baseline_requests == 0
    trace = trace.replace(reserved_start_bytes=start, info=info | {"complete": complete})
    excess = trace.live_bytes(trace.size)[1:] - trace.reserved_bytes()
    if excess.max() > 0:
        event = int(np.argmax(excess > 0))
        raise BadInputError(
            f"{where}: at event {event} more bytes are live than its segments hold, by {int(excess[event])} bytes, "
            f"so events or segments are missing: record again with a larger max_entries, in one piece."
        )
    return trace
