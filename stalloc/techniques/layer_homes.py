"""Where the parameters of a streamed layer lie while its block does not compute: in host memory, or in a file.

Contract: `tensors` have the values that were stored last, or that the program has put there since, by whichever way;
what is fetched has those. They stay the same tensors. Memory of the device goes when what it held is whole elsewhere.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from stalloc.errors import DiskError
from stalloc.techniques.changed_memory import drop_changes, is_changed
from stalloc.techniques.disk_store import DiskStore, Region, viewed
from stalloc.techniques.host_store import HostStore
from stalloc.techniques.transfers import Transfers

Tensors = list[torch.Tensor]
Lent = tuple[Tensors, Callable[[], None]]
"""Tensors, and a function that waits until they have their values."""
_ON_HOST = Transfers(torch.device("cpu"))


class Home(Protocol):
    """The place of one layer."""

    tensors: Tensors

    def fetch(self, here: Tensors) -> Callable[[], None]:
        """Begin to copy the layer to tensors of the device; returns a function that makes the program wait for that."""

    def store(self, here: Tensors) -> Callable[[], None]:
        """Begin to copy them back; returns a function that waits until their memory can be freed."""

    def lend(self, rows: Sequence[int], room: Callable[[torch.Tensor], torch.Tensor]) -> Lent:
        """Begin to provide some as tensors of the host that can be changed; `room` gives memory like a tensor's."""

    def take_back(self, rows: Sequence[int], lent: Tensors) -> Callable[[], None]:
        """Begin to keep their changed values; returns a function that waits until their memory can be freed."""

    def settle(self) -> None:
        """Wait until what was stored can be read."""

    def finish(self) -> None:
        """Wait until no copy uses this memory or the device's, which others are about to get."""


def find_home(parameters: Tensors, store: HostStore, disk: DiskStore | None) -> Home | None:
    """Room for parameters in the host, else on disk; None if there is none."""
    transfers = Transfers(parameters[0].device)
    tensors = store.take_like(parameters, pinned=parameters[0].is_cuda)
    if tensors is not None:
        return HostHome(tensors, transfers)
    regions = None if disk is None else disk.take([one.nbytes for one in parameters])
    return DiskHome(parameters, disk, regions, transfers) if disk is not None and regions is not None else None


class HostHome:
    """The home of a layer in tensors of the host."""

    def __init__(self, tensors: Tensors, transfers: Transfers) -> None:
        self.tensors = tensors
        self._transfers = transfers
        self._fetched: Any = None  # event after the last copy from here

    def fetch(self, here: Tensors) -> Callable[[], None]:
        """See `Home`."""
        arrived = self._fetched = self._transfers.to_device(list(zip(here, self.tensors, strict=True)))
        return lambda: self._transfers.wait(arrived)

    def store(self, here: Tensors) -> Callable[[], None]:
        """See `Home`."""
        stored = self._transfers.to_host(list(zip(self.tensors, here, strict=True)))
        return lambda: self._transfers.wait(stored)

    def lend(self, rows: Sequence[int], room: Callable[[torch.Tensor], torch.Tensor]) -> Lent:
        """As in `Home`: as they are."""
        return [self.tensors[row] for row in rows], lambda: None

    def take_back(self, rows: Sequence[int], lent: Tensors) -> Callable[[], None]:
        """See `Home`."""
        return lambda: None

    def settle(self) -> None:
        """See `Home`."""
        self._transfers.settle()

    def finish(self) -> None:
        """See `Home`."""
        self.settle()
        if self._fetched is not None:
            self._fetched.synchronize()


class DiskHome:
    """Regions of a file, and tensors that are mapped from it: what the program puts there stays in memory until it is
    written, which is before it is read again."""

    def __init__(self, like: Tensors, disk: DiskStore, regions: list[Region], transfers: Transfers) -> None:
        self._disk, self._regions, self._transfers = disk, regions, transfers
        self._memory = [disk.memory(region) for region in regions]
        self.tensors = [viewed(*one) for one in zip(self._memory, like, strict=True)]
        self._fetched: Callable[[], None] = lambda: None  # waits for what is read

    def fetch(self, here: Tensors) -> Callable[[], None]:
        """As in `Home`. Raises DiskError."""
        self._write_changes()
        self._fetched = self._disk.read(list(zip(here, self._regions, strict=True)), self._transfers)
        return self._fetched

    def store(self, here: Tensors) -> Callable[[], None]:
        """As in `Home`. The memory of the device stays until all is in the file, so an error there loses nothing."""
        copied = self._disk.write(list(zip(here, self._regions, strict=True)), self._transfers)

        def stored() -> None:
            copied()
            self._disk.settle(self._regions)
            for memory in self._memory:
                drop_changes(memory)

        return stored

    def lend(self, rows: Sequence[int], room: Callable[[torch.Tensor], torch.Tensor]) -> Lent:
        """As in `Home`. Raises DiskError."""
        lent = [room(self.tensors[row]) for row in rows]
        if self._disk.folder is None:
            return lent, lambda: None
        self._write_changes()
        return lent, self._disk.read(list(zip(lent, self._regions_of(rows), strict=True)), _ON_HOST)

    def take_back(self, rows: Sequence[int], lent: Tensors) -> Callable[[], None]:
        """As in `Home`. What cannot be written stays in memory, as a change that the program has made."""
        if self._disk.folder is None:
            return lambda: None
        regions = self._regions_of(rows)
        copied = self._disk.write(list(zip(lent, regions, strict=True)), _ON_HOST)

        def stored() -> None:
            try:
                copied()
                self._disk.settle(regions)
            except DiskError:
                for row, tensor in zip(rows, lent, strict=True):
                    self.tensors[row].copy_(tensor)
                raise
            for row in rows:
                drop_changes(self._memory[row])

        return stored

    def settle(self) -> None:
        """As in `Home`: there is nothing to wait for, as `store` has waited."""

    def finish(self) -> None:
        """See `Home`."""
        with contextlib.suppress(DiskError):
            self._fetched()

    def _write_changes(self) -> None:
        if self._disk.folder is None:
            return
        changed = [row for row, memory in enumerate(self._memory) if is_changed(memory)]
        if not changed:
            return
        regions = self._regions_of(changed)
        self._disk.write(
            [(self.tensors[row], region) for row, region in zip(changed, regions, strict=True)], _ON_HOST
        )()
        self._disk.settle(regions)
        for row in changed:
            drop_changes(self._memory[row])

    def _regions_of(self, rows: Sequence[int]) -> list[Region]:
        return [self._regions[row] for row in rows]
