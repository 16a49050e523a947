"""Building the virtual GPU's libraries: one that holds everything, and an empty one under each name NVIDIA uses.

Contract: `build()` returns a directory whose libraries, loaded first, satisfy every NVIDIA library that torch, CuPy and
the other installed extensions ask for. It is built once per user and kept; its name is a hash of all that went into it,
and it appears by one rename, so several processes may build at the same time. A C compiler is all that is needed, no
CUDA headers.

The empty libraries carry the names (sonames) and version nodes that the loader checks; the symbols themselves are
found in the one library, unversioned, which the loader accepts for any version (glibc: elf/dl-lookup.c, check_match).

What lies in the directory is loaded and run, so it is a private one (see stalloc/private.py), and only the libraries
that were built are loaded from it.
"""

import atexit
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stalloc.device.installed_extensions import Extensions, of_torch_and_cupy
from stalloc.errors import SetupError
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


@dataclass(frozen=True)
class Surface:
    """What the installed libraries ask of NVIDIA's: symbols, and per library name the version nodes it must define."""

    symbols: tuple[str, ...]
    libraries: tuple[tuple[str, tuple[str, ...]], ...]
    cuda_version: int
    """That suits torch and CuPy, as CUDA writes it: 13000, or 12080 where they are built for CUDA 12."""


def _suiting(names: Collection[str]) -> int:
    return 12080 if "libcublas.so.12" in names and "libcublas.so.13" not in names else 13000


def scan() -> Surface:
    """The surface of all that is installed; it is read, not imported, and only what has changed since the last time."""
    symbols: set[str] = set()
    libraries: dict[str, set[str]] = {name: set() for name in _ALWAYS}
    try:
        cache = private_folder(user_cache("extensions"), _ADVICE)
    except (OSError, SetupError):
        cache = None
    extensions = Extensions(cache)
    version = 0
    for paths in (of_torch_and_cupy(), extensions.installed()):
        for path in paths:
            asked = extensions.asked(path)
            if asked is not None:
                symbols.update(asked.symbols)
                for name, versions in asked.versions.items():
                    libraries.setdefault(name, set()).update(versions)
        version = version or _suiting(libraries)
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
    """The directory of this user for all builds: $XDG_CACHE_HOME/stalloc/virtual-gpu, by default below ~/.cache."""
    return user_cache("virtual-gpu")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise SetupError(
            f"the virtual GPU could not be built: {what} failed ({reason}): try another compiler with CC=."
        )


def _compile(surface: Surface, command: list[str], folder: Path) -> None:
    weak = "".join(f"__attribute__((weak)) int {name}(void) {{ return 0; }}\n" for name in surface.symbols)
    (folder / "stubs.c").write_text(weak, encoding="ascii")
    parts = [str(source) for source in _SOURCES if source.suffix == ".c"] + [str(folder / "stubs.c")]
    shared = [*command, "-shared", "-fPIC"]
    # -fno-builtin: a stub may share its name with nothing the compiler knows, but never let it guess a signature
    main = [
        *shared,
        "-O2",
        "-std=gnu11",
        "-fno-builtin",
        f"-Wl,-soname,{MAIN_LIBRARY}",
        "-o",
        str(folder / MAIN_LIBRARY),
    ]
    _run([*main, *parts, "-lpthread", "-ldl"], "compiling it")
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
    """The libraries of a build, the one that holds everything first.

    Raises SetupError if one is missing or can be written by others.
    """
    paths = [folder / name for name in _library_names(surface)]
    try:
        for path in paths:
            check_private_file(path)
    except OSError as error:
        raise SetupError(f"the virtual GPU is not whole ({path} is missing): remove {folder}.") from error
    return paths


def _key(surface: Surface, command: list[str]) -> str:
    digest = hashlib.sha256(repr((surface, command, os.uname().machine)).encode())
    for source in (*_SOURCES, _AT_START):
        digest.update(source.read_bytes())
    digest.update(Path(__file__).read_bytes())
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
    surface, command = surface or scan(), compiler()
    directory = cache_directory()
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
        raise SetupError(
            f"the virtual GPU needs a C compiler once, and {wanted}: install gcc, or set CC to a compiler."
        )
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder.parent) as scratch:
        fresh = Path(scratch) / "build"
        fresh.mkdir(0o700)
        _compile(surface, command, fresh)
        try:
            fresh.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have finished first: its build is the same
                raise
