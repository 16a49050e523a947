"""Traces from columns that were written while a program ran (by the live recorder, or by any tool that has events).

The columns are taken as they are; only pairing, baseline and checks happen here, in under a second a million events.
Upheld: events of one address alternate between alloc and free_completed; anything else is a contradiction and is
reported, never guessed at. Sorting by address makes pairing O(m log m) with no loop in Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.trace.record import Action, Trace, empty_columns, mark_columns

# NumPy asks an enumeration what it can do, and drops an interruption (Ctrl-C) that comes while it answers
_ALLOC, _REQUESTED, _COMPLETED = int(Action.ALLOC), int(Action.FREE_REQUESTED), int(Action.FREE_COMPLETED)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pairs:
    """Request columns as in Trace, ordered by start, and the request of each event."""

    start: Column
    end: Column
    size: Column
    stream: Column
    free_requested: Column
    address: Column  #: (n,) uint64
    event_request: Column  #: (m,) row, or -1

    def columns(self, lasting: Sequence[int] | Column = (), stream: Any = 0) -> dict[str, Column]:
        """The columns of a Trace, with requests of these (k,) sizes and streams that lived throughout in front."""
        num_lasting, num_events = len(lasting), len(self.event_request)

        def after(value: Any, column: Column) -> Column:
            return np.concatenate([np.full(num_lasting, value, np.int64), column])

        return {
            "start": after(-1, self.start),
            "end": after(num_events, self.end),
            "size": after(lasting, self.size),
            "stream": after(stream, self.stream),
            "free_requested": after(num_events, self.free_requested),
            "event_request": np.where(self.event_request >= 0, self.event_request + num_lasting, -1),
        }


def pair_events(action: Column, address: Column, size: Column, stream: Column, where: str) -> Pairs:
    """Pair the events of one device.

    `action`, `address`, `size`, `stream` are (m,) columns; `where` names the source in errors. A free of an address
    that no earlier event allocated becomes a request with start -1.

    Raises BadInputError when an address is allocated twice or freed twice with nothing between.
    """
    num_events = len(action)
    events = np.flatnonzero(action <= _COMPLETED)
    order = events[np.argsort(address[events], kind="stable")]
    kind, place = action[order], address[order]
    new_address = np.append(True, place[1:] != place[:-1])[: len(place)]
    after_free = np.append(False, kind[:-1] == _COMPLETED)[: len(place)] & ~new_address
    _refuse(after_free & (kind != _ALLOC), order, place, where, "freed twice")
    _refuse((kind == _ALLOC) & ~new_address & ~after_free, order, place, where, "allocated twice")

    first = new_address | (kind == _ALLOC)
    group = np.cumsum(first) - 1  # request of each sorted event, in order of (address, time)
    heads = order[first]
    num_requests = len(heads)
    start = np.where(action[heads] == _ALLOC, heads, -1)
    end = np.full(num_requests, num_events, np.int64)
    free_requested = np.full(num_requests, num_events, np.int64)
    done, asked = kind == _COMPLETED, kind == _REQUESTED
    end[group[done]] = order[done]
    free_requested[group[asked][::-1]] = order[asked][::-1]  # the first one asked counts
    free_requested = np.minimum(free_requested, end)  # a source without free_requested events asks when it frees

    by_start = np.lexsort((heads, start))
    row = np.empty(num_requests, np.int64)
    row[by_start] = np.arange(num_requests)
    event_request = np.full(num_events, -1, np.int64)
    event_request[order] = row[group]
    return Pairs(
        start=start[by_start],
        end=end[by_start],
        size=size[heads][by_start].astype(np.int64),
        stream=stream[heads][by_start].astype(np.int64),
        free_requested=free_requested[by_start],
        address=address[heads][by_start],
        event_request=event_request,
    )


def _refuse(wrong: Column, order: Column, place: Column, where: str, what: str) -> None:
    if not wrong.any():
        return
    at = int(np.argmin(np.where(wrong, order, np.iinfo(np.int64).max)))
    raise BadInputError(
        f"{where}: event {order[at]} says that address {int(place[at]):#x} is {what} with nothing between, "
        f"so events are missing: record again in one piece."
    )


def from_recorded(
    device: int,
    action: Column,
    address: Column,
    size: Column,
    stream: Column,
    time_ns: Column,
    marks: Sequence[tuple[int, int, str]],
    streams_raw: Sequence[int],
    *,
    reserved_start_bytes: int = 0,
    segments: tuple[Column, Column, Column] | None = None,
    info: dict[str, Any] | None = None,
) -> Trace:
    """The Trace of recorded events.

    `action`, `address`, `size` (bytes), `stream` (index into `streams_raw`) and `time_ns` are (m,) columns; `marks`
    are (event index, mark kind, name); `segments` at the end are (address, size, stream index). Frees of addresses
    that were never allocated become requests with start -1; without any, and with nothing reserved at the start,
    the record is complete. `info` overrides what is put there ("source", "complete", "notes").

    Raises BadInputError when an address is allocated or freed twice with nothing between.
    """
    action = np.asarray(action).astype(np.int8)
    address = np.asarray(address).astype(np.uint64)
    pairs = pair_events(action, address, np.asarray(size), np.asarray(stream), f"recording of device {device}")
    names, mark_table = mark_columns(marks)
    columns = empty_columns(("segment_address", "segment_size", "segment_stream"))
    if segments is not None:
        columns = dict(zip(columns, segments, strict=True))
    baseline = bool(len(pairs.start) and pairs.start[0] < 0)
    return Trace(
        device=device,
        **pairs.columns(),
        action=action,
        address=address,
        event_size=np.asarray(size),
        event_stream=np.asarray(stream),
        time_us=np.asarray(time_ns).astype(np.int64) // 1000,
        **mark_table,
        **columns,
        streams=tuple(int(raw) for raw in streams_raw),
        names=names,
        reserved_start_bytes=reserved_start_bytes,
        info={
            "source": "stalloc recorder",
            "file": "",
            "complete": not baseline and reserved_start_bytes == 0,
            "notes": [],
        }
        | (info or {}),
        extra={},
    )
