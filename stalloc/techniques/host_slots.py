"""Places in host memory that are used again for the next tensor of the same size.

Contract: places are of exact sizes, so what a step takes is what it holds at the most; when there is no more room,
those that nobody uses are given back first.
"""

from collections.abc import Callable

import torch

from stalloc.techniques.host_store import HostStore
from stalloc.techniques.parts import aligned


class HostSlots:
    """The places of one technique. `settle` waits until no copy uses a place that was given back."""

    def __init__(self, store: HostStore, settle: Callable[[], None], *, pinned: bool) -> None:
        self._store, self._settle, self._pinned = store, settle, pinned
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, size_bytes: int) -> torch.Tensor | None:
        """A flat tensor with room for so many bytes; None where there is none."""
        free = self._free.get(aligned(size_bytes))
        if free:
            return free.pop()
        slot = self._store.take(aligned(size_bytes), pinned=self._pinned)
        if slot is None and any(self._free.values()):
            self._settle()
            self._free.clear()
            slot = self._store.take(aligned(size_bytes), pinned=self._pinned)
        return slot

    def give_back(self, slot: torch.Tensor) -> None:
        """What it held is not needed any more."""
        self._free.setdefault(slot.nbytes, []).append(slot)
