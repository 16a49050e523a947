"""Which installed extensions ask for NVIDIA's libraries, and what of them: PyTorch, CuPy, and all that pip installed.

Contract: extensions are read, never imported. What each asks for is kept by the path, size and time of its file, and
which files a distribution has by those of its RECORD, so a second look costs a few milliseconds. A kept answer that
cannot be read or written is no error: it is found anew. Names that no C compiler would take are left out. Paths are
strings, since hundreds of them are looked at whenever a program starts.
"""

import importlib.util
import json
import os
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalloc.device.elf import ElfFile
from stalloc.errors import StallocError
from stalloc.files import write_whole

_KEPT = "extensions.json"
_LAYOUT = 1  # of what is kept
NVIDIA_LIBRARY = re.compile(
    r"lib(cuda|cudart|cudnn|cublas|cufft|curand|cusolver|cusparse|cufile|cupti|cutensor|nv|nccl)"
)
_NVIDIA_SYMBOL = re.compile(
    r"(__cuda|cuda[A-Z]|cu[A-Z]|cublas|cudnn|cufft|curand|cusparse|cusolver|cutensor|p?nccl[A-Z]|nvshmem|nvrtc|nvJitLink|nvml)"
)
_C_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FILE_NAME = re.compile(r"[\w.+-]+", re.ASCII)
_THEIR_OWN = ("nvidia/", "nvidia_")  # packages of NVIDIA's libraries themselves


@dataclass(frozen=True)
class Asked:
    """What one extension asks of NVIDIA's libraries: which, the versions of each, and symbols."""

    versions: dict[str, list[str]]
    symbols: list[str]


def package_directory(name: str) -> Path | None:
    """Where the package `name` is installed, without importing it; None if it is not."""
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def of_torch_and_cupy() -> Iterator[str]:
    """Their libraries, wherever they are installed."""
    torch = package_directory("torch")
    if torch is not None and os.path.isdir(folder := str(torch / "lib")):
        yield from sorted(f"{folder}/{name}" for name in os.listdir(folder) if re.fullmatch(r"lib.*\.so", name))
    for package in ("cupy", "cupy_backends"):
        directory = package_directory(package)
        if directory is not None:
            for folder, _, names in os.walk(directory):
                yield from (f"{folder}/{name}" for name in names if name.endswith(".so"))


class Extensions:
    """What is installed, with what was kept of an earlier look."""

    def __init__(self, cache: Path | None) -> None:
        """`cache`: a private folder; None: nothing is kept."""
        self._file = cache / _KEPT if cache is not None else None
        self._known: dict[str, dict[str, Any]] = {"records": {}, "files": {}}
        self._seen: dict[str, dict[str, Any]] = {"records": {}, "files": {}}
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8")) if self._file is not None else {}
            if kept["layout"] == _LAYOUT:
                self._known = {"records": dict(kept["records"]), "files": dict(kept["files"])}
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def installed(self) -> Iterator[str]:
        """The extensions of every distribution on Python's path which ask for a library of NVIDIA's."""
        for folder in dict.fromkeys(os.path.abspath(one) for one in sys.path):
            for distribution in _distributions(folder):
                for name in self._listed(f"{folder}/{distribution}/RECORD"):
                    if self.asked(path := f"{folder}/{name}") is not None:
                        yield path

    def _listed(self, record: str) -> list[str]:
        """The extensions of a distribution, all of them."""

        def read() -> list[str]:
            lines = Path(record).read_text(encoding="utf-8", errors="replace").splitlines()
            names = (line.split(".so,")[0] + ".so" for line in lines if ".so," in line)
            return [one for one in names if not one.startswith(_THEIR_OWN) and not NVIDIA_LIBRARY.match(Path(one).name)]

        return self._kept("records", record, read) or []

    def asked(self, path: str) -> Asked | None:
        """What one file asks for; None if it is of no library of NVIDIA's, or not there."""
        found = self._kept("files", path, lambda: _read(Path(path)))
        return Asked(found["versions"], found["symbols"]) if found else None

    def _kept(self, table: str, path: str, read: Any) -> Any:
        try:
            status = os.stat(path)
            stamp = [status.st_size, status.st_mtime_ns]
            kept = self._known[table].get(path)
            if not isinstance(kept, list) or kept[0] != stamp:
                kept = [stamp, read()]
        except (OSError, ValueError, LookupError, struct.error):  # none, or no library after all
            return None
        self._seen[table][path] = kept
        return kept[1]

    def keep(self) -> None:
        """Write what was found, where that is new."""
        known = {table: self._known[table] | self._seen[table] for table in self._known}
        if self._file is None or known == self._known:
            return
        known = {
            table: {name: one for name, one in kept.items() if os.path.exists(name)} for table, kept in known.items()
        }
        try:
            write_whole(self._file, json.dumps({"layout": _LAYOUT, **known}), private=True)
        except (OSError, StallocError):
            return


def _distributions(folder: str) -> list[str]:
    """The folders that say what is installed in a folder of Python's path."""
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(".dist-info"))
    except OSError:
        return []


def _read(path: Path) -> dict[str, Any] | None:
    with ElfFile(path) as elf:
        needed = [one for one in elf.needed_libraries() if NVIDIA_LIBRARY.match(one) and _FILE_NAME.fullmatch(one)]
        versions: dict[str, list[str]] = {one: [] for one in needed}
        if not versions:
            return None
        for version, library in elf.needed_versions().values():
            if library in versions and _FILE_NAME.fullmatch(version):
                versions[library].append(version)
        symbols = {
            one.name
            for one in elf.requirements()
            if (one.library in versions or _NVIDIA_SYMBOL.match(one.name)) and _C_NAME.fullmatch(one.name)
        }
    return {"versions": {name: sorted(set(found)) for name, found in versions.items()}, "symbols": sorted(symbols)}
