"""The baseline: what each test or program needed when it was last accepted, in a JSON file that is committed.

Contract: the same measurements give the same bytes, entries and keys in order, so that a diff of the file shows what
changed. Writing replaces the entries of what was measured and keeps all others.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stalloc.analysis.comparison import PeakUse
from stalloc.errors import BadInputError
from stalloc.files import write_whole
from stalloc.guard.growth_limit import GrowthLimit, growth_limit
from stalloc.guard.measured import Measured, use_of, wrong_use
from stalloc.inputs import read_input

FORMAT = "stalloc baseline 1"
DEFAULT_TOLERANCE = "5%"


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The entries of a file by name, and how much more than them is fine."""

    tolerance: GrowthLimit
    entries: dict[str, PeakUse]

    def updated(self, measured: Iterable[Measured]) -> "Baseline":
        """With what was measured in place of what stood there."""
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
            raise wrong_use(f"{path}: the entry of {name[:80]!r}", error) from error
    limit = growth_limit(f"the tolerance of {path}", tolerance or str(found.get("tolerance", DEFAULT_TOLERANCE)))
    return Baseline(limit, entries)


def save_baseline(file: str | Path, baseline: Baseline) -> None:
    """Write a baseline."""
    entries = {name: _entry(use) for name, use in sorted(baseline.entries.items())}
    found = {"format": FORMAT, "tolerance": baseline.tolerance.text, "entries": entries}
    write_whole(file, json.dumps(found, indent=1, sort_keys=True) + "\n", "name another file for the baseline")


def _entry(use: PeakUse) -> dict[str, Any]:
    entry = dataclasses.asdict(use)
    del entry["reserved_peak_bytes"]  # it hangs on what the pool did before
    return entry
