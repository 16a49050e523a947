"""Places in host memory that are used again for later tensors of about the same size.

Contract: places are of exact sizes, so what a step takes is what it holds at the most; with `changing` sizes, where no
two tensors may be alike, a place may be up to an eighth larger, and no more lies free than is in use. When there is no
more room, those that nobody uses are given back first.
"""

from collections.abc import Callable

import torch

from stalloc.techniques.host_store import HostStore
from stalloc.techniques.parts import aligned


class HostSlots:
    """The places of one technique. `settle` waits until no copy uses a place that was given back."""

    def __init__(self, store: HostStore, settle: Callable[[], None], *, pinned: bool, changing: bool = False) -> None:
        self._store, self._settle, self._pinned = store, settle, pinned
        self._room = _in_eighths if changing else aligned
        self._changing = changing
        self._free: dict[int, list[torch.Tensor]] = {}
        self._free_bytes = self._used_bytes = 0

    def take(self, size_bytes: int) -> torch.Tensor | None:
        """A flat tensor with room for so many bytes; None where there is no room."""
        room_bytes = self._room(size_bytes)
        free = self._free.get(room_bytes)
        if free:
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
        """Give a place back whose content is not needed any more."""
        self._free.setdefault(slot.nbytes, []).append(slot)
        self._free_bytes += slot.nbytes
        self._used_bytes -= slot.nbytes

    def _clear(self) -> None:
        self._settle()
        self._free.clear()
        self._free_bytes = 0


def _in_eighths(size_bytes: int) -> int:
    """The next of the sizes that lie an eighth of a power of two apart."""
    step = max(1 << max(size_bytes.bit_length() - 4, 0), aligned(1))
    return -(-size_bytes // step) * step
