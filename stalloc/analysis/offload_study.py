"""Where the time of a program goes that moves data between device, host and disk: by phase, by link, by size of copy.

The measures are those of the study of hybrid offload by Maurya et al. (Breaking the Memory Wall, 2024). Contract: the
seconds of a phase are divided into computing alone, copying alone, both and neither, and add up; so do the bytes that
each link moves, by phase, by size and in all. What the input does not have is None, and named in `missing`.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stalloc.analysis.link_use import (
    EVERYTHING,
    LINKS,
    NO_PHASE,
    Windows,
    blocking_copies,
    busy,
    highest_within,
    link_uses,
    moved_within,
    part_uses,
    peak_rate,
    phase_windows,
    size_uses,
)
from stalloc.analysis.study_record import AsReady, PhaseUse, Study
from stalloc.columns import Column, Times
from stalloc.errors import BadInputError
from stalloc.trace import DeviceRecord
from stalloc.trace.activity import Activity, Link, MemoryKind, activity_of


class Level(NamedTuple):
    """Bytes over time: each level holds from its nanosecond on."""

    time: Times
    num_bytes: Column


def study(record: DeviceRecord) -> Study:
    """The study of one device. Raises BadInputError if the record has no times at all."""
    activity = activity_of([]) if record.activity is None else record.activity
    levels = memory_levels(record)
    begin, end = span(record)
    windows = phase_windows(activity, begin, end)
    total = record.info.get("total_bytes")
    total = total if isinstance(total, int) else None
    is_estimated = record.info.get("estimated") is True
    has_times = is_estimated or record.info.get("virtual") is not True
    phases = _phases(activity, windows, levels, total)
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
        stretches=[
            (windows.names[name], *pair)
            for name, pair in zip(
                windows.name.tolist(), pairwise(((windows.bounds - begin) / 1e9).tolist()), strict=True
            )
        ],
        links=link_uses(activity, end - begin),
        sizes=size_uses(activity),
        parts=part_uses(activity, windows),
        blocking=blocking_copies(activity),
        missed_overlap_seconds=sum(min(phase.copy_seconds, phase.compute_seconds) for phase in phases),
        missed_across_seconds=min(
            sum(phase.copy_seconds for phase in phases), sum(phase.compute_seconds for phase in phases)
        ),
        as_ready=_as_ready(activity, record.as_ready),
        missing=_missing(activity, levels, total, windows, has_times=has_times),
    )


def span(record: DeviceRecord) -> tuple[int, int]:
    """The first and the last nanosecond that a record knows. Raises BadInputError if it knows none."""
    parts = [level.time for level in memory_levels(record).values()]
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


def memory_levels(record: DeviceRecord) -> dict[MemoryKind, Level]:
    """What was held over time, as far as it is known; a trace with times knows the device's memory best."""
    found: dict[MemoryKind, Level] = {}
    activity, trace = record.activity, record.trace
    if activity is not None:
        for kind in MemoryKind:
            rows = activity.memory_kind == kind
            if np.any(rows):
                order = np.flatnonzero(rows)[np.argsort(activity.memory_time[rows], kind="stable")]
                found[kind] = Level(activity.memory_time[order], activity.memory_bytes[order])
    if trace is not None and len(trace.time_us) and trace.time_us.max() > trace.time_us.min():
        time = np.maximum.accumulate(trace.time_us) * 1000
        found[MemoryKind.ALLOCATED] = Level(time, trace.live_bytes(trace.aligned_size())[1:])
        if trace.reserved_bytes().max(initial=0):
            found[MemoryKind.RESERVED] = Level(time, trace.reserved_bytes())
    return found


def _phases(
    activity: Activity, windows: Windows, levels: dict[MemoryKind, Level], total_bytes: int | None
) -> list[PhaseUse]:
    begin, end = windows.bounds[:-1], windows.bounds[1:]
    copies, computes = np.isin(activity.link, LINKS), activity.link == Link.COMPUTE
    computing = busy(activity, computes).within(begin, end)
    copying = busy(activity, copies).within(begin, end)
    either = busy(activity, computes | copies).within(begin, end)
    on_host = busy(activity, activity.link == Link.HOST_COMPUTE).within(begin, end)
    moved = {link: moved_within(activity, link, windows.bounds) for link in LINKS}
    highest = {kind: highest_within(*level, begin, end) for kind, level in levels.items()}
    peaks = {link: peak_rate(activity, link) for link in LINKS}
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
    either, computing = (busy(other, rows).within(begin[None], end[None]) for rows in (computes | copies, computes))
    arrived = [(one.end - one.start.min(), one.num_bytes, one.link == Link.TO_DEVICE) for one in (other, activity)]
    moments = np.concatenate([moment[rows] for moment, _, rows in arrived])
    ahead = np.concatenate([sign * size[rows] for sign, (_, size, rows) in zip((1, -1), arrived, strict=True)])
    order = np.lexsort((-ahead, moments))
    return AsReady(
        seconds=float(end - begin) / 1e9,
        copy_seconds=float((either - computing)[0]) / 1e9,
        more_bytes=max(0, int(np.cumsum(ahead[order]).max(initial=0))),
    )


def _missing(
    activity: Activity, levels: dict[MemoryKind, Level], total: int | None, windows: Windows, *, has_times: bool
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
    elif not any(peak_rate(activity, link) for link in LINKS):
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
    levels = memory_levels(record).items()
    memory = {kind: highest_within(*level, bounds[:-1], bounds[1:]) for kind, level in levels}
    activity = activity_of([]) if record.activity is None else record.activity
    return Series(
        stretch_seconds=stretch_ns / 1e9,
        memory_bytes={
            kind.name.lower(): [None if size < 0 else size for size in level.tolist()] for kind, level in memory.items()
        },
        link_bytes_per_second={
            link.text: (1e9 * moved_within(activity, link, bounds) / stretch_ns).tolist()
            for link in LINKS
            if np.any(activity.link == link)
        },
        computing_share={
            name: (busy(activity, activity.link == link).within(bounds[:-1], bounds[1:]) / np.diff(bounds)).tolist()
            for name, link in (("device", Link.COMPUTE), ("host", Link.HOST_COMPUTE))
            if np.any(activity.link == link)
        },
    )
