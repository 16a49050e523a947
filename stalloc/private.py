"""Folders and files whose content is trusted (libraries, compiled code, kept plans): nobody else can write to them.

Contract: a folder is private if it and every folder on the way to it, links resolved one by one, belongs to this user
or to root and can be written by nobody else. A folder for everybody's scratch files (/tmp: sticky) may be on the way,
since there nobody can replace what belongs to another. What is not private is refused in one sentence.
"""

import contextlib
import errno
import fnmatch
import os
import pwd
import shlex
import shutil
import stat
import time
from pathlib import Path

from stalloc.errors import SetupError
from stalloc.files import SCRATCH_PATTERN

SANDBOX_VARIABLE = "STALLOC_SANDBOX"
"""Set in a process that stalloc has put into a sandbox, where files of other users may seem to be nobody's."""
STARTED_ANEW = "STALLOC_STARTED_ANEW"
"""Set where the libraries were imported with the variables that the program sets before it imports them."""
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40  # as Linux has it
_OLD_SECONDS = 24 * 3600.0


def is_installed(sources: Path) -> bool:
    return any(part.endswith("-packages") for part in sources.parts)


def user_cache(name: str) -> Path:
    """Where a cache of ours lies unless the user names another place: $XDG_CACHE_HOME/stalloc, or below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "stalloc" / name


def private_folder(path: str | os.PathLike[str], advice: str, *, make: bool = True, mode: int = 0o700) -> Path:
    """The real path of a private folder; what is missing on the way is made if `make`, for this user alone by default.

    Scratch files that a killed process left in it are removed. Raises SetupError, which ends with `advice`, if others
    can write to it; FileNotFoundError if it is not there and not to be made; OSError if it cannot be made.
    """
    folder = _walk(Path.cwd() / path, advice, mode if make else None)
    remove_old(folder, SCRATCH_PATTERN)
    return folder


def _walk(path: Path, advice: str, mode: int | None) -> Path:
    folder, ahead, num_links = Path("/"), list(reversed(path.parts[1:])), 0
    status = os.lstat(folder)
    _check(path, folder, status, advice, is_last=not ahead)
    while ahead:
        part = ahead.pop()
        if part == "..":
            folder = folder.parent
            _check(path, folder, os.lstat(folder), advice, is_last=not ahead)
            continue
        here = folder / part
        try:
            status = os.lstat(here)
        except FileNotFoundError:
            if mode is None:
                raise
            with contextlib.suppress(FileExistsError):  # another process makes it at this moment
                os.mkdir(here, mode)
            status = os.lstat(here)
        if not stat.S_ISLNK(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(here))
        _check(path, here, status, advice, is_last=not ahead)
        if stat.S_ISLNK(status.st_mode):
            num_links += 1
            if num_links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = Path(os.readlink(here))
            if target.is_absolute():
                folder = Path("/")
            ahead += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            if not ahead:
                _check(path, folder, os.lstat(folder), advice, is_last=True)
        else:
            folder = here
    return folder


def _check(path: Path, here: Path, status: os.stat_result, advice: str, *, is_last: bool) -> None:
    passable = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX and not is_last
    reason, remedy = _weakness(here, status, passable=bool(passable))
    if reason:
        raise SetupError(f"{path} is not used, because {reason}: {remedy}{advice}.")


def _weakness(here: Path, status: os.stat_result, *, passable: bool = False) -> tuple[str, str]:
    """What lets others change a file or a folder, and what can be done, or two empty strings."""
    if status.st_uid not in (0, os.geteuid(), _root_here()):
        return f"{here} belongs to {_user(status.st_uid)}", ""
    others = status.st_mode & _OTHERS_MAY_WRITE
    if not others or passable or stat.S_ISLNK(status.st_mode):
        return "", ""
    who = "everybody" if others & stat.S_IWOTH else "its group"
    mine = os.geteuid() in (0, status.st_uid)
    return f"{who} can write to {here}", f"run chmod go-w {shlex.quote(str(here))}, or " if mine else ""


def _root_here() -> int:
    if os.environ.get(SANDBOX_VARIABLE):
        with contextlib.suppress(OSError, ValueError):
            if Path("/proc/self/uid_map").read_text(encoding="ascii").split()[0] != "0":
                return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    return 0


def _user(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user with the number {uid}"


def check_private_file(path: Path) -> None:
    """Raise SetupError unless a file of a private folder is a regular one that only this user or root can write.

    Raises OSError if it is not there.
    """
    _check_file(path, os.lstat(path))


def _check_file(path: Path, status: os.stat_result) -> None:
    reason = _weakness(path, status)[0] if stat.S_ISREG(status.st_mode) else "it is no regular file"
    if reason:
        raise SetupError(f"{path} is not used, because {reason}: remove it.")


def read_private(path: Path) -> bytes:
    """The content of a file of a private folder, which is opened without following links. Raises as the check does."""
    _check_file(path, os.lstat(path))
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _check_file(path, os.fstat(file.fileno()))
        return file.read()


def remove_old(folder: Path, pattern: str) -> None:
    """Remove what this user left in a private folder more than a day ago under such names; others may do the same."""
    before = time.time() - _OLD_SECONDS
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not fnmatch.fnmatchcase(entry.name, pattern):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid != os.geteuid() or status.st_mtime > before:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
