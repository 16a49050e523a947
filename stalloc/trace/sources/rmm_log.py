"""Logs of RMM's logging resource adaptor: CSV with the columns Thread, Time, Action, Pointer, Size, Stream.

Each row is one event, in the order of the log. RMM logs one file a device, named `….dev1.…`; the device is taken from
there. Allocations of zero bytes have no address and are left out; `allocate failure` is out of memory.
"""

import io
import re
from array import array
from pathlib import Path

import numpy as np

from stalloc.errors import BadInputError
from stalloc.trace.record import Action, Trace
from stalloc.trace.sources.events import MAX_ADDRESS, MAX_SIZE_BYTES, make_trace

_COLUMNS = ("thread", "time", "action", "pointer", "size", "stream")
_ACTIONS = {
    "allocate": Action.ALLOC,
    "free": Action.FREE_COMPLETED,
    "deallocate": Action.FREE_COMPLETED,
    "allocate failure": Action.OOM,
}
_TIME = re.compile(r"(\d\d):(\d\d):(\d\d)[.:](\d{6})")
_EPOCH = re.compile(r"(\d{1,11})\.(\d{6})")  # in its documentation
_DEVICE = re.compile(r"\.dev(\d{1,3})(?:\.|$)")
_NULL = "(nil)"
_MAX_LINE_BYTES = 4096


def looks_like_rmm_log(head: bytes) -> bool:
    """Whether the first line names the six columns."""
    return tuple(head.splitlines()[0].decode("utf-8", "replace").lower().replace(" ", "").split(",")) == _COLUMNS


def read_rmm_log(path: Path, data: bytes) -> Trace:
    """The trace of a log; times are microseconds since midnight, or since 1970 if the log says so, zero if not at all.

    Raises BadInputError naming the line that is cut short or holds what RMM does not write.
    """
    action, identity, size, stream, time_us = array("b"), array("Q"), array("q"), array("q"), array("q")
    for number, line in enumerate(io.BytesIO(data), start=1):
        if len(line) > _MAX_LINE_BYTES:
            raise BadInputError(
                f"{path}: line {number} is {len(line)} bytes long, RMM writes short ones: log it again."
            )
        cells = [cell.strip() for cell in line.decode("utf-8", "replace").split(",")]
        if number == 1 or cells == [""]:
            continue
        try:
            _, time, name, pointer, num_bytes, on_stream = cells
            kind = _ACTIONS[name]
            address, raw_stream = (0 if cell == _NULL else int(cell, 16) for cell in (pointer, on_stream))
            if not (num_bytes.isascii() and num_bytes.isdigit()) or int(num_bytes) > MAX_SIZE_BYTES:
                raise ValueError(num_bytes)
            if not 0 <= address <= MAX_ADDRESS or not 0 <= raw_stream < 1 << 63:
                raise ValueError(pointer)
        except (ValueError, KeyError) as error:
            raise BadInputError(
                f"{path}: line {number} is not thread, time, allocate or free, pointer, bytes, stream: "
                f"log it again, and let the program end so that RMM writes the log out."
            ) from error
        if kind != Action.OOM and (address == 0 or int(num_bytes) == 0):
            continue
        action.append(kind)
        identity.append(address)
        size.append(int(num_bytes))
        stream.append(raw_stream)
        time_us.append(_microseconds(time))
    device = _DEVICE.search(path.name)
    return make_trace(
        path,
        "rmm log",
        device=int(device[1]) if device else 0,
        action=action,
        identity=identity,
        size=size,
        raw_stream=np.asarray(stream, np.int64),
        time_us=time_us,
        has_addresses=True,
    )


def _microseconds(time: str) -> int:
    if found := _TIME.fullmatch(time):
        hours, minutes, seconds, micros = (int(part) for part in found.groups())
        return ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + micros
    if found := _EPOCH.fullmatch(time):
        return int(found[1]) * 1_000_000 + int(found[2])
    return 0
