"""The parameters of a block in host memory, on the device only while the block computes, or is updated.

Contract: wherever its block does not compute, a streamed parameter is a tensor of the host with the values that it has:
reading, saving or changing it there is what it would be on the device. What autograd saved of it stays valid, since
memory comes back for the same storage.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from stalloc.errors import StreamError
from stalloc.techniques.parts import aligned
from stalloc.techniques.transfers import Transfers
from stalloc.techniques.update_order import Parameters

_layer_of: Any = WeakIdKeyDictionary()  # parameter -> its StreamedLayer


def layer_of(parameter: torch.Tensor) -> "StreamedLayer | None":
    """The layer that a parameter is streamed with."""
    found: StreamedLayer | None = _layer_of.get(parameter)
    return found


def device_of(parameter: torch.Tensor) -> torch.device:
    """Where a parameter computes, and is updated on the device, wherever it lies now."""
    layer = layer_of(parameter)
    return parameter.device if layer is None else layer.device


class StreamedLayer:
    """The parameters of one block. Invariant: `is_here` says whether they are on the device, as one."""

    def __init__(self, name: str, parameters: Parameters, host: list[torch.Tensor], transfers: Transfers) -> None:
        self.name, self.parameters, self.host = name, parameters, host
        self.device = parameters[0].device
        self.size_bytes = sum(aligned(one.nbytes) for one in host)
        self.waiting = 0  # gradients that backward is still to bring before the memory can go
        self._transfers = transfers
        self._here = [one.data for one in parameters]
        self._num_bytes = [one.untyped_storage().nbytes() for one in self._here]
        self._arrived: Any = None
        self._versions = [one._version for one in parameters]
        self.is_here = True
        for one in parameters:
            _layer_of[one] = self
        self.store()()

    def load(self) -> None:
        """Begin to bring it; `wait` before it is used."""
        if self.is_here:
            return
        self.is_here = True
        for parameter, here, host, size in zip(self.parameters, self._here, self.host, self._num_bytes, strict=True):
            if parameter.data_ptr() != host.data_ptr():
                self._take(parameter, host)
            here.untyped_storage().resize_(size)
        self._arrived = self._transfers.to_device(list(zip(self._here, self.host, strict=True)))
        for parameter, here in zip(self.parameters, self._here, strict=True):
            parameter.data = here
        self._versions = [one._version for one in self.parameters]

    def wait(self) -> None:
        """Let the program's stream wait until it is there."""
        self._transfers.wait(self._arrived)
        self._arrived = None

    def release(self) -> None:
        """Let the memory go; what was changed in place meanwhile is stored."""
        if self.is_here:
            self.wait()
            if self._versions != [one._version for one in self.parameters]:
                self.store()()
                self._transfers.settle()
            else:
                self._let_go()

    def store(self) -> Callable[[], None]:
        """Begin to write it to the host; what comes back waits for that and lets the memory go."""
        stored = self._transfers.to_host(list(zip(self.host, self._here, strict=True)))

        def let_go() -> None:
            self._transfers.wait(stored)
            self._let_go()

        return let_go

    def adopt(self) -> None:
        """While it is here: what the program has given a parameter in place of its memory goes there."""
        for parameter, here in zip(self.parameters, self._here, strict=True):
            if parameter.data_ptr() != here.data_ptr():
                self._take(parameter, here)
                parameter.data = here

    def settle(self) -> None:
        """Let the processor wait until the host has it whole."""
        self._transfers.settle()

    def bring_home(self) -> None:
        """For good."""
        self.load()
        self.wait()
        for one in self.parameters:
            _layer_of.pop(one, None)

    def _let_go(self) -> None:
        for parameter, here, host in zip(self.parameters, self._here, self.host, strict=True):
            parameter.data = host
            here.untyped_storage().resize_(0)
        self.is_here, self.waiting = False, 0

    def _take(self, parameter: torch.Tensor, place: torch.Tensor) -> None:
        """The program has given a parameter other memory meanwhile, by a move of the model perhaps."""
        if parameter.shape != place.shape or parameter.dtype != place.dtype:
            raise StreamError(
                f"a parameter of {self.name}, which is streamed, was given another shape or type: change the model "
                "before its first forward pass."
            )
        self._transfers.settle()
        with torch.no_grad():
            place.copy_(parameter)
