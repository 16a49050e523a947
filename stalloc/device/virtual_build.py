"""Building the virtual GPU's libraries: one that holds everything, and an empty one under each name NVIDIA uses.

Contract: `build()` returns a directory whose libraries, loaded first, satisfy every NVIDIA library that torch, CuPy and
the other installed extensions ask for. It is built once per user and kept; its name is a hash of all that went into it,
and it appears by one rename, so several processes may build at the same time. A C compiler is all that is needed, no
CUDA headers.

The empty libraries carry the names (sonames) and version nodes that the loader checks; the symbols themselves are
found in the one library, unversioned, which the loader accepts for any version (glibc: elf/dl-lookup.c, check_match).

What lies in the directory is loaded and run, so it is a private one (see stalloc/private.py), and only the libraries
that were built are loaded from it.

Extensions are read, never imported. What each asks for is kept by the path, size and time of its file, and which files
a distribution has by those of its RECORD, so a second look costs a few milliseconds. A kept answer that cannot be read
or written is no error: it is found anew. Names that no C compiler would take are left out. Paths are strings, since
hundreds of them are looked at whenever a program starts.
"""

import atexit
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stalloc.device.elf import ElfFile
from stalloc.errors import SetupError, StallocError
from stalloc.files import write_whole
from stalloc.notices import say
from stalloc.private import check_private_file, private_folder, remove_old, user_cache

MAIN_LIBRARY = "libstalloc_virtual_gpu.so"
_SOURCES = sorted(Path(__file__).parent.glob("virtual_*.[ch]"))
_AT_START = Path(__file__).with_name("inherited.py")  # what new interpreters run
_SCRATCH = "building-"  # how the names of unfinished builds begin
_ADVICE = "set XDG_CACHE_HOME to another directory"
# Loaded by name at run time, so no file asks for them.
_BY_NAME = ("cudart", "nvrtc", "nvJitLink")
_ALWAYS = ("libcuda.so.1", "libnvidia-ml.so.1", *(f"lib{name}.so.{major}" for major in (12, 13) for name in _BY_NAME))

_KEPT = "extensions.json"
_LAYOUT = 1  # of what is kept
_NVIDIA_LIBRARY = re.compile(
    r"lib(cuda|cudart|cudnn|cublas|cufft|curand|cusolver|cusparse|cufile|cupti|cutensor|nv|nccl)"
)
_NVIDIA_SYMBOL = re.compile(
    r"(__cuda|cuda[A-Z]|cu[A-Z]|cublas|cudnn|cufft|curand|cusparse|cusolver|cutensor|p?nccl[A-Z]|nvshmem|nvrtc|nvJitLink|nvml)"
)
_C_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FILE_NAME = re.compile(r"[\w.+-]+", re.ASCII)
_THEIR_OWN = ("nvidia/", "nvidia_")  # packages of NVIDIA's libraries themselves


def package_directory(name: str) -> Path | None:
    """Where the package `name` is installed, without importing it; None if it is not."""
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _of_torch_and_cupy() -> Iterator[str]:
    torch = package_directory("torch")
    if torch is not None and os.path.isdir(folder := str(torch / "lib")):
        yield from sorted(f"{folder}/{name}" for name in os.listdir(folder) if re.fullmatch(r"lib.*\.so", name))
    for package in ("cupy", "cupy_backends"):
        directory = package_directory(package)
        if directory is not None:
            for folder, _, names in os.walk(directory):
                yield from (f"{folder}/{name}" for name in names if name.endswith(".so"))


class _Extensions:
    def __init__(self) -> None:
        self._file: Path | None = None  # nothing is kept
        self._known: dict[str, dict[str, Any]] = {"records": {}, "files": {}}
        self._seen: dict[str, dict[str, Any]] = {"records": {}, "files": {}}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, SetupError):
            self._file = private_folder(user_cache("extensions"), _ADVICE) / _KEPT
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            if kept["layout"] == _LAYOUT:
                self._known = {"records": dict(kept["records"]), "files": dict(kept["files"])}

    def installed(self) -> Iterator[str]:
        """The extensions of every distribution on Python's path which ask for a library of NVIDIA's."""
        for folder in dict.fromkeys(os.path.abspath(one) for one in sys.path):
            names = os.listdir(folder) if os.path.isdir(folder) and os.access(folder, os.R_OK) else ()
            for distribution in sorted(name for name in names if name.endswith(".dist-info")):
                for name in self._kept("records", f"{folder}/{distribution}/RECORD", _listed) or ():
                    if self.asked(path := f"{folder}/{name}") is not None:
                        yield path

    def asked(self, path: str) -> dict[str, Any] | None:
        """What one file asks for: versions by library, symbols; None if of no library of NVIDIA's, or not there."""
        found: dict[str, Any] | None = self._kept("files", path, _read)
        return found

    def _kept(self, table: str, path: str, read: Callable[[Path], Any]) -> Any:
        try:
            status = os.stat(path)
            stamp = [status.st_size, status.st_mtime_ns]
            kept = self._known[table].get(path)
            if not isinstance(kept, list) or kept[0] != stamp:
                kept = [stamp, read(Path(path))]
        except (OSError, ValueError, LookupError, struct.error):  # none, or no library after all
            return None
        self._seen[table][path] = kept
        return kept[1]

    def keep(self) -> None:
        known = {table: self._known[table] | self._seen[table] for table in self._known}
        if self._file is None or known == self._known:
            return
        for table, kept in known.items():
            known[table] = {name: one for name, one in kept.items() if os.path.exists(name)}
        with contextlib.suppress(OSError, StallocError):
            write_whole(self._file, json.dumps({"layout": _LAYOUT, **known}), private=True)


def _listed(record: Path) -> list[str]:
    """The extensions of a distribution, all of them."""
    lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
    names = (line.split(".so,")[0] + ".so" for line in lines if ".so," in line)
    return [one for one in names if not one.startswith(_THEIR_OWN) and not _NVIDIA_LIBRARY.match(Path(one).name)]


def _read(path: Path) -> dict[str, Any] | None:
    with ElfFile(path) as elf:
        needed = [one for one in elf.needed_libraries() if _NVIDIA_LIBRARY.match(one) and _FILE_NAME.fullmatch(one)]
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


@dataclass(frozen=True)
class Surface:
    """What the installed libraries ask of NVIDIA's: symbols, and per library name the version nodes it must define."""

    symbols: tuple[str, ...]
    libraries: tuple[tuple[str, tuple[str, ...]], ...]
    cuda_version: int  #: that suits torch and CuPy: 13000, or 12080 where they are built for CUDA 12


def scan() -> Surface:
    """The surface of all that is installed; it is read, not imported, and only what has changed since the last time."""
    symbols: set[str] = set()
    libraries: dict[str, set[str]] = {name: set() for name in _ALWAYS}
    extensions = _Extensions()
    version = 0
    for paths in (_of_torch_and_cupy(), extensions.installed()):
        for path in paths:
            asked = extensions.asked(path)
            if asked is not None:
                symbols.update(asked["symbols"])
                for name, versions in asked["versions"].items():
                    libraries.setdefault(name, set()).update(versions)
        version = version or (12080 if "libcublas.so.12" in libraries and "libcublas.so.13" not in libraries else 13000)
    extensions.keep()
    named = tuple((name, tuple(sorted(versions))) for name, versions in sorted(libraries.items()))
    return Surface(tuple(sorted(symbols)), named, version)


def compiler() -> list[str] | None:
    """The C compiler's command: $CC, else cc, gcc or clang; None if there is none."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        return chosen if shutil.which(chosen[0]) else None
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def cache_directory() -> Path:
    return user_cache("virtual-gpu")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        what = f"{what} failed ({reason})"
        raise SetupError(f"the virtual GPU could not be built: {what}: try another compiler with CC=.")


def _compile(surface: Surface, command: list[str], folder: Path) -> None:
    weak = "".join(f"__attribute__((weak)) int {name}(void) {{ return 0; }}\n" for name in surface.symbols)
    (folder / "stubs.c").write_text(weak, encoding="ascii")
    parts = [str(source) for source in _SOURCES if source.suffix == ".c"] + [str(folder / "stubs.c")]
    shared = [*command, "-shared", "-fPIC"]
    # -fno-builtin: a stub may share its name with nothing the compiler knows, but never let it guess a signature
    options = ["-O2", "-std=gnu11", "-fno-builtin", f"-Wl,-soname,{MAIN_LIBRARY}", "-o", str(folder / MAIN_LIBRARY)]
    _run([*shared, *options, *parts, "-lpthread", "-ldl"], "compiling it")
    (folder / "empty.c").write_text("", encoding="ascii")
    for name, versions in surface.libraries:
        script = folder / "versions.map"
        script.write_text("\n".join(f"{version} {{ }};" for version in versions) or "{ };", encoding="ascii")
        options = [f"-Wl,-soname,{name}", f"-Wl,--version-script={script}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
        output = ["-o", str(folder / name), f"-L{folder}", f"-l:{MAIN_LIBRARY}"]
        _run([*shared, str(folder / "empty.c"), *options, *output], f"linking {name}")
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # the name that linkers look for
    shutil.copyfile(_AT_START, folder / "sitecustomize.py")
    for leftover in ("stubs.c", "empty.c", "versions.map"):
        (folder / leftover).unlink()
    for name in _library_names(surface):
        (folder / name).chmod(0o755)  # whatever the umask: what others can write is not loaded


def _library_names(surface: Surface) -> list[str]:
    return [MAIN_LIBRARY, *(name for name, _ in surface.libraries)]


def libraries(folder: Path, surface: Surface) -> list[Path]:
    """The libraries of a build, the main one first. Raises SetupError if one is missing or others can write to it."""
    paths = [folder / name for name in _library_names(surface)]
    try:
        for path in paths:
            check_private_file(path)
    except OSError as error:
        raise SetupError(f"the virtual GPU is not whole ({path} is missing): remove {folder}.") from error
    return paths


def _key(surface: Surface, command: list[str]) -> str:
    digest = hashlib.sha256(repr((surface, command, os.uname().machine)).encode())
    for source in (*_SOURCES, _AT_START, Path(__file__)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def built_directory() -> Path | None:
    """The directory of a finished build for what is installed now, or None."""
    try:
        return private_folder(cache_directory() / _key(scan(), compiler() or []), _ADVICE, make=False)
    except (OSError, SetupError):
        return None


def build(surface: Surface | None = None) -> Path:
    """Build the libraries for `surface` (by default what is installed), or find them built; returns their directory.

    Where there is no cache they are built for this process alone, and one sentence says so. Raises SetupError if there
    is no C compiler, if it fails, or if others can write to the cache.
    """
    surface, command, directory = surface or scan(), compiler(), cache_directory()
    try:
        directory = private_folder(directory, _ADVICE)
        remove_old(directory, f"{_SCRATCH}*")
        folder = directory / _key(surface, command or [])
        if folder.is_dir():
            return private_folder(folder, _ADVICE, make=False)
        _build(surface, command, folder)
    except OSError as error:
        return _build_for_this_process(surface, tuple(command or ()), f"{directory} ({error.strerror})")
    return folder


@cache
def _build_for_this_process(surface: Surface, command: tuple[str, ...], refused: str) -> Path:
    try:
        scratch = Path(tempfile.mkdtemp(prefix="stalloc-virtual-gpu-"))
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        _build(surface, list(command) or None, scratch / "build")
    except OSError as error:
        raise SetupError(
            f"the virtual GPU cannot be kept in {refused}, nor be built elsewhere ({error.strerror}): "
            "set XDG_CACHE_HOME to a writable directory."
        ) from error
    say(f"the virtual GPU cannot be kept in {refused}, so every process builds it: name a writable XDG_CACHE_HOME.")
    return scratch / "build"


def _build(surface: Surface, command: list[str] | None, folder: Path) -> None:
    if command is None:
        wanted = f"CC={os.environ['CC']} is not there" if os.environ.get("CC") else "none of cc, gcc and clang is there"
        needs = f"needs a C compiler once, and {wanted}"
        raise SetupError(f"the virtual GPU {needs}: install gcc, or set CC to a compiler.")
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder.parent) as scratch:
        fresh = Path(scratch) / "build"
        fresh.mkdir(0o700)
        _compile(surface, command, fresh)
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have finished first: its build is the same
                raise
