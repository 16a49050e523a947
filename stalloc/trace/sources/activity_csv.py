"""Copies, computing and phases as CSV, for whatever else can say what a device did: `start_us,end_us,link,bytes,phase`.

Each line is one row of the table of activity; `link` is compute, to_device, to_host, peer, disk_read, disk_write or
host_compute. A line with the link `phase` says that the phase ran from start to end, one with `host_memory`,
`allocated` or `reserved` how many bytes there were from start on. `waited_us` and `pinned` (1 or 0) may follow. Times
are microseconds with fractions, on any clock; the device is number 0.
"""

import csv
import io
import math
from pathlib import Path

from stalloc.errors import BadInputError
from stalloc.printable import printable
from stalloc.trace.activity import MAX_TEXT, Activity, Held, Link, MemoryKind, PhaseRun, Work, activity_of

_REQUIRED = ("start_us", "end_us", "link", "bytes", "phase")
_PHASE = "phase"
_MEMORY = {"host_memory": MemoryKind.HOST, "allocated": MemoryKind.ALLOCATED, "reserved": MemoryKind.RESERVED}
_LINKS = {link.name.lower(): link for link in Link}
_MAX_US = float(1 << 51)


def looks_like_activity_csv(head: bytes) -> bool:
    """Whether the first line names the columns."""
    first = head.splitlines()[0].decode("utf-8", "replace").lstrip("\ufeff")
    return {cell.strip().lower() for cell in first.split(",")} >= set(_REQUIRED)


def read_activity_csv(path: Path, data: bytes) -> Activity:
    """The table. Raises BadInputError naming the line for what is no number, no link, or ends before it starts."""
    rows = csv.DictReader(io.StringIO(data.decode("utf-8-sig", "replace")))
    rows.fieldnames = [name.strip().lower() for name in rows.fieldnames or ()]
    work: list[Work] = []
    phases: list[PhaseRun] = []
    held: list[Held] = []
    try:
        for row in rows:
            where = f"{path}: line {rows.line_num}"
            if None in row or None in row.values():
                raise BadInputError(f"{where} has another number of cells than the header: correct it.")
            begin, end = (_nanoseconds(row[name], name, where) for name in ("start_us", "end_us"))
            link, phase = row["link"].strip().lower(), row["phase"].strip()[:MAX_TEXT]
            if end < begin:
                raise BadInputError(f"{where} ends before it starts: correct it.")
            if link == _PHASE:
                phases.append(PhaseRun(begin, end, phase))
            elif link in _MEMORY:
                held.append(Held(begin, _MEMORY[link], _bytes(row["bytes"], where)))
            elif link in _LINKS:
                waited = row.get("waited_us", "").strip()
                waited_ns = _nanoseconds(waited, "waited_us", where) if waited else -1
                pinned = {"1": 1, "0": 0}.get(row.get("pinned", "").strip(), -1)
                size = _bytes(row["bytes"], where)
                work.append(Work(begin, end, _LINKS[link], size, phase, waited_ns, pinned))
            else:
                known = ", ".join((*_LINKS, _PHASE, *_MEMORY))
                raise BadInputError(f"{where}: {printable(link, 40)!r} is no link: give one of {known}.")
    except csv.Error as error:
        raise BadInputError(f"{path}: not readable as CSV ({error}): write it again.") from error
    return activity_of(work, phases, held)


def _nanoseconds(cell: str, name: str, where: str) -> int:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MAX_US:
        raise BadInputError(f"{where}: {name} is {printable(cell, 40)!r}: give microseconds, from 0.")
    return round(value * 1000)


def _bytes(cell: str, where: str) -> int:
    text = cell.strip() or "0"
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        raise BadInputError(f"{where}: bytes is {printable(cell, 40)!r}: give a whole number.")
    return int(text)
