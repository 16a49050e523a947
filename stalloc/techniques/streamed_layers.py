"""The parameters of a block in host memory or on disk, on the device only while the block computes, or is updated.

Contract: wherever its block does not compute, a streamed parameter is a tensor of the host with the values that it has:
reading, saving or changing it there is what it would be on the device. What autograd saved of it stays valid, since
memory comes back for the same storage. A layer lives as long as one of its parameters, and no longer.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from stalloc.errors import DiskError, StreamError
from stalloc.techniques.gradient_access import set_own_gradient
from stalloc.techniques.layer_homes import DiskHome, Home, Lent
from stalloc.techniques.parts import aligned
from stalloc.techniques.update_order import Parameters

_layer_of: Any = WeakIdKeyDictionary()  # parameter -> its StreamedLayer


def layer_of(parameter: torch.Tensor) -> "StreamedLayer | None":
    """The layer that a parameter is streamed with."""
    found: StreamedLayer | None = _layer_of.get(parameter)
    return found


def device_of(parameter: torch.Tensor) -> torch.device:
    """The device on which a parameter computes and is updated, wherever it lies now."""
    layer = layer_of(parameter)
    return parameter.device if layer is None else layer.device


def put_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Let a parameter, which may be a tensor of the host now, have a gradient where it computes."""
    layer = layer_of(parameter)
    if layer is not None and parameter.device != gradient.device:
        with layer.as_on_device(parameter):
            set_own_gradient(parameter, gradient)
    else:
        set_own_gradient(parameter, gradient)


class StreamedLayer:
    """The parameters of one block. Invariant: `is_here` says whether they are on the device, as one."""

    def __init__(self, name: str, parameters: Parameters, home: Home) -> None:
        self.name, self.home = name, home
        self.device = parameters[0].device
        self.size_bytes = sum(aligned(one.nbytes) for one in home.tensors)
        self.waiting = 0  # gradients that backward is still to bring before the memory can go
        self._parameters = [TensorWeakRef(one) for one in parameters]
        self._here = [one.data for one in parameters]
        self._num_bytes = [one.untyped_storage().nbytes() for one in self._here]
        self._arrived: Callable[[], None] | None = None
        self._versions = self._versions_now()
        self.is_here = True
        for one in parameters:
            _layer_of[one] = self
        weakref.finalize(self, _finish, home, self._here).atexit = False
        self.store()()

    @property
    def parameters(self) -> Parameters:
        """The parameters of the layer that the program still has."""
        return [one for one, _, _ in self._placed()]

    @property
    def is_on_disk(self) -> bool:
        """Whether the layer lies on disk while it is not on the device."""
        return isinstance(self.home, DiskHome)

    def load(self) -> None:
        """Begin to bring it; `wait` before it is used. Raises DiskError."""
        if self.is_here:
            return
        self._gather()
        for here, size in zip(self._here, self._num_bytes, strict=True):
            here.untyped_storage().resize_(size)
        try:
            self._arrived = self.home.fetch(self._here)
        except DiskError:
            self._let_go()
            raise
        for parameter, here, _ in self._placed():
            parameter.data = here
        self._versions = self._versions_now()
        self.is_here = True

    def wait(self) -> None:
        """Let the program's stream wait until it is there. Raises DiskError, and then it is where it was."""
        if self._arrived is None:
            return
        try:
            self._arrived()
        except DiskError:
            self._let_go()
            raise
        self._arrived = None

    def release(self) -> None:
        """Let the memory go; what was changed in place meanwhile is stored."""
        if self.is_here:
            self.wait()
            if self._versions != self._versions_now():
                self.store()()
                self.settle()
            else:
                self._let_go()

    def store(self) -> Callable[[], None]:
        """Begin to write the layer back; returns a function that waits for that and frees the device memory."""
        stored = self.home.store(self._here)

        def let_go() -> None:
            stored()
            self._let_go()

        return let_go

    def adopt(self) -> None:
        """While it is here: what the program has given a parameter in place of its memory goes there."""
        for parameter, here, _ in self._placed():
            if parameter.data_ptr() != here.data_ptr():
                self._take(parameter, here)
                parameter.data = here

    def in_host(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A parameter as it is in host memory, while it is here too; None of one on disk, or changed meanwhile."""
        if self.is_on_disk or (self.is_here and self._versions != self._versions_now()):
            return None
        self.settle()
        return self.home.tensors[self._rows([parameter])[0]]

    @contextmanager
    def as_on_device(self, parameter: torch.Tensor) -> Iterator[None]:
        """While it is not here: a parameter has its place on the device, without memory, as a gradient asks for."""
        elsewhere = parameter.data
        try:
            parameter.data = self._here[self._rows([parameter])[0]]
            yield
        finally:
            parameter.data = elsewhere

    def lend(self, part: Parameters, room: Callable[[torch.Tensor], torch.Tensor]) -> Lent:
        """Let some of its parameters be changed in the host, as `Home.lend` does. Raises DiskError."""
        self.release()
        self.settle()
        self._gather()
        return self.home.lend(self._rows(part), room)

    def take_back(self, part: Parameters, lent: Parameters) -> Callable[[], None]:
        """Take back parameters that were changed in the host, as `Home.take_back` does."""
        return self.home.take_back(self._rows(part), lent)

    def settle(self) -> None:
        """Let the processor wait until what was stored is whole."""
        self.home.settle()

    def bring_home(self) -> None:
        """Bring the layer to the device for good."""
        self.load()
        self.wait()
        for one in self.parameters:
            _layer_of.pop(one, None)

    def _placed(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each parameter, its memory on the device and the tensor that it is elsewhere."""
        for weak, here, host in zip(self._parameters, self._here, self.home.tensors, strict=True):
            parameter = weak()
            if parameter is not None:
                yield parameter, here, host

    def _rows(self, part: Parameters) -> list[int]:
        row_of = {id(weak()): row for row, weak in enumerate(self._parameters)}
        return [row_of[id(one)] for one in part]

    def _gather(self) -> None:
        """While it is not here: what the program has given a parameter in place of its memory goes there."""
        for parameter, _, host in self._placed():
            if parameter.data_ptr() != host.data_ptr():
                self._take(parameter, host)
                parameter.data = host

    def _versions_now(self) -> list[int]:
        return [one._version for one in self.parameters]

    def _let_go(self) -> None:
        for parameter, _, host in self._placed():
            parameter.data = host
        for here in self._here:
            here.untyped_storage().resize_(0)
        self.is_here, self.waiting, self._arrived = False, 0, None

    def _take(self, parameter: torch.Tensor, place: torch.Tensor) -> None:
        """Copy to `place` a parameter to which the program gave other memory meanwhile, perhaps by moving the model."""
        if parameter.shape != place.shape or parameter.dtype != place.dtype:
            raise StreamError(
                f"a parameter of {self.name}, which is streamed, was given another shape or type: change the model "
                "before its first forward pass."
            )
        self.settle()
        with torch.no_grad():
            place.copy_(parameter)


def _finish(home: Home, _: Parameters) -> None:
    """A layer is gone: hold its memory, on the device and elsewhere, until no copy uses it."""
    home.finish()
