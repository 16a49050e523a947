"""Whether what was measured is too much: by a limit, by a committed baseline, or left behind; and what is said of it.

Contract: a baseline is a JSON file; the same measurements give the same bytes, entries and keys in order, so that a
diff of the file shows what changed. Writing replaces the entries of what was measured and keeps all others. Every text
of a finding fits on a screen, however many call sites there are; its first line says what is wrong.
"""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stalloc.analysis.comparison import Change
from stalloc.analysis.holders import Holder
from stalloc.analysis.peak_use import PeakUse, class_growth, site_growth
from stalloc.device.known_gpus import memory_option
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.files import write_whole
from stalloc.guard.measured import Measured, size_text, use_of
from stalloc.inputs import read_input
from stalloc.printable import printable

FORMAT = "stalloc baseline 1"
DEFAULT_TOLERANCE = "5%"
_MAX_LINES = 8  # of a list
_AUTOGRAD = "no Python line (the backward pass runs in threads of its own)"


@dataclasses.dataclass(frozen=True)
class GrowthLimit:
    """By how much a peak may grow: a share of what it was and a number of bytes, one of which is zero."""

    share: float
    num_bytes: int
    text: str
    """The limit as it was given."""

    def allowed_bytes(self, before_bytes: int) -> int:
        return int(self.share * before_bytes) + self.num_bytes

    def is_exceeded(self, before_bytes: int, now_bytes: int) -> bool:
        return now_bytes - before_bytes > self.allowed_bytes(before_bytes)


def growth_limit(option: str, text: str) -> GrowthLimit:
    """What an option says: 5%, 200MiB or 0. Raises BadInputError for anything else."""
    if share := re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)%", text):
        return GrowthLimit(float(share[1]) / 100, 0, text)
    try:
        return GrowthLimit(0.0, 0 if text == "0" else memory_option(option, text), text)
    except BadInputError as error:
        raise BadInputError(f"{option} is {text[:40]!r}: give 5%, 200MiB or 4096B.") from error


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The entries of a file by name, and how much more than them is fine."""

    tolerance: GrowthLimit
    entries: dict[str, PeakUse]

    def updated(self, measured: Iterable[Measured]) -> "Baseline":
        new = {one.name: dataclasses.replace(one.use, reserved_peak_bytes=None) for one in measured}
        return Baseline(self.tolerance, self.entries | new)


def load_baseline(file: str | Path, tolerance: str | None = None, *, must_exist: bool = True) -> Baseline:
    """A baseline; `tolerance` in place of the file's own. Raises BadInputError if it is none."""
    path = Path(file)
    if not must_exist and not path.exists():
        return Baseline(growth_limit("the tolerance", tolerance or DEFAULT_TOLERANCE), {})
    data = read_input(path, "a baseline that stalloc wrote")
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is not JSON: give a baseline that stalloc wrote.") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("entries"), dict):
        raise BadInputError(f"{path} is not a baseline of this version of stalloc: write it anew.")
    entries = {}
    for name, entry in found["entries"].items():
        try:
            entries[name] = use_of({"reserved_peak_bytes": None, **entry})
        except (KeyError, TypeError, ValueError) as error:
            raise BadInputError(
                f"{path}: the entry of {name[:80]!r} is damaged ({type(error).__name__}: {str(error)[:60]}): "
                "restore it, or write it anew."
            ) from error
    limit = growth_limit(f"the tolerance of {path}", tolerance or str(found.get("tolerance", DEFAULT_TOLERANCE)))
    return Baseline(limit, entries)


def save_baseline(file: str | Path, baseline: Baseline) -> None:
    """Write a baseline, without what was reserved, which hangs on what the pool did before."""
    entries = {name: dataclasses.asdict(use) for name, use in baseline.entries.items()}
    for entry in entries.values():
        del entry["reserved_peak_bytes"]
    found = {"format": FORMAT, "tolerance": baseline.tolerance.text, "entries": entries}
    write_whole(file, json.dumps(found, indent=1, sort_keys=True) + "\n", "name another file for the baseline")


@dataclasses.dataclass(frozen=True)
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
    return _of_holders(headline, "held then by", measured.use.by_site)


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
    details = (*_changes("call site", grown), *_changes("class", class_growth(before, measured.use)))
    return Finding(headline, details, tuple(one.name for one in grown if one.change_bytes > 0))


def leaked(measured: Measured, limit_bytes: int) -> Finding | None:
    """The finding if more was left behind than is fine."""
    if measured.left_bytes <= limit_bytes:
        return None
    fine = f", {human_bytes(limit_bytes)} are fine" if limit_bytes else ""
    headline = f"stalloc: {human_bytes(measured.left_bytes)} allocated in the test are not freed after it{fine}"
    return _of_holders(headline, "allocated by", measured.left)


def held_at_error(measured: Measured) -> Finding:
    """Who held memory, whether of this test or from before, when a test ran out of it."""
    headline = f"stalloc: out of memory; at the peak {human_bytes(measured.use.allocated_peak_bytes)} were allocated"
    return _of_holders(headline, "held then by", measured.use.by_site)


def _of_holders(headline: str, title: str, found: Sequence[Holder]) -> Finding:
    lines = [f"    {human_bytes(one.held_bytes):>12}  {_name(one.name)}" for one in found[:_MAX_LINES]]
    lines.insert(0, f"  {title}:")
    if rest := found[_MAX_LINES:]:
        lines.append(f"    {human_bytes(sum(one.held_bytes for one in rest)):>12}  {len(rest):,} more")
    return Finding(headline, tuple(lines), tuple(one.name for one in found))


def _ending(measured: Measured) -> Iterator[str]:
    if measured.process:
        yield f"  in a child process: {printable(measured.process)}"
    yield f"  reserved at the peak: {size_text(measured.use.reserved_peak_bytes)} (told, not judged)"
    for note in measured.notes[:3]:
        yield f"  note: {printable(note, 200)}"
    if measured.trace_file:
        yield f"  next: stalloc top {shlex.quote(measured.trace_file)}"


def _changes(title: str, changes: Sequence[Change]) -> Iterator[str]:
    grown = [one for one in changes if one.change_bytes > 0]
    if grown:
        yield f"    {'grew by':>12}  {'was':>12}  {'is':>12}  {title}"
    for one in grown[:_MAX_LINES]:
        figures = (human_bytes(num) for num in (one.change_bytes, one.first_bytes, one.second_bytes))
        yield "    " + "  ".join(f"{figure:>12}" for figure in figures) + f"  {_name(one.name)}"
    if rest := sum(one.change_bytes for one in grown[_MAX_LINES:]):
        yield f"    {human_bytes(rest):>12}  {len(grown) - _MAX_LINES:,} more"
    if shrunk := sum(one.change_bytes for one in changes if one.change_bytes < 0):
        yield f"    {'-' + human_bytes(-shrunk):>12}  what shrank, together"


def _name(name: str) -> str:
    return _AUTOGRAD if name == "unknown" else printable(name, 100)
