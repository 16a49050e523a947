"""When a program was in which phase, by its table of activity: stretches of time side by side, from begin to end.

Where the table says when phases ran, that decides, and what lies between them is in no phase. Otherwise a phase lasts
from the first thing that the device computes for it to that of the next one. A copy counts as well if the device
computes nothing else between the two, so that a copy ahead of time does not end the phase that it runs in; of a phase
for which the device computes nothing, copies and the processor's work count.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.columns import Rows, Times
from stalloc.trace.activity import Activity, Link

NO_PHASE, EVERYTHING = "in no phase", "all"


@dataclass(frozen=True, eq=False, kw_only=True)
class Windows:
    """Stretches of time, each with its phase."""

    bounds: Times
    """(k + 1,) ascending nanoseconds; stretch i is [bounds[i], bounds[i + 1])."""
    name: Rows
    """(k,) index of each stretch's phase in the names."""
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.name)


def top_phase(name: str) -> str:
    """The phase to which a part such as `update/3` belongs."""
    return name.partition("/")[0]


def phase_windows(activity: Activity, begin: int, end: int) -> Windows:
    """The phases of a stretch of time, which may be longer than the activity."""
    tops = [top_phase(name) for name in activity.names]
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
    return Windows(bounds=bounds, name=np.array([name for _, name in kept], np.int64), names=tuple(names))


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
