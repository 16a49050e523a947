"""Memory, traffic and computing over time, in so many stretches of equal length: what charts draw, and `--json` has.

Contract: a stretch has the highest level of memory in it, all bytes that a link moved in it, and the share of it in
which the device (or the processor, for the program's step) computed. Bytes and computing add up to those of the study.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.analysis.busy_time import highest_within
from stalloc.analysis.link_use import LINKS, busy, moved_within
from stalloc.analysis.offload_study import memory_levels, span
from stalloc.trace import DeviceRecord
from stalloc.trace.activity import Link, activity_of

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
    memory = {kind: highest_within(level.time, level.num_bytes, bounds[:-1], bounds[1:]) for kind, level in levels}
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
