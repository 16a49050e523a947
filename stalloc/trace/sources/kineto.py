"""Traces of torch.profiler (Kineto JSON): the `[memory]` events of each device, ordered by time, then by `Ev Idx`.

Sizes are those of the allocator's blocks, which are rounded up; streams are not in the file. Old files have no `Addr`:
then a free is paired with the newest allocation of its size (see NewestFirst), and a note says so. `Total Allocated`
shows what was live throughout and is named by no event; it is put into info["unseen_bytes"], and a total that drifts
from the events means that events are missing.

Activity (kernels, copies, host memory) has phases. A phase is the one that the host was in when it asked for a kernel
or a copy: the step of an optimizer is `update`, what autograd runs is `backward`, a range that the program named has
its name, and the rest is `forward` where there is a backward pass. Ranges inside of the update are its subgroups. The
program stood still for a copy if it was in the call that asked for it, or in the synchronization behind that, for at
least half of the copy. Sets and copies within a device count as computing. All clocks of the file are one.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.printable import printable
from stalloc.trace.activity import Activity, Held, Link, MemoryKind, Work, activity_of
from stalloc.trace.record import MARK_PHASE_BEGIN, MARK_PHASE_END, MARK_STEP, Action, Trace
from stalloc.trace.sources.events import MAX_ADDRESS, MAX_SIZE_BYTES, Mark, NewestFirst, make_trace, whole_number
from stalloc.trace.sources.json_text import decode, list_elements, wanted_elements

_CPU = 0  # device types as torch counts them; CUDA is 1, HIP is 6
_MAX_DEVICE = 4095
_MAX_MICROSECONDS = 1 << 62
_PROFILE = "profile with torch.profiler.profile(profile_memory=True)"
_MEMORY, _OUT_OF_MEMORY, _ANNOTATION = "[memory]", "[OutOfMemory]", "user_annotation"
_WANTED = re.compile(b"|".join(re.escape(name.encode()) for name in (_MEMORY, _OUT_OF_MEMORY, _ANNOTATION)))


class NoMemoryEvents(BadInputError):
    """A profiler trace that is whole, and does not say what was allocated."""


@dataclass(frozen=True, slots=True)
class _Event:
    time_us: float
    order: int
    size_bytes: int  #: positive: allocated, negative: freed
    address: int | None
    allocated_bytes: int | None  #: all bytes that are allocated after the event
    reserved_bytes: int | None
    failed: bool


def read_kineto(path: Path, data: bytes) -> list[Trace]:
    """The traces of a profiler trace, one for each device that is not the CPU, ordered by device.

    Raises BadInputError when it is no profiler trace or cut short, NoMemoryEvents if it has none of a device.
    """
    found = _events(path, data, _WANTED)
    if found is None:
        raise BadInputError(f"{path}: JSON without traceEvents, so not a profiler trace: {_PROFILE}.")
    devices: dict[tuple[int, int], list[_Event]] = {}
    annotations: list[tuple[Any, tuple[float, float, str]]] = []  # with the process they belong to
    of_cpu = False
    for number, where, event in found:
        if not isinstance(event, dict):
            raise BadInputError(f"{where} is not an object: export the trace again.")
        if event.get("name") in (_MEMORY, _OUT_OF_MEMORY):
            args = event.get("args")
            if not isinstance(args, dict):
                raise BadInputError(f"{where} has no args: export the trace again.")
            kind = whole_number(args.get("Device Type"), 0, 1000, where, "Device Type")
            if kind == _CPU:
                of_cpu = True
                continue
            device = whole_number(args.get("Device Id"), 0, _MAX_DEVICE, where, "Device Id")
            devices.setdefault((device, kind), []).append(_memory_event(event, args, number, where))
        elif event.get("cat") == _ANNOTATION and event.get("ph") == "X" and isinstance(event.get("name"), str):
            began = _time(event.get("ts"), where, "ts")
            ended = began + _time(event.get("dur", 0), where, "dur")
            annotations.append((event.get("pid"), (began, ended, event["name"])))
    if not devices:
        only = "of the CPU only" if of_cpu else "at all"
        raise NoMemoryEvents(f"{path}: the profiler trace has no memory events of a GPU, {only}: {_PROFILE} on a GPU.")
    if len({device for device, _ in devices}) < len(devices):
        raise BadInputError(f"{path}: two kinds of device share one number: profile them one by one.")
    properties = device_properties(path, data)
    said = _converter_notes(path, data)
    return [
        _read_device(path, device, events, annotations, properties.get(device, {}), said)
        for (device, _), events in sorted(devices.items())
    ]


def _events(path: Path, data: bytes, wanted: re.Pattern[bytes]) -> Iterator[tuple[int, str, Any]] | None:
    """The number of each wanted event, what sentences call it, and the event; None if it is no profiler trace."""
    spans = list_elements(path, data, None if data.lstrip()[:1] == b"[" else "traceEvents")
    if spans is None:
        return None

    def event(number: int) -> tuple[int, str, Any]:
        where = f"event {number} of traceEvents"
        text = data[int(spans[0][number]) : int(spans[1][number])]
        return number, f"{path}: {where}", decode(path, text, where)

    return map(event, wanted_elements(data, wanted, *spans))


def _memory_event(event: dict[str, Any], args: dict[str, Any], number: int, where: str) -> _Event:
    def optional(name: str, highest: int) -> int | None:
        return whole_number(args[name], 0, highest, where, name) if name in args else None

    return _Event(
        time_us=_time(event.get("ts"), where, "ts"),
        order=whole_number(args.get("Ev Idx", number), 0, MAX_ADDRESS, where, "Ev Idx"),
        size_bytes=whole_number(args.get("Bytes"), -MAX_SIZE_BYTES, MAX_SIZE_BYTES, where, "Bytes"),
        address=optional("Addr", MAX_ADDRESS),
        allocated_bytes=optional("Total Allocated", MAX_SIZE_BYTES),
        reserved_bytes=optional("Total Reserved", MAX_SIZE_BYTES),
        failed=event["name"] == _OUT_OF_MEMORY,
    )


def _time(value: Any, where: str, what: str) -> float:
    """Microseconds; new files give fractions, old ones whole numbers."""
    if isinstance(value, float) and 0 <= value <= _MAX_MICROSECONDS:
        return value
    return whole_number(value, 0, _MAX_MICROSECONDS, where, what)


def _read_device(
    path: Path,
    device: int,
    events: list[_Event],
    annotations: list[tuple[Any, tuple[float, float, str]]],
    properties: dict[str, Any],
    said: list[str] | None,
) -> Trace:
    events = [event for event in events if event.size_bytes]
    events.sort(key=lambda event: (event.time_us, event.order))
    has_addresses = all(event.address is not None for event in events if not event.failed)
    guess = NewestFirst()
    action: list[int] = []
    identity: list[int] = []
    for event in events:
        if event.failed:
            action.append(Action.OOM)
            identity.append(0)
            continue
        allocates = event.size_bytes > 0
        action.append(Action.ALLOC if allocates else Action.FREE_COMPLETED)
        if has_addresses:
            identity.append(event.address or 0)
        else:
            identity.append(guess.allocate(event.size_bytes) if allocates else guess.free(-event.size_bytes))
    whose = "sizes are of the allocator's blocks, " if said is None else ""  # stalloc writes what was requested
    notes = [f"{whose}streams are not in the file"]
    if not has_addresses:
        notes.append("no addresses in the file: each free is taken to end the newest allocation of its size")
    reserved_start, at, change = _reserved_changes(events)  # segment events go in before events `at`
    clock = np.array([event.time_us for event in events], np.float64)
    clock = np.insert(clock, at, clock[at])
    moved = np.where(change > 0, int(Action.SEGMENT_ALLOC), int(Action.SEGMENT_FREE))
    trace = make_trace(
        path,
        "kineto",
        device=device,
        action=np.insert(np.array(action, np.int8), at, moved),
        identity=np.insert(np.array(identity, np.uint64), at, 0),
        size=np.insert(np.array([abs(event.size_bytes) for event in events], np.int64), at, np.abs(change)),
        time_us=clock.astype(np.int64),
        # the profiler's are of the host, so they concern every device; in our files a process is a device
        marks=_marks(clock, [one for process, one in annotations if said is None or process == device]),
        has_addresses=has_addresses,
        reserved_start_bytes=reserved_start,
        more_info=properties,
    )
    unseen, note = _unseen_bytes(events, int(trace.size[trace.start < 0].sum()))
    notes += [*([note] if note else []), *(said or [])]
    told = {"notes": notes, "complete": trace.info["complete"] and unseen == 0}
    return trace.replace(info=trace.info | told | ({} if unseen is None else {"unseen_bytes": unseen}))


def _unseen_bytes(events: list[_Event], num_old: int) -> tuple[int | None, str]:
    """Bytes live from before the first event to after the last, None when the totals do not tell; and a note.

    `num_old` bytes are those of requests of which the file has the free and no allocation.
    """
    events = [event for event in events if not event.failed]
    if not events or any(event.allocated_bytes is None for event in events):
        return None, ""
    total = np.array([event.allocated_bytes for event in events], np.int64)
    size = np.array([event.size_bytes for event in events], np.int64)
    outside = total - np.cumsum(size)  # what the events do not explain, frees of older blocks included
    drifts = int(np.count_nonzero(np.diff(outside)))
    if drifts:
        return None, f"the allocated total departs from the events {drifts} times: some events are missing"
    lowest = int(outside[0]) - num_old
    if lowest > 0:
        shown = f"{lowest / 2**30:.2f} GiB" if lowest >= 1 << 30 else f"{lowest / 2**20:.2f} MiB"
        return lowest, f"{shown} more were live throughout, which no event names and no plan places"
    return max(lowest, 0), ""


def _reserved_changes(events: list[_Event]) -> tuple[int, Column, Column]:
    """Reserved at the start; before which events it changed, as (k,) indices; by how many bytes."""
    if any(event.reserved_bytes is None for event in events):
        return 0, np.empty(0, np.int64), np.empty(0, np.int64)
    reserved = np.array([event.reserved_bytes for event in events], np.int64)
    change = np.diff(reserved)
    at = np.flatnonzero(change)
    return int(reserved[0]) if len(reserved) else 0, at + 1, change[at]


def _marks(clock: Column, annotations: list[tuple[float, float, str]]) -> list[Mark]:
    """Annotations as marks: profiler steps are steps, all others are phases."""
    timed: list[tuple[float, int, str]] = []
    for began, ended, name in annotations:
        if name.startswith("ProfilerStep#"):
            timed.append((began, MARK_STEP, name))
        else:
            timed += [(began, MARK_PHASE_BEGIN, name), (ended, MARK_PHASE_END, name)]
    timed.sort(key=lambda mark: mark[0])
    places = np.searchsorted(clock, [mark[0] for mark in timed])
    return [(int(event), kind, name) for event, (_, kind, name) in zip(places, timed, strict=True)]


def _converter_notes(path: Path, data: bytes) -> list[str] | None:
    """What `stalloc convert` says of a file that it wrote, such as that addresses are made up; None for other files."""
    spans = list_elements(path, data, "stalloc_notes") if b'"stalloc_notes"' in data[:4096] else None
    if spans is None:
        return None
    listed = [decode(path, data[begin:end], "a note") for begin, end in zip(spans[0][:20], spans[1][:20], strict=True)]
    return [printable(note, 300) for note in listed if isinstance(note, str)]


def device_properties(path: Path, data: bytes) -> dict[int, dict[str, Any]]:
    """What the file says of each device; nothing of it is needed, so what is not understood is passed over."""
    spans = None if data.lstrip()[:1] == b"[" else list_elements(path, data, "deviceProperties")
    known: dict[int, dict[str, Any]] = {}
    for begin, end in zip(*spans, strict=True) if spans else ():
        entry = decode(path, data[begin:end], "an entry of deviceProperties")
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            device_name, total_bytes = entry.get("name"), entry.get("totalGlobalMem")
            known[entry["id"]] = {"device_name": device_name} if isinstance(device_name, str) else {}
            if _is_whole(total_bytes, MAX_SIZE_BYTES):
                known[entry["id"]]["total_bytes"] = total_bytes
    return known


_KERNELS, _SETS = ("kernel", "Kernel"), ("gpu_memset", "Memset")
_COPIES = ("gpu_memcpy", "Memcpy")
_CALLS = ("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime")
_OPERATIONS = ("cpu_op", "Operator")
_CATEGORIES = (*_KERNELS, *_SETS, *_COPIES, *_CALLS, "user_annotation")
_BACKWARD, _OLD_BACKWARD = "autograd::engine::evaluate_function", "torch::autograd::AccumulateGrad"
_STEP, _UPDATE = "ProfilerStep#", "Optimizer.step#"
_NAMES = (_BACKWARD, _OLD_BACKWARD, _STEP, _UPDATE, _MEMORY)
_AT_WORK = re.compile(
    rb'"cat"\s*:\s*"(?:%s)"|"name"\s*:\s*"(?:%s)'
    % ("|".join(_CATEGORIES).encode(), "|".join(map(re.escape, _NAMES)).encode())
)
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_LINKS = {"HtoD": Link.TO_DEVICE, "DtoH": Link.TO_HOST, "PtoP": Link.PEER, "DtoD": Link.COMPUTE}
_OTHER, _ALL = "other", "all"  # beside phases that the program has named; where there are none
_MAX_US = float(1 << 51)


@dataclass(slots=True)
class _Range:
    begin: int
    end: int
    name: str
    is_named: bool  #: by the program, or a library


@dataclass(slots=True)
class _Thread:
    ranges: list[_Range] = field(default_factory=list)
    calls: list[tuple[int, int, str, Any]] = field(default_factory=list)  #: begin, end, name, correlation
    is_autograd: bool = False


@dataclass
class _Found:
    threads: dict[Any, _Thread] = field(default_factory=lambda: defaultdict(_Thread))
    work: dict[int, list[tuple[int, int, Link, int, int, Any]]] = field(default_factory=lambda: defaultdict(list))
    host: list[Held] = field(default_factory=list)


def read_kineto_activity(path: Path, data: bytes) -> dict[int, Activity]:
    """The activity of each device of which the file has kernels or copies. Raises BadInputError if it is damaged."""
    found = _Found()
    for _, where, event in _events(path, data, _AT_WORK) or ():
        if isinstance(event, dict):
            _take(found, event, where)
    phases = dict(_phases(list(found.threads.values())))
    if set(phases.values()) == {_OTHER}:
        phases = dict.fromkeys(phases, _ALL)
    waits = dict(_waits(found))
    made = {}
    for device, rows in sorted(found.work.items()):
        rows.sort(key=lambda row: row[:2])
        work, phase = [], next((phases[row[-1]] for row in rows if row[-1] in phases), "")
        for begin, end, link, size, pinned, key in rows:
            phase = phases.get(key, phase)  # the call of some is not in the file: they belong to what ran before
            work.append(Work(begin, end, link, size, phase, waits.get(key, -1), pinned))
        try:
            made[device] = activity_of(work, held=found.host)
        except BadInputError as error:
            raise BadInputError(f"{path}: {error}") from error
    return made


def _take(found: _Found, event: dict[str, Any], where: str) -> None:
    """Sort one event into what was found; what has no time, or is of no use, is passed over."""
    kind, name, args = event.get("cat"), event.get("name"), event.get("args")
    args = args if isinstance(args, dict) else {}
    if not isinstance(name, str):
        return
    if name == _MEMORY:
        total = args.get("Total Allocated")
        if args.get("Device Type") == 0 and _is_whole(total, MAX_SIZE_BYTES - 1):
            found.host.append(Held(_nanoseconds(event.get("ts"), where), MemoryKind.HOST, total))
        return
    if event.get("ph") != "X":
        return
    correlation = _key(args.get("correlation"))
    begin = _nanoseconds(event.get("ts"), where)
    end = begin + _nanoseconds(event.get("dur", 0), where)
    if kind in _KERNELS or kind in _SETS or kind in _COPIES:
        device, size = args.get("device"), args.get("bytes", 0)
        if not (_is_whole(device, _MAX_DEVICE) and _is_whole(size, MAX_SIZE_BYTES - 1)):
            raise BadInputError(
                f"{where} is a kernel or a copy without a device or with impossible bytes: export again."
            )
        links = (link for word, link in _LINKS.items() if word in name and kind in _COPIES)
        link = next(links, Link.COMPUTE)
        pinned = (1 if "Pinned" in name else 0 if "Pageable" in name else -1) if link.moves else -1
        found.work[device].append((begin, end, link, size if link.moves else 0, pinned, correlation))
        return
    thread = found.threads[_key(event.get("pid")), _key(event.get("tid"))]
    if kind in _CALLS:
        thread.calls.append((begin, end, name, correlation))
    elif not name.startswith(_STEP):  # which holds all phases
        is_operation = kind in _OPERATIONS or name.startswith((_BACKWARD, _OLD_BACKWARD, _UPDATE))
        thread.is_autograd |= name.startswith((_BACKWARD, _OLD_BACKWARD))
        thread.ranges.append(_Range(begin, end, name, not is_operation))


def _is_whole(value: Any, most: int) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= most


def _key(value: Any) -> int | str | None:
    """A number or a name that tells things apart; None for what cannot."""
    return value if type(value) in (int, str) else None


def _nanoseconds(value: Any, where: str) -> int:
    if type(value) not in (int, float) or not 0 <= value <= _MAX_US:
        raise BadInputError(f"{where} has an impossible time: export the trace again.")
    return round(value * 1000)


def _phases(threads: list[_Thread]) -> Iterator[tuple[Any, str]]:
    """The correlation of each call, and the phase that the host was in."""
    trains = any(thread.is_autograd for thread in threads)
    rest = "forward" if trains else _OTHER
    for thread in threads:
        updates = any(one.name.startswith(_UPDATE) for one in thread.ranges)
        default = "backward" if thread.is_autograd and not updates else rest
        ranges = sorted(thread.ranges, key=lambda one: (one.begin, -one.end))
        open_ranges: list[_Range] = []
        at = 0
        for begin, _, _, correlation in sorted(thread.calls, key=lambda call: call[0]):
            while at < len(ranges) and ranges[at].begin <= begin:
                open_ranges.append(ranges[at])
                at += 1
            open_ranges = [one for one in open_ranges if one.end > begin]
            if correlation is not None:
                yield correlation, _phase(open_ranges, default)


def _phase(around: list[_Range], default: str) -> str:
    """The phase of a call inside of these ranges, outermost first."""
    for number, one in enumerate(around):
        if one.name.startswith(_UPDATE):
            inner = next((other.name for other in around[number + 1 :] if other.is_named), "")
            return f"update/{_shown(inner)}" if inner else "update"
        if one.name.startswith(_BACKWARD):
            return "backward"
    outermost = next((one.name for one in around if one.is_named), None)
    return default if outermost is None else _shown(outermost) or default


def _shown(name: str) -> str:
    """The name of a range without what would make it look like a part of a phase."""
    return printable(name.strip("# ").replace("/", " "), 80)


def _waits(found: _Found) -> Iterator[tuple[Any, int]]:
    """The correlation of each copy, and for how many nanoseconds the program stood still for it."""
    copies = {key: (begin, end) for rows in found.work.values() for begin, end, link, _, _, key in rows if link.moves}
    for thread in found.threads.values():
        calls = sorted(thread.calls, key=lambda call: call[0])
        for number, (begin, end, _, correlation) in enumerate(calls):
            if correlation not in copies:
                continue
            started, ended = copies[correlation]
            inside = [(begin, end)]
            if number + 1 < len(calls) and calls[number + 1][2] in _WAITS:
                inside.append(calls[number + 1][:2])
            during = sum(max(0, min(last, ended) - max(first, started)) for first, last in inside)
            stood = sum(max(0, min(last, ended) - first) for first, last in inside)
            yield correlation, stood if 2 * during >= ended - started else 0
