"""What one test or program needed, and whether that is too much: by a limit, a committed baseline, or left behind.

Contract: what counts is what was allocated by the one that is measured, and what its fixtures hold. What others left
behind counts for nobody else, so figures do not hang on the order of the tests. A baseline is a JSON file; the same
measurements give the same bytes, entries and keys in order, so that a diff of the file shows what changed. Writing
replaces the entries of what was measured and keeps all others. Every text of a finding fits on a screen, however many
call sites there are; its first line says what is wrong.
"""

import dataclasses
import json
import re
import shlex
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.analysis.comparison import Change, PeakUse, SiteText, class_growth, peak_use, site_growth
from stalloc.analysis.holders import Holder, site_text
from stalloc.columns import Column
from stalloc.device.known_gpus import memory_option
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.files import write_whole
from stalloc.inputs import read_input
from stalloc.printable import printable
from stalloc.sizes import aligned
from stalloc.trace import Trace
from stalloc.trace.sites import Frame

FORMAT = "stalloc baseline 1"
DEFAULT_TOLERANCE = "5%"
_MAX_LINES = 8  # of a list
_AUTOGRAD = "no Python line (the backward pass runs in threads of its own)"
_MAX_SITES = 40  # that a file keeps; the rest is one line
_HELD_BEFORE = "allocated before the test"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurement of one test or program, on the device that took most."""

    name: str
    use: PeakUse
    left: tuple[Holder, ...] = ()
    """Allocated and not freed, by call site; where that was asked for."""
    process: str = ""
    """The child process that took most; empty: the tests' own."""
    notes: tuple[str, ...] = ()
    trace_file: str = ""
    """Where the record was saved."""

    @property
    def left_bytes(self) -> int:
        return sum(one.held_bytes for one in self.left)

    def with_reserved(self, more_bytes: int) -> "Measured":
        """With what a cache holds besides."""
        if (reserved := self.use.reserved_peak_bytes) is None:
            return self
        use = dataclasses.replace(self.use, reserved_peak_bytes=reserved + more_bytes)
        return dataclasses.replace(self, use=use)

    @staticmethod
    def of(found: dict[str, Any]) -> "Measured":
        """The reverse of `dataclasses.asdict`, also of values that were JSON."""
        left = tuple(Holder(**one) for one in found["left"])
        return Measured(**{**found, "use": use_of(found["use"]), "left": left, "notes": tuple(found["notes"])})


def use_of(found: dict[str, Any]) -> PeakUse:
    """A PeakUse of plain values. Raises KeyError, TypeError or ValueError for others."""
    lists = {name: tuple(Holder(**one) for one in found[name]) for name in ("by_site", "by_class")}
    numbers: dict[str, Any] = {name: found[name] for name in ("device", "allocated_peak_bytes", "reserved_peak_bytes")}
    if not isinstance(numbers["allocated_peak_bytes"], int) or numbers["allocated_peak_bytes"] < 0:
        raise ValueError("allocated_peak_bytes")
    if any(not isinstance(one.held_bytes, int) for one in (*lists["by_site"], *lists["by_class"])):
        raise ValueError("held_bytes")
    return PeakUse(**numbers, by_site=lists["by_site"], by_class=lists["by_class"])


def sites_below(root: Path) -> SiteText:
    """Call sites by the path of their file from a folder on; what lies elsewhere by the name of the file."""
    folder = f"{root}/"

    def text(key: Hashable) -> str:
        if isinstance(key, Frame) and key.filename.startswith(folder):
            return printable(f"{key.filename.removeprefix(folder)}:{key.line} {key.name}")
        return site_text(key)

    return text


def measure(
    name: str,
    traces: Sequence[Trace],
    fixtures: dict[tuple[int, int], int] | None = None,
    site: SiteText = site_text,
    **more: Any,
) -> Measured:
    """What traces say; `fixtures` are blocks (device, address) and their bytes that were live before and count too.

    Without `fixtures` all that was live before counts.
    """
    uses = [peak_use(trace, _counted(trace, fixtures), site) for trace in traces]
    held = fixtures or {}
    uses += [
        _held_before(device, [num_bytes for (at, _), num_bytes in held.items() if at == device])
        for device in {device for device, _ in held} - {trace.device for trace in traces}
    ]
    use = max(uses, key=lambda one: one.allocated_peak_bytes, default=_held_before(0, []))
    if rest := use.by_site[_MAX_SITES:]:
        others = Holder("all others", sum(one.held_bytes for one in rest), sum(one.requests for one in rest))
        use = dataclasses.replace(use, by_site=(*use.by_site[:_MAX_SITES], others))
    notes = tuple(dict.fromkeys(str(note) for trace in traces for note in trace.info.get("notes", [])))
    return Measured(name=name, use=use, notes=notes, **more)


def _held_before(device: int, sizes: Collection[int]) -> PeakUse:
    total = sum(map(aligned, sizes))
    held = (Holder(_HELD_BEFORE, total, len(sizes)),) if sizes else ()
    return PeakUse(device=device, allocated_peak_bytes=total, reserved_peak_bytes=None, by_site=held, by_class=held)


def _counted(trace: Trace, fixtures: dict[tuple[int, int], int] | None) -> Column | None:
    if fixtures is None:
        return None
    address = np.zeros(trace.num_requests, np.uint64)
    known = trace.event_request >= 0
    address[trace.event_request[known]] = trace.address[known]
    if {"block_request", "block_address"} <= trace.extra.keys():
        row = trace.extra["block_request"]
        address[row[row >= 0]] = trace.extra["block_address"][row >= 0]
    theirs = np.array([at for device, at in fixtures if device == trace.device], np.uint64)
    return (trace.start >= 0) | np.isin(address, theirs)


def size_text(num_bytes: int | None) -> str:
    return "not recorded" if num_bytes is None else human_bytes(num_bytes)


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
