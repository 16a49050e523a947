"""The parameters of a block in host memory or on disk, on the device only while the block computes, or is updated.

Contract: wherever its block does not compute, a streamed parameter is a tensor of the host with the values that it has:
reading, saving or changing it there is what it would be on the device. What autograd saved of it stays valid, since
memory comes back for the same storage. A layer lives as long as one of its parameters, and no longer. Memory of the
device goes when what it held is whole elsewhere.
"""

import contextlib
import ctypes
import functools
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from stalloc.errors import DiskError, StreamError
from stalloc.techniques.disk_store import DiskStore, Region, viewed
from stalloc.techniques.host_store import HostStore
from stalloc.techniques.parameters import Parameters, set_own_gradient
from stalloc.techniques.parts import aligned
from stalloc.techniques.transfers import Transfers

_Lent = tuple[Parameters, Callable[[], None]]
"""Tensors, and a function that waits until they have their values."""
_ON_HOST = Transfers(torch.device("cpu"))
_HALVED_AFTER = 16  # uses of each expert, on average
_HELD, _OF_FILE = 3 << 62, 1 << 61  # of a page in /proc/PID/pagemap: in memory or swapped out, still that of the file
_layer_of: Any = WeakIdKeyDictionary()  # parameter -> its StreamedLayer
layer_of: "Callable[[torch.Tensor], StreamedLayer | None]" = _layer_of.get
"""The layer that a parameter is streamed with."""


def device_of(parameter: torch.Tensor) -> torch.device:
    """The device on which a parameter computes and is updated, wherever it lies now."""
    layer = layer_of(parameter)
    return parameter.device if layer is None else layer.device


def put_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Let a parameter, which may be a tensor of the host now, have a gradient where it computes."""
    layer, elsewhere = layer_of(parameter), parameter.data
    if layer is None or parameter.device == gradient.device:
        set_own_gradient(parameter, gradient)
        return
    try:
        parameter.data = layer.place_of(parameter)  # without memory, as a gradient asks for it
        set_own_gradient(parameter, gradient)
    finally:
        parameter.data = elsewhere


class Home:
    """Where the parameters of a layer lie while its block does not compute: here in tensors of the host. `tensors` have
    the values that were stored last, or that the program has put there since, by whichever way; what is fetched has
    those. They stay the same tensors."""

    def __init__(self, tensors: Parameters, transfers: Transfers) -> None:
        self.tensors = tensors
        self._transfers = transfers
        self._fetched: Any = None  # event after the last copy from here

    def fetch(self, here: Parameters) -> Callable[[], None]:
        """Begin to copy the layer to tensors of the device; returns a function that makes the program wait for that."""
        arrived = self._fetched = self._transfers.to_device(list(zip(here, self.tensors, strict=True)))
        return lambda: self._transfers.wait(arrived)

    def store(self, here: Parameters) -> Callable[[], None]:
        """Begin to copy them back; returns a function that waits until their memory can be freed."""
        stored = self._transfers.to_host(list(zip(self.tensors, here, strict=True)))
        return lambda: self._transfers.wait(stored)

    def lend(self, rows: Sequence[int], room: Callable[[torch.Tensor], torch.Tensor]) -> _Lent:
        """Begin to provide some as tensors of the host that can be changed; `room` gives memory like a tensor's."""
        return [self.tensors[row] for row in rows], lambda: None

    def take_back(self, rows: Sequence[int], lent: Parameters) -> Callable[[], None]:
        """Begin to keep their changed values; returns a function that waits until their memory can be freed."""
        return lambda: None

    def settle(self) -> None:
        """Wait until what was stored can be read."""
        self._transfers.settle()

    def finish(self) -> None:
        """Wait until no copy uses this memory or the device's, which others are about to get."""
        self.settle()
        if self._fetched is not None:
            self._fetched.synchronize()


class _DiskHome(Home):
    """Regions of a file, and tensors that are mapped from it: what the program puts there stays in memory until it is
    written, which is before it is read again."""

    def __init__(self, like: Parameters, disk: DiskStore, regions: list[Region], transfers: Transfers) -> None:
        self._disk, self._regions = disk, regions
        self._memory = [disk.memory(region) for region in regions]
        super().__init__([viewed(*one) for one in zip(self._memory, like, strict=True)], transfers)
        self._fetched = lambda: None  # waits for what is read

    def fetch(self, here: Parameters) -> Callable[[], None]:
        self._write_changes()
        self._fetched = self._disk.read(list(zip(here, self._regions, strict=True)), self._transfers)
        return self._fetched

    def store(self, here: Parameters) -> Callable[[], None]:
        # the memory of the device stays until all is in the file, so an error there loses nothing
        return self._written(range(len(here)), here, self._transfers)

    def lend(self, rows: Sequence[int], room: Callable[[torch.Tensor], torch.Tensor]) -> _Lent:
        lent = [room(self.tensors[row]) for row in rows]
        if self._disk.folder is None:
            return lent, lambda: None
        self._write_changes()
        regions = [self._regions[row] for row in rows]
        return lent, self._disk.read(list(zip(lent, regions, strict=True)), _ON_HOST)

    def take_back(self, rows: Sequence[int], lent: Parameters) -> Callable[[], None]:
        if self._disk.folder is None:
            return lambda: None
        written = self._written(rows, lent, _ON_HOST)

        def stored() -> None:
            try:
                written()
            except DiskError:  # stays in memory, as a change that the program has made
                for row, tensor in zip(rows, lent, strict=True):
                    self.tensors[row].copy_(tensor)
                raise

        return stored

    def finish(self) -> None:
        with contextlib.suppress(DiskError):
            self._fetched()

    def _write_changes(self) -> None:
        changed = [row for row, memory in enumerate(self._memory) if self._disk.folder is not None and _changed(memory)]
        if changed:
            self._written(changed, [self.tensors[row] for row in changed], _ON_HOST)()

    def _written(self, rows: Sequence[int], tensors: Parameters, transfers: Transfers) -> Callable[[], None]:
        """Begin to write tensors; returns a function that waits until the file has them, and memory shows the file."""
        regions = [self._regions[row] for row in rows]
        copied = self._disk.write(list(zip(tensors, regions, strict=True)), transfers)

        def stored() -> None:
            copied()
            self._disk.settle(regions)
            for row in rows:
                self._memory[row].madvise(mmap.MADV_DONTNEED)

        return stored


def find_home(parameters: Parameters, store: HostStore, disk: DiskStore | None) -> Home | None:
    """Room for parameters in the host, else on disk; None if there is none."""
    transfers = Transfers(parameters[0].device)
    if (tensors := store.take_like(parameters, pinned=parameters[0].is_cuda)) is not None:
        return Home(tensors, transfers)
    regions = None if disk is None else disk.take([one.nbytes for one in parameters])
    return _DiskHome(parameters, disk, regions, transfers) if disk is not None and regions is not None else None


def _changed(memory: mmap.mmap) -> bool:
    """Whether any page of a private mapping of a file may be a copy of the file's, where the kernel tells it or not."""
    try:
        return not _kernel_tells() or _has_copies(memory)
    except OSError:
        return True


@functools.cache
def _kernel_tells() -> bool:
    """Whether the kernel tells which pages are copies; some sandboxes have an empty file."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)
    page[0] = 1
    return _has_copies(page)


def _has_copies(memory: mmap.mmap) -> bool:
    """Whether any page is a copy. Raises OSError where /proc/self/pagemap is missing or must not be read."""
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(begin // mmap.PAGESIZE * 8)
        pages = np.frombuffer(file.read(len(memory) // mmap.PAGESIZE * 8), np.uint64)
    is_whole = len(pages) * mmap.PAGESIZE == len(memory)
    return not is_whole or bool(((pages & _HELD != 0) & (pages & _OF_FILE == 0)).any())


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
        # memory, here and elsewhere, is held until no copy uses it
        weakref.finalize(self, lambda home, _: home.finish(), home, self._here).atexit = False
        self.store()()

    @property
    def parameters(self) -> Parameters:
        return [one for one, _, _ in self._placed()]

    @property
    def is_on_disk(self) -> bool:
        return isinstance(self.home, _DiskHome)

    def load(self) -> None:
        """Begin to bring it; `wait` before it is used. Raises DiskError."""
        if self.is_here:
            return
        self.adopt()
        for here, size in zip(self._here, self._num_bytes, strict=True):
            here.untyped_storage().resize_(size)
        with self._let_go_if_lost():
            self._arrived = self.home.fetch(self._here)
        for parameter, here, _ in self._placed():
            parameter.data = here
        self._versions = self._versions_now()
        self.is_here = True

    def wait(self) -> None:
        """Let the program's stream wait until it is there. Raises DiskError, and then it is where it was."""
        if self._arrived is not None:
            with self._let_go_if_lost():
                self._arrived()
            self._arrived = None

    def release(self) -> None:
        """Let the memory go; what was changed in place meanwhile is stored."""
        if self.is_here:
            self.wait()
            if self._versions != self._versions_now():
                self.store()()
                self.home.settle()
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
        """Put what the program has given a parameter in place of its memory there, perhaps by moving the model."""
        for parameter, here, host in self._placed():
            place = here if self.is_here else host
            if parameter.data_ptr() == place.data_ptr():
                continue
            if parameter.shape != place.shape or parameter.dtype != place.dtype:
                raise StreamError(
                    f"a parameter of {self.name}, which is streamed, was given another shape or type: change the model "
                    "before its first forward pass."
                )
            self.home.settle()
            with torch.no_grad():
                place.copy_(parameter)
            parameter.data = place

    def in_host(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A parameter as it is in host memory, while it is here too; None of one on disk, or changed meanwhile."""
        if self.is_on_disk or (self.is_here and self._versions != self._versions_now()):
            return None
        self.home.settle()
        return self.home.tensors[self._rows([parameter])[0]]

    def place_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The place of a parameter on the device, without memory while the layer is not here."""
        return self._here[self._rows([parameter])[0]]

    def lend(self, part: Parameters, room: Callable[[torch.Tensor], torch.Tensor]) -> _Lent:
        self.release()
        self.home.settle()
        self.adopt()
        return self.home.lend(self._rows(part), room)

    def take_back(self, part: Parameters, lent: Parameters) -> Callable[[], None]:
        return self.home.take_back(self._rows(part), lent)

    def bring_home(self) -> None:
        self.load()
        self.wait()
        for one in self.parameters:
            _layer_of.pop(one, None)

    def _placed(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each parameter, its memory on the device and the tensor that it is elsewhere."""
        for weak, here, host in zip(self._parameters, self._here, self.home.tensors, strict=True):
            if (parameter := weak()) is not None:
                yield parameter, here, host

    def _rows(self, part: Parameters) -> list[int]:
        row_of = {id(weak()): row for row, weak in enumerate(self._parameters)}
        return [row_of[id(one)] for one in part]

    def _versions_now(self) -> list[int]:
        return [one._version for one in self.parameters]

    @contextmanager
    def _let_go_if_lost(self) -> Iterator[None]:
        try:
            yield
        except DiskError:
            self._let_go()
            raise

    def _let_go(self) -> None:
        for parameter, _, host in self._placed():
            parameter.data = host
        for here in self._here:
            here.untyped_storage().resize_(0)
        self.is_here, self.waiting, self._arrived = False, 0, None


class WeightTier:
    """A tier of a `PagedOptimizer`: brings the layers of a part for their update on the device."""

    def __init__(self, is_on_processor: Callable[[torch.Tensor], bool]) -> None:
        self._is_on_processor = is_on_processor

    def bytes_of(self, part: Parameters) -> int:
        return sum(layer.size_bytes for layer in self._needed(part) if not layer.is_here)

    def fetch(self, part: Parameters) -> Any:
        layers = self._needed(part)
        for layer in layers:
            layer.load()

        def arrived() -> None:
            for layer in layers:
                layer.wait()

        return arrived

    def store(self, part: Parameters) -> Any:
        layers = self._needed(part)
        stored = [layer.store() for layer in layers]

        def let_go() -> None:
            for one in stored:
                one()

        return sum(layer.size_bytes for layer in layers), let_go

    def _needed(self, part: Parameters) -> list[StreamedLayer]:
        return layers_of([one for one in part if not self._is_on_processor(one)])


def layers_of(part: Parameters) -> list[StreamedLayer]:
    """The layers that some parameters are streamed with."""
    found = {id(layer): layer for one in part if (layer := layer_of(one)) is not None}
    return list(found.values())


class ExpertCache:
    """Modules of which a call uses few lie in host memory, and those used most on the device too. What is used least
    goes first, where uses of long ago count less and less; of several the one that was used last, since layers come in
    turn (Yu et al., MoESys, 2022, for inference). What goes is written back, whoever changed it. Invariant:
    `here_bytes` is what those in `_here` take, at most `room_bytes`."""

    def __init__(self, modules: list[Any], layers: list[StreamedLayer], room_bytes: int) -> None:
        self.room_bytes, self.here_bytes, self.most_bytes = room_bytes, 0, 0
        self.hits = self.misses = 0
        self._layers = layers
        self._here: dict[int, tuple[StreamedLayer, Any]] = {}  # by id, the last used last, with the stream it is for
        self._uses = dict.fromkeys(map(id, layers), 0.0)
        self._hooks = [
            module.register_forward_pre_hook(functools.partial(self._about_to_call, layer), prepend=True)
            for module, layer in zip(modules, layers, strict=True)
        ]

    @property
    def hit_rate(self) -> float:
        """The share of calls so far whose expert was on the device, from 0 to 1."""
        return self.hits / max(1, self.hits + self.misses)

    def undo(self) -> None:
        """Bring every expert back to the device, for good."""
        for hook in self._hooks:
            hook.remove()
        self._here.clear()
        for layer in self._layers:
            layer.bring_home()

    def _about_to_call(self, layer: StreamedLayer, *_: Any) -> None:
        if torch.is_grad_enabled():
            raise StreamError(
                f"{layer.name} is cached, and is called with gradients: call the model under torch.no_grad(), or "
                "stream its layers."
            )
        on_gpu = layer.device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise StreamError(f"{layer.name} is cached, and a CUDA graph would keep its place: capture none with it.")
        stream = torch.cuda.current_stream(layer.device) if on_gpu else None
        self._uses[id(layer)] += 1
        if (self.hits + self.misses) % (_HALVED_AFTER * len(self._layers)) == 0:
            self._uses = {one: count / 2 for one, count in self._uses.items()}
        before = self._here.pop(id(layer), None)
        if before is not None and before[1] == stream:
            self.hits += 1
            layer.adopt()
        else:
            self.misses += 1
            if before is not None:  # its memory would be given away without asking this stream
                self._send_away(*before)
            while self._here and self.here_bytes + layer.size_bytes > self.room_bytes:
                self._send_away(*self._here.pop(min(reversed(self._here), key=self._uses.__getitem__)))
            layer.load()
            layer.wait()
            self.here_bytes += layer.size_bytes
            self.most_bytes = max(self.most_bytes, self.here_bytes)
        self._here[id(layer)] = layer, stream

    def _send_away(self, layer: StreamedLayer, stream: Any) -> None:
        with torch.cuda.stream(stream):  # that it arrived on, and was used on: the copy comes after both
            layer.adopt()
            layer.store()()
        layer.home.settle()
        self.here_bytes -= layer.size_bytes
