"""Operations of a trace, from what a profiler noted of the same run: ranges of the program, and memory by address.

Contract: the clock is the allocator's own history, and the profiler's memory events are a part of it, address by
address in the same order; each range is placed between the events that it lies between. What a range reads comes
before a free that the profiler did not see. A request belongs to the outermost operation with a kernel that contains
its alloc.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stalloc.columns import Column
from stalloc.trace.operations import ACCESS_READ, ACCESS_WRITTEN, ModuleName, Operations, RangeKind
from stalloc.trace.record import Action, Trace


class Range(NamedTuple):
    """A piece of the program's time on one thread; ordered by their begin, parents before what they contain."""

    name: str
    kind: RangeKind
    parent: int
    begin_ns: int
    end_ns: int
    thread: int
    sequence: int
    module: int  #: row of the profile's modules, or -1
    call: int  #: row of the profile's calls, or -1
    read: tuple[tuple[int, int], ...]  #: storages on GPUs: device, address
    written: tuple[tuple[int, int], ...]


class MemoryEvent(NamedTuple):
    """The allocator of a device gave or took an address."""

    time_ns: int
    device: int
    address: int
    is_alloc: bool
    range: int  #: in which it happened, or -1


class ProfiledModule(NamedTuple):
    """A module of the program."""

    name: ModuleName
    parent: int  #: an earlier one, or -1
    is_block: bool


class Work(NamedTuple):
    """What a call of one shape computes and moves."""

    flops: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class Profile:
    """What a profiler noted of a program, of all devices."""

    ranges: Sequence[Range]
    memory: Sequence[MemoryEvent]  #: ordered by time
    calls: Sequence[list[Any]]  #: distinct ones: name, overload, arguments
    work: Sequence[Work]  #: of each call
    modules: Sequence[ProfiledModule]


@dataclass(frozen=True, eq=False)
class Placed:
    """The ranges of a profile on the clock of one device's trace."""

    operations: Operations
    unmatched: int  #: events of the profiler that the history does not have
    unresolved: int  #: accesses to addresses at which nothing lives
    last_event: int  #: of the trace that the profiler saw, or -1


def place(trace: Trace, profile: Profile) -> Placed:
    """The operations of one device; roles are left unknown."""
    memory = [event for event in profile.memory if event.device == trace.device]
    found, unmatched = _match(trace, memory)
    clock = _Clock(found, memory)
    requests = RequestsByAddress(trace)
    ranges = profile.ranges
    begin = [clock.before(one.begin_ns) for one in ranges]
    end = [clock.before(one.end_ns) for one in ranges]
    counted = _counted(ranges)
    made_by = np.full(trace.num_requests, -1, np.int64)
    for event, place_of in zip(memory, found, strict=True):
        if event.is_alloc and place_of >= 0 and event.range >= 0:
            outermost = counted[event.range]
            made_by[trace.event_request[place_of]] = outermost if outermost >= 0 else event.range
    accesses, unresolved = _accesses(trace.device, ranges, counted, begin, requests)
    kept, renumbered = _kept(ranges, accesses, made_by)
    operations = _tables(profile, kept, renumbered, begin, end, accesses, made_by)
    return Placed(operations, unmatched, unresolved, max(found, default=-1))


def _match(trace: Trace, memory: Sequence[MemoryEvent]) -> tuple[list[int], int]:
    """The event of the trace that each memory event is, -1 for none, and how many are none."""
    history: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for action, is_alloc in ((Action.ALLOC, True), (Action.FREE_REQUESTED, False)):
        events = np.flatnonzero(trace.action == action)
        for row, address in zip(events.tolist(), trace.address[events].tolist(), strict=True):
            history[address, is_alloc].append(row)
    latest: dict[int, int] = {}
    found: list[int] = []
    for event in memory:
        rows = history.get((event.address, event.is_alloc), [])
        place_of = bisect_right(rows, latest.get(event.address, -1))
        found.append(rows[place_of] if place_of < len(rows) else -1)
        if found[-1] >= 0:
            latest[event.address] = found[-1]
    return found, sum(row < 0 for row in found)


class _Clock:
    """Times of the profiler as event indices."""

    def __init__(self, found: Sequence[int], memory: Sequence[MemoryEvent]) -> None:
        pairs = [(event.time_ns, row) for event, row in zip(memory, found, strict=True) if row >= 0]
        self._times = [time for time, _ in pairs]
        self._after = np.maximum.accumulate([row + 1 for _, row in pairs]).tolist() if pairs else []

    def before(self, time_ns: int) -> int:
        """How many events come before a time: those up to the last one that the profiler saw by then."""
        place_of = bisect_left(self._times, time_ns)
        return self._after[place_of - 1] if place_of else 0


class RequestsByAddress:
    """Which request of a trace lies at an address at a moment."""

    def __init__(self, trace: Trace) -> None:
        self._begun: dict[int, list[int]] = defaultdict(list)
        self._rows: dict[int, list[int]] = defaultdict(list)
        born = np.flatnonzero(trace.start >= 0)
        for row, start in zip(born.tolist(), trace.start[born].tolist(), strict=True):
            address = int(trace.address[start])
            self._begun[address].append(start)
            self._rows[address].append(row)

    def at(self, address: int, event: int) -> int:
        """The last request that was given the address before an event; -1 for none."""
        place_of = bisect_left(self._begun.get(address, ()), event) - 1
        return self._rows[address][place_of] if place_of >= 0 else -1


def _counted(ranges: Sequence[Range]) -> list[int]:
    """For each range, the index of the outermost operation with a kernel that it is or lies in; -1 if there is none."""
    counted: list[int] = []
    for row, one in enumerate(ranges):
        outer = counted[one.parent] if one.parent >= 0 else -1
        counted.append(outer if outer >= 0 else row if one.kind == RangeKind.OPERATION else -1)
    return counted


def _accesses(
    device: int, ranges: Sequence[Range], counted: Sequence[int], begin: Sequence[int], requests: RequestsByAddress
) -> tuple[list[tuple[int, int, int]], int]:
    """Accesses of the outermost operations with kernels: operation, request, kind; and how many have no request."""
    found: list[tuple[int, int, int]] = []
    unresolved = 0
    for row, one in enumerate(ranges):
        if counted[row] != row:
            continue
        touched: dict[int, int] = {}
        for storages, kind in ((one.read, ACCESS_READ), (one.written, ACCESS_WRITTEN)):
            for where, address in storages:
                if where != device or not address:
                    continue
                request = requests.at(address, begin[row])
                if request < 0:
                    unresolved += 1
                else:
                    touched[request] = kind
        found += [(row, request, kind) for request, kind in sorted(touched.items())]
    return found, unresolved


def _kept(
    ranges: Sequence[Range], accesses: Sequence[tuple[int, int, int]], made_by: Column
) -> tuple[list[int], Column]:
    """The ranges that have to do with the device, or contain one that does, and their new numbers."""
    wanted = np.zeros(len(ranges), bool)
    wanted[[row for row, _, _ in accesses]] = True
    wanted[made_by[made_by >= 0]] = True
    for row in range(len(ranges) - 1, -1, -1):
        parent = ranges[row].parent
        if ranges[row].kind in (RangeKind.MODULE, RangeKind.OPTIMIZER):
            wanted[row] = True
        if wanted[row] and parent >= 0:
            wanted[parent] = True
    renumbered = np.where(wanted, np.cumsum(wanted) - 1, -1)
    return np.flatnonzero(wanted).tolist(), renumbered


_RANGE_COLUMNS = ("name", "parent", "begin", "end", "thread", "sequence", "kind", "shape", "module")


def _tables(
    profile: Profile,
    kept: Sequence[int],
    renumbered: Column,
    begin: Sequence[int],
    end: Sequence[int],
    accesses: Sequence[tuple[int, int, int]],
    made_by: Column,
) -> Operations:
    names: dict[str, int] = {}
    threads: dict[int, int] = {}
    calls: dict[int, int] = {}
    rows = []
    for row in kept:
        one = profile.ranges[row]
        rows.append(
            (
                names.setdefault(one.name, len(names)),
                int(renumbered[one.parent]) if one.parent >= 0 else -1,
                begin[row],
                end[row],
                threads.setdefault(one.thread, len(threads)),
                one.sequence,
                int(one.kind),
                calls.setdefault(one.call, len(calls)) if one.call >= 0 else -1,
                one.module,
            )
        )
    table = np.array(rows, np.int64).reshape(-1, 9).T
    touched = np.array(accesses, np.int64).reshape(-1, 3).T
    work = np.array([profile.work[call] for call in calls], np.int64).reshape(-1, 3).T
    return Operations(
        **dict(zip(_RANGE_COLUMNS, table, strict=True)),
        names=tuple(names),
        access_op=renumbered[touched[0]],
        access_request=touched[1],
        access_kind=touched[2],
        made_by=np.where(made_by >= 0, renumbered[made_by], -1),
        role=np.zeros(len(made_by), np.int8),
        shapes=tuple(profile.calls[call] for call in calls),
        shape_flops=work[0],
        shape_read_bytes=work[1],
        shape_written_bytes=work[2],
        shape_ns=np.zeros(len(calls), np.int64),
        modules=tuple(module.name for module in profile.modules),
        module_parent=np.array([module.parent for module in profile.modules], np.int64),
        module_is_block=np.array([module.is_block for module in profile.modules], np.int8),
    )
