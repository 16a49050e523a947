"""What a device, its host and the links between them did over time: computing, copies, phases.

These are tables of Trace.extra, whose columns docs/files.md describes. A phase `update/3` is a part of the phase
`update`, such as a subgroup of its parameters. Where the tables do not say when phases ran, a phase lasts from the
first thing that it computes (or copies) to that of the next. Files are untrusted: what is read back is checked, whole,
before anything of it is used.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from stalloc.columns import Column, Rows, Sizes, Times
from stalloc.errors import BadInputError
from stalloc.trace.record import MAX_BYTES, Trace
from stalloc.trace.table_columns import DamagedTable, Rule, Rules, packed_list, unpacked_list

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
    """The tables of one device, as the columns say."""

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
        for fields in _FIELDS.values():
            if len({len(getattr(self, field)) for field in fields}) != 1:
                raise DamagedTable(f"the columns {', '.join(fields)} differ in length")
        _COLUMNS.check(self, {"names": len(self.names)})
        if np.any(self.end < self.start) or np.any(self.phase_end < self.phase_start):
            raise DamagedTable("something in it ends before it starts")
        if float(self.num_bytes.sum(dtype=np.float64)) >= MAX_BYTES:
            raise DamagedTable("its copies add up to more than 2**61 bytes")

    def __len__(self) -> int:
        return len(self.start)

    def columns(self) -> dict[str, Column]:
        """What belongs into Trace.extra."""
        return _COLUMNS.written(self) | {_TEXT: packed_list(self.names)}


def activity_of(work: Iterable[Work], phases: Iterable[PhaseRun] = (), held: Iterable[Held] = ()) -> Activity:
    """The tables of rows in any order. Raises BadInputError where they are impossible."""
    rows, runs, levels = sorted(work), sorted(phases), sorted(held)
    numbers: dict[str, int] = {"": -1}
    for name in [row.phase for row in rows] + [run.name for run in runs]:
        numbers.setdefault(name, len(numbers) - 1)

    def columns(values: Sequence[tuple[int, ...]], table: str) -> dict[str, Column]:
        fields = _FIELDS[table]
        return dict(zip(fields, np.array(values, np.int64).reshape(-1, len(fields)).T.copy(), strict=True))

    try:
        return Activity(
            **columns([(*row[:4], row.waited_ns, row.pinned, numbers[row.phase]) for row in rows], "activity"),
            **columns([(run.start_ns, run.end_ns, numbers[run.name]) for run in runs], "phase"),
            **columns([(level.start_ns, level.num_bytes, level.kind) for level in levels], "memory"),
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
        columns = _COLUMNS.read(trace.extra)
        names = unpacked_list(trace.extra, _TEXT, MAX_NAMES)
        if not all(isinstance(name, str) for name in names):
            raise DamagedTable(f"{_TEXT} holds what is no name")
        return Activity(**columns, names=tuple(name[:MAX_TEXT] for name in names))
    except DamagedTable as error:
        raise BadInputError(
            f"trace of device {trace.device}: its table of activity is damaged ({error}): copy or record it again."
        ) from error


_TEXT = "activity_text"
_COLUMNS = Rules(
    {
        "activity_start": Rule("start", np.int64, "activity", -_LATEST_NS, _LATEST_NS),
        "activity_end": Rule("end", np.int64, "activity", -_LATEST_NS, _LATEST_NS),
        "activity_link": Rule("link", np.int8, "activity", 0, len(Link)),
        "activity_bytes": Rule("num_bytes", np.int64, "activity", 0, _MAX_COPY_BYTES),
        "activity_waited": Rule("waited", np.int64, "activity", -1, _LATEST_NS),
        "activity_pinned": Rule("pinned", np.int8, "activity", -1, 2),
        "activity_phase": Rule("phase", np.int32, "activity", -1, "names"),
        "phase_start": Rule("phase_start", np.int64, "phase", -_LATEST_NS, _LATEST_NS),
        "phase_end": Rule("phase_end", np.int64, "phase", -_LATEST_NS, _LATEST_NS),
        "phase_name": Rule("phase_name", np.int32, "phase", 0, "names"),
        "memory_time": Rule("memory_time", np.int64, "memory", -_LATEST_NS, _LATEST_NS),
        "memory_bytes": Rule("memory_bytes", np.int64, "memory", 0, _MAX_COPY_BYTES),
        "memory_kind": Rule("memory_kind", np.int8, "memory", 0, len(MemoryKind)),
    }
)
_FIELDS = _COLUMNS.fields()
