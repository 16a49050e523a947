"""Tensors in a file, for state and parameters that neither the device nor the host has room for.

Contract: a region of the file that was committed is not written again until a later commit has taken its place, and the
manifest takes its name only after all that it tells of is on the disk, so whenever the process ends, the last commit is
there bit by bit. What is read is what was written, or a DiskError says so: every chunk has a checksum. Files are
written past the page cache where the file system can (O_DIRECT), by a few threads with a pinned buffer each. A folder
belongs to one process at a time; files that no manifest names are deleted when it is opened anew, and at the end of the
process. A virtual GPU has no bytes: then no file is made, and room alone is counted.
"""

import contextlib
import fcntl
import itertools
import json
import mmap
import os
import queue
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from stalloc.errors import BadInputError, DiskError
from stalloc.figures import human_bytes
from stalloc.notices import say
from stalloc.techniques.host_store import HostStore, dense_strides, has_values
from stalloc.techniques.parts import DISK_THREADS, PAGE_BYTES, disk_buffers_bytes, disk_chunk_bytes, in_pages
from stalloc.techniques.transfers import Transfers, threads_at

_FORMAT, _VERSION = "stalloc state", 1
_Copy = Callable[[torch.Tensor, torch.Tensor], None]
_MANIFEST, _LOCK, _PATTERN = "state.json", "state.lock", "state-*.bin"


@dataclass
class DiskRoom:
    """A budget of bytes in files."""

    limit_bytes: int
    used_bytes: int = 0
    peak_bytes: int = 0

    def take(self, size_bytes: int) -> bool:
        if self.used_bytes + size_bytes > self.limit_bytes:
            return False
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return True

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes


class Disk:
    """What stores share: a budget of bytes in files, and threads with `buffers` of `chunk_bytes`, begun at a page.
    Optimizers whose state lies on disk may share the threads, since each step waits for its own copies. Whoever takes a
    buffer puts it back."""

    def __init__(self, limit_bytes: int, host: HostStore, device: torch.device) -> None:
        """Raises BadInputError if `host` has no room for buffers."""
        self.room = DiskRoom(limit_bytes)
        self.chunk_bytes = disk_chunk_bytes(host.limit_bytes)
        size_bytes = disk_buffers_bytes(self.chunk_bytes)
        block = host.take(size_bytes, pinned=device.type == "cuda") if self.chunk_bytes else None
        if block is None:
            raise BadInputError(
                f"state on disk needs {human_bytes(2 * DISK_THREADS * PAGE_BYTES)} of host memory for its buffers: "
                "allow as much."
            )
        begin = -block.data_ptr() % PAGE_BYTES
        self.buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for number in range(DISK_THREADS):
            self.buffers.put(block[begin + number * self.chunk_bytes :][: self.chunk_bytes])
        self.threads = threads_at(device, DISK_THREADS, "stalloc-disk")


STATE, PARAMETERS = "the optimizer's state", "parameters"  #: what a file may hold
_WAYS_OUT = {
    STATE: "go on from what was committed last, with stalloc.committed()",
    PARAMETERS: "go on from what you saved last",
}


@dataclass(eq=False)
class Region:
    """Room for one tensor. Invariant: `places[committed]` is not written to."""

    size_bytes: int
    places: list[int]  #: offsets in the file; the second is made at the first commit
    current: int = 0  #: which of them holds the newest bytes
    committed: int = -1  #: which of them the last commit names; -1: none
    sums: list[int] = field(default_factory=list)  #: CRC-32 of each chunk of the newest bytes
    writing: "list[Future[None]]" = field(default_factory=list)


class DiskStore:
    """The file of one optimizer, or of one model's layers, in a folder that nobody else may use meanwhile."""

    def __init__(self, folder: Path, disk: Disk, device: torch.device, holds: str = STATE) -> None:
        """Raises BadInputError if the folder cannot be used."""
        self.chunk_bytes = disk.chunk_bytes
        self.room, self._disk, self._holds = disk.room, disk, holds
        self.folder = _StateFolder(folder) if has_values(device) else None
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()
        self._end = 0  # of the file
        self._taken: list[weakref.finalize[Any, Any]] = []  # give room back when this is gone; a commit stays
        self._failed = ""

    def take(self, sizes: Sequence[int]) -> list[Region] | None:
        """Room for tensors of so many bytes; None where that is more than is allowed, or the disk is full."""
        if (begins := self._extend([in_pages(size) for size in sizes])) is None:
            return None
        found = [Region(size, [begin]) for size, begin in zip(sizes, begins, strict=True)]
        self._regions.update(found)
        return found

    def read(self, wanted: Sequence[tuple[torch.Tensor, Region]], transfers: Transfers) -> Callable[[], None]:
        self.settle([region for _, region in wanted])
        copy = transfers.by_threads()
        reading = [
            self._disk.threads.submit(self._read, region, number, [piece], copy)
            for target, region in wanted
            for number, piece in enumerate(_pieces(target, self.chunk_bytes))
        ]
        return lambda: self._wait(reading)

    def write(self, wanted: Sequence[tuple[torch.Tensor, Region]], transfers: Transfers) -> Callable[[], None]:
        """Begin to write; what comes back waits until the tensors were read, and their memory can go."""
        self.settle([region for _, region in wanted])
        copy = transfers.by_threads()
        copied: list[Future[None]] = []
        for source, region in wanted:
            region.current = 0 if region.committed < 0 else 1 - region.committed
            dense = source if source.stride() == dense_strides(source) else torch.empty_like(source).copy_(source)
            region.sums = [0] * -(-region.size_bytes // self.chunk_bytes)
            for number, piece in enumerate(_pieces(dense, self.chunk_bytes)):
                done: Future[None] = Future()
                copied.append(done)
                region.writing.append(self._disk.threads.submit(self._write, region, number, [piece], copy, done))
        return lambda: self._wait(copied)

    def settle(self, regions: Iterable[Region] | None = None) -> None:
        """Wait until all that was written, or what was to these regions, is in the file."""
        for region in self._regions if regions is None else regions:
            self._wait(region.writing)

    def memory(self, region: Region) -> mmap.mmap:
        """The bytes of a region, from the file as they are needed; what is written there stays in memory."""
        size_bytes = in_pages(region.size_bytes)
        if self.folder is None:
            return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE)
        return _mapped(self.folder.mapped, size_bytes, region.places[region.current])

    def commit(self, manifest: dict[str, Any]) -> None:
        """Make the file's content, described by `manifest`, what is found however this process ends.

        Raises DiskError, with the commit before as it was, if the disk has no room or cannot be written.
        """
        if self.folder is None:
            return
        self.settle()
        single = [region for region in self._regions if len(region.places) < 2]
        if (begins := self._extend([in_pages(region.size_bytes) for region in single])) is None:
            needed = human_bytes(sum(in_pages(region.size_bytes) for region in single))
            raise DiskError(
                f"a commit needs {needed} more in {self.folder.path}, since what it commits is not written to again: "
                "allow more, or make room. Nothing was lost."
            )
        for region, begin in zip(single, begins, strict=True):
            region.places.append(begin)
        try:
            self.folder.commit(manifest)
        except OSError as error:
            raise self._lost(error) from error
        for region in self._regions:
            region.committed = region.current
        for taken in self._taken:
            taken.detach()

    def _extend(self, sizes: Sequence[int]) -> list[int] | None:
        total = sum(sizes)
        if total == 0:
            return []
        if not self.room.take(total):
            return None
        if self.folder is not None:
            try:
                os.posix_fallocate(self.folder.mapped, self._end, total)
            except OSError as error:
                self.room.give_back(total)
                say(f"{self.folder.path} has no room for {human_bytes(total)} of {self._holds} ({error.strerror}).")
                return None
        taken = weakref.finalize(self, self.room.give_back, total)
        taken.atexit = False
        self._taken.append(taken)
        *begins, self._end = itertools.accumulate(sizes, initial=self._end)
        return begins

    def _read(self, region: Region, number: int, piece: list[torch.Tensor], copy: _Copy) -> None:
        """Read one tensor, taken out of `piece`, so that a late thread holds no memory of the device."""
        buffer, target = self._disk.buffers.get(), piece.pop()
        begin = number * self.chunk_bytes
        try:
            if self.folder is not None:
                view = memoryview(buffer.numpy())[: in_pages(target.nbytes)]
                self.folder.read(view, region.places[region.current] + begin)
                if zlib.crc32(view[: target.nbytes]) != region.sums[number]:
                    raise OSError(0, "what was read is not what was written")
            copy(target, buffer[: target.nbytes].view(target.dtype))
        finally:
            self._disk.buffers.put(buffer)

    def _write(
        self, region: Region, number: int, piece: list[torch.Tensor], copy: _Copy, copied: "Future[None]"
    ) -> None:
        """Write one tensor, taken out of `piece`, so that nothing here holds it once it is copied."""
        buffer = self._disk.buffers.get()
        try:
            source = piece.pop()
            num_bytes = source.nbytes
            try:
                copy(buffer[:num_bytes].view(source.dtype), source)
            finally:
                del source
                copied.set_result(None)
            if self.folder is not None:
                view = buffer[: in_pages(num_bytes)].numpy()
                region.sums[number] = zlib.crc32(view[:num_bytes])
                self.folder.write(view, region.places[region.current] + number * self.chunk_bytes)
        finally:
            self._disk.buffers.put(buffer)

    def _wait(self, tasks: "list[Future[None]]") -> None:
        """Wait for all, even if one fails, so that none still uses memory that is freed then."""
        wait(tasks)
        try:
            if self._failed:
                raise OSError(0, self._failed)
            for task in tasks:
                task.result()
        except OSError as error:
            self._failed = self._failed or error.strerror or str(error)
            raise self._lost(error) from error
        tasks.clear()

    def _lost(self, error: OSError) -> DiskError:
        where = "" if self.folder is None else f" {self.folder.path}"
        return DiskError(
            f"{self._holds} cannot be kept in{where} ({error.strerror or error}): {_WAYS_OUT[self._holds]}."
        )


def viewed(memory: mmap.mmap, like: torch.Tensor) -> torch.Tensor:
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=like.nbytes)
    return flat.view(like.dtype).as_strided(like.shape, dense_strides(like))


def _pieces(tensor: torch.Tensor, piece_bytes: int) -> list[torch.Tensor]:
    """A dense tensor in pieces of so many bytes, in the order of its memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return list(flat.split(piece_bytes // tensor.itemsize))


class _StateFolder:
    """The folder of one optimizer, or of one model's layers, open for writing."""

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
        self._file, self.mapped = _open_both(path / self._name)
        self._end = weakref.finalize(self, _close, os.getpid(), path, self._name, self._file, self.mapped, self._lock)

    def read(self, target: Any, begin: int) -> None:
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

    def commit(self, told: dict[str, Any]) -> None:
        os.fdatasync(self._file)
        before = _file_of(self.path)
        body = json.dumps({"format": _FORMAT, "version": _VERSION, "file": self._name, **told}, sort_keys=True)
        scratch = self.path / f".{_MANIFEST}.part"
        with scratch.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"sum": sha256(body.encode()).hexdigest(), "body": body}))
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self.path)  # the name of the file itself
        os.replace(scratch, self.path / _MANIFEST)
        _sync_folder(self.path)
        if before not in ("", self._name):
            (self.path / before).unlink(missing_ok=True)


def read_committed(folder: str | os.PathLike[str]) -> tuple[int, dict[str, Any]]:
    """See `stalloc.committed`. Every byte is checked first."""
    path = Path(folder)
    if (told := _manifest(path)) is None:
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
    memory = _mapped(file.fileno(), size_bytes, begin)
    return torch.frombuffer(memory, dtype=kind).as_strided(told["shape"], told["stride"])


def _mapped(descriptor: int, size_bytes: int, begin: int) -> mmap.mmap:
    """Bytes of a file as memory, whose changes stay there."""
    kept = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=kept, offset=begin)


def _manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None where there is none. Raises BadInputError for a damaged one."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        text = (path / _MANIFEST).read_text(encoding="utf-8")
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            outer = json.loads(text)
            if sha256(outer["body"].encode()).hexdigest() == outer["sum"]:
                told: dict[str, Any] = json.loads(outer["body"])
                if told["format"] == _FORMAT and told["version"] == _VERSION and "/" not in told["file"]:
                    return told
        raise BadInputError(f"{path / _MANIFEST} is damaged: move the folder away, and go on from another checkpoint.")
    return None


def _file_of(path: Path) -> str:
    told = _manifest(path)
    return "" if told is None else str(told["file"])


def _open_both(path: Path) -> tuple[int, int]:
    """The file, opened once past the page cache, where that is possible, and once with it, for what has to use it."""
    ordinary = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT), ordinary
    return os.dup(ordinary), ordinary


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
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
