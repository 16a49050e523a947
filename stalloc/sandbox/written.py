"""What became of the files that a program wrote, for reports."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stalloc.figures import human_bytes, plural
from stalloc.printable import printable
from stalloc.sandbox.layer import Change

_MOST_NAMES = 5


@dataclass(frozen=True)
class Named:
    """Some files, by the names that people look for them under."""

    names: tuple[str, ...] = ()
    """Those in the program's folder by their first part ("runs/"), others by the first folder that is new."""
    num_files: int = 0
    size_bytes: int = 0

    def text(self) -> str:
        """As `last.pt, runs/ (12 files, 2.10 GiB)`; empty without any."""
        if not self.num_files:
            return ""
        shown = [printable(one) for one in self.names[:_MOST_NAMES]]
        more = len(self.names) - len(shown)
        size = f", {human_bytes(self.size_bytes)}" if self.size_bytes else ""
        return f"{', '.join(shown)}{f' and {more} more' if more else ''} ({plural(self.num_files, 'file')}{size})"

    def as_json(self) -> dict[str, Any]:
        """The names, the number of files and their bytes, for a report."""
        return {"names": list(self.names), "files": self.num_files, "bytes": self.size_bytes}


@dataclass(frozen=True)
class Files:
    """The files of one run, or of several that ran one program."""

    way: str = "real"
    """"overlay", "landlock", or "real" where nothing was kept from them."""
    discarded: Named = Named()
    kept: Named = Named()
    removals: Named = Named()
    """What the program removed, and what is there still."""

    @property
    def written_bytes(self) -> int:
        """Bytes of all files that were written, whether they were discarded or kept."""
        return self.discarded.size_bytes + self.kept.size_bytes

    def sentences(self) -> list[str]:
        """A line of what was discarded, and one of what was kept; none where nothing was written."""
        removed = self.removals.text()
        parts = [part for part in (self.discarded.text(), f"the removal of {removed}" if removed else "") if part]
        lines = [f"discarded: {' and '.join(parts)}"] if parts else []
        return lines + ([f"kept: {self.kept.text()}"] if self.kept.num_files else [])

    def as_json(self) -> dict[str, Any]:
        """Plain values for the JSON of a report."""
        parts = {"discarded": self.discarded, "kept": self.kept, "removals": self.removals}
        return {"way": self.way, **{name: part.as_json() for name, part in parts.items()}}


def files_from_json(told: dict[str, Any]) -> Files:
    """The files of which `as_json` gave the values."""
    parts = {
        name: Named(tuple(told[name]["names"]), told[name]["files"], told[name]["bytes"])
        for name in ("discarded", "kept", "removals")
    }
    return Files(told["way"], **parts)


def merged(runs: Iterable[Files]) -> Files:
    """The files of runs of one program: it writes about the same in each, so they are not added up."""
    runs = list(runs)
    if not runs:
        return Files()

    def most(parts: Sequence[Named]) -> Named:
        names = tuple(dict.fromkeys(name for part in parts for name in part.names))
        return Named(names, max(part.num_files for part in parts), max(part.size_bytes for part in parts))

    return Files(
        runs[0].way,
        most([one.discarded for one in runs]),
        most([one.kept for one in runs]),
        most([one.removals for one in runs]),
    )


def named(changes: Sequence[Change], folder: str) -> Named:
    """Changes by the names that people look for them under; `folder` is the program's."""
    sizes: dict[str, int] = {}
    for one in changes:
        name = _name(one.path, folder)
        sizes[name] = sizes.get(name, 0) + one.size_bytes
    names = sorted(sizes, key=lambda name: -sizes[name])
    return Named(tuple(names), len(changes), sum(one.size_bytes for one in changes))


def _name(path: str, folder: str) -> str:
    if path.startswith(folder.rstrip("/") + "/"):
        first, slash, _ = os.path.relpath(path, folder).partition("/")
        return first + slash
    home = os.path.expanduser("~")
    here = path
    while not os.path.lexists(os.path.dirname(here)):
        here = os.path.dirname(here)
    shown = here if here == path else here + "/"
    return "~" + shown[len(home) :] if home != "/" and shown.startswith(home + "/") else shown
