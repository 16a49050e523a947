"""What a chart draws of a study: memory and traffic over time, in as many stretches as a picture has room for.

Contract: a stretch shows the highest level of memory in it, and all bytes that a link moved in it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.analysis.busy_time import bytes_within, highest_within
from stalloc.analysis.link_use import LINKS
from stalloc.analysis.offload_study import memory_levels, span, study
from stalloc.analysis.study_findings import findings
from stalloc.analysis.study_record import Study
from stalloc.trace import DeviceRecord

STRETCHES = 300


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Over time, from the begin of the study."""

    seconds: float  #: of one stretch
    memory: dict[str, list[int]]  #: allocated, reserved, host: bytes; -1 where that is not known
    traffic: dict[str, list[float]]  #: by link, bytes a second


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A study with what is drawn and said of it."""

    found: Study
    curves: Curves | None  #: none where times say nothing
    findings: list[str]


def drawn_study(record: DeviceRecord) -> Drawn | None:
    """The study of a record that has kernels or copies; None of one that has not."""
    if record.activity is None or not len(record.activity):
        return None
    found = study(record)
    return Drawn(found=found, curves=_curves(record) if found.has_times else None, findings=findings(found))


def _curves(record: DeviceRecord) -> Curves:
    begin, end = span(record)
    bounds = np.unique(np.linspace(begin, end, STRETCHES + 1).astype(np.int64))
    seconds = (end - begin) / (len(bounds) - 1) / 1e9
    memory = {
        kind.name.lower(): highest_within(level.time, level.num_bytes, bounds[:-1], bounds[1:]).tolist()
        for kind, level in memory_levels(record).items()
    }
    activity: Any = record.activity
    traffic = {}
    for link in LINKS:
        rows = activity.link == link
        if np.any(rows):
            moved = bytes_within(activity.start[rows], activity.end[rows], activity.num_bytes[rows], bounds)
            traffic[link.text] = (moved / seconds).tolist()
    return Curves(seconds=seconds, memory=memory, traffic=traffic)
