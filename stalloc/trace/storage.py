"""Traces on disk: one `.trace.npz`, the same bytes for the same traces, columns prefixed by device, a JSON header.

Nothing is pickled. Tables that this version does not know travel in `extra` and are written again; a file of a newer
schema is refused with one sentence. Before v1 there is one schema and no migration.
"""

import io
import json
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.errors import BadInputError
from stalloc.files import whole
from stalloc.trace.record import COLUMNS, Column, Trace

SCHEMA_VERSION = 1
_SUFFIX = ".trace.npz"
_DAMAGE: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    MemoryError,
    RuntimeError,
)
_DAMAGE += (zipfile.BadZipFile, zlib.error)
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
    members: dict[str, Column] = {"header": np.frombuffer(_header(traces), np.uint8)}
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


def _header(traces: Sequence[Trace]) -> bytes:
    header = {
        "format": "stalloc trace",
        "schema": SCHEMA_VERSION,
        "devices": [
            {
                "device": trace.device,
                "streams": list(trace.streams),
                "names": list(trace.names),
                "reserved_start_bytes": trace.reserved_start_bytes,
                "info": trace.info,
            }
            for trace in traces
        ],
    }
    return json.dumps(header, sort_keys=True).encode()


def read_npz(path: Path) -> list[Trace]:
    """Read what `save_traces` wrote.

    Raises BadInputError when the file is damaged, of another kind, or of a newer schema.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            if "header" not in archive.files:
                raise BadInputError(f"{path}: a zip archive, but not a trace of stalloc: give a {_SUFFIX} file.")
            header = json.loads(archive["header"].tobytes())
            _check_header(path, header)
            return [_read_device(archive, entry) for entry in header["devices"]]
    except BadInputError:
        raise
    except _DAMAGE as error:
        raise BadInputError(
            f"{path}: damaged trace file ({type(error).__name__}: {error}): copy or record it again."
        ) from error


def _check_header(path: Path, header: Any) -> None:
    if not isinstance(header, dict) or header.get("format") != "stalloc trace":
        raise BadInputError(f"{path}: not a trace of stalloc: give a {_SUFFIX} file that stalloc wrote.")
    schema = header.get("schema")
    if schema != SCHEMA_VERSION:
        raise BadInputError(
            f"{path}: written with trace schema {schema}, this stalloc reads {SCHEMA_VERSION}: "
            f"use the version of stalloc that wrote it, or record again."
        )


def _read_device(archive: Any, entry: dict[str, Any]) -> Trace:
    prefix = f"d{int(entry['device'])}."
    extra_prefix = prefix + "extra."
    return Trace(
        device=int(entry["device"]),
        **{name: archive[prefix + name] for name in COLUMNS},
        streams=tuple(int(raw) for raw in entry["streams"]),
        names=tuple(str(name) for name in entry["names"]),
        reserved_start_bytes=int(entry["reserved_start_bytes"]),
        info=dict(entry["info"]),
        extra={
            name.removeprefix(extra_prefix): archive[name] for name in archive.files if name.startswith(extra_prefix)
        },
    )
