"""What a record needed: its allocated peak, and who held it then, small enough to be kept in a file and compared.

Contract: the bytes of each list add up to the allocated peak. Rows that do not count (what others held before) are in
neither. Call sites are told without the folder of the project, so that they agree between machines.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.analysis.comparison import Change, Held, changes_of, moved_lines
from stalloc.analysis.grouping import class_keys, site_keys, site_text
from stalloc.analysis.holders import Holder, grouped
from stalloc.analysis.peaks import allocated_peak, reserved_peak
from stalloc.columns import Column
from stalloc.trace import Trace
from stalloc.trace.sites import Frame

SiteText = Callable[[Hashable], str]  #: of a key of `site_keys`
_SITE = re.compile(r"([^:\n]+):(\d{1,9}) (.+)")


@dataclass(frozen=True, kw_only=True)
class PeakUse:
    """One device of a record at its allocated peak."""

    device: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int | None
    """None where the source does not say."""
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


def lasting(trace: Trace, counted: Column | None = None, site: SiteText = site_text) -> list[Holder]:
    """What was allocated in a trace and is live at its end, by call site; `counted` and `site` as in `peak_use`."""
    alive = (trace.start >= 0) & (trace.end == trace.num_events)
    if counted is not None:
        alive &= counted
    rows = np.flatnonzero(alive)
    return grouped(site_keys(trace, rows), trace.aligned_size()[rows], site)


def site_growth(before: PeakUse, now: PeakUse) -> list[Change]:
    """What each call site holds at the two peaks, what grew most first; lines that moved in a function are paired."""
    first, second = (_by_frame(use.by_site) for use in (before, now))
    return changes_of(moved_lines(second, first), second, site_text)  # lines as they are now


def class_growth(before: PeakUse, now: PeakUse) -> list[Change]:
    """What each lifespan class holds at the two peaks, what grew most first."""
    first, second = ({one.name: (one.held_bytes, one.requests) for one in use.by_class} for use in (before, now))
    return changes_of(first, second, str)  # type: ignore[arg-type]


def _by_frame(sites: Sequence[Holder]) -> Held:
    found: Held = {}
    for one in sites:
        parts = _SITE.fullmatch(one.name)
        key: Any = Frame(parts[1], int(parts[2]), parts[3]) if parts else one.name
        found[key] = (one.held_bytes, one.requests)
    return found
