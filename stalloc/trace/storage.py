"""Traces on disk: one `.trace.npz`, the same bytes for the same traces, columns prefixed by device, a JSON header.

Nothing is pickled. Tables that this version does not know travel in `extra` and are written again; a file of a newer
schema is refused with one sentence. Before v1 there is one schema and no migration. What passes has the types that
the Trace record states; keys of `info` that nobody knows are kept as they are.
"""

import io
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.files import whole
from stalloc.npz import DAMAGE, Columns
from stalloc.trace.record import COLUMNS, MAX_BYTES, Trace

SCHEMA_VERSION = 1
FORMAT = "stalloc trace"
MAX_HEADER_BYTES = 16 << 20
MAX_DEVICE = 4095
_Check = Callable[[Any], bool]


class NotATrace(ValueError):
    """The archive is of another kind, or of another version; the text says which."""


def read_header(content: bytes) -> list[dict[str, Any]]:
    """The entries of the devices. Raises NotATrace, and what damaged JSON raises."""
    if len(content) > MAX_HEADER_BYTES:
        raise ValueError(f"its header is {len(content):,} bytes long")
    header = json.loads(content)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise NotATrace("not a trace of stalloc: give a .trace.npz file that stalloc wrote")
    schema = header.get("schema")
    if type(schema) is not int or schema != SCHEMA_VERSION:
        shown = str(schema)[:20] if type(schema) is int else f"of type {type(schema).__name__}"
        raise NotATrace(
            f"written with trace schema {shown}, this stalloc reads {SCHEMA_VERSION}: "
            f"use the version of stalloc that wrote it, or record again"
        )
    entries = header.get("devices")
    if not isinstance(entries, list) or not entries:
        raise ValueError("its header lists no devices")
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ValueError(f"entry {number} of its header is no object")
        for name, (is_right, expected) in _ENTRY.items():
            if name not in entry or not is_right(entry[name]):
                raise ValueError(f"{name} of device {number} in its header is not {expected}")
        for name, (is_right, expected) in _INFO.items():
            if name in entry["info"] and not is_right(entry["info"][name]):
                raise ValueError(f"info.{name} of device {number} in its header is not {expected}")
    if len({entry["device"] for entry in entries}) < len(entries):
        raise ValueError("its header has a device twice")
    return entries


def _whole(lowest: int, highest: int) -> _Check:
    return lambda value: type(value) is int and lowest <= value <= highest


def _is(kind: type) -> _Check:
    return lambda value: isinstance(value, kind)


def _list_of(is_right: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a truth value or nothing."""
    return value is None or isinstance(value, str | int | float | bool)


def is_settings(value: Any) -> bool:
    """Whether a value is what a snapshot says of its allocator's settings: plain values, or one dictionary of them."""
    if not isinstance(value, dict):
        return False
    return all(
        isinstance(key, str)
        and (is_plain(item) or (isinstance(item, dict) and all(map(is_plain, [*item, *item.values()]))))
        for key, item in value.items()
    )


_ENTRY: dict[str, tuple[_Check, str]] = {
    "device": (_whole(0, MAX_DEVICE), f"a number from 0 to {MAX_DEVICE}"),
    "streams": (_list_of(_whole(-(1 << 63), (1 << 64) - 1)), "a list of streams"),
    "names": (_list_of(_is(str)), "a list of names"),
    "reserved_start_bytes": (_whole(0, MAX_BYTES), "a number of bytes"),
    "info": (_is(dict), "an object"),
}
_INFO: dict[str, tuple[_Check, str]] = {
    **dict.fromkeys(("source", "file", "converted_from", "device_name", "torch"), (_is(str), "text")),
    "complete": (_is(bool), "true or false"),
    "notes": (_list_of(_is(str)), "a list of texts"),
    **dict.fromkeys(("unseen_bytes", "total_bytes"), (_whole(0, MAX_BYTES), "a number of bytes")),
    "allocator_settings": (is_settings, "a table of settings"),
}


_SUFFIX = ".trace.npz"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date a zip can hold: files must not depend on when they were written


def save_traces(path: str | os.PathLike[str], traces: Sequence[Trace]) -> None:
    """Write traces, at most one a device, to one file whose name ends in `.trace.npz`.

    Raises BadInputError for another suffix, two traces of one device, or a place that cannot be written.
    """
    path = Path(path)
    if not path.name.endswith(_SUFFIX):
        raise BadInputError(f"{path}: traces are written as {_SUFFIX}: choose a name that ends so.")
    devices = [trace.device for trace in traces]
    if len(set(devices)) != len(devices):
        raise BadInputError(f"{path}: two traces of the same device cannot share a file: save them one by one.")
    entries = [{name: getattr(trace, name) for name in _ENTRY} for trace in traces]
    header = json.dumps({"format": FORMAT, "schema": SCHEMA_VERSION, "devices": entries}, sort_keys=True)
    members: dict[str, Column] = {"header": np.frombuffer(header.encode(), np.uint8)}
    for trace in traces:
        for name in COLUMNS:
            members[f"d{trace.device}.{name}"] = getattr(trace, name)
        for name in sorted(trace.extra):
            members[f"d{trace.device}.extra.{name}"] = trace.extra[name]
    with whole(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, column in members.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.ascontiguousarray(column), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, buffer.getvalue(), compresslevel=1)


def read_npz(path: Path, file: BinaryIO) -> list[Trace]:
    """Read what `save_traces` wrote; `path` is what sentences call the open file.

    Raises BadInputError when the file is damaged, of another kind, of a newer schema, or larger than it can be.
    """
    try:
        columns = Columns(file)
        if "header" not in columns:
            raise NotATrace(f"a zip archive, but not a trace of stalloc: give a {_SUFFIX} file")
        return [_read_device(columns, entry) for entry in read_header(columns["header"].tobytes())]
    except BadInputError:
        raise
    except NotATrace as error:
        raise BadInputError(f"{path}: {error}.") from error
    except DAMAGE as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        reason = (reason.splitlines() or [""])[0].rstrip(".")[:200] or type(error).__name__
        raise BadInputError(f"{path}: damaged trace file ({reason}): copy or record it again.") from error


def _read_device(columns: Columns, entry: dict[str, Any]) -> Trace:
    prefix = f"d{entry['device']}."
    extra_prefix = prefix + "extra."
    fields: dict[str, Any] = {name: columns[prefix + name] for name in COLUMNS}
    fields |= {name: tuple(entry[name]) if isinstance(entry[name], list) else entry[name] for name in _ENTRY}
    return Trace(
        **fields,
        extra={
            name.removeprefix(extra_prefix): columns[name] for name in columns.names if name.startswith(extra_prefix)
        },
    )
