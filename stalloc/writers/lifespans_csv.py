"""Bare lifespans for planners: CSV `id,lower,upper,size[,alignment][,offset]`, as google/minimalloc reads them.

The format has lifespans of one device and nothing else: `[lower, upper)` are event indices, moved by one where
something was live before the recording, which starts at 0 then.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stalloc.trace import Trace
from stalloc.writers.writing import write_chunks


def write_lifespans_csv(path: Path, trace: Trace) -> list[str]:
    """Write the requests of a trace, one a line; returns what the format leaves out, a sentence each."""
    write_chunks(path, _lines(trace))
    notes = ["a planning CSV holds lifespans and sizes only: events, addresses, streams, marks and times are left out"]
    if trace.num_baseline_requests:
        notes.append("what was live before the recording starts at 0, so every event is one later than in the record")
    return notes


def _lines(trace: Trace) -> Iterator[bytes]:
    ids = trace.extra.get("id")
    shift = -min(int(trace.start.min(initial=0)), 0)  # what was live before recording starts at -1
    names = ["id", "lower", "upper", "size"]
    columns = [
        np.arange(trace.num_requests) if ids is None else ids,
        trace.start + shift,
        trace.end + shift,
        trace.size,
    ]
    for name in ("alignment", "offset"):
        column = trace.extra.get(name)
        if column is not None and column.shape == trace.size.shape:
            names.append(name)
            columns.append(column)
    yield (",".join(names) + "\n").encode()
    for row in zip(*(column.tolist() for column in columns), strict=True):
        yield (",".join(map(_cell, row)) + "\n").encode()


def _cell(value: object) -> str:
    text = str(value)
    return '"' + text.replace('"', '""') + '"' if any(char in text for char in ',"\r\n') else text
