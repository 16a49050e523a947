"""Traces on disk: one `.trace.npz`, the same bytes for the same traces, columns prefixed by device, a JSON header.

Nothing is pickled. Tables that this version does not know travel in `extra` and are written again; a file of a newer
schema is refused with one sentence. Before v1 there is one schema and no migration.
"""

import io
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.files import whole
from stalloc.npz import DAMAGE, Columns
from stalloc.trace.header import FORMAT, SCHEMA_VERSION, NotATrace, read_header
from stalloc.trace.record import COLUMNS, Trace

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
        "format": FORMAT,
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
    return Trace(
        device=entry["device"],
        **{name: columns[prefix + name] for name in COLUMNS},
        streams=tuple(entry["streams"]),
        names=tuple(entry["names"]),
        reserved_start_bytes=entry["reserved_start_bytes"],
        info=entry["info"],
        extra={
            name.removeprefix(extra_prefix): columns[name] for name in columns.names if name.startswith(extra_prefix)
        },
    )
