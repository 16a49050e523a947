"""When a program was in which phase, and what each link between device, host and disk moved then and in all.

Where the table of activity says when phases ran, that decides, and what lies between them is in no phase. Otherwise a
phase lasts from the first thing that the device computes for it to that of the next one. A copy counts as well if the
device computes nothing else between the two, so that a copy ahead of time does not end the phase that it runs in; of a
phase for which the device computes nothing, copies and the processor's work count.

The measured peak of a link is the highest rate of one of its copies of 1 MiB or more; its use is a share of that.
Contract: times are whole nanoseconds, intervals half open. Bytes of a copy that reaches over a boundary are divided by
time; those of all stretches that lie side by side add up to all bytes.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.analysis.study_record import Blocking, LinkUse, PartUse, SizeUse
from stalloc.columns import Column, Rows, Sizes, Times
from stalloc.trace.activity import Activity, Link

NO_PHASE, EVERYTHING = "in no phase", "all"


@dataclass(frozen=True, eq=False, kw_only=True)
class Windows:
    """Stretches of time, each with its phase."""

    bounds: Times  #: (k + 1,) ascending nanoseconds; stretch i is [bounds[i], bounds[i + 1])
    name: Rows  #: (k,) index of each stretch's phase in the names
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


class Busy:
    """The times at which at least one of some intervals is open."""

    def __init__(self, start: Times, end: Times) -> None:
        order = np.argsort(start, kind="stable")
        start, end = start[order], np.maximum.accumulate(end[order]) if len(order) else end[order]
        first = np.append(True, start[1:] > end[:-1])[: len(start)]
        self.start = start[first]
        self.end = end[np.append(first[1:], True)[: len(end)]]
        self._before = np.concatenate([[0], np.cumsum(self.end - self.start)])

    @property
    def seconds(self) -> float:
        """Of work in all."""
        return float(self._before[-1]) / 1e9

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


def bytes_within(start: Times, end: Times, size: Sizes, bounds: Times) -> Sizes:
    """(k,) bytes that copies moved in each stretch between (k + 1,) ascending bounds, within which all copies lie."""
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


def highest_within(time: Times, level: Column, begin: Times, end: Times) -> Column:
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


def busy(activity: Activity, rows: Column) -> Busy:
    """When at least one of some rows ran."""
    return Busy(activity.start[rows], activity.end[rows])


def moved_within(activity: Activity, link: Link, bounds: Times) -> Sizes:
    """(k,) bytes that a link moved in each of the stretches between (k + 1,) ascending bounds."""
    rows = activity.link == link
    return bytes_within(activity.start[rows], activity.end[rows], activity.num_bytes[rows], bounds)


def peak_rate(activity: Activity, link: Link) -> float | None:
    """Bytes a second of the quickest copy of a link that is large enough to tell; None without one."""
    rows = (activity.link == link) & (activity.num_bytes >= _RATED_BYTES) & (activity.end > activity.start)
    if not np.any(rows):
        return None
    return float((activity.num_bytes[rows] / (activity.end - activity.start)[rows]).max()) * 1e9


def link_uses(activity: Activity, span_ns: int) -> list[LinkUse]:
    """Each link that moved something in so many nanoseconds."""
    found = []
    for link in LINKS:
        rows = activity.link == link
        if not np.any(rows):
            continue
        size, peak = int(activity.num_bytes[rows].sum()) or None, peak_rate(activity, link)
        found.append(
            LinkUse(
                link=link.text,
                copies=int(rows.sum()),
                num_bytes=size,
                busy_seconds=busy(activity, rows).seconds,
                rate=None if size is None else _rate(activity, rows),
                peak_rate=peak,
                used=None if peak is None or size is None or not span_ns else size / (peak * span_ns / 1e9),
            )
        )
    return found


def size_uses(activity: Activity) -> list[SizeUse]:
    """The copies of each link by size, smallest first."""
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


def part_uses(activity: Activity, windows: Windows) -> list[PartUse]:
    """The parts of phases, in the order in which they first ran; each runs once in a run of its phase."""
    computes = np.isin(activity.link, (Link.COMPUTE, Link.HOST_COMPUTE))
    found = []
    for number, name in enumerate(activity.names):
        rows = activity.phase == number
        told = activity.phase_name == number
        if "/" not in name or not (np.any(rows) or np.any(told)):
            continue
        start, end = activity.phase_start[told], activity.phase_end[told]
        if not len(start):
            start, end = _runs(activity.start[rows], activity.end[rows], windows)
        moved = {link.text: int(activity.num_bytes[rows & (activity.link == link)].sum()) for link in LINKS}
        found.append(
            PartUse(
                phase=top_phase(name),
                name=name.partition("/")[2],
                runs=len(start),
                start_seconds=float(start.min() - windows.bounds[0]) / 1e9,
                seconds=float((end - start).sum()) / 1e9,
                compute_seconds=busy(activity, rows & computes).seconds,
                moved_bytes={link: size for link, size in moved.items() if size},
            )
        )
    return sorted(found, key=lambda part: part.start_seconds)


def _runs(start: Times, end: Times, windows: Windows) -> tuple[Times, Times]:
    """When the work of a part began and ended in each stretch of the phases."""
    order = np.argsort(start, kind="stable")
    inside = np.searchsorted(windows.bounds, start[order], side="right")
    first = np.flatnonzero(np.diff(inside, prepend=-1))
    return start[order][first], np.maximum.reduceat(end[order], first)


def blocking_copies(activity: Activity) -> Blocking | None:
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
    """Bytes a second of some copies while they ran."""
    seconds = float((activity.end - activity.start)[rows].sum()) / 1e9
    return float(activity.num_bytes[rows].sum()) / seconds if seconds else 0.0
