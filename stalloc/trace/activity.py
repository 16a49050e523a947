"""What a device, its host and the links between them did over time: computing, copies, phases. Tables of Trace.extra.

| column | |
|---|---|
| `activity_start`, `activity_end` | (a,) int64: nanoseconds, on the clock of `time_us` |
| `activity_link` | (a,) int8 of Link: what was at work |
| `activity_bytes` | (a,) int64: bytes that were moved; 0 where something computes |
| `activity_waited` | (a,) int64: nanoseconds that the program stood still for it; 0: it went on; -1: not known |
| `activity_pinned` | (a,) int8: the host memory of a copy is 1 page-locked, 0 pageable, -1 not known |
| `activity_phase` | (a,) int32: the phase that asked for it, an index into the names; -1: none |
| `phase_start`, `phase_end` | (p,) int64: nanoseconds, of each time that a phase ran |
| `phase_name` | (p,) int32: an index into the names |
| `memory_time`, `memory_bytes` | (h,) int64: from this nanosecond on there are so many bytes |
| `memory_kind` | (h,) int8 of MemoryKind: what they are |
| `activity_text` | (t,) uint8: a JSON list of the names |

A phase `update/3` is a part of the phase `update`, such as a subgroup of its parameters. Where the tables do not say
when phases ran, a phase lasts from the first thing that it computes (or copies) to that of the next. Files are
untrusted: what is read back is checked, whole, before anything of it is used.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from stalloc.columns import Column, Rows, Sizes, Times
from stalloc.errors import BadInputError
from stalloc.trace.record import MAX_BYTES, Trace
from stalloc.trace.table_columns import DamagedTable, check_numbers, packed_list, table_column, unpacked_list

MAX_NAMES, MAX_TEXT = 1 << 16, 1000
_MAX_COPY_BYTES = 1 << 44
_LATEST_NS = 1 << 61


class Link(enum.IntEnum):
    """What was at work; the numbers are part of the file format."""

    COMPUTE = 0  #: the device: kernels, and copies within it
    TO_DEVICE = 1  #: from host memory to the device
    TO_HOST = 2
    PEER = 3  #: between devices
    DISK_READ = 4
    DISK_WRITE = 5
    HOST_COMPUTE = 6  #: the processor, for the program's step: an optimizer on the host

    @property
    def text(self) -> str:
        """As people read it."""
        return _LINK_TEXTS.get(self.name, self.name.lower().replace("_", " "))

    @property
    def moves(self) -> bool:
        """Whether it moves bytes."""
        return self not in (Link.COMPUTE, Link.HOST_COMPUTE)


_LINK_TEXTS = {"TO_DEVICE": "host to device", "TO_HOST": "device to host", "PEER": "device to device"}


class MemoryKind(enum.IntEnum):
    """Which memory; the numbers are part of the file format. A trace with times knows the device's own better."""

    HOST = 0  #: of the program on the host, as far as it is counted
    ALLOCATED = 1  #: on the device
    RESERVED = 2


class Work(NamedTuple):
    """One row of the table, for whoever records."""

    start_ns: int
    end_ns: int
    link: Link
    num_bytes: int = 0
    phase: str = ""
    waited_ns: int = -1
    pinned: int = -1


class PhaseRun(NamedTuple):
    """One time that a phase ran."""

    start_ns: int
    end_ns: int
    name: str


class Held(NamedTuple):
    """What is held from a moment on."""

    start_ns: int
    kind: MemoryKind
    num_bytes: int


def _none() -> Column:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Activity:
    """The tables of one device, as the columns above say."""

    start: Times
    end: Times
    link: Column
    num_bytes: Sizes
    waited: Column
    pinned: Column
    phase: Rows
    phase_start: Times = field(default_factory=_none)
    phase_end: Times = field(default_factory=_none)
    phase_name: Rows = field(default_factory=_none)
    memory_time: Times = field(default_factory=_none)
    memory_bytes: Sizes = field(default_factory=_none)
    memory_kind: Column = field(default_factory=_none)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        return len(self.start)

    def columns(self) -> dict[str, Column]:
        """What belongs into Trace.extra."""
        found = {name: np.asarray(getattr(self, part)).astype(dtype) for name, (part, dtype) in _COLUMNS.items()}
        return found | {_TEXT: packed_list(self.names)}


def activity_of(work: Iterable[Work], phases: Iterable[PhaseRun] = (), held: Iterable[Held] = ()) -> Activity:
    """The tables of rows in any order. Raises BadInputError where they are impossible."""
    rows, runs, levels = sorted(work), sorted(phases), sorted(held)
    numbers: dict[str, int] = {"": -1}
    for name in [row.phase for row in rows] + [run.name for run in runs]:
        numbers.setdefault(name, len(numbers) - 1)

    def column(values: Sequence[int]) -> Column:
        return np.array(values, np.int64)

    try:
        return Activity(
            start=column([row.start_ns for row in rows]),
            end=column([row.end_ns for row in rows]),
            link=column([row.link for row in rows]),
            num_bytes=column([row.num_bytes for row in rows]),
            waited=column([row.waited_ns for row in rows]),
            pinned=column([row.pinned for row in rows]),
            phase=column([numbers[row.phase] for row in rows]),
            phase_start=column([run.start_ns for run in runs]),
            phase_end=column([run.end_ns for run in runs]),
            phase_name=column([numbers[run.name] for run in runs]),
            memory_time=column([level.start_ns for level in levels]),
            memory_bytes=column([level.num_bytes for level in levels]),
            memory_kind=column([level.kind for level in levels]),
            names=tuple(numbers)[1:],
        )
    except (DamagedTable, OverflowError) as error:
        raise BadInputError(
            f"what was recorded of copies and phases is impossible ({error}): record it again."
        ) from error


def read_activity(trace: Trace) -> Activity | None:
    """The activity of a trace, None if it has none. Raises BadInputError if the tables contradict each other."""
    if not any(name in trace.extra for name in (*_COLUMNS, _TEXT)):
        return None
    try:
        columns = {part: table_column(trace.extra, name, dtype) for name, (part, dtype) in _COLUMNS.items()}
        names = unpacked_list(trace.extra, _TEXT, MAX_NAMES)
        if not all(isinstance(name, str) for name in names):
            raise DamagedTable(f"{_TEXT} holds what is no name")
        return Activity(**columns, names=tuple(name[:MAX_TEXT] for name in names))
    except DamagedTable as error:
        raise BadInputError(
            f"trace of device {trace.device}: its table of activity is damaged ({error}): copy or record it again."
        ) from error


_TEXT = "activity_text"
_COLUMNS: Mapping[str, tuple[str, Any]] = {
    "activity_start": ("start", np.int64),
    "activity_end": ("end", np.int64),
    "activity_link": ("link", np.int8),
    "activity_bytes": ("num_bytes", np.int64),
    "activity_waited": ("waited", np.int64),
    "activity_pinned": ("pinned", np.int8),
    "activity_phase": ("phase", np.int32),
    "phase_start": ("phase_start", np.int64),
    "phase_end": ("phase_end", np.int64),
    "phase_name": ("phase_name", np.int32),
    "memory_time": ("memory_time", np.int64),
    "memory_bytes": ("memory_bytes", np.int64),
    "memory_kind": ("memory_kind", np.int8),
}
_TABLES = (
    ("start", "end", "link", "num_bytes", "waited", "pinned", "phase"),
    ("phase_start", "phase_end", "phase_name"),
    ("memory_time", "memory_bytes", "memory_kind"),
)


def _check(found: Activity) -> None:
    for table in _TABLES:
        if len({len(getattr(found, part)) for part in table}) != 1:
            raise DamagedTable(f"the columns {', '.join(table)} differ in length")
    latest, num_names = _LATEST_NS, len(found.names)
    bounds = {  # lowest, and what is beyond
        **dict.fromkeys(("start", "end", "phase_start", "phase_end", "memory_time"), (-latest, latest)),
        "link": (0, len(Link)),
        "num_bytes": (0, _MAX_COPY_BYTES),
        "waited": (-1, latest),
        "pinned": (-1, 2),
        "phase": (-1, num_names),
        "phase_name": (0, num_names),
        "memory_bytes": (0, _MAX_COPY_BYTES),
        "memory_kind": (0, len(MemoryKind)),
    }
    for part, (lowest, bound) in bounds.items():
        check_numbers(part, getattr(found, part), lowest, bound)
    if np.any(found.end < found.start) or np.any(found.phase_end < found.phase_start):
        raise DamagedTable("something in it ends before it starts")
    if float(found.num_bytes.sum(dtype=np.float64)) >= MAX_BYTES:
        raise DamagedTable("its copies add up to more than 2**61 bytes")
