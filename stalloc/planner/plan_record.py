"""The Plan record: where each request of one device lives, with its peak, its lower bound and where it came from.

Contract: a plan is immutable columns plus a small header; the same plan is the same bytes on disk; whatever a plan
file holds, reading it runs no code of the file, and anything that is not a well-formed plan is one BadInputError.
"""

import io
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stalloc.columns import Ints, Offsets, Rows, Sizes, Times
from stalloc.errors import BadInputError
from stalloc.figures import html_table, human_bytes, plural
from stalloc.files import write_whole
from stalloc.inputs import read_input
from stalloc.npz import Columns
from stalloc.printable import printable

FORMAT, VERSION = "stalloc plan", 3
#: files of version 1 lack the tables of constraints and of handovers, and the proven bound; up to version 2 a schedule
#: was called a tape, and its cycle a ring
READABLE = (1, 2, VERSION)

ROW_COLUMNS = ("offset", "size", "start", "end", "stream")
SCHEDULE_COLUMNS = (
    "schedule_row",
    "schedule_size",
    "schedule_stream",
    "schedule_start",
    "schedule_end",
    "schedule_offset",
)
CONSTRAINT_TABLES = (("row_alignment",), ("fixed_row", "fixed_offset"), ("forbidden_low", "forbidden_high"))
HANDOVER_COLUMNS = ("handover_earlier", "handover_later")
LATER_TABLES = (*CONSTRAINT_TABLES, HANDOVER_COLUMNS)  #: since version 2
LATER_COLUMNS = tuple(name for table in LATER_TABLES for name in table)
INTEGERS = ("device", "alignment", "peak_bytes", "lower_bound_bytes", "num_prologue", "cycle_start", "cycle_end")
PROVEN = "proven_bound_bytes"


def _empty() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Plan:
    """Offsets for the n requests of one device; a "program" plan also carries the k entries of its schedule.

    All columns are int64. Times are event indices and lifespans half open, [start, end).
    """

    offset: Offsets  #: (n,) bytes from the start of the arena; -1: not planned, to be served dynamically, or of no time
    size: Sizes  #: (n,) bytes as requested
    start: Times  #: (n,) event index as in the trace; -1: live before recording
    end: Times  #: (n,) event index as in the trace
    stream: Ints  #: (n,) index into the trace's streams
    device: int
    alignment: int  #: bytes; every planned offset is a multiple of it
    peak_bytes: int  #: the size of the arena: the highest end of a planned request, its size rounded up
    lower_bound_bytes: int  #: the maximum load of the planned requests, sizes rounded up to the alignment
    optimal: bool  #: whether the peak is proven to be the lowest possible
    method: str  #: what found the layout, for people
    kind: str  #: "trace": the requests of one recording; "program": a schedule to be followed for ever
    provenance: dict[str, Any]  #: source, options, version; nothing that varies between equal runs
    num_prologue: int = 0  #: entries of the schedule that run once, before the cycle
    cycle_start: int = 0  #: schedule time at which the cycle begins
    cycle_end: int = 0  #: schedule time at which the cycle starts over
    #: (k,) the row of this plan that each schedule entry stands for; -1: it comes later than the record
    schedule_row: Rows = field(default_factory=_empty)
    schedule_size: Sizes = field(default_factory=_empty)  #: (k,) bytes
    schedule_stream: Ints = field(default_factory=_empty)  #: (k,)
    schedule_start: Times = field(default_factory=_empty)  #: (k,) schedule time
    #: (k,) schedule time; beyond cycle_end: into the next iteration
    schedule_end: Times = field(default_factory=_empty)
    schedule_offset: Offsets = field(default_factory=_empty)  #: (k,) bytes; -1: served dynamically
    proven_bound_bytes: int = 0  #: no plan is lower, at least lower_bound_bytes; 0: nothing beyond that is claimed
    row_alignment: Sizes = field(default_factory=_empty)  #: (n,) bytes, where rows ask for more than `alignment`
    fixed_row: Rows = field(default_factory=_empty)  #: (f,) rows that were placed beforehand
    fixed_offset: Offsets = field(default_factory=_empty)  #: (f,) bytes, where they are
    forbidden_low: Offsets = field(default_factory=_empty)  #: (b,) ranges [low, high) of bytes that no row may use
    forbidden_high: Offsets = field(default_factory=_empty)  #: (b,) bytes
    #: (h,) schedule entries whose bytes another stream takes over
    handover_earlier: Rows = field(default_factory=_empty)
    handover_later: Rows = field(default_factory=_empty)  #: (h,) the entries that take them, after an event and a wait

    def __getattr__(self, name: str) -> Any:
        """What the last release called a tape and its ring is there under these names, too."""
        if not name.startswith(("tape_", "ring_")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        now = name.replace("tape_", "schedule_").replace("ring_", "cycle_")
        warnings.warn(f"Plan.{name} is called {now} now.", DeprecationWarning, stacklevel=2)
        return getattr(self, now)

    def __repr__(self) -> str:
        bound = "the lower bound" if not self.gap_bytes else f"{human_bytes(self.gap_bytes)} above the lower bound"
        counts = f"{self.num_planned:,} of {plural(self.num_requests, 'request')}"
        return f"<Plan of device {self.device}: {counts}, peak {human_bytes(self.peak_bytes)}, {bound}>"

    def _repr_html_(self) -> str:
        rows = [
            ("kind", printable(self.kind)),
            ("requests", f"{self.num_requests:,}, {self.num_planned:,} of them planned"),
            ("peak", human_bytes(self.peak_bytes)),
            ("lower bound", human_bytes(self.lower_bound_bytes)),
            ("found by", printable(self.method)),
        ]
        return html_table(f"Plan of device {self.device}", rows)

    @property
    def num_requests(self) -> int:
        """The number of rows, planned or not."""
        return len(self.size)

    @property
    def num_planned(self) -> int:
        """The number of rows with an offset."""
        return int(np.count_nonzero(self.offset >= 0))

    @property
    def gap_bytes(self) -> int:
        """How far the peak lies above what is proven to be needed."""
        return self.peak_bytes - max(self.lower_bound_bytes, self.proven_bound_bytes)

    @property
    def interrupted(self) -> str:
        """What ended planning before its time ("time budget", "Ctrl-C"); empty if nothing did."""
        return str(self.provenance.get("interrupted", ""))


def program_plan(*, offset: Offsets, size: Sizes, start: Times, end: Times, stream: Ints, **others: Any) -> Plan:
    """A "program" plan whose rows are the entries of its schedule, (k,) columns; `others` are what else a plan has."""
    columns: dict[str, Any] = {"offset": offset, "size": size, "start": start, "end": end, "stream": stream}
    columns |= {f"schedule_{name}": column for name, column in columns.items()}
    return Plan(**columns, schedule_row=np.arange(len(size), dtype=np.int64), kind="program", **others)


def save_plans(path: str | Path, plans: list[Plan]) -> None:
    """Write one plan a device to `path`, replacing it whole or not at all. Raises BadInputError if it cannot."""
    write_whole(path, plans_to_bytes(plans))


def plans_to_bytes(plans: list[Plan]) -> bytes:
    """The content of a plan file."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "plans": [
            {name: getattr(plan, name) for name in (*INTEGERS, PROVEN, "optimal", "method", "kind", "provenance")}
            for plan in plans
        ],
    }
    columns = {
        f"{i}.{name}": np.ascontiguousarray(getattr(plan, name), np.int64)
        for i, plan in enumerate(plans)
        for name in ROW_COLUMNS + SCHEDULE_COLUMNS + LATER_COLUMNS
    }
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    # Not compressed: the bytes would depend on the version of zlib.
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, header=np.frombuffer(text, np.uint8), **columns)
    return buffer.getvalue()


def load_plans(path: str | Path) -> list[Plan]:
    """The plans of a file, one a device. Raises BadInputError for anything that is not a whole plan file."""
    path = Path(path)
    data = read_input(path, "a file that `stalloc plan -o` wrote")
    return plans_from_bytes(data, path)


def plans_from_bytes(data: bytes, source: str | Path) -> list[Plan]:
    """The plans in the content of a plan file, which came from `source`. Raises BadInputError as load_plans does."""
    try:
        if not data.startswith(b"PK"):
            raise ValueError("it is no archive of columns")
        archive = Columns(io.BytesIO(data))
        header = _header(archive)
        return [_plan(archive, index, entry, header["version"]) for index, entry in enumerate(header["plans"])]
    except Exception as error:  # zipfile and numpy raise a dozen kinds for damaged bytes, none of them a defect of ours
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        reason = (reason.splitlines() or ["it is damaged"])[0].rstrip(".")[:200]
    raise BadInputError(f"{source} is not a plan ({reason}): write one with `stalloc plan FILE -o step.plan.npz`.")


def _header(archive: Any) -> dict[str, Any]:
    header = json.loads(bytes(_array(archive, "header", np.uint8)).decode())
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("its header does not say so")
    if header.get("version") not in READABLE:
        raise ValueError(f"its format version is {header.get('version')!r:.20}, this stalloc reads up to {VERSION}")
    if not isinstance(header["plans"], list) or not all(isinstance(entry, dict) for entry in header["plans"]):
        raise ValueError("its header lists no plans")
    return header


def _array(archive: Any, name: str, dtype: type) -> NDArray[Any]:
    array = archive[name]
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is no array")
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"{name} is {array.ndim}-dimensional {array.dtype}, not a column of {np.dtype(dtype)}")
    return array


def _name_in_file(name: str, version: int) -> str:
    return name if version > 2 else name.replace("schedule_", "tape_").replace("cycle_", "ring_")


def _plan(archive: Any, index: int, entry: dict[str, Any], version: int) -> Plan:
    later = version > 1
    tables: tuple[tuple[str, ...], ...] = (ROW_COLUMNS, SCHEDULE_COLUMNS, *(LATER_TABLES if later else ()))
    integers = (*INTEGERS, PROVEN) if later else INTEGERS
    columns = {
        name: _array(archive, f"{index}.{_name_in_file(name, version)}", np.int64) for table in tables for name in table
    }
    for names in tables:
        if len({len(columns[name]) for name in names}) != 1:
            raise ValueError(f"the columns {', '.join(names)} of plan {index} differ in length")
    entry = {**entry, **{name: entry[_name_in_file(name, version)] for name in integers}}
    for name in integers:
        if type(entry[name]) is not int or not 0 <= entry[name] < 2**63:
            raise ValueError(f"{name} of plan {index} is no count")
    for name, kind in (("optimal", bool), ("method", str), ("kind", str), ("provenance", dict)):
        if not isinstance(entry[name], kind):
            raise ValueError(f"{name} of plan {index} is no {kind.__name__}")
    if entry["alignment"] & (entry["alignment"] - 1) or not entry["alignment"]:
        raise ValueError(f"alignment of plan {index} is no power of two")
    if entry["kind"] not in ("trace", "program"):
        raise ValueError(f"kind of plan {index} is neither trace nor program")
    if later and len(columns["row_alignment"]) not in (0, len(columns["size"])):
        raise ValueError(f"row_alignment of plan {index} is not one a row")
    header = {name: entry[name] for name in (*integers, "optimal", "method", "kind", "provenance")}
    fields: dict[str, Any] = {**columns, **header}
    return Plan(**fields)
