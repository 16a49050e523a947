"""Room for the tensors of an optimizer's state outside of the device: in host memory, else in a file.

Contract: tensors that come together get room together, or none of them any; a tensor keeps its slot as long as its
shape and type stay.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from stalloc.techniques.disk_store import DiskStore, Region, viewed
from stalloc.techniques.host_store import HostStore

Named = tuple[torch.Tensor, str, torch.Tensor]
"""A parameter, the name of a tensor of its state, and that tensor."""


class StateSlots:
    """The slots of one optimizer's state, by parameter and name."""

    def __init__(self, store: HostStore, disk: DiskStore | None) -> None:
        self._store, self._disk = store, disk
        self._slots: Any = WeakIdKeyDictionary()  # parameter -> tensors of the host, or mapped from the file, by name
        self._regions: Any = WeakIdKeyDictionary()  # parameter -> where in the file those are that lie there, by name

    def of(self, parameter: Any) -> dict[str, torch.Tensor]:
        """The slots of a parameter by name."""
        found: dict[str, torch.Tensor] = self._slots.get(parameter, {}) if isinstance(parameter, torch.Tensor) else {}
        return found

    def region(self, parameter: torch.Tensor, name: str) -> Region | None:
        """Where in the file a slot is; None for one in host memory."""
        found: Region | None = self._regions.get(parameter, {}).get(name)
        return found

    def make(self, wanted: list[Named], device: torch.device, *, to_disk: bool) -> None:
        """Make slots for tensors that have none."""
        lacking = []
        for parameter, name, tensor in wanted:
            slot = self.of(parameter).get(name)
            if slot is None or slot.shape != tensor.shape or slot.dtype != tensor.dtype:
                self.of(parameter).pop(name, None)
                self._regions.get(parameter, {}).pop(name, None)
                lacking.append((parameter, name, tensor))
        if not lacking:
            return
        tensors = [tensor for _, _, tensor in lacking]
        slots = self._store.take_like(tensors, pinned=device.type == "cuda")
        for (parameter, name, _), slot in zip(lacking, slots or (), strict=False):
            self._slots.setdefault(parameter, {})[name] = slot
        if slots is None and to_disk and self._disk is not None:
            regions = self._disk.take([tensor.nbytes for tensor in tensors])
            for (parameter, name, tensor), region in zip(lacking, regions or (), strict=False):
                self._regions.setdefault(parameter, {})[name] = region
                self.map(parameter, name, tensor)

    def map(self, parameter: torch.Tensor, name: str, like: torch.Tensor) -> torch.Tensor:
        """Let a slot in the file show what is written there now."""
        assert self._disk is not None
        slot = viewed(self._disk.memory(self._regions[parameter][name]), like)
        self._slots.setdefault(parameter, {})[name] = slot
        return slot

    def in_file(self) -> Iterator[torch.Tensor]:
        """The parameters with state in the file."""
        return iter(list(self._regions))

    def clear(self) -> None:
        """Give all room back."""
        self._slots, self._regions = WeakIdKeyDictionary(), WeakIdKeyDictionary()
