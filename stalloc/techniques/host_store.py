"""Host memory that techniques keep things in: pinned where it is for a GPU, in exact sizes, never more than allowed.

Contract: what is taken counts until its last tensor is gone.
"""

import weakref

import numpy as np
import torch

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
        self.used_bytes = 0
        self.peak_bytes = 0
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
        """Room for each of these tensors, in one block, with their shapes, their orders in memory and their types.

        None as in `take`.
        """
        begins, total = [], 0
        for one in tensors:
            begins.append(total)
            total += aligned(one.nbytes)
        block = self.take(total, pinned=pinned)
        if block is None:
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
