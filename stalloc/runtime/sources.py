"""Where a device's memory comes from: CuPy's pool, which owns it, or ranges of addresses that memory is mapped into.

Contract: what `take` returns has its address in `ptr` and its bytes in `mem.size`, or is a MappedRange, and goes back
when nothing refers to it any more. Nothing here knows what the memory is for.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from stalloc.device import Device
from stalloc.device.capture import relaxed_capture
from stalloc.device.mapped import MappedRange


class Source(Protocol):
    """What the runtime asks of the place that memory comes from."""

    def take(self, size_bytes: int, *, mapped: bool) -> Any:
        """Memory, None if there is no more; `mapped`: in a range that can grow and shrink, where there are such."""

    def free_bytes(self) -> int:
        """What can still be taken, within the limit."""

    def at_device(self, *, capturing: bool) -> contextlib.AbstractContextManager[Any]:
        """Where calls to the driver are made from, and while a CUDA graph is captured, allowed."""

    def collect(self) -> None:
        """Give what is not referred to any more back to the device."""

    @property
    def ranges(self) -> list[MappedRange]:
        """The mapped ranges that hold memory."""

    @property
    def limit_bytes(self) -> int:
        """No more than this is taken from the device; 0: no limit."""

    @limit_bytes.setter
    def limit_bytes(self, size_bytes: int) -> None: ...

    def forked(self) -> None:
        """This process is a fork: what the parent took is neither given back nor counted any more."""


class PoolSource:
    """The memory of a device through a pool of CuPy's, or mapped."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.pool = device.new_pool()
        self._ranges: weakref.WeakSet[MappedRange] = weakref.WeakSet()
        self._inherited: list[Any] = []

    def take(self, size_bytes: int, *, mapped: bool) -> Any:
        """Memory, None if there is no more. `mapped`: a range, if the device has such and memory for it."""
        import cupy

        with contextlib.suppress(cupy.cuda.memory.OutOfMemoryError):
            memory = self._device.new_range() if mapped else None
            if memory is not None and memory.grow(size_bytes):
                self._ranges.add(memory)
                return memory
            return self.pool.malloc(size_bytes)
        return None

    def free_bytes(self) -> int:
        """What can still be taken from the device, within the limit."""
        free, _ = self._device.memory_info()
        limit = self.limit_bytes
        mapped = sum(memory.size_bytes for memory in self._ranges)
        return min(free, limit - self.pool.total_bytes() - mapped) if limit else free

    @property
    def limit_bytes(self) -> int:
        """No more than this is taken from the device; 0: no limit."""
        return int(self.pool.get_limit())

    @limit_bytes.setter
    def limit_bytes(self, size_bytes: int) -> None:
        with self.at_device(capturing=False):
            self.pool.set_limit(size=size_bytes)

    @contextlib.contextmanager
    def at_device(self, *, capturing: bool) -> Iterator[None]:
        """With this device as the current one and, while a graph is captured, with calls that it would forbid."""
        import cupy

        relaxed = relaxed_capture() if capturing else contextlib.nullcontext()
        with cupy.cuda.Device(self._device.index), relaxed:
            yield

    def collect(self) -> None:
        """Give what is not referred to any more back to the device."""
        with self.at_device(capturing=False):
            self.pool.free_all_blocks()

    @property
    def ranges(self) -> list[MappedRange]:
        """The mapped ranges that hold memory."""
        return [*self._ranges]

    def forked(self) -> None:
        """This process is a fork: a thread that is gone may have held the locks of the pool that the parent used."""
        self._inherited.append(self.pool)
        self.pool = self._device.new_pool()
        self._ranges = weakref.WeakSet()
