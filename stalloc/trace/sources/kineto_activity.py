"""What traces of torch.profiler (Kineto JSON) say of devices at work: kernels, copies, phases, host memory.

A phase is the one that the host was in when it asked for a kernel or a copy: the step of an optimizer is `update`, what
autograd runs is `backward`, a range that the program named has its name, and the rest is `forward` where there is a
backward pass. Ranges inside of the update are its subgroups. The program stood still for a copy if it was in the call
that asked for it, or in the synchronization behind that, for at least half of the copy. Sets and copies within a device
count as computing. All clocks of the file are one.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stalloc.errors import BadInputError
from stalloc.printable import printable
from stalloc.trace.activity import Activity, Held, Link, MemoryKind, Work, activity_of
from stalloc.trace.sources.events import MAX_SIZE_BYTES
from stalloc.trace.sources.json_text import decode, list_elements, wanted_elements

_KERNELS, _SETS = ("kernel", "Kernel"), ("gpu_memset", "Memset")
_COPIES = ("gpu_memcpy", "Memcpy")
_CALLS = ("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime")
_OPERATIONS = ("cpu_op", "Operator")
_CATEGORIES = (*_KERNELS, *_SETS, *_COPIES, *_CALLS, "user_annotation")
_BACKWARD, _OLD_BACKWARD = "autograd::engine::evaluate_function", "torch::autograd::AccumulateGrad"
_STEP, _UPDATE, _MEMORY = "ProfilerStep#", "Optimizer.step#", "[memory]"
_NAMES = (_BACKWARD, _OLD_BACKWARD, _STEP, _UPDATE, _MEMORY)
_WANTED = re.compile(
    rb'"cat"\s*:\s*"(?:%s)"|"name"\s*:\s*"(?:%s)'
    % ("|".join(_CATEGORIES).encode(), "|".join(map(re.escape, _NAMES)).encode())
)
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
_LINKS = {"HtoD": Link.TO_DEVICE, "DtoH": Link.TO_HOST, "PtoP": Link.PEER, "DtoD": Link.COMPUTE}
_OTHER, _ALL = "other", "all"  # beside phases that the program has named; where there are none
_MAX_DEVICE, _MAX_US = 4095, float(1 << 51)


@dataclass(slots=True)
class _Range:
    """A stretch of a thread of the host."""

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
    """What the file says, device by device and thread by thread."""

    threads: dict[Any, _Thread] = field(default_factory=lambda: defaultdict(_Thread))
    work: dict[int, list[tuple[int, int, Link, int, int, Any]]] = field(default_factory=lambda: defaultdict(list))
    host: list[Held] = field(default_factory=list)


def read_kineto_activity(path: Path, data: bytes) -> dict[int, Activity]:
    """The activity of each device of which the file has kernels or copies. Raises BadInputError if it is damaged."""
    spans = list_elements(path, data, None if data.lstrip()[:1] == b"[" else "traceEvents")
    if spans is None:
        return {}
    found = _Found()
    for number in wanted_elements(data, _WANTED, *spans):
        text = data[int(spans[0][number]) : int(spans[1][number])]
        event = decode(path, text, f"event {number} of traceEvents")
        if isinstance(event, dict):
            _take(found, event, f"{path}: event {number} of traceEvents")
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
        if args.get("Device Type") == 0 and type(total) is int and 0 <= total < MAX_SIZE_BYTES:
            found.host.append(Held(_nanoseconds(event.get("ts"), where), MemoryKind.HOST, total))
        return
    if event.get("ph") != "X":
        return
    correlation = _key(args.get("correlation"))
    begin = _nanoseconds(event.get("ts"), where)
    end = begin + _nanoseconds(event.get("dur", 0), where)
    if kind in _KERNELS or kind in _SETS or kind in _COPIES:
        device, size = args.get("device"), args.get("bytes", 0)
        if (
            type(device) is not int
            or not 0 <= device <= _MAX_DEVICE
            or type(size) is not int
            or not 0 <= size < MAX_SIZE_BYTES
        ):
            raise BadInputError(
                f"{where} is a kernel or a copy without a device or with impossible bytes: export again."
            )
        link = (
            next((link for word, link in _LINKS.items() if word in name), Link.COMPUTE)
            if kind in _COPIES
            else Link.COMPUTE
        )
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
