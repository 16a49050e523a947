"""Whether what was measured is too much, and what is said of it: what grew, where, and what to type next.

Contract: every text fits on a screen, however many call sites there are; the first line says what is wrong.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stalloc.analysis.comparison import Change, PeakUse, class_growth, site_growth
from stalloc.analysis.holders import Holder
from stalloc.figures import human_bytes
from stalloc.guard.growth_limit import GrowthLimit
from stalloc.guard.measured import Measured, size_text
from stalloc.printable import printable

_MAX_LINES = 8  # of a list
_AUTOGRAD = "no Python line (the backward pass runs in threads of its own)"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: a line, and the lines below it."""

    headline: str
    details: tuple[str, ...]
    sites: tuple[str, ...] = ()
    """The call sites that it is about, most important first."""

    def text(self, measured: Measured) -> str:
        """All of it, with what is known besides and where the trace is."""
        return "\n".join((self.headline, *self.details, *_ending(measured)))


def over_limit(measured: Measured, limit_bytes: int, named: str) -> Finding | None:
    """The finding if more was allocated than a limit allows."""
    peak = measured.use.allocated_peak_bytes
    if peak <= limit_bytes:
        return None
    more = human_bytes(peak - limit_bytes)
    headline = f"stalloc: {human_bytes(peak)} allocated at the peak, {more} more than {named}"
    return Finding(headline, tuple(_holders("held then by", measured.use.by_site)), _names(measured.use.by_site))


def over_baseline(measured: Measured, before: PeakUse, tolerance: GrowthLimit) -> Finding | None:
    """The finding if more was allocated than the baseline has, by more than what is fine."""
    old, now = before.allocated_peak_bytes, measured.use.allocated_peak_bytes
    if not tolerance.is_exceeded(old, now):
        return None
    headline = (
        f"stalloc: {human_bytes(now)} allocated at the peak, {human_bytes(now - old)} more than the baseline's "
        f"{human_bytes(old)} (tolerance {tolerance.text})"
    )
    grown = site_growth(before, measured.use)
    details = [*_changes("call site", grown)]
    details += _changes("class", class_growth(before, measured.use))
    return Finding(headline, tuple(details), tuple(one.name for one in grown if one.change_bytes > 0))


def leaked(measured: Measured, limit_bytes: int) -> Finding | None:
    """The finding if more was left behind than is fine."""
    if measured.left_bytes <= limit_bytes:
        return None
    fine = f", {human_bytes(limit_bytes)} are fine" if limit_bytes else ""
    headline = f"stalloc: {human_bytes(measured.left_bytes)} allocated in the test are not freed after it{fine}"
    return Finding(headline, tuple(_holders("allocated by", measured.left)), _names(measured.left))


def held_at_error(measured: Measured) -> Finding:
    """Who held memory, whether of this test or from before, when a test ran out of it."""
    headline = f"stalloc: out of memory; at the peak {human_bytes(measured.use.allocated_peak_bytes)} were allocated"
    return Finding(headline, tuple(_holders("held then by", measured.use.by_site)), _names(measured.use.by_site))


def _ending(measured: Measured) -> Iterator[str]:
    if measured.process:
        yield f"  in a child process: {printable(measured.process)}"
    yield f"  reserved at the peak: {size_text(measured.use.reserved_peak_bytes)} (told, not judged)"
    for note in measured.notes[:3]:
        yield f"  note: {printable(note, 200)}"
    if measured.trace_file:
        yield f"  next: stalloc top {shlex.quote(measured.trace_file)}"


def _holders(title: str, found: Sequence[Holder]) -> Iterator[str]:
    yield f"  {title}:"
    for one in found[:_MAX_LINES]:
        yield f"    {human_bytes(one.held_bytes):>12}  {_name(one.name)}"
    if len(found) > _MAX_LINES:
        rest = found[_MAX_LINES:]
        yield f"    {human_bytes(sum(one.held_bytes for one in rest)):>12}  {len(rest):,} more"


def _changes(title: str, changes: Sequence[Change]) -> Iterator[str]:
    grown = [one for one in changes if one.change_bytes > 0]
    if grown:
        yield f"    {'grew by':>12}  {'was':>12}  {'is':>12}  {title}"
    for one in grown[:_MAX_LINES]:
        figures = (human_bytes(num) for num in (one.change_bytes, one.first_bytes, one.second_bytes))
        yield "    " + "  ".join(f"{figure:>12}" for figure in figures) + f"  {_name(one.name)}"
    shrunk = sum(one.change_bytes for one in changes if one.change_bytes < 0)
    rest = sum(one.change_bytes for one in grown[_MAX_LINES:])
    if rest:
        yield f"    {human_bytes(rest):>12}  {len(grown) - _MAX_LINES:,} more"
    if shrunk:
        yield f"    {'-' + human_bytes(-shrunk):>12}  what shrank, together"


def _names(found: Sequence[Holder]) -> tuple[str, ...]:
    return tuple(one.name for one in found)


def _name(name: str) -> str:
    return _AUTOGRAD if name == "unknown" else printable(name, 100)
