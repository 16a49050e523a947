"""Host memory that techniques keep things in: pinned where it is for a GPU, in exact sizes, never more than allowed.

Contract: what is taken counts until its last tensor is gone.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stalloc.device import virtual
from stalloc.device.pinned_memory import pinned_memory
from stalloc.errors import BadInputError
from stalloc.techniques.parts import aligned

_stores: "weakref.WeakSet[HostStore]" = weakref.WeakSet()


def held_bytes() -> int:
    """The bytes that all stores of this process hold together."""
    return sum(store.used_bytes for store in _stores)


class HostStore:
    """A budget of host memory; `limit_bytes` None: as much as there is."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < 0:
            raise BadInputError(f"{limit_bytes} bytes of host memory are not possible: give 0 or more.")
        self.limit_bytes = limit_bytes
        self.used_bytes = self.peak_bytes = 0
        _stores.add(self)

    def take(self, size_bytes: int, *, pinned: bool) -> torch.Tensor | None:
        """So many bytes, as a flat tensor; None where that is more than is allowed, or the host gives no more."""
        if self.limit_bytes is not None and self.used_bytes + size_bytes > self.limit_bytes:
            return None
        try:
            if pinned:
                block = np.frombuffer(pinned_memory(size_bytes), np.uint8, size_bytes)
            else:
                block = np.empty(size_bytes, np.uint8)
        except MemoryError:
            return None
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        weakref.finalize(block, self._gone, size_bytes).atexit = False
        return torch.from_numpy(block)  # which holds the array

    def take_like(self, tensors: list[torch.Tensor], *, pinned: bool) -> list[torch.Tensor] | None:
        """Room for each of these tensors, in one block, with their shapes, their orders in memory and their types. None
        as in `take`."""
        *begins, total = itertools.accumulate((aligned(one.nbytes) for one in tensors), initial=0)
        if (block := self.take(total, pinned=pinned)) is None:
            return None
        return [
            block[begin : begin + one.nbytes].view(one.dtype).as_strided(one.shape, dense_strides(one))
            for begin, one in zip(begins, tensors, strict=True)
        ]

    def _gone(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes


def has_values(device: torch.device) -> bool:
    """Whether tensors of a device have values; those of a virtual GPU that keeps no bytes have none."""
    pretended = virtual.active_gpu() if device.type == "cuda" else None
    return pretended is None or pretended.copy_limit_bytes is None


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides for a copy of a tensor: its own, unless it has holes."""
    return torch.empty_like(tensor, device="meta").stride()


class HostSlots:
    """Places in host memory that are used again for later tensors of about the same size. Places are of exact sizes, so
    what a step takes is what it holds at the most; with `changing` sizes, where no two tensors may be alike, a place
    may be up to an eighth larger, and no more lies free than is in use. Where there is no more room those that nobody
    uses are given back first; `settle` waits until no copy uses one of these."""

    def __init__(self, store: HostStore, settle: Callable[[], None], *, pinned: bool, changing: bool = False) -> None:
        self._store, self._settle, self._pinned, self._changing = store, settle, pinned, changing
        self._free: dict[int, list[torch.Tensor]] = {}
        self._free_bytes = self._used_bytes = 0

    def take(self, size_bytes: int) -> torch.Tensor | None:
        room_bytes = aligned(size_bytes)
        if self._changing:  # to the next of the sizes that lie an eighth of a power of two apart
            step = max(1 << max(size_bytes.bit_length() - 4, 0), aligned(1))
            room_bytes = -(-size_bytes // step) * step
        if free := self._free.get(room_bytes):
            slot: torch.Tensor | None = free.pop()
            self._free_bytes -= room_bytes
        else:
            if self._changing and self._free_bytes > self._used_bytes + room_bytes:
                self._clear()
            slot = self._store.take(room_bytes, pinned=self._pinned)
            if slot is None and self._free_bytes:
                self._clear()
                slot = self._store.take(room_bytes, pinned=self._pinned)
        self._used_bytes += 0 if slot is None else room_bytes
        return slot

    def give_back(self, slot: torch.Tensor) -> None:
        self._free.setdefault(slot.nbytes, []).append(slot)
        self._free_bytes += slot.nbytes
        self._used_bytes -= slot.nbytes

    def _clear(self) -> None:
        self._settle()
        self._free.clear()
        self._free_bytes = 0


class HostCopy:
    """The copy of a storage in the host; refers to the storage without keeping it alive."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self.size_bytes, self.device = storage.nbytes(), device
        self.slot: torch.Tensor | None = None  #: a place in the host that has its bytes, or is about to
        self.memory = StorageWeakRef(storage)  #: as long as this lives no other memory is taken for it
        self._kind = torch.uint8 if self.size_bytes % 4 else torch.float32  # that it is copied as

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def stream_number(self) -> tuple[int, int, int]:
        """The program's stream as torch numbers it; asking for the stream itself takes 50 times as long."""
        if self.device.type != "cuda":
            return 0, 0, 0
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        return torch._C._cuda_getCurrentStream(index)

    def held(self) -> torch.UntypedStorage | None:
        """The storage, if somebody has held it all the time and it is as large as it was."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        return storage if storage is not None and storage.nbytes() == self.size_bytes else None

    def place(self) -> torch.Tensor:
        assert self.slot is not None
        return self.slot[: self.size_bytes].view(self._kind)

    def numbers(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A storage of its size as numbers to be copied."""
        return torch.empty(0, dtype=self._kind, device=self.device).set_(storage)
