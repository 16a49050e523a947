"""What a running program shows of its memory: one small file a process, which others read while it goes on.

Contract: the program writes its own file, mapped into memory, and nobody else does; a reader takes figures as whole
only if the counter before them is even and did not change meanwhile. Files lie in a folder that is this user's alone;
those of programs that are gone are removed by whoever looks. What a file holds is data: JSON, of a bounded size.
"""

import contextlib
import json
import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

from stalloc.errors import BadInputError
from stalloc.private import private_folder

FILE_BYTES = 1 << 16
_HEAD = struct.Struct("<8sQQ")  # what it is, a counter that is odd while it is written, bytes of JSON behind it
_MAGIC = b"stalloc1"
_ADVICE = "set XDG_RUNTIME_DIR to a folder of your own."


def live_folder() -> Path:
    """Where the files of this user's programs lie: $XDG_RUNTIME_DIR/stalloc, or a folder of the user's in /tmp.

    Raises SetupError if others can write there, OSError if it cannot be made.
    """
    own = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(own) / "stalloc" if own else Path(tempfile.gettempdir()) / f"stalloc-{os.getuid()}"
    return private_folder(path, _ADVICE)


_known_as: dict[int, int] = {}


def be_known_as(pid: int) -> None:
    """Show the memory of this process, not of those that it makes, under another number: the one that a user knows."""
    _known_as[os.getpid()] = pid


class LiveFile:
    """The file of this process."""

    def __init__(self) -> None:
        """Make it. Raises SetupError or OSError where that cannot be."""
        self.pid = _known_as.get(os.getpid(), os.getpid())
        self.path = live_folder() / f"{self.pid}.live"
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()  # of a process that had this number before
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(handle, FILE_BYTES)
            self._map = mmap.mmap(handle, FILE_BYTES)
        finally:
            os.close(handle)
        self._counter = 0
        self.write({})

    def write(self, figures: dict[str, Any]) -> None:
        """Show these figures from here on; what does not fit is not shown."""
        text = json.dumps(figures).encode()
        if _HEAD.size + len(text) > FILE_BYTES:
            return
        self._map[: _HEAD.size] = _HEAD.pack(_MAGIC, self._counter + 1, len(text))
        self._map[_HEAD.size : _HEAD.size + len(text)] = text
        self._counter += 2
        self._map[: _HEAD.size] = _HEAD.pack(_MAGIC, self._counter, len(text))

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


def read_live(path: Path) -> dict[str, Any] | None:
    """What a program shows; None while it writes, and where there is no such file any more.

    Raises BadInputError for a file that no stalloc has written.
    """
    try:
        raw = path.read_bytes()[:FILE_BYTES]
    except FileNotFoundError:
        return None
    if len(raw) < _HEAD.size or not raw.startswith(_MAGIC):
        raise BadInputError(f"{path} is no file of a running program: another version of stalloc may have written it.")
    _, counter, length = _HEAD.unpack(raw[: _HEAD.size])
    with open(path, "rb") as file:
        again = file.read(_HEAD.size)
    if counter % 2 or again != raw[: _HEAD.size]:
        return None
    try:
        figures = json.loads(raw[_HEAD.size : _HEAD.size + length])
    except (ValueError, RecursionError):
        figures = None
    return figures if isinstance(figures, dict) else None


def running_programs() -> list[int]:
    """The processes of this user that show their memory, and run. Raises SetupError as `live_folder` does."""
    found = []
    for path in sorted(live_folder().glob("*.live")):
        if path.stem.isdigit() and _runs(int(path.stem)):
            found.append(int(path.stem))
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return found


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 is none: it only asks whether the process is there
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
