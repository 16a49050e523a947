"""Where the time of a program goes that moves data between device, host and disk: by phase, by link, by size of copy.

The measures are those of the study of hybrid offload by Maurya et al. (Breaking the Memory Wall, 2024). Contract: the
seconds of a phase are divided into computing alone, copying alone, both and neither, and add up; so do the bytes that
each link moves, by phase, by size and in all. What the input does not have is None, and named in `missing`.

Phases: where the table of activity says when they ran, that decides, and what lies between them is in no phase.
Otherwise a phase lasts from the first thing that the device computes for it to that of the next one. A copy counts as
well if the device computes nothing else between the two, so that a copy ahead of time does not end the phase that it
runs in; of a phase for which the device computes nothing, copies and the processor's work count.

Links: the measured peak is the highest rate of one copy of 1 MiB or more; the use of a link is a share of that. Times
are whole nanoseconds, intervals half open. Bytes of a copy that reaches over a boundary are divided by time.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stalloc.analysis.study_record import AsReady, Blocking, LinkUse, PartUse, PhaseUse, SizeUse, Study
from stalloc.columns import Column, Rows, Sizes, Times
from stalloc.errors import BadInputError
from stalloc.trace import DeviceRecord
from stalloc.trace.activity import Activity, Link, MemoryKind, activity_of

NO_PHASE, EVERYTHING = "in no phase", "all"


@dataclass(frozen=True, eq=False, kw_only=True)
class _Windows:
    bounds: Times  #: (k + 1,) ascending nanoseconds; stretch i is [bounds[i], bounds[i + 1])
    name: Rows  #: (k,) index of each stretch's phase in the names
    names: tuple[str, ...]


def _phase_windows(activity: Activity, begin: int, end: int) -> _Windows:
    """The phases of a stretch of time, which may be longer than the activity."""
    tops = [name.partition("/")[0] for name in activity.names]  # `update/3` is a part of `update`
    names = [*dict.fromkeys(tops), NO_PHASE]
    number = np.array([names.index(name) for name in tops] + [len(names) - 1], np.int64)  # the last for -1
    nothing = len(names) - 1
    if len(activity.phase_start):
        runs = [(begin, nothing), *_told(activity, number, nothing)]
    else:
        runs = _seen(activity, number[activity.phase]) or [(begin, nothing)]
        runs[0] = begin, runs[0][1]
    kept: list[tuple[int, int]] = []  # of stretches of a length
    for start, name in runs:
        if kept and kept[-1][0] >= start:
            kept.pop()
        if start < end or not kept:
            kept.append((max(start, begin), name))
    if {name for _, name in kept} == {nothing}:
        names[nothing] = EVERYTHING
    bounds = np.array([start for start, _ in kept] + [max(end, begin)], np.int64)
    return _Windows(bounds=bounds, name=np.array([name for _, name in kept], np.int64), names=tuple(names))


def _told(activity: Activity, number: Rows, nothing: int) -> list[tuple[int, int]]:
    """When each phase that the table names begins, and where none runs; consecutive parts of a phase count as one."""
    runs: list[list[int]] = []  # begin, end, name
    parts = np.array(["/" in name for name in activity.names], bool)
    for row in np.argsort(activity.phase_start, kind="stable").tolist():
        start, end = int(activity.phase_start[row]), int(activity.phase_end[row])
        name, is_part = int(number[activity.phase_name[row]]), bool(parts[activity.phase_name[row]])
        if runs and runs[-1][2] == name and (start < runs[-1][1] or is_part):
            runs[-1][1] = max(runs[-1][1], end)
        else:
            runs.append([start, end, name])
    found: list[tuple[int, int]] = []
    for at, (start, end, name) in enumerate(runs):
        found.append((start, name))
        if at + 1 == len(runs) or runs[at + 1][0] > end:
            found.append((end, nothing))
    return found


def _seen(activity: Activity, name: Rows) -> list[tuple[int, int]]:
    """The moments at which the phase of the running work changes."""
    computed = np.flatnonzero(activity.link == Link.COMPUTE)
    computed = computed[np.argsort(activity.start[computed], kind="stable")]
    if len(computed):
        until = np.maximum.accumulate(activity.end[computed])
        following = np.searchsorted(activity.start[computed], activity.start, side="left")
        is_free = (following == 0) | (until[following - 1] <= activity.start)
        leads = (following < len(computed)) & (name[computed[np.minimum(following, len(computed) - 1)]] == name)
        counts = (activity.link == Link.COMPUTE) | (is_free & leads) | ~np.isin(name, np.unique(name[computed]))
    else:
        counts = np.ones(len(name), bool)
    rows = np.flatnonzero(counts)
    rows = rows[np.argsort(activity.start[rows], kind="stable")]
    changes = np.flatnonzero(np.append(True, name[rows][1:] != name[rows][:-1])[: len(rows)])
    return [(int(activity.start[rows[at]]), int(name[rows[at]])) for at in changes]


class _Busy:
    """The times at which at least one of some rows ran."""

    def __init__(self, activity: Activity, rows: Column) -> None:
        start, end = activity.start[rows], activity.end[rows]
        order = np.argsort(start, kind="stable")
        start, end = start[order], np.maximum.accumulate(end[order]) if len(order) else end[order]
        first = np.append(True, start[1:] > end[:-1])[: len(start)]
        self.start = start[first]
        self.end = end[np.append(first[1:], True)[: len(end)]]
        self._before = np.concatenate([[0], np.cumsum(self.end - self.start)])
        self.total_ns = int(self._before[-1])

    def until(self, moments: Times) -> Times:
        """Nanoseconds of work before each of (k,) moments."""
        if not len(self.start):
            return np.zeros(len(moments), np.int64)
        row = np.searchsorted(self.start, moments, side="right") - 1
        inside = np.clip(np.minimum(self.end[row], moments) - self.start[row], 0, None)
        return np.where(row < 0, 0, self._before[row] + inside)

    def within(self, begin: Times, end: Times) -> Times:
        """Nanoseconds of work inside of each of the (k,) stretches [begin, end)."""
        return self.until(end) - self.until(begin)


def _highest_within(time: Times, level: Column, begin: Times, end: Times) -> Column:
    """(k,) the highest level in each stretch [begin, end), -1 if unknown; `level` (n,) is valid from `time` (n,) on."""
    first = np.searchsorted(time, begin, side="right") - 1  # what held when it began
    last = np.searchsorted(time, end, side="left")
    rows = [level[max(low, 0) : high] for low, high in zip(first.tolist(), last.tolist(), strict=True)]
    return np.array([int(row.max()) if len(row) else -1 for row in rows], np.int64)


LINKS = tuple(link for link in Link if link.moves)
SIZE_CLASSES = (
    ("below 64 KiB", 1 << 16),
    ("64 KiB to 1 MiB", 1 << 20),
    ("1 to 16 MiB", 1 << 24),
    ("16 to 64 MiB", 1 << 26),
    ("64 MiB and more", 1 << 62),
)
_RATED_BYTES = 1 << 20  # of a copy whose rate says something about its link


def _moved_within(activity: Activity, link: Link, bounds: Times) -> Sizes:
    """(k,) bytes that a link moved in each stretch between (k + 1,) ascending bounds, within which all copies lie."""
    rows = activity.link == link
    start, end, size = activity.start[rows], activity.end[rows], activity.num_bytes[rows]
    moved = np.zeros(len(bounds) - 1, np.int64)
    if not len(moved):
        return moved
    last_row = len(moved) - 1
    first = np.clip(np.searchsorted(bounds, start, side="right") - 1, 0, last_row)
    last = np.clip(np.searchsorted(bounds, end, side="left") - 1, first, last_row)
    whole = first == last
    np.add.at(moved, first[whole], size[whole])
    for row in np.flatnonzero(~whole).tolist():
        cuts = np.minimum(bounds[first[row] + 1 : last[row] + 2], end[row]) - start[row]
        shares = [int(size[row]) * int(cut) // int(end[row] - start[row]) for cut in cuts]
        moved[first[row] : last[row] + 1] += np.diff([0, *shares[:-1], int(size[row])])
    return moved


def _peak_rate(activity: Activity, link: Link) -> float | None:
    """Bytes a second of the quickest copy of a link that is large enough to tell; None without one."""
    rows = (activity.link == link) & (activity.num_bytes >= _RATED_BYTES) & (activity.end > activity.start)
    if not np.any(rows):
        return None
    return float((activity.num_bytes[rows] / (activity.end - activity.start)[rows]).max()) * 1e9


def _link_uses(activity: Activity, span_ns: int) -> list[LinkUse]:
    found = []
    for link in LINKS:
        rows = activity.link == link
        if not np.any(rows):
            continue
        size, peak = int(activity.num_bytes[rows].sum()) or None, _peak_rate(activity, link)
        found.append(
            LinkUse(
                link=link.text,
                copies=int(rows.sum()),
                num_bytes=size,
                busy_seconds=_Busy(activity, rows).total_ns / 1e9,
                rate=None if size is None else _rate(activity, rows),
                peak_rate=peak,
                used=None if peak is None or size is None or not span_ns else size / (peak * span_ns / 1e9),
            )
        )
    return found


def _size_uses(activity: Activity) -> list[SizeUse]:
    found = []
    limits = np.array([limit for _, limit in SIZE_CLASSES])
    size_class = np.searchsorted(limits, activity.num_bytes, side="right")
    for link in LINKS:
        silent = (activity.link == link) & (activity.num_bytes == 0)  # no copy moves nothing
        if np.any(silent):
            found.append(SizeUse(link=link.text, size="unknown", copies=int(silent.sum()), num_bytes=None, rate=None))
        for number, (name, _) in enumerate(SIZE_CLASSES):
            rows = (activity.link == link) & (size_class == number) & ~silent
            if np.any(rows):
                size, rate = int(activity.num_bytes[rows].sum()), _rate(activity, rows)
                found.append(SizeUse(link=link.text, size=name, copies=int(rows.sum()), num_bytes=size, rate=rate))
    return found


def _part_uses(activity: Activity, windows: _Windows) -> list[PartUse]:
    """The parts of phases, in the order in which they first ran; each runs once in a run of its phase."""
    computes = np.isin(activity.link, (Link.COMPUTE, Link.HOST_COMPUTE))
    found = []
    for number, name in enumerate(activity.names):
        rows = activity.phase == number
        told = activity.phase_name == number
        phase, _, part = name.partition("/")
        if "/" not in name or not (np.any(rows) or np.any(told)):
            continue
        start, end = activity.phase_start[told], activity.phase_end[told]
        if not len(start):
            start, end = _runs(activity.start[rows], activity.end[rows], windows)
        moved = {link.text: int(activity.num_bytes[rows & (activity.link == link)].sum()) for link in LINKS}
        found.append(
            PartUse(
                phase=phase,
                name=part,
                runs=len(start),
                start_seconds=float(start.min() - windows.bounds[0]) / 1e9,
                seconds=float((end - start).sum()) / 1e9,
                compute_seconds=_Busy(activity, rows & computes).total_ns / 1e9,
                moved_bytes={link: size for link, size in moved.items() if size},
            )
        )
    return sorted(found, key=lambda part: part.start_seconds)


def _runs(start: Times, end: Times, windows: _Windows) -> tuple[Times, Times]:
    """When the work of a part began and ended in each stretch of the phases."""
    order = np.argsort(start, kind="stable")
    inside = np.searchsorted(windows.bounds, start[order], side="right")
    first = np.flatnonzero(np.diff(inside, prepend=-1))
    return start[order][first], np.maximum.reduceat(end[order], first)


def _blocking_copies(activity: Activity) -> Blocking | None:
    """The copies that the program stood still for; None where that is not known of any."""
    copies = np.isin(activity.link, LINKS)
    if not np.any(activity.waited[copies] >= 0):
        return None
    rows = copies & (activity.waited > 0)
    return Blocking(
        copies=int(rows.sum()),
        num_bytes=int(activity.num_bytes[rows].sum()),
        pageable_bytes=int(activity.num_bytes[rows & (activity.pinned == 0)].sum()),
        copy_seconds=float((activity.end - activity.start)[rows].sum()) / 1e9,
        stood_seconds=float(activity.waited[rows].sum()) / 1e9,
    )


def _rate(activity: Activity, rows: Column) -> float:
    seconds = float((activity.end - activity.start)[rows].sum()) / 1e9
    return float(activity.num_bytes[rows].sum()) / seconds if seconds else 0.0


class _Level(NamedTuple):
    """Bytes over time: each level holds from its nanosecond on."""

    time: Times
    num_bytes: Column


def study(record: DeviceRecord) -> Study:
    """The study of one device. Raises BadInputError if the record has no times at all."""
    activity = activity_of([]) if record.activity is None else record.activity
    levels = _memory_levels(record)
    begin, end = span(record)
    windows = _phase_windows(activity, begin, end)
    total = record.info.get("total_bytes")
    total = total if isinstance(total, int) else None
    is_estimated = record.info.get("estimated") is True
    has_times = is_estimated or record.info.get("virtual") is not True
    phases = _phases(activity, windows, levels, total)
    moments = pairwise(((windows.bounds - begin) / 1e9).tolist())
    copying, computing = (sum(getattr(phase, part) for phase in phases) for part in ("copy_seconds", "compute_seconds"))
    return Study(
        device=record.device,
        device_name=str(record.info.get("device_name", "")),
        total_bytes=total,
        is_estimated=is_estimated,
        headroom_is_bound=MemoryKind.RESERVED not in levels,
        has_times=has_times,
        begin_ns=begin,
        seconds=(end - begin) / 1e9,
        phases=phases,
        stretches=[(windows.names[name], *pair) for name, pair in zip(windows.name.tolist(), moments, strict=True)],
        links=_link_uses(activity, end - begin),
        sizes=_size_uses(activity),
        parts=_part_uses(activity, windows),
        blocking=_blocking_copies(activity),
        missed_overlap_seconds=sum(min(phase.copy_seconds, phase.compute_seconds) for phase in phases),
        missed_across_seconds=min(copying, computing),
        as_ready=_as_ready(activity, record.as_ready),
        missing=_missing(activity, levels, total, windows, has_times=has_times),
    )


def span(record: DeviceRecord) -> tuple[int, int]:
    """The first and the last nanosecond that a record knows. Raises BadInputError if it knows none."""
    parts = [level.time for level in _memory_levels(record).values()]
    if record.activity is not None:
        activity = record.activity
        parts += [activity.start, activity.end, activity.phase_start, activity.phase_end]
    known = np.concatenate([part for part in parts if len(part)] or [np.empty(0, np.int64)])
    if not len(known) or known.min() == known.max():
        raise BadInputError(
            f"device {record.device}: the file does not say when things happened: give a trace of torch.profiler, or a "
            "table of copies and phases."
        )
    return int(known.min()), int(known.max())


def _memory_levels(record: DeviceRecord) -> dict[MemoryKind, _Level]:
    """What was held over time, as far as it is known; a trace with times knows the device's memory best."""
    found: dict[MemoryKind, _Level] = {}
    activity, trace = record.activity, record.trace
    if activity is not None:
        for kind in MemoryKind:
            rows = activity.memory_kind == kind
            if np.any(rows):
                order = np.flatnonzero(rows)[np.argsort(activity.memory_time[rows], kind="stable")]
                found[kind] = _Level(activity.memory_time[order], activity.memory_bytes[order])
    if trace is not None and len(trace.time_us) and trace.time_us.max() > trace.time_us.min():
        time = np.maximum.accumulate(trace.time_us) * 1000
        found[MemoryKind.ALLOCATED] = _Level(time, trace.live_bytes(trace.aligned_size())[1:])
        if trace.reserved_bytes().max(initial=0):
            found[MemoryKind.RESERVED] = _Level(time, trace.reserved_bytes())
    return found


def _phases(
    activity: Activity, windows: _Windows, levels: dict[MemoryKind, _Level], total_bytes: int | None
) -> list[PhaseUse]:
    begin, end = windows.bounds[:-1], windows.bounds[1:]
    copies, computes = np.isin(activity.link, LINKS), activity.link == Link.COMPUTE
    computing = _Busy(activity, computes).within(begin, end)
    copying = _Busy(activity, copies).within(begin, end)
    either = _Busy(activity, computes | copies).within(begin, end)
    on_host = _Busy(activity, activity.link == Link.HOST_COMPUTE).within(begin, end)
    moved = {link: _moved_within(activity, link, windows.bounds) for link in LINKS}
    highest = {kind: _highest_within(*level, begin, end) for kind, level in levels.items()}
    peaks = {link: _peak_rate(activity, link) for link in LINKS}
    found = []
    for name in dict.fromkeys(windows.name.tolist()):
        rows = windows.name == name
        seconds = float((end - begin)[rows].sum()) / 1e9
        bytes_of = {link: int(moved[link][rows].sum()) for link in LINKS}
        most = {kind: int(level[rows].max()) for kind, level in highest.items() if level[rows].max() >= 0}
        fullest = most.get(MemoryKind.RESERVED, most.get(MemoryKind.ALLOCATED))
        found.append(
            PhaseUse(
                name=windows.names[name],
                runs=int(rows.sum()),
                seconds=seconds,
                compute_seconds=float((either - copying)[rows].sum()) / 1e9,
                copy_seconds=float((either - computing)[rows].sum()) / 1e9,
                overlap_seconds=float((computing + copying - either)[rows].sum()) / 1e9,
                idle_seconds=float((end - begin - either)[rows].sum()) / 1e9,
                host_compute_seconds=float(on_host[rows].sum()) / 1e9,
                moved_bytes={link.text: size for link, size in bytes_of.items() if size},
                link_used={
                    link.text: bytes_of[link] / (peak * seconds)
                    for link, peak in peaks.items()
                    if peak is not None and seconds
                },
                allocated_bytes=most.get(MemoryKind.ALLOCATED),
                reserved_bytes=most.get(MemoryKind.RESERVED),
                headroom_bytes=None if total_bytes is None or fullest is None else total_bytes - fullest,
                host_bytes=most.get(MemoryKind.HOST),
            )
        )
    return found


def _as_ready(activity: Activity, other: Activity | None) -> AsReady | None:
    """The totals if all work ran as soon as what it needs is there; None where that is not known."""
    if other is None or not len(other):
        return None
    begin, end = other.start.min(), other.end.max()
    copies, computes = np.isin(other.link, LINKS), other.link == Link.COMPUTE
    copying_ns = _Busy(other, computes | copies).total_ns - _Busy(other, computes).total_ns
    arrived = [(one.end - one.start.min(), one.num_bytes, one.link == Link.TO_DEVICE) for one in (other, activity)]
    moments = np.concatenate([moment[rows] for moment, _, rows in arrived])
    ahead = np.concatenate([sign * size[rows] for sign, (_, size, rows) in zip((1, -1), arrived, strict=True)])
    order = np.lexsort((-ahead, moments))
    return AsReady(
        seconds=float(end - begin) / 1e9,
        copy_seconds=copying_ns / 1e9,
        more_bytes=max(0, int(np.cumsum(ahead[order]).max(initial=0))),
    )


def _missing(
    activity: Activity, levels: dict[MemoryKind, _Level], total: int | None, windows: _Windows, *, has_times: bool
) -> list[str]:
    """What the record cannot tell, a sentence each."""
    found = []
    host_links = np.isin(activity.link, (Link.TO_DEVICE, Link.TO_HOST))
    if not len(activity):
        found.append("the file has no kernels and no copies: give a trace of torch.profiler with CUDA activities")
    elif not np.any(host_links):
        found.append("the file has no copies between host and device")
    elif not np.any(activity.num_bytes[np.isin(activity.link, LINKS)]):
        found.append("the file does not say how many bytes its copies moved, as profiles of ROCm do not")
    elif not any(_peak_rate(activity, link) for link in LINKS):
        found.append("no copy is of 1 MiB or more, so the peak of no link is measured")
    if has_times and len(activity) and not np.any(activity.link == Link.COMPUTE):
        found.append("the file does not say when the device computed, so neither overlap nor idle time is known")
    if MemoryKind.ALLOCATED not in levels:
        found.append("the file does not say what was allocated: profile with profile_memory=True")
    elif MemoryKind.RESERVED not in levels and total is not None:
        found.append(
            "the file does not say what was reserved: what lives throughout without an event, what the allocator "
            "caches and the CUDA context are not in it, so headroom is at most what is shown"
        )
    elif total is None:
        found.append("the file does not say how much memory the device has, so headroom is not known")
    if MemoryKind.HOST not in levels:
        found.append("the file does not say what was allocated on the host")
    named = {windows.names[name] for name in windows.name.tolist()} - {NO_PHASE, EVERYTHING}
    if not named:
        found.append("the file names no phases: everything is one")
    if not any("/" in name for name in activity.names):
        found.append("the file names no subgroups of an update")
    return found


STRETCHES = 300


@dataclass(frozen=True, kw_only=True)
class Series:
    """(n,) values each, the first of the stretch in which the study begins."""

    stretch_seconds: float  #: how long each stretch is
    memory_bytes: dict[str, list[int | None]]  #: allocated, reserved, host: the most; None where that is not known
    link_bytes_per_second: dict[str, list[float]]  #: by link
    computing_share: dict[str, list[float]]  #: device, host: from 0 to 1


def study_series(record: DeviceRecord) -> Series:
    """The series of one device. Raises BadInputError if the record has no times at all."""
    begin, end = span(record)
    bounds = np.unique(np.linspace(begin, end, STRETCHES + 1).astype(np.int64))
    stretch_ns = (end - begin) / (len(bounds) - 1)
    levels = _memory_levels(record).items()
    memory = {kind: _highest_within(*level, bounds[:-1], bounds[1:]) for kind, level in levels}
    activity = activity_of([]) if record.activity is None else record.activity
    return Series(
        stretch_seconds=stretch_ns / 1e9,
        memory_bytes={
            kind.name.lower(): [None if size < 0 else size for size in level.tolist()] for kind, level in memory.items()
        },
        link_bytes_per_second={
            link.text: (1e9 * _moved_within(activity, link, bounds) / stretch_ns).tolist()
            for link in LINKS
            if np.any(activity.link == link)
        },
        computing_share={
            name: (_Busy(activity, activity.link == link).within(bounds[:-1], bounds[1:]) / np.diff(bounds)).tolist()
            for name, link in (("device", Link.COMPUTE), ("host", Link.HOST_COMPUTE))
            if np.any(activity.link == link)
        },
    )
