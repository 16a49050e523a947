"""Tensors in a file, for state and parameters that neither the device nor the host has room for.

Contract: a region of the file that was committed is not written again until a later commit has taken its place, so
whenever the process ends, the last commit is there bit by bit. What is read is what was written, or a DiskError says
so: every chunk has a checksum. Files are written past the page cache where the file system can (O_DIRECT), by a few
threads with a pinned buffer each. A virtual GPU has no bytes: then no file is made, and room alone is counted.
"""

import contextlib
import mmap
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stalloc.errors import DiskError
from stalloc.figures import human_bytes
from stalloc.notices import say
from stalloc.techniques.disk_threads import DiskThreads
from stalloc.techniques.host_store import HostStore, dense_strides, has_values
from stalloc.techniques.parts import in_pages
from stalloc.techniques.state_folder import StateFolder
from stalloc.techniques.transfers import Transfers, current_phase


@dataclass
class DiskRoom:
    """A budget of bytes in files, which several stores may share."""

    limit_bytes: int
    used_bytes: int = 0
    peak_bytes: int = 0

    def take(self, size_bytes: int) -> bool:
        """Take bytes from the budget; whether it has as many."""
        if self.used_bytes + size_bytes > self.limit_bytes:
            return False
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return True

    def give_back(self, size_bytes: int) -> None:
        """Give bytes back to the budget."""
        self.used_bytes -= size_bytes


@dataclass(frozen=True)
class Holding:
    """What a file holds, as text for people."""

    name: str
    way_out: str


STATE = Holding("the optimizer's state", "go on from what was committed last, with stalloc.committed()")
PARAMETERS = Holding("parameters", "go on from what you saved last")


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

    def __init__(
        self,
        folder: Path,
        room: DiskRoom,
        threads: DiskThreads,
        device: torch.device,
        holds: Holding = STATE,
    ) -> None:
        """Raises BadInputError if the folder cannot be used."""
        self.chunk_bytes = threads.chunk_bytes
        self._holds = holds
        self._threads = threads
        self.room = room
        self.folder = StateFolder(folder) if has_values(device) else None
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()
        self._end = 0  # of the file
        self._taken: list[weakref.finalize[Any, Any]] = []  # give room back when this is gone; a commit stays
        self._failed = ""

    def take(self, sizes: Sequence[int]) -> list[Region] | None:
        """Room for tensors of so many bytes; None where that is more than is allowed, or the disk is full."""
        begins = self._extend([in_pages(size) for size in sizes])
        if begins is None:
            return None
        found = [Region(size, [begin]) for size, begin in zip(sizes, begins, strict=True)]
        self._regions.update(found)
        return found

    def read(self, wanted: Sequence[tuple[torch.Tensor, Region]], transfers: Transfers) -> Callable[[], None]:
        """Begin to read; what comes back waits until it is there."""
        self.settle([region for _, region in wanted])
        transfers.follow()
        reading = []
        for target, region in wanted:
            for number, piece in enumerate(_pieces(target, self.chunk_bytes)):
                task = self._threads.pool.submit(self._read, region, number, [piece], transfers, current_phase())
                reading.append(task)
        return lambda: self._wait(reading)

    def write(self, wanted: Sequence[tuple[torch.Tensor, Region]], transfers: Transfers) -> Callable[[], None]:
        """Begin to write; what comes back waits until the tensors were read, and their memory can go."""
        self.settle([region for _, region in wanted])
        transfers.follow()
        copied: list[Future[None]] = []
        for source, region in wanted:
            region.current = 0 if region.committed < 0 else 1 - region.committed
            dense = source if source.stride() == dense_strides(source) else torch.empty_like(source).copy_(source)
            region.sums = [0] * -(-region.size_bytes // self.chunk_bytes)
            for number, piece in enumerate(_pieces(dense, self.chunk_bytes)):
                done: Future[None] = Future()
                copied.append(done)
                task = self._threads.pool.submit(self._write, region, number, [piece], transfers, current_phase(), done)
                region.writing.append(task)
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
        return self.folder.map(region.places[region.current], size_bytes)

    def commit(self, manifest: dict[str, Any]) -> None:
        """Make the file's content, described by `manifest`, what is found however this process ends.

        Raises DiskError, with the commit before as it was, if the disk has no room or cannot be written.
        """
        if self.folder is None:
            return
        self.settle()
        single = [region for region in self._regions if len(region.places) < 2]
        begins = self._extend([in_pages(region.size_bytes) for region in single])
        if begins is None:
            needed = human_bytes(sum(in_pages(region.size_bytes) for region in single))
            raise DiskError(
                f"a commit needs {needed} more in {self.folder.path}, since what it commits is not written to again: "
                "allow more, or make room. Nothing was lost."
            )
        for region, begin in zip(single, begins, strict=True):
            region.places.append(begin)
        with self._told("commit"):
            self.folder.commit(manifest)
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
                self.folder.allocate(self._end, total)
            except OSError as error:
                self.room.give_back(total)
                say(
                    f"{self.folder.path} has no room for {human_bytes(total)} of {self._holds.name} ({error.strerror})."
                )
                return None
        taken = weakref.finalize(self, self.room.give_back, total)
        taken.atexit = False
        self._taken.append(taken)
        begins = []
        for size in sizes:
            begins.append(self._end)
            self._end += size
        return begins

    def _read(
        self, region: Region, number: int, piece: list[torch.Tensor], transfers: Transfers, of_phase: str
    ) -> None:
        """Read one tensor, taken out of `piece`, so that a late thread holds no memory of the device."""
        buffer, target = self._threads.buffers.get(), piece.pop()
        begin = number * self.chunk_bytes
        try:
            if self.folder is not None:
                view = memoryview(buffer.numpy())[: in_pages(target.nbytes)]
                self.folder.read(view, region.places[region.current] + begin)
                if zlib.crc32(view[: target.nbytes]) != region.sums[number]:
                    raise OSError(0, "what was read is not what was written")
            transfers.copy_now(target, buffer[: target.nbytes].view(target.dtype), of_phase)
        finally:
            self._threads.buffers.put(buffer)

    def _write(
        self,
        region: Region,
        number: int,
        piece: list[torch.Tensor],
        transfers: Transfers,
        of_phase: str,
        copied: "Future[None]",
    ) -> None:
        """Write one tensor, taken out of `piece`, so that nothing here holds it once it is copied."""
        buffer = self._threads.buffers.get()
        try:
            source = piece.pop()
            num_bytes = source.nbytes
            try:
                transfers.copy_now(buffer[:num_bytes].view(source.dtype), source, of_phase)
            finally:
                del source
                copied.set_result(None)
            if self.folder is not None:
                view = buffer[: in_pages(num_bytes)].numpy()
                region.sums[number] = zlib.crc32(view[:num_bytes])
                self.folder.write(view, region.places[region.current] + number * self.chunk_bytes)
        finally:
            self._threads.buffers.put(buffer)

    def _wait(self, tasks: "list[Future[None]]") -> None:
        """Wait for all, even if one fails, so that none still uses memory that is freed then."""
        wait(tasks)
        with self._told("use"):
            if self._failed:
                raise OSError(0, self._failed)
            for task in tasks:
                task.result()
        tasks.clear()

    @contextlib.contextmanager
    def _told(self, what: str) -> Any:
        try:
            yield
        except OSError as error:
            if what == "use":
                self._failed = self._failed or error.strerror or str(error)
            where = "" if self.folder is None else f" {self.folder.path}"
            raise DiskError(
                f"{self._holds.name} cannot be kept in{where} ({error.strerror or error}): {self._holds.way_out}."
            ) from error


def open_disk(
    folder: Path,
    limit_bytes: int,
    host: HostStore,
    device: torch.device,
    holds: Holding = STATE,
) -> DiskStore:
    """A store with threads and room of its own, whose buffers are in `host`. Raises BadInputError as they do."""
    return DiskStore(folder, DiskRoom(limit_bytes), DiskThreads(host, device), device, holds)


def viewed(memory: mmap.mmap, like: torch.Tensor) -> torch.Tensor:
    """A view of a region's memory with the type and shape of another tensor."""
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=like.nbytes)
    return flat.view(like.dtype).as_strided(like.shape, dense_strides(like))


def _pieces(tensor: torch.Tensor, piece_bytes: int) -> list[torch.Tensor]:
    """A dense tensor in pieces of so many bytes, in the order of its memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return list(flat.split(piece_bytes // tensor.itemsize))
