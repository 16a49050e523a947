"""Reading traces of any kind: the content decides what a file is, its name only breaks ties.

Whatever is wrong with a file ends in a BadInputError of one sentence; nothing from the file is ever executed. In a
trace that was read, each request that was allocated in the record names the event of its alloc and of its free, and
these events name it; a known table of `extra` has one entry for each row it belongs to and points inside other tables.
Call sites are checked where they are read (trace/sites.py); tables that nobody knows are not looked at.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError, NotATraceError
from stalloc.inputs import memory_limit_bytes, open_input, read_bounded, shown_name
from stalloc.trace.activity import Activity, read_activity
from stalloc.trace.operations import read_operations
from stalloc.trace.record import MAX_BYTES, Action, Trace
from stalloc.trace.sources.activity_csv import looks_like_activity_csv, read_activity_csv
from stalloc.trace.sources.deepspeed_log import looks_like_deepspeed_log, read_deepspeed_log
from stalloc.trace.sources.dtr_log import looks_like_dtr_log, read_dtr_log
from stalloc.trace.sources.kineto import NoMemoryEvents, device_properties, read_kineto, read_kineto_activity
from stalloc.trace.sources.log_text import BOMS, is_tar, log_text, unpack, unpacked
from stalloc.trace.sources.memory_timeline import read_memory_timeline
from stalloc.trace.sources.planning_csv import looks_like_planning_csv, read_planning_csv
from stalloc.trace.sources.rmm_log import looks_like_rmm_log, read_rmm_log
from stalloc.trace.sources.torch_snapshot import read_json_snapshot, read_torch_snapshot, refuse_without_history
from stalloc.trace.sources.viz_page import read_viz_page
from stalloc.trace.storage import read_npz
from stalloc.trace.table_columns import DamagedTable

_PRIORITY = re.compile(rb"<\d{1,3}>")  # with which lines of syslog begin
_PPROF = re.compile(rb"\n[\x02-\x08]\x08")  # begins with the kind of its first column
_SNAPSHOT_JSON = re.compile(
    rb'\{\s*"(?:segments|device_traces|allocator_settings|external_annotations|host_segments|host_traces)"\s*:|\[\s*\{[^{}\[\]]{0,1000}"total_size"\s*:'
)
#: formats of text that are told by how they begin: how people call one, whether it is that, and what reads it
_TEXTS: tuple[tuple[str, Callable[[bytes], bool], Callable[[Path, bytes], Trace | list[Trace]]], ...] = (
    ("a CSV with the columns id,lower,upper,size", looks_like_planning_csv, read_planning_csv),
    ("a log of RMM", looks_like_rmm_log, read_rmm_log),
    ("a log of DTR", looks_like_dtr_log, read_dtr_log),
)


@dataclass(frozen=True)
class DeviceRecord:
    """What a file says of one device: its memory, what it did over time, or both."""

    device: int
    trace: Trace | None
    activity: Activity | None
    info: dict[str, Any]
    """What is known of the device, as in Trace.info."""
    as_ready: Activity | None = None
    """`activity` as if each piece began once what it needs is there; None where the operations do not tell what."""


def record_of(trace: Trace) -> DeviceRecord:
    """The record of a trace, with the activity that is in its tables. Raises BadInputError if those are damaged."""
    return DeviceRecord(trace.device, trace, read_activity(trace), trace.info)


def load_traces(path: str | os.PathLike[str], *, history: bool = True, call_sites: bool = True) -> list[Trace]:
    """The traces of a file, one for each device that has events, ordered by device.

    Reads what docs/files.md lists, plain or packed; the name `-` is standard input. Snapshots are read several times as
    fast where `call_sites` may be missing. Raises BadInputError for everything else, and, unless `history` is false,
    for a snapshot of one moment.
    """
    records = _load(path, lambda name, data: map(record_of, _read_content(name, data, call_sites=call_sites)))
    traces = [record.trace for record in records if record.trace is not None]
    if history:
        refuse_without_history(shown_name(path), traces)
    return traces


def load_devices(path: str | os.PathLike[str], *, history: bool = True) -> list[DeviceRecord]:
    """What a file says of each device, ordered by device: traces as `load_traces` reads them, and activity.

    Activity is in traces of torch.profiler, which then need no memory events, in `.trace.npz` that have the table, in
    CSV `start_us,end_us,link,bytes,phase`, and in logs of DeepSpeed, where a rank is a device. Raises BadInputError as
    `load_traces` does.
    """

    def of_content(name: Path, data: bytes) -> list[DeviceRecord]:
        head = data[:4096].lstrip()
        if head and looks_like_activity_csv(head):
            return [DeviceRecord(0, None, read_activity_csv(name, data), {})]
        if looks_like_deepspeed_log(data):
            return [DeviceRecord(rank, None, activity, {}) for rank, activity in read_deepspeed_log(name, data).items()]
        if not _is_kineto(head) or _SNAPSHOT_JSON.match(head):
            return [record_of(trace) for trace in _read_content(name, data)]
        activity = read_kineto_activity(name, data)
        try:
            traces = {trace.device: trace for trace in read_kineto(name, data)}
        except NoMemoryEvents:
            if not activity:
                raise
            traces = {}
        known = device_properties(name, data)
        return [
            DeviceRecord(device, traces.get(device), activity.get(device), known.get(device, {}))
            for device in sorted(traces.keys() | activity.keys())
        ]

    records = _load(path, of_content)
    if history:
        refuse_without_history(shown_name(path), [record.trace for record in records if record.trace is not None])
    return records


def read_log(path: str | os.PathLike[str]) -> str | None:
    """The text of a log, however it is kept; None for a trace, and for what is no text."""
    try:
        with open_input(path, "a trace file, or a log") as file:
            data = unpacked(file)
    except MemoryError as error:
        raise BadInputError(f"{shown_name(path)}: too large for this machine's memory: give a part of it.") from error
    head = data[:4096].lstrip()
    if {".pickle", ".pkl"} & set(Path(path).suffixes):  # of protocol 0, which looks like text
        return None
    if not head or looks_like_activity_csv(head) or _reader_of(head) is not None:
        return None
    return log_text(data)


def _load(
    path: str | os.PathLike[str], of_content: Callable[[Path, bytes], Iterable[DeviceRecord]]
) -> list[DeviceRecord]:
    """Read a file, with a function for all that is no archive of ours, and check the traces in it."""
    name = shown_name(path)
    try:
        with open_input(path, "a trace file") as file:
            content = unpack(name, file)
            if content is None and file.read(2) == b"PK":
                file.seek(0)
                found = [record_of(trace) for trace in read_npz(name, file)]
            else:
                file.seek(0)
                if content is None:
                    content = read_bounded(file, str(name), memory_limit_bytes())
                found = list(of_content(name, _without_mark(content)))
            for record in found:
                if record.trace is not None:
                    _check(record.trace)
            return found
    except BadInputError as error:  # what a trace says of itself does not know the file
        named = any(one in str(error) for one in (str(name), os.fspath(path)))  # a Path has one slash after s3:
        sentence = str(error) if named else f"{name}: {error}"
        raise NotATraceError(sentence, os.fspath(path)) from error
    except MemoryError as error:
        raise BadInputError(f"{name}: too large for this machine's memory: record fewer steps.") from error


def _without_mark(data: bytes) -> bytes:
    """Text as UTF-8 without a mark: programs of Windows write one, and PowerShell's `>` writes UTF-16."""
    mark, encoding = next(((mark, name) for mark, name in BOMS if data.startswith(mark)), (b"", ""))
    text = data[len(mark) :]
    return text if encoding in ("", "utf-8") else text.decode(encoding, "replace").encode()


def _read_content(path: Path, data: bytes, *, call_sites: bool = True) -> list[Trace]:
    head = data[:4096].lstrip()
    if not head:
        raise BadInputError(f"{path} is empty: record it again.")
    if is_tar(data):
        raise BadInputError(f"{path}: a tar archive: unpack it, and give one of its files.")
    if _PPROF.match(data):
        raise BadInputError(f"{path}: a profile of pprof, as JAX writes: see `pprof -top`, stalloc does not read it.")
    if data[0] == 0x80 or {".pickle", ".pkl"} & set(path.suffixes):
        return read_torch_snapshot(path, data, call_sites=call_sites)
    if (read := _reader_of(head)) is not None:
        found = read(path, data)
        return found if isinstance(found, list) else [found]
    if head.startswith(b"<") and not _PRIORITY.match(head):
        return read_viz_page(path, data)
    if head.startswith(b"[") and head[1:].lstrip().startswith(b"["):
        return [read_memory_timeline(path, data)]
    if _SNAPSHOT_JSON.match(head):
        return read_json_snapshot(path, data)
    if _is_kineto(head):
        return read_kineto(path, data)
    if looks_like_activity_csv(head):
        raise BadInputError(
            f"{path}: a table of copies and phases, which says nothing of memory: stalloc timeline shows it."
        )
    raise BadInputError(
        f"{path}: not a trace: expected a .trace.npz, a snapshot pickle of torch.cuda.memory or its HTML page, a trace "
        f"or raw memory timeline of torch.profiler, {', '.join(name for name, *_ in _TEXTS)}; for `stalloc explain` "
        "also a log with an out-of-memory error of any GPU library."
    )


def _reader_of(head: bytes) -> Callable[[Path, bytes], Trace | list[Trace]] | None:
    return next((read for _, looks_like, read in _TEXTS if looks_like(head)), None)


def _is_kineto(head: bytes) -> bool:
    """Whether JSON that begins so can be a trace of torch.profiler, and none of the other kinds."""
    if head.startswith(b"{"):
        return _reader_of(head) is None
    return head.startswith(b"[") and head[1:].lstrip()[:1] in (b"{", b"]", b"")


_BLOCKS = ("block_address", "block_size", "block_request")
_MAX_ADDRESS = (1 << 63) - MAX_BYTES  # so that a block ends below 2**63
_SEGMENTS = ("segment_pool", "segment_is_small", "segment_is_expandable")


def _check(trace: Trace) -> None:
    """Raise BadInputError, naming the column or the table, for the first one that does not fit the others."""
    try:
        if len(trace.action):
            _check_events(trace)
        _check_extra(trace)
    except DamagedTable as error:
        raise BadInputError(f"trace of device {trace.device}: {error}: the file is damaged.") from error
    read_operations(trace)


def _check_events(trace: Trace) -> None:
    for name, action, outside in (("start", Action.ALLOC, -1), ("end", Action.FREE_COMPLETED, trace.num_events)):
        event = getattr(trace, name)
        rows = np.flatnonzero(event != outside)
        if not np.array_equal(trace.event_request[event[rows]], rows) or np.any(trace.action[event[rows]] != action):
            raise DamagedTable(f"column {name} names other events than those of its requests")
        if np.count_nonzero((trace.action == action) & (trace.event_request >= 0)) != len(rows):
            raise DamagedTable(f"its events name requests that column {name} does not know")
    asked = np.flatnonzero((trace.action == Action.FREE_REQUESTED) & (trace.event_request >= 0))
    row = trace.event_request[asked]
    if np.any((asked < trace.free_requested[row]) | (asked < trace.start[row]) | (asked > trace.end[row])):
        raise DamagedTable("its events ask to free what does not live")
    if np.any((trace.free_requested < trace.start) | (trace.free_requested > trace.end)):
        raise DamagedTable("column free_requested names events at which its requests do not live")


def _check_extra(trace: Trace) -> None:
    extra, num_requests = trace.extra, trace.num_requests
    for name in ("offset", "alignment"):
        if name in extra:
            column = _numbers(trace, name, (num_requests,))
            if len(column) and (column.min() < 0 or column.max() >= MAX_BYTES):
                raise DamagedTable(f"table {name} holds what is no number of bytes")
    if "id" in extra and (extra["id"].shape != (num_requests,) or extra["id"].dtype.kind not in "iuU"):
        raise DamagedTable("table id is not one for each request")
    num_segments = len(trace.segment_address)
    for name in _SEGMENTS:
        if name in extra:
            _numbers(trace, name, (num_segments, 2) if name == "segment_pool" else (num_segments,))
    present = [name for name in _BLOCKS if name in extra]
    if present and len(present) < len(_BLOCKS):
        raise DamagedTable(f"table {present[0]} comes without {', '.join(set(_BLOCKS) - set(present))}")
    if present:
        columns = [_numbers(trace, name, extra[_BLOCKS[0]].shape[:1]) for name in _BLOCKS]
        address, size, request = columns
        if len(size) and (size.min() < 0 or float(size.sum(dtype=np.float64)) >= MAX_BYTES):
            raise DamagedTable("table block_size holds what is no number of bytes")
        if len(address) and int(address.max()) > _MAX_ADDRESS:
            raise DamagedTable("table block_address holds an address that no address space has")
        if len(request) and (request.min() < -1 or request.max() >= num_requests):
            raise DamagedTable("table block_request points outside the requests")


def _numbers(trace: Trace, name: str, shape: tuple[int, ...]) -> Column:
    column = trace.extra[name]
    if column.shape != shape or column.dtype.kind not in "iub":
        raise DamagedTable(
            f"table {name} is {column.dtype} of shape {column.shape}, expected whole numbers of shape {shape}"
        )
    return column
