"""How stalloc writes a file: whole, or not at all.

Contract: what is written grows in a scratch file of a random name beside the target, which no symbolic link and no
other writer can be in the way of, and is renamed over it at the end; until then, and after any failure, the target is
what it was, and the scratch file is gone. A file that is replaced keeps its permissions. Symbolic links of this user
or of root are followed; one that somebody else put there is replaced. What is no regular file (a pipe, /dev/stdout) is
written to as it is.
"""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from stalloc.errors import BadInputError, StallocError

SCRATCH_PATTERN = ".stalloc-*.part"
"""The names of scratch files; one that is left over belonged to a process that was killed."""
_redirected: dict[str, Path] = {}
_ADVICE = "name a file in a folder you can write"
_MAX_LINKS = 40  # as Linux has it


def redirect(places: Mapping[str, Path]) -> None:
    """From now on write what is for a file, named by its absolute path, to another one."""
    _redirected.update(places)


@contextlib.contextmanager
def whole(
    path: str | os.PathLike[str],
    advice: str = _ADVICE,
    *,
    error: type[StallocError] = BadInputError,
    private: bool = False,
) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when the block ends without an exception.

    `private`: nobody else may read it. Raises `error`, which ends with `advice`, if it cannot be written.
    """
    try:
        with _opened(_redirected.get(os.path.abspath(path)) or Path(path), private) as file:
            yield file
    except OSError as problem:
        raise error(f"cannot write {path}: {problem.strerror or problem}: {advice}.") from problem


def write_whole(
    path: str | os.PathLike[str],
    content: bytes | str,
    advice: str = _ADVICE,
    *,
    error: type[StallocError] = BadInputError,
    private: bool = False,
) -> None:
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    with whole(path, advice, error=error, private=private) as file:
        file.write(data)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise BadInputError now if the file could not be written after a long run; changes nothing."""
    try:
        place = _led_to(Path(path))
        if isinstance(place, Path) and _is_replaced(place):
            scratch, descriptor = _make_scratch(place, 0o600)
            os.close(descriptor)
            os.unlink(scratch)
    except OSError as problem:
        raise BadInputError(f"cannot write {path}: {problem.strerror or problem}: {_ADVICE}.") from problem


@contextlib.contextmanager
def _opened(path: Path, private: bool) -> Iterator[BinaryIO]:
    place = _led_to(path)
    if isinstance(place, int):
        if sys.stdout is not None:
            sys.stdout.flush()  # it may be the same file: what was printed before comes first
        with os.fdopen(os.dup(place), "wb") as file:
            yield file
        return
    if not _is_replaced(place):
        with place.open("wb") as file:
            yield file
        return
    scratch, descriptor = _make_scratch(place, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if not private:
                _keep_permissions(place, descriptor)
            yield file
        os.replace(scratch, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def _led_to(path: Path) -> Path | int:
    """The place that a path leads to, links of others not followed; an int is a descriptor of this process."""
    descriptors = os.path.realpath("/proc/self/fd")
    for _ in range(_MAX_LINKS):
        folder = os.path.realpath(path.parent)
        place = Path(folder, path.name)
        if folder == descriptors and path.name.isdecimal():
            return int(path.name)
        try:
            status = os.lstat(place)
        except FileNotFoundError:
            return place
        if not stat.S_ISLNK(status.st_mode) or status.st_uid not in (0, os.geteuid()) or folder.startswith("/proc/"):
            return place
        path = Path(folder, os.readlink(place))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _is_replaced(place: Path) -> bool:
    """Whether a new file takes this place, rather than that what is there is written to. Raises OSError if neither."""
    try:
        mode = os.lstat(place).st_mode
    except FileNotFoundError:
        return True
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if place.parts[:2] == ("/", "proc"):
        return False  # a descriptor of another process
    if stat.S_ISLNK(mode):
        return True
    if not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return stat.S_ISREG(mode)


def _make_scratch(place: Path, mode: int) -> tuple[str, int]:
    name = os.path.join(place.parent, SCRATCH_PATTERN.replace("*", os.urandom(8).hex()))
    return name, os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def _keep_permissions(place: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # nothing is there, or a file system without permissions
        status = os.lstat(place)
        if stat.S_ISREG(status.st_mode):
            os.fchmod(descriptor, status.st_mode & 0o777)
