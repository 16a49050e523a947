"""Memory of the device that a copy in the host can stand for."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class HostCopy:
    """The copy of a storage in the host; refers to the storage without keeping it alive."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self.size_bytes, self.device = storage.nbytes(), device
        self.slot: torch.Tensor | None = None  #: a place in the host that has its bytes, or is about to
        self.memory = StorageWeakRef(storage)  #: as long as this lives no other memory is taken for it
        self._kind = torch.uint8 if self.size_bytes % 4 else torch.float32  # that it is copied as

    def current_stream(self) -> Any:
        """The program's current stream on the storage's device."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def stream_number(self) -> tuple[int, int, int]:
        """The program's stream as torch numbers it; asking for the stream itself takes 50 times as long."""
        if self.device.type != "cuda":
            return 0, 0, 0
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        number: tuple[int, int, int] = torch._C._cuda_getCurrentStream(index)
        return number

    def held(self) -> torch.UntypedStorage | None:
        """The storage, if somebody has held it all the time and it is as large as it was."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        return storage if storage is not None and storage.nbytes() == self.size_bytes else None

    def place(self) -> torch.Tensor:
        """The place of the copy in host memory."""
        assert self.slot is not None
        return self.slot[: self.size_bytes].view(self._kind)

    def numbers(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A storage of its size as numbers to be copied."""
        return torch.empty(0, dtype=self._kind, device=self.device).set_(storage)
