"""Files that a user names: opened in one place, so that no name makes a verb wait for ever or fill the memory.

Contract: what is read is a regular file, standard input where the name is `-` or /dev/stdin, or a file on another
machine where the name has a scheme that fsspec knows (s3://, gs://, https:// and others), which is imported only then,
and asked for nothing but what the name says. Directories, named pipes, devices and sockets are refused in one sentence
before anything is read from them, whatever takes the place of the name meanwhile; more than `memory_limit_bytes` is
refused as well.
"""

import functools
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from stalloc.errors import BadInputError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_remote(name: str) -> bool:
    return _SCHEME.match(name) is not None


def read_remote(name: str, read: Callable[[BinaryIO], bytes]) -> bytes:
    """What `read` makes of the open file. Raises BadInputError saying what is missing, or why it cannot be read."""
    with _asking(name):
        import fsspec

        with fsspec.open(name, "rb") as file:
            content = read(file)
    return content


def matching(pattern: str) -> list[str]:
    """The names that match a pattern with a scheme, in no order."""
    names: list[str] = []
    with _asking(pattern):
        import fsspec

        files, path = fsspec.core.url_to_fs(pattern)
        names += [files.unstrip_protocol(found) for found in files.glob(path)]
    return names


@contextmanager
def _asking(name: str) -> Iterator[None]:
    try:
        yield
    except BadInputError:
        raise
    except ImportError as error:
        raise BadInputError(
            f"{name} needs a package that is not installed ({error}): pip install 'stalloc[remote]', and what its "
            "scheme needs, such as s3fs for s3:// and gcsfs for gs://."
        ) from error
    except FileNotFoundError as error:
        raise BadInputError(f"{name} does not exist: check the name.") from error
    except Exception as error:  # whatever a driver of another project raises
        said = (str(error).strip().splitlines() or [""])[0][:200]
        raise BadInputError(
            f"cannot read {name}: {type(error).__name__}: {said}: check the name and your rights."
        ) from error


MAX_BYTES = 8 << 30
_STANDARD_INPUT = ("-", "/dev/stdin")
_CHUNK = 16 << 20
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class SupportsRead(Protocol):
    """Anything that bytes are read from."""

    def read(self, size: int, /) -> bytes: ...


def memory_limit_bytes() -> int:
    return min(MAX_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


def is_standard_input(name: str | os.PathLike[str]) -> bool:
    return os.fspath(name) in _STANDARD_INPUT


def shown_name(name: str | os.PathLike[str]) -> Path:
    return Path("standard input") if is_standard_input(name) else Path(name)


@contextmanager
def open_input(name: str | os.PathLike[str], wanted: str) -> Iterator[BinaryIO]:
    """The file, open for reading from its beginning, seekable. `wanted` says what to give instead: "a trace file".

    Standard input is read whole, once; every later use of its name gives the same bytes. Raises BadInputError for
    what cannot be read, and for an OSError inside the block.
    """
    shown = shown_name(name)
    if is_standard_input(name):
        yield io.BytesIO(_standard_input())
        return
    if is_remote(remote := os.fspath(name)):
        limit = memory_limit_bytes()
        yield io.BytesIO(read_remote(remote, lambda file: read_bounded(file, remote, limit)))
        return
    try:
        with _opened(shown, wanted) as file:
            yield file
    except FileNotFoundError as error:
        raise BadInputError(f"{shown} does not exist: check the name.") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BadInputError(f"cannot read {shown}: {reason}: check its permissions, or give {wanted}.") from error


def _opened(shown: Path, wanted: str) -> BinaryIO:
    try:
        _refuse_other_kinds(shown, os.stat(shown).st_mode, wanted)  # opening a device may already do something
        descriptor = os.open(shown, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except BadInputError:
        raise
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise BadInputError(f"no file has the name {str(shown)[:80]!a}: give {wanted}.") from error
    file = os.fdopen(descriptor, "rb")
    try:
        _refuse_other_kinds(shown, os.fstat(descriptor).st_mode, wanted)
    except BadInputError:
        file.close()
        raise
    return file


def read_input(name: str | os.PathLike[str], wanted: str) -> bytes:
    """The whole contents of a file. Raises BadInputError as `open_input` does, and for more than fits."""
    shown = shown_name(name)
    try:
        with open_input(name, wanted) as file:
            return read_bounded(file, str(shown), memory_limit_bytes())
    except MemoryError as error:
        raise BadInputError(f"{shown}: too large for this machine's memory: give {wanted}.") from error


def read_bounded(file: SupportsRead, where: str, limit_bytes: int) -> bytes:
    """What is left in a file. Raises BadInputError, naming `where`, when that is more than `limit_bytes`."""
    parts, total = [], 0
    while part := file.read(_CHUNK):
        parts.append(part)
        total += len(part)
        if total > limit_bytes:
            raise BadInputError(
                f"{where}: holds more than {limit_bytes >> 20:,} MiB of data, which no such file does on this machine: "
                f"record fewer steps."
            )
    return b"".join(parts)


@functools.cache
def _standard_input() -> bytes:
    if sys.stdin is None or sys.stdin.isatty():
        raise BadInputError("standard input is a terminal: pipe a file into it, or name one.")
    return read_bounded(sys.stdin.buffer, "standard input", memory_limit_bytes())


def _refuse_other_kinds(shown: Path, mode: int, wanted: str) -> None:
    if stat.S_ISREG(mode):
        return
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
    inside = " inside it" if stat.S_ISDIR(mode) else ", or - for standard input"
    raise BadInputError(f"{shown} is {kind}: give {wanted}{inside}.")
