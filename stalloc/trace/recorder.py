"""Traces from columns that were written while a program ran (by the live recorder, or by any tool that has events).

The columns are taken as they are; only pairing, baseline and checks happen here, in under a second a million events.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.trace.pairing import pair_events
from stalloc.trace.record import Trace, empty_columns, mark_columns


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
