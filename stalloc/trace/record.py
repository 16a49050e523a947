"""The Trace record: requests with half-open lifespans on the clock of event indices, checked when it is made.

Every Trace that exists satisfies: columns of one table have one length, requests are ordered by start, lifespans
are not empty, every index points into its table, and no sum of its sizes leaves 64 bits, however an allocator rounds
them. Wall time is an attribute, never the clock.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.figures import html_table, human_bytes, plural
from stalloc.printable import printable
from stalloc.sizes import ALIGNMENT_BYTES


class Action(enum.IntEnum):
    """What an event did, by torch's names; the numbers are part of the file format."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    OOM = 7
    SNAPSHOT = 8


MAX_BYTES = 1 << 61
"""Sums of sizes stay below this, so that no sum that is made of them overflows."""
_MAX_ROUNDING_BYTES = 32 << 20
"""What an allocator adds to a request at most: torch's segments are of up to 20 MiB."""
_LATEST_US = 1 << 62

MARK_STEP, MARK_PHASE_BEGIN, MARK_PHASE_END = 0, 1, 2

REQUEST_COLUMNS = ("start", "end", "size", "stream", "free_requested")
EVENT_COLUMNS = ("action", "address", "event_size", "event_stream", "event_request", "time_us")
MARK_COLUMNS = ("mark_event", "mark_kind", "mark_name")
SEGMENT_COLUMNS = ("segment_address", "segment_size", "segment_stream")
TABLES = (REQUEST_COLUMNS, EVENT_COLUMNS, MARK_COLUMNS, SEGMENT_COLUMNS)
COLUMNS = tuple(name for table in TABLES for name in table)

_NARROW = {"action": "int8", "mark_kind": "int8", "address": "uint64", "segment_address": "uint64"}
DTYPES: Mapping[str, np.dtype[Any]] = {name: np.dtype(_NARROW.get(name, "int64")) for name in COLUMNS}


def empty_columns(*tables: tuple[str, ...]) -> dict[str, Column]:
    """Columns of length zero for the given tables, to be handed to Trace."""
    return {name: np.empty(0, DTYPES[name]) for table in tables for name in table}


def mark_columns(marks: Sequence[tuple[int, int, str]]) -> tuple[tuple[str, ...], dict[str, Column]]:
    """The distinct names of marks (event index, mark kind, name), and the columns for Trace."""
    names = tuple(dict.fromkeys(name for _, _, name in marks))
    index = {name: number for number, name in enumerate(names)}
    rows = [(event, kind, index[name]) for event, kind, name in marks]
    return names, dict(zip(MARK_COLUMNS, np.array(rows, np.int64).reshape(-1, len(MARK_COLUMNS)).T, strict=True))


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """The requests of one device with their events, marks and segments. Columns are int64 unless said otherwise."""

    device: int
    """CUDA device index."""

    start: Column
    """(n,) event index of the alloc; -1 for a request that was live before recording."""
    end: Column
    """(n,) event index of free_completed; num_events if it was never freed. The lifespan is [start, end)."""
    size: Column
    """(n,) requested bytes."""
    stream: Column
    """(n,) index into `streams`."""
    free_requested: Column
    """(n,) event index of free_requested, or num_events."""

    action: Column
    """(m,) int8 of Action."""
    address: Column
    """(m,) uint64; for an out-of-memory event the bytes that were free on the device, where the source says so."""
    event_size: Column
    """(m,) bytes."""
    event_stream: Column
    """(m,) index into `streams`."""
    event_request: Column
    """(m,) row of the request that the event belongs to, or -1."""
    time_us: Column
    """(m,) wall time in microseconds, zero where the source has none."""

    mark_event: Column
    """(k,) a mark at event e lies between event e-1 and event e."""
    mark_kind: Column
    """(k,) int8: MARK_STEP, MARK_PHASE_BEGIN or MARK_PHASE_END."""
    mark_name: Column
    """(k,) index into `names`."""

    segment_address: Column
    """(s,) uint64: segments at the end of the record."""
    segment_size: Column
    """(s,) bytes."""
    segment_stream: Column
    """(s,) index into `streams`."""

    streams: tuple[int, ...]
    """Raw stream ids in order of first appearance; on CUDA the default stream is 0."""
    names: tuple[str, ...]
    """Names that marks refer to."""
    reserved_start_bytes: int
    """Bytes reserved before the first event."""
    info: dict[str, Any]
    """JSON-able: source, file, complete (recording began before the first allocation), notes, and what else is known
    (device_name, total_bytes, torch, allocator_settings)."""
    extra: dict[str, Column]
    """Tables that this version does not know; kept on load and save."""

    def __post_init__(self) -> None:
        for name in COLUMNS:
            column = np.ascontiguousarray(getattr(self, name))
            if column.dtype != DTYPES[name]:
                if column.dtype.kind not in "iub":
                    raise BadInputError(f"trace column {name} holds {column.dtype}, expected {DTYPES[name]}.")
                bounds = np.iinfo(DTYPES[name])
                if column.size and not bounds.min <= int(column.min()) <= int(column.max()) <= bounds.max:
                    raise BadInputError(
                        f"trace column {name} holds numbers beyond {DTYPES[name]}: the file is damaged."
                    )
                column = column.astype(DTYPES[name])
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        self._check()

    def _check(self) -> None:
        where = f"trace of device {self.device}"
        for table in TABLES:
            if len({getattr(self, name).shape for name in table}) != 1 or getattr(self, table[0]).ndim != 1:
                raise BadInputError(f"{where}: the columns {', '.join(table)} differ in length: record it again.")
        num_streams, num_events = len(self.streams), self.num_events
        bounds = {
            "stream": num_streams,
            "event_stream": num_streams,
            "segment_stream": num_streams,
            "mark_name": len(self.names),
            "mark_event": num_events + 1,
            "free_requested": num_events + 1,
            "end": num_events + 1,
            "start": max(num_events, 1),
            "event_request": self.num_requests,
            "action": len(Action),
            "mark_kind": 3,
        }
        lowest = {"start": -1, "event_request": -1}
        for name, bound in bounds.items():
            column = getattr(self, name)
            if column.size and (column.min() < lowest.get(name, 0) or column.max() >= bound):
                raise BadInputError(f"{where}: column {name} points outside its table: the file is damaged.")
        if self.num_requests:
            if np.any(self.end <= self.start):
                row = int(np.argmax(self.end <= self.start))
                raise BadInputError(f"{where}: request {row} ends before it starts: the file is damaged.")
            if np.any(np.diff(self.start) < 0):
                raise BadInputError(f"{where}: requests are not ordered by start: sort them before making a Trace.")
        self._check_sizes(where)
        if len(self.time_us) and (self.time_us.min() < -_LATEST_US or self.time_us.max() > _LATEST_US):
            raise BadInputError(f"{where}: an event has an impossible time: the file is damaged.")

    def _check_sizes(self, where: str) -> None:
        for name in ("size", "event_size", "segment_size"):
            column = getattr(self, name)
            if column.size and column.min() < 0:
                raise BadInputError(f"{where}: column {name} has a negative size: the file is damaged.")
        # what ran out of memory was asked for and not served: alone it may be as large as a program dares
        # as a plain number: NumPy looks at an enum's attributes, and what a signal raises there is lost
        failed = self.action == int(Action.OOM)
        sums = {"requests": self.size, "events": self.event_size[~failed], "segments": self.segment_size}
        for name, column in sums.items():
            total = float(column.sum(dtype=np.float64)) + len(column) * _MAX_ROUNDING_BYTES
            if total >= MAX_BYTES:
                raise BadInputError(
                    f"{where}: the sizes of its {name} add up to more than 2**61 bytes, which no device holds: "
                    f"correct them, or record fewer steps."
                )
        if max(int(self.event_size[failed].max(initial=0)), abs(self.reserved_start_bytes)) >= MAX_BYTES:
            raise BadInputError(f"{where}: it names more than 2**61 bytes, which no device holds: the file is damaged.")

    def __repr__(self) -> str:
        held = human_bytes(int(self.live_bytes(self.size).max(initial=0)))
        source = printable(str(self.info.get("source", "")))
        counts = f"{plural(self.num_requests, 'request')}, {plural(self.num_events, 'event')}"
        return f"<Trace of device {self.device}: {counts}, {held} at the peak, from {source or 'nowhere'}>"

    def _repr_html_(self) -> str:
        rows = [
            ("source", printable(str(self.info.get("source", "")))),
            ("requests", f"{self.num_requests:,}"),
            ("live before recording", f"{self.num_baseline_requests:,}"),
            ("events", f"{self.num_events:,}"),
            ("streams", f"{len(self.streams):,}"),
            ("requested at the peak", human_bytes(int(self.live_bytes(self.size).max(initial=0)))),
        ]
        return html_table(f"Trace of device {self.device}", rows)

    @property
    def num_requests(self) -> int:
        """Number of requests, those live before recording included."""
        return len(self.start)

    @property
    def num_baseline_requests(self) -> int:
        """Number of requests that were live before recording; they are the first rows."""
        return int(np.searchsorted(self.start, 0))

    @property
    def num_events(self) -> int:
        """Number of events; for a source of bare lifespans, which has no events, the largest end."""
        return len(self.action) or int(self.end.max(initial=0))

    def aligned_size(self, alignment: int = ALIGNMENT_BYTES) -> Column:
        """(n,) requested bytes rounded up to a multiple of `alignment` bytes. BadInputError if that is too large."""
        if alignment * max(self.num_requests, 1) >= MAX_BYTES:
            raise BadInputError(f"an alignment of {alignment} bytes makes sums of more than 2**61 bytes: take 512.")
        return (self.size + alignment - 1) // alignment * alignment

    def reserved_bytes(self) -> Column:
        """(m,) bytes reserved after each event."""
        grows = np.isin(self.action, (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP))
        shrinks = np.isin(self.action, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP))
        delta = np.where(grows, self.event_size, np.where(shrinks, -self.event_size, 0))
        return self.reserved_start_bytes + np.cumsum(delta)

    def live_bytes(self, size: Column) -> Column:
        """(m + 1,) bytes live, given (n,) bytes: when recording began, then after each event."""
        change = np.zeros(self.num_events + 2, np.int64)
        np.add.at(change, self.start + 1, size)
        np.subtract.at(change, self.end + 1, size)
        return np.cumsum(change[:-1])

    def replace(self, **changes: Any) -> "Trace":
        """A copy with other values for the named fields, checked again."""
        return dataclasses.replace(self, **changes)


def index_streams(raw: Column) -> tuple[tuple[int, ...], Column]:
    """The distinct ids in order of first appearance, and for each of the (n,) ids its index among them."""
    distinct, first, inverse = np.unique(raw, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first)
    rank = np.argsort(by_appearance)
    return tuple(int(value) for value in distinct[by_appearance]), rank[inverse.reshape(-1)].astype(np.int64)
