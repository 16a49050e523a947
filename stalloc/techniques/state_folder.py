"""A folder with state of an optimizer: a file of bytes, and a manifest that says what of it was committed.

Contract: the manifest takes its name only after all that it tells of is on the disk, in one step of the file system; a
folder belongs to one process at a time. A commit of an earlier process stays until the first of this one. Files that no
manifest names are deleted when the folder is opened anew, and at the end of the process.
"""

import contextlib
import fcntl
import json
import mmap
import os
import weakref
import zlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from stalloc.errors import BadInputError

FORMAT, VERSION = "stalloc state", 1
MANIFEST, _LOCK, _PATTERN = "state.json", "state.lock", "state-*.bin"


class StateFolder:
    """The folder of one optimizer, open for writing."""

    def __init__(self, path: Path) -> None:
        """Raises BadInputError if it cannot be used."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise BadInputError(f"{path} is used by another optimizer or model meanwhile: name another.") from None
        except OSError as error:
            raise BadInputError(f"{path} cannot be used ({error.strerror}): name a folder you can write.") from error
        for left in path.glob(_PATTERN):
            if left.name != _file_of(path):
                left.unlink(missing_ok=True)
        self._name = _PATTERN.replace("*", os.urandom(8).hex())
        self._file, self._mapped = _open_both(path / self._name)
        self._end = weakref.finalize(self, _close, os.getpid(), path, self._name, self._file, self._mapped, self._lock)

    def allocate(self, begin: int, size_bytes: int) -> None:
        """Make the file longer. Raises OSError if the disk is full."""
        os.posix_fallocate(self._mapped, begin, size_bytes)

    def read(self, target: Any, begin: int) -> None:
        """Fill an array of bytes. Raises OSError."""
        view = memoryview(target)
        while view:
            count = os.preadv(self._file, [view], begin)
            if count == 0:
                raise OSError(0, "the file was cut")
            view, begin = view[count:], begin + count

    def write(self, source: Any, begin: int) -> None:
        """Put an array of bytes there. Raises OSError."""
        view = memoryview(source)
        while view:
            count = os.pwritev(self._file, [view], begin)
            view, begin = view[count:], begin + count

    def map(self, begin: int, size_bytes: int) -> mmap.mmap:
        """Bytes of the file as memory, whose changes stay there."""
        kept = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(self._mapped, size_bytes, flags=mmap.MAP_PRIVATE, prot=kept, offset=begin)

    def commit(self, told: dict[str, Any]) -> None:
        """Replace the manifest by another one. Raises OSError."""
        os.fdatasync(self._file)
        before = _file_of(self.path)
        body = json.dumps({"format": FORMAT, "version": VERSION, "file": self._name, **told}, sort_keys=True)
        scratch = self.path / f".{MANIFEST}.part"
        with scratch.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"sum": sha256(body.encode()).hexdigest(), "body": body}))
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self.path)  # the name of the file itself
        os.replace(scratch, self.path / MANIFEST)
        _sync_folder(self.path)
        if before not in ("", self._name):
            (self.path / before).unlink(missing_ok=True)


def committed(folder: str | os.PathLike[str]) -> tuple[int, dict[str, Any]]:
    """The label and the state of the last commit in a folder, as `optimizer.load_state_dict` takes it.

    Large tensors are mapped from the file, so they take no memory before they are read. Every byte is checked first.
    Raises BadInputError if nothing was committed there, or the files are damaged.
    """
    path = Path(folder)
    told = _manifest(path)
    if told is None:
        raise BadInputError(f"{path} holds no committed state: stalloc.commit(optimizer, label) leaves one.")
    try:
        with (path / told["file"]).open("rb") as file:
            state = {
                int(number): {name: _value(file, one, told["chunk_bytes"]) for name, one in values.items()}
                for number, values in told["state"].items()
            }
        groups = [
            {name: tuple(value) if isinstance(value, list) and name != "params" else value
             for name, value in group.items()}
            for group in told["param_groups"]
        ]  # fmt: skip
        return int(told["label"]), {"state": state, "param_groups": groups}
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise BadInputError(f"the state in {path} is damaged ({error}): go on from another checkpoint.") from error


def _value(file: Any, told: dict[str, Any], chunk_bytes: int) -> Any:
    if "value" in told:
        return told["value"]
    kind = getattr(torch, told["dtype"])
    if not isinstance(kind, torch.dtype):
        raise ValueError("a type of numbers is unknown")
    if "data" in told:
        return torch.frombuffer(bytearray.fromhex(told["data"]), dtype=kind).reshape(told["shape"])
    begin, size_bytes = told["offset"], told["size_bytes"]
    for number, at in enumerate(range(0, size_bytes, chunk_bytes)):
        count = min(chunk_bytes, size_bytes - at)
        if zlib.crc32(os.pread(file.fileno(), count, begin + at)) != told["sums"][number]:
            raise ValueError("a checksum does not agree")
    kept = mmap.PROT_READ | mmap.PROT_WRITE
    memory = mmap.mmap(file.fileno(), size_bytes, flags=mmap.MAP_PRIVATE, prot=kept, offset=begin)
    return torch.frombuffer(memory, dtype=kind).as_strided(told["shape"], told["stride"])


def _manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None where there is none. Raises BadInputError for a damaged one."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        text = (path / MANIFEST).read_text(encoding="utf-8")
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            outer = json.loads(text)
            if sha256(outer["body"].encode()).hexdigest() == outer["sum"]:
                told: dict[str, Any] = json.loads(outer["body"])
                if told["format"] == FORMAT and told["version"] == VERSION and "/" not in told["file"]:
                    return told
        raise BadInputError(f"{path / MANIFEST} is damaged: move the folder away, and go on from another checkpoint.")
    return None


def _file_of(path: Path) -> str:
    """The name of the file that the last commit is in; empty where there is none."""
    told = _manifest(path)
    return "" if told is None else str(told["file"])


def _open_both(path: Path) -> tuple[int, int]:
    """The file, opened once past the page cache, where that is possible, and once with it, for what has to use it."""
    ordinary = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT), ordinary
    return os.dup(ordinary), ordinary


def _sync_folder(path: Path) -> None:
    with _opened(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _close(owner: int, path: Path, name: str, *descriptors: int) -> None:
    """Close the files as a process or an optimizer ends; a forked child leaves everything as it is."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(BadInputError, OSError):
        if _file_of(path) != name:
            (path / name).unlink(missing_ok=True)
    for descriptor in descriptors:
        os.close(descriptor)
