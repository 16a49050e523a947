"""What a program wrote, read from the layer that its writes went to, and what became of it, for reports.

Contract: nothing that is there is changed: what is published is new, and takes the place of no file. A file that was
opened for writing and is as it was is not counted. The layer is the upper side of overlays, as overlay.py made them: a
character device 0:0 stands for what was removed, an attribute for a folder that was removed and made again, and another
for a folder that was renamed, whose files are not in the layer.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stalloc.figures import human_bytes, plural
from stalloc.printable import printable

_ATTRIBUTES = ("trusted.overlay.", "user.overlay.")
_NOT_TOLD = ("__pycache__",)  #: Python's own, which nobody asks for


@dataclass(frozen=True)
class Change:
    """One file that a program wrote, or one name that it removed."""

    path: str
    kind: Literal["new", "changed", "removed"]
    size_bytes: int = 0  #: of a file that was written
    source: str = ""  #: where it is in the layer


class Layer:
    """A layer: the folder it is in, and the folders that its parts cover, as `View.covered` has them."""

    def __init__(self, folder: Path, covered: list[tuple[str, str]]) -> None:
        self._folder = str(folder)
        self._covered = covered

    def changes(self) -> Iterator[Change]:
        for name, lower in self._covered:
            yield from _changes(os.path.join(self._folder, name), lower)

    def publish(self, change: Change) -> bool:
        """Give the machine a file that is new; whether that was possible, which a file that others made forbids."""
        try:
            os.makedirs(os.path.dirname(change.path), exist_ok=True)
            if os.path.lexists(change.path):
                return False
            try:
                os.link(change.source, change.path)  # fails where a rename would replace a file that came meanwhile
            except OSError:
                _copy(change.source, change.path)
        except OSError:
            return False
        return True

    def publish_folders(self) -> None:
        for name, lower in self._covered:
            top = os.path.join(self._folder, name)
            for here, folders, _ in os.walk(top):
                folders[:] = [one for one in folders if not _attribute(os.path.join(here, one), "redirect")]
                path = os.path.join(lower, os.path.relpath(here, top))
                with contextlib.suppress(OSError):
                    if here != top and not os.path.lexists(path):
                        os.makedirs(path)
                        os.chmod(path, stat.S_IMODE(os.stat(here).st_mode))


def _copy(source: str, target: str) -> None:
    status = os.lstat(source)
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(status.st_mode):
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IMODE(status.st_mode))
        with open(source, "rb") as file, os.fdopen(handle, "wb") as copied:
            shutil.copyfileobj(file, copied, 1 << 20)
        shutil.copystat(source, target)
    # a pipe or a socket is of no use without the program


def _changes(upper: str, lower: str) -> Iterator[Change]:
    removed = []
    if _attribute(upper, "opaque"):  # the program made the folder anew in the place of another
        with contextlib.suppress(OSError):
            removed = [one for one in os.listdir(lower) if not os.path.lexists(os.path.join(upper, one))]
    for entry in sorted(os.scandir(upper), key=lambda one: one.name):
        path = os.path.join(lower, entry.name)
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            removed.append(entry.name)
        elif entry.name in _NOT_TOLD:
            continue
        elif entry.is_dir(follow_symlinks=False):
            if _attribute(entry.path, "redirect"):
                yield Change(path, "changed")
            yield from _changes(entry.path, path)
        elif not os.path.lexists(path):
            yield Change(path, "new", status.st_size, entry.path)
        elif any(getattr(os.lstat(path), name) != getattr(status, name) for name in _SAME):
            yield Change(path, "changed", status.st_size, entry.path)
    for name in removed:
        path = os.path.join(lower, name)
        if os.path.lexists(path) and name not in _NOT_TOLD:
            if os.path.islink(path) or not os.path.isdir(path):
                yield Change(path, "removed")
            for here, _, files in os.walk(path):
                yield from (Change(os.path.join(here, file), "removed") for file in files)


def _attribute(path: str, name: str) -> bytes:
    for prefix in _ATTRIBUTES:
        with contextlib.suppress(OSError):
            return os.getxattr(path, prefix + name, follow_symlinks=False)
    return b""


def size_bytes(folder: Path) -> int:
    total = 0
    for here, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(here, name)).st_blocks * 512
    return total


def remove(folder: Path) -> None:
    """Remove a layer, whose work folders let nobody in."""
    for here, folders, _ in os.walk(folder):
        for path in (os.path.join(here, name) for name in folders):
            with contextlib.suppress(OSError):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


_SAME = ("st_mode", "st_size", "st_mtime_ns", "st_uid", "st_gid")
_MOST_NAMES = 5
_PARTS = ("discarded", "kept", "removals")  # of `Files`


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
        return {"names": list(self.names), "files": self.num_files, "bytes": self.size_bytes}


@dataclass(frozen=True)
class Files:
    """The files of one run, or of several that ran one program."""

    way: str = "real"  #: "overlay", "landlock", or "real" where nothing was kept from them
    discarded: Named = Named()
    kept: Named = Named()
    removals: Named = Named()  #: what the program removed, and what is there still

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
        return {"way": self.way, **{name: getattr(self, name).as_json() for name in _PARTS}}


def files_from_json(told: dict[str, Any]) -> Files:
    """The files of which `as_json` gave the values."""
    parts = [told[name] for name in _PARTS]
    return Files(told["way"], *(Named(tuple(one["names"]), one["files"], one["bytes"]) for one in parts))


def merged(runs: Iterable[Files]) -> Files:
    """The files of runs of one program: it writes about the same in each, so they are not added up."""
    runs = list(runs)
    if not runs:
        return Files()

    def most(which: str) -> Named:
        parts: list[Named] = [getattr(one, which) for one in runs]
        names = tuple(dict.fromkeys(name for part in parts for name in part.names))
        return Named(names, max(part.num_files for part in parts), max(part.size_bytes for part in parts))

    return Files(runs[0].way, *map(most, _PARTS))


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
