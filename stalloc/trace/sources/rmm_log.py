"""Logs of RMM: the CSV of its logging resource adaptor, with its columns or without, and what csv_log() of its releases
until 0.12 gives.

Each row is one event, in the order of the log. The adaptor logs one file a device, named `….dev1.…`; the device is
taken from there. Allocations of zero bytes have no address and are left out; `allocate failure` is out of memory.
Without columns, as Spark's plugin writes rows to standard error, other lines are passed over. A last line that is cut
short is left out: what RMM had not written yet when the process ended.
"""

import io
import re
from array import array
from collections import defaultdict
from pathlib import Path

import numpy as np

from stalloc.errors import BadInputError
from stalloc.trace.record import Action, Trace
from stalloc.trace.sources.events import MAX_ADDRESS, MAX_SIZE_BYTES, make_trace

_COLUMNS = ("thread", "time", "action", "pointer", "size", "stream")
_OLD_COLUMNS = ("eventtype", "deviceid", "address", "stream", "size(bytes)")  # the first five
_ACTIONS = {
    "allocate": Action.ALLOC,
    "free": Action.FREE_COMPLETED,
    "deallocate": Action.FREE_COMPLETED,
    "allocate failure": Action.OOM,
}
_OLD_ACTIONS = {"Alloc": Action.ALLOC, "Free": Action.FREE_COMPLETED}
_ROW = re.compile(rb"(?m)^\d+,[\d:.]+,(?:allocate|allocate failure|free|deallocate),(?:0x)?[\da-f(nil)]+,\d+,\w+\s*$")
_TIME = re.compile(r"(\d\d):(\d\d):(\d\d)[.:](\d{6})")
_EPOCH = re.compile(r"(\d{1,11})\.(\d{6})")  # in its documentation
_DEVICE = re.compile(r"\.dev(\d{1,3})(?:\.|$)")
_NULL = "(nil)"
_MAX_LINE_BYTES = 4096
_MAX_DEVICE, _MAX_STREAM = 4095, (1 << 63) - 1


class _Events:
    def __init__(self) -> None:
        self.action, self.identity, self.size = array("b"), array("Q"), array("q")
        self.raw_stream, self.time_us = array("q"), array("q")
        self.live: dict[int, int] = {}  #: bytes by address, in a log whose frees do not tell them

    def add(self, kind: Action, address: int, num_bytes: int, stream: int, time_us: int) -> None:
        if kind != Action.OOM and (address == 0 or num_bytes == 0):
            return
        self.action.append(kind)
        self.identity.append(address)
        self.size.append(num_bytes)
        self.raw_stream.append(stream)
        self.time_us.append(time_us)


def looks_like_rmm_log(head: bytes) -> bool:
    """Whether the first line names the columns, or there is a row of a log without them."""
    columns = tuple(head.splitlines()[0].decode("utf-8", "replace").lower().replace(" ", "").split(","))
    return columns == _COLUMNS or columns[: len(_OLD_COLUMNS)] == _OLD_COLUMNS or _ROW.search(head) is not None


def read_rmm_log(path: Path, data: bytes) -> list[Trace]:
    """The traces of a log, one a device; times are microseconds since midnight, or since 1970 or the start of the
    program if the log says so, zero if not at all.

    Raises BadInputError naming the line that is damaged, or holds what RMM does not write.
    """
    first = data.lstrip()[:_MAX_LINE_BYTES].splitlines()[0].lower()
    is_old, has_columns = first.startswith(b"event"), first.startswith((b"event", b"thread"))
    in_name = _DEVICE.search(path.name)
    device = int(in_name[1]) if in_name else 0
    events: dict[int, _Events] = defaultdict(_Events)
    notes = []
    for number, line in enumerate(io.BytesIO(data), start=1):
        if len(line) > _MAX_LINE_BYTES and has_columns:
            raise BadInputError(
                f"{path}: line {number} is {len(line)} bytes long, RMM writes short ones: log it again."
            )
        cells = [cell.strip() for cell in line[:_MAX_LINE_BYTES].decode("utf-8", "replace").split(",")]
        if cells == [""] or (number == 1 and has_columns) or not (has_columns or _ROW.match(line)):
            continue
        try:
            if is_old:
                _add_old(events, cells)
            else:
                _add(events[device], cells)
        except (ValueError, KeyError) as error:
            if not line.endswith(b"\n") and number > 1:
                notes.append("the last line of the log is cut short, so later ones may be missing")
                break
            new = "thread, time, allocate or free, pointer, bytes, stream"
            columns = "Event Type, Device ID, address, stream, bytes" if is_old else new
            raise BadInputError(
                f"{path}: line {number} is not {columns}: "
                "log it again, and let the program end so that RMM writes the log out."
            ) from error
    if not events:
        events[device] = _Events()
    return [
        make_trace(
            path,
            "rmm log",
            device=number,
            action=one.action,
            identity=one.identity,
            size=one.size,
            raw_stream=np.asarray(one.raw_stream, np.int64),
            time_us=one.time_us,
            has_addresses=True,
            notes=notes,
        )
        for number, one in sorted(events.items())
    ]


def _add(events: _Events, cells: list[str]) -> None:
    _, time, name, pointer, num_bytes, on_stream = cells
    address, stream = _number(pointer, MAX_ADDRESS), _number(on_stream, _MAX_STREAM)
    events.add(_ACTIONS[name], address, _bytes(num_bytes), stream, _microseconds(time))


def _add_old(events: dict[int, _Events], cells: list[str]) -> None:
    name, device, pointer, on_stream, num_bytes, *more = cells
    if not (device.isascii() and device.isdigit()) or int(device) > _MAX_DEVICE:
        raise ValueError(device)
    one, address, stream = events[int(device)], _number(pointer, MAX_ADDRESS), _number(on_stream, _MAX_STREAM)
    time_us = round(float(more[3]) * 1e6)  # when the call began, in seconds
    if not 0 <= time_us < 1 << 62:
        raise ValueError(more[3])
    if name == "Realloc":
        one.add(Action.FREE_COMPLETED, address, one.live.pop(address, 0), stream, time_us)
    kind = _OLD_ACTIONS["Alloc" if name == "Realloc" else name]
    size = _bytes(num_bytes) if kind == Action.ALLOC else one.live.pop(address, 0)  # that of a free is 0
    if kind == Action.ALLOC:
        one.live[address] = size
    one.add(kind, address, size, stream, time_us)


def _number(text: str, most: int) -> int:
    number = 0 if text == _NULL else int(text, 16)
    if not 0 <= number <= most:
        raise ValueError(text)
    return number


def _bytes(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > MAX_SIZE_BYTES:
        raise ValueError(text)
    return int(text)


def _microseconds(time: str) -> int:
    if found := _TIME.fullmatch(time):
        hours, minutes, seconds, micros = (int(part) for part in found.groups())
        return ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + micros
    if found := _EPOCH.fullmatch(time):
        return int(found[1]) * 1_000_000 + int(found[2])
    return 0
