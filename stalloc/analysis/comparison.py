"""Two traces side by side, each at the moment when most is allocated: what grew, by class, by call site and by size.

Upheld: the changes of every list add up to the change of the allocated peak, to the byte; a list is ordered by what
grew most. Bytes are those of the rounded sizes, of which the peak is the lower bound of every plan. A `PeakUse` is
small enough to be kept in a file, in place of the first trace: what does not count in it (what others held before) is
in no list, and call sites are told without the folder of the project, so that they agree between machines.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.analysis.holders import Holder, class_keys, grouped, held_by, site_keys, site_text
from stalloc.analysis.moments import allocated_peak, live_rows, reserved_peak
from stalloc.columns import Column
from stalloc.trace import Trace
from stalloc.trace.sites import Frame


@dataclass(frozen=True)
class Peak:
    """One trace at its allocated peak; the first such event counts."""

    device: int
    source: str
    allocated_peak_bytes: int
    allocated_peak_event: int
    """-1 in a trace without requests."""
    allocated_peak_requests: int
    """Requests live at that event."""
    reserved_peak_bytes: int | None
    """The most that was reserved at any event; None where the source does not say."""


@dataclass(frozen=True)
class Change:
    """What one class, call site or size holds at each peak."""

    name: str
    first_bytes: int
    second_bytes: int
    first_requests: int
    second_requests: int

    @property
    def change_bytes(self) -> int:
        """Positive: it grew."""
        return self.second_bytes - self.first_bytes


@dataclass(frozen=True)
class Comparison:
    """One device of two traces."""

    first: Peak
    second: Peak
    by_class: list[Change]
    by_site: list[Change]
    by_size: list[Change]

    @property
    def allocated_change_bytes(self) -> int:
        """By how much the allocated peak grew."""
        return self.second.allocated_peak_bytes - self.first.allocated_peak_bytes

    @property
    def reserved_change_bytes(self) -> int | None:
        """By how much the reserved peak grew; None where one of the sources does not say."""
        first, second = self.first.reserved_peak_bytes, self.second.reserved_peak_bytes
        return None if first is None or second is None else second - first


Held = dict[Any, tuple[int, int]]
"""Bytes and requests by key, such as a call site."""


def compare(first: Trace, second: Trace, alignment: int = 512) -> Comparison:
    """Compare two traces at their allocated peaks, sizes rounded up to `alignment` bytes."""
    (peak, live, size), (other_peak, other_live, other_size) = (_peak(trace, alignment) for trace in (first, second))

    def held(keys: Callable[[Trace, Column], Sequence[Any]]) -> tuple[Held, Held]:
        return held_by(keys(first, live), size), held_by(keys(second, other_live), other_size)

    sites = held(site_keys)
    return Comparison(
        first=peak,
        second=other_peak,
        by_class=changes_of(*held(class_keys), str),
        by_site=changes_of(sites[0], moved_lines(*sites), site_text),
        by_size=changes_of(*held(lambda trace, rows: trace.size[rows].tolist()), lambda size: f"{size} bytes"),
    )


def _peak(trace: Trace, alignment: int) -> tuple[Peak, Column, Column]:
    size = trace.aligned_size(alignment)
    allocated, reserved = allocated_peak(trace, size), reserved_peak(trace, size)
    rows = live_rows(trace, allocated.event)
    peak = Peak(
        device=trace.device,
        source=str(trace.info.get("source", "")),
        allocated_peak_bytes=allocated.num_bytes,
        allocated_peak_event=allocated.event,
        allocated_peak_requests=len(rows),
        reserved_peak_bytes=reserved.reserved_bytes if reserved else None,
    )
    return peak, rows, size[rows]


def moved_lines(first: Held, second: Held) -> Held:
    """The second with the lines of the first: as edits move lines, a function with one line left in each is paired."""

    def left(of: Held, other: Held) -> dict[tuple[str, str], list[Frame]]:
        functions: dict[tuple[str, str], list[Frame]] = {}
        for key in of:
            if isinstance(key, Frame) and key not in other:
                functions.setdefault((key.filename, key.name), []).append(key)
        return functions

    before, after = left(first, second), left(second, first)
    renamed = {
        after[function][0]: frames[0]
        for function, frames in before.items()
        if len(frames) == 1 and len(after.get(function, [])) == 1
    }
    return {renamed.get(key, key) if isinstance(key, Frame) else key: held for key, held in second.items()}


def changes_of(first: Held, second: Held, text: Callable[[Any], str]) -> list[Change]:
    """What every key holds in each of two, what grew most first."""
    totals: dict[str, list[int]] = {}  # two files of one name look the same
    for side, held in enumerate((first, second)):
        for key, (num_bytes, count) in held.items():
            total = totals.setdefault(text(key), [0, 0, 0, 0])
            total[side] += num_bytes
            total[2 + side] += count
    changes = [Change(name, *total) for name, total in totals.items()]
    return sorted(changes, key=lambda change: (-change.change_bytes, -change.second_bytes, change.name))


SiteText = Callable[[Hashable], str]  #: of a key of `site_keys`
_SITE = re.compile(r"([^:\n]+):(\d{1,9}) (.+)")


@dataclass(frozen=True, kw_only=True)
class PeakUse:
    """One device of a record at its allocated peak."""

    device: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int | None  #: None where the source does not say
    by_site: tuple[Holder, ...]
    by_class: tuple[Holder, ...]


def peak_use(trace: Trace, counted: Column | None = None, site: SiteText = site_text) -> PeakUse:
    """What a trace needed; `counted`: (n,) which of its requests count, all without it; `site`: how sites are told."""
    size = trace.aligned_size()
    if counted is not None:
        size = np.where(counted, size, 0)
    peak, reserved = allocated_peak(trace, size), reserved_peak(trace, size)
    rows = np.flatnonzero((np.maximum(trace.start, 0) <= peak.event) & (trace.end > peak.event) & (size > 0))
    return PeakUse(
        device=trace.device,
        allocated_peak_bytes=peak.num_bytes,
        reserved_peak_bytes=reserved.reserved_bytes if reserved else None,
        by_site=tuple(grouped(site_keys(trace, rows), size[rows], site)),
        by_class=tuple(grouped(class_keys(trace, rows), size[rows], str)),
    )


def lasting(trace: Trace, site: SiteText = site_text) -> list[Holder]:
    """What was allocated in a trace and is live at its end, by call site; `site`: how sites are told."""
    rows = np.flatnonzero((trace.start >= 0) & (trace.end == trace.num_events))
    return grouped(site_keys(trace, rows), trace.aligned_size()[rows], site)


def site_growth(before: PeakUse, now: PeakUse) -> list[Change]:
    """What each call site holds at the two peaks, what grew most first; lines that moved in a function are paired."""
    first, second = (_by_frame(use.by_site) for use in (before, now))
    return changes_of(moved_lines(second, first), second, site_text)  # lines as they are now


def class_growth(before: PeakUse, now: PeakUse) -> list[Change]:
    """What each lifespan class holds at the two peaks, what grew most first."""
    first, second = ({one.name: (one.held_bytes, one.requests) for one in use.by_class} for use in (before, now))
    return changes_of(first, second, str)


def _by_frame(sites: Sequence[Holder]) -> Held:
    found: Held = {}
    for one in sites:
        parts = _SITE.fullmatch(one.name)
        key: Any = Frame(parts[1], int(parts[2]), parts[3]) if parts else one.name
        found[key] = (one.held_bytes, one.requests)
    return found
