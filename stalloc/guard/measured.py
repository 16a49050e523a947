"""What one test or program needed, as it crosses from process to process and stands in a baseline file.

Contract: what counts is what was allocated by the one that is measured, and what its fixtures hold. What others left
behind counts for nobody else, so figures do not hang on the order of the tests.
"""

import dataclasses
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.analysis.comparison import PeakUse, SiteText, lasting, peak_use
from stalloc.analysis.holders import Holder, site_text
from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.printable import printable
from stalloc.sizes import aligned
from stalloc.trace import Trace
from stalloc.trace.sites import Frame

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
        """What was not freed."""
        return sum(one.held_bytes for one in self.left)

    def with_reserved(self, more_bytes: int) -> "Measured":
        """With what a cache holds besides."""
        reserved = self.use.reserved_peak_bytes
        if reserved is None or not more_bytes:
            return self
        use = dataclasses.replace(self.use, reserved_peak_bytes=reserved + more_bytes)
        return dataclasses.replace(self, use=use)

    def plain(self) -> dict[str, Any]:
        """As values that JSON has."""
        return dataclasses.asdict(self)

    @staticmethod
    def of(found: dict[str, Any]) -> "Measured":
        """The reverse of `plain`."""
        values = {**found, "use": use_of(found["use"]), "left": tuple(Holder(**one) for one in found["left"])}
        return Measured(**{**values, "notes": tuple(found["notes"])})


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
    notes = tuple(dict.fromkeys(str(note) for trace in traces for note in trace.info.get("notes", [])))
    return Measured(name=name, use=shortened(use), notes=notes, **more)


def left_behind(traces: Sequence[Trace], site: SiteText) -> tuple[Holder, ...]:
    """What was allocated in the traces and is there at their end, on all devices, by call site."""
    return tuple(one for trace in traces for one in lasting(trace, site=site))


def _held_before(device: int, sizes: Collection[int]) -> PeakUse:
    total = sum(map(aligned, sizes))
    held = (Holder(_HELD_BEFORE, total, len(sizes)),) if sizes else ()
    return PeakUse(device=device, allocated_peak_bytes=total, reserved_peak_bytes=None, by_site=held, by_class=held)


def shortened(use: PeakUse) -> PeakUse:
    """A peak use with a short list of call sites: the smaller ones are one line, "all others"."""
    rest = use.by_site[_MAX_SITES:]
    if not rest:
        return use
    held, requests = sum(one.held_bytes for one in rest), sum(one.requests for one in rest)
    return dataclasses.replace(use, by_site=(*use.by_site[:_MAX_SITES], Holder("all others", held, requests)))


def _counted(trace: Trace, fixtures: dict[tuple[int, int], int] | None) -> Column | None:
    """(n,) which requests count."""
    if fixtures is None:
        return None
    address = np.zeros(trace.num_requests, np.uint64)
    known = trace.event_request >= 0
    address[trace.event_request[known]] = trace.address[known]
    tables = trace.extra
    if "block_request" in tables and "block_address" in tables:
        row = tables["block_request"]
        address[row[row >= 0]] = tables["block_address"][row >= 0]
    theirs = np.array([at for device, at in fixtures if device == trace.device], np.uint64)
    return (trace.start >= 0) | np.isin(address, theirs)


def size_text(num_bytes: int | None) -> str:
    """Bytes for people, where they are known."""
    return "not recorded" if num_bytes is None else human_bytes(num_bytes)


def wrong_use(where: str, error: Exception) -> BadInputError:
    """The sentence for an entry that is not one."""
    return BadInputError(
        f"{where} is damaged ({type(error).__name__}: {str(error)[:60]}): restore it, or write it anew."
    )
