"""Planning CSV: bare lifespans `id,lower,upper,size[,offset][,stream]` as google/minimalloc and others write them.

`lower` and `upper` become start and end unchanged, half open; there are no events. The columns may come in any order.
The names that minimalloc reads besides are read too: `buffer` or `buffer_id`, `begin` or `start`, and `end`, which is
the last moment and not the one after it. Its `alignment` is kept, its `gaps` count as parts of lifespans; notes say so.
"""

import csv
import io
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.errors import BadInputError
from stalloc.trace.record import EVENT_COLUMNS, MARK_COLUMNS, SEGMENT_COLUMNS, Trace, empty_columns, index_streams

_REQUIRED = ("id", "lower", "upper", "size")
_OPTIONAL = ("offset", "stream", "alignment")
_ALIASES = {"buffer": "id", "buffer_id": "id", "begin": "lower", "start": "lower", "end": "upper"}
_INT64_MAX = np.iinfo(np.int64).max
_MAX_ID = 200
_MAX_DIGITS = 40  # zeros in front of a number do no harm, thousands of digits take time


def looks_like_planning_csv(head: bytes) -> bool:
    """Whether the first line names the four columns."""
    first = head.splitlines()[0].decode("utf-8", "replace").lstrip("\ufeff")
    return set(_REQUIRED) <= set(_column_names(first.split(",")))


def _column_names(cells: list[str]) -> list[str]:
    names = [cell.strip().lower() for cell in cells]
    return [_ALIASES.get(name, name) for name in names]


def read_planning_csv(path: Path, data: bytes) -> Trace:
    """The lifespans of a CSV as a Trace of device 0, requests ordered by lower; ids and offsets are kept in `extra`.

    `extra["id"]` has the ids (int64, or text when one is not a number), `extra["offset"]` and `extra["alignment"]`
    bytes. Raises BadInputError naming the line for anything that is not a whole number, an empty lifespan, or a
    negative start, size or offset.
    """
    rows = _rows(path, data)
    cells = next(rows, [])
    header = _column_names(cells)
    for name in (*_REQUIRED, *_OPTIONAL):
        if header.count(name) > 1:
            raise BadInputError(f"{path}: there are two columns for {name}: leave one of them.")
    is_last = int("end" in {name.strip().lower() for name in cells})
    names = [name for name in (*_REQUIRED, *_OPTIONAL) if name in header]
    place = {name: header.index(name) for name in names}
    values = {name: array("q") for name in names if name != "id"}
    ids: list[str] = []
    gap_place, has_gaps = header.index("gaps") if "gaps" in header else None, False
    for number, row in enumerate(rows, start=2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise BadInputError(f"{path}: line {number} has {len(row)} cells, the header {len(header)}: correct it.")
        ids.append(row[place["id"]].strip())
        if len(ids[-1]) > _MAX_ID:
            raise BadInputError(f"{path}: line {number}: the id is {len(ids[-1])} characters long: give short ones.")
        has_gaps = has_gaps or (gap_place is not None and bool(row[gap_place].strip()))
        for name, column in values.items():
            cell = row[place[name]].strip()
            if not (cell.isascii() and cell.isdigit()) or len(cell) > _MAX_DIGITS or int(cell) >= _INT64_MAX:
                raise BadInputError(
                    f"{path}: line {number}: {name} is {cell[:40]!r}, expected a whole number from 0: correct it."
                )
            column.append(int(cell) + (is_last if name == "upper" else 0))
        if values["lower"][-1] >= values["upper"][-1]:
            raise BadInputError(f"{path}: line {number}: upper is not above lower, the lifespan is empty: correct it.")
    if not ids:
        raise BadInputError(f"{path}: the CSV has a header and no lifespans: write one line a request.")
    order = np.argsort(np.array(values["lower"], np.int64), kind="stable")
    columns = {name: np.array(column, np.int64)[order] for name, column in values.items()}
    extra: dict[str, Any] = {name: columns[name] for name in ("offset", "alignment") if name in columns}
    extra["id"] = _id_column(ids)[order]
    notes = []
    if "alignment" in columns and np.any(columns["alignment"] > 1):
        notes.append("the file asks for alignments of single requests: plans have one alignment for all")
    if has_gaps:
        notes.append("the file has gaps inside lifespans: requests are taken to be live in them")
    streams, stream = index_streams(columns.get("stream", np.zeros(len(ids), np.int64)))
    return Trace(
        device=0,
        start=columns["lower"],
        end=columns["upper"],
        size=columns["size"],
        stream=stream,
        free_requested=columns["upper"],
        **empty_columns(EVENT_COLUMNS, MARK_COLUMNS, SEGMENT_COLUMNS),
        streams=streams,
        names=(),
        reserved_start_bytes=0,
        info={"source": "planning csv", "file": path.name, "complete": True, "notes": notes},
        extra=extra,
    )


def _rows(path: Path, data: bytes) -> Iterator[list[str]]:
    """The lines of a CSV, one after the other: kept all together they take fifty times their text."""
    try:
        yield from csv.reader(io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline=""))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInputError(f"{path}: not readable as CSV ({error}): save it as plain UTF-8 text.") from error


def _id_column(ids: list[str]) -> np.ndarray:
    try:
        return np.array([int(text) for text in ids], np.int64)
    except (ValueError, OverflowError):
        return np.array(ids)
