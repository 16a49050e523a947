"""What is told at the end of a test session, and the baseline that is written then, from the reports of all workers."""

from typing import Any

import pytest

from stalloc.errors import StallocError
from stalloc.figures import human_bytes, plural
from stalloc.guard.judgement import Measured, load_baseline, save_baseline, size_text
from stalloc.printable import printable

_HUNGRIEST = 5


class SessionSummary:
    """Gathers what was measured in a session."""

    def __init__(self, option: Any) -> None:
        self._option = option
        self._measured: dict[str, Measured] = {}
        self._passed: set[str] = set()
        self._updated = ""

    def add(self, found: dict[str, Any], when: str | None, *, passed: bool) -> None:
        """A report of a test, or of its end: what it left is told with the failure, so the first one counts."""
        if when == "call":
            one = Measured.of(found)
            self._measured[one.name] = one
            if passed:
                self._passed.add(one.name)

    def update(self) -> None:
        """Write what passed to the baseline. Raises UsageError if it cannot be read or written."""
        file = self._option.stalloc_baseline
        try:
            baseline = load_baseline(file, self._option.stalloc_tolerance, must_exist=False)
            new = [one for name, one in self._measured.items() if name in self._passed and one.use.allocated_peak_bytes]
            save_baseline(file, baseline.updated(new))
        except StallocError as error:
            raise pytest.UsageError(str(error)) from error
        self._updated = f"wrote {plural(len(new), 'test')} to {file}; commit it"

    def lines(self) -> list[str]:
        users = [one for one in self._measured.values() if one.use.allocated_peak_bytes]
        if not users:
            return ["no test allocated GPU memory: without a GPU, --stalloc-gpu virtual:H100 stands in for one"]
        users.sort(key=lambda one: (-one.use.allocated_peak_bytes, one.name))
        lines = [f"{'allocated':>12}  {'reserved':>12}  (peaks of the hungriest of {plural(len(users), 'test')})"]
        for one in users[:_HUNGRIEST]:
            figures = human_bytes(one.use.allocated_peak_bytes), size_text(one.use.reserved_peak_bytes)
            lines.append("  ".join([*(f"{figure:>12}" for figure in figures), printable(one.name, 200)]))
        if self._updated:
            return [*lines, self._updated]
        if self._option.stalloc_baseline:
            baseline = load_baseline(self._option.stalloc_baseline, self._option.stalloc_tolerance)
            old = [(one.use.allocated_peak_bytes, baseline.entries.get(one.name)) for one in users]
            if new := sum(before is None for _, before in old):
                lines.append(f"{plural(new, 'test')} not in the baseline: --stalloc-update writes them")
            is_exceeded = baseline.tolerance.is_exceeded
            if less := sum(before is not None and is_exceeded(now, before.allocated_peak_bytes) for now, before in old):
                lines.append(f"{plural(less, 'test')} need less than the baseline has: --stalloc-update keeps that")
        return lines
