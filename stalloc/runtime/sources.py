"""Where a device's memory comes from: pages of a pool of CuPy's that are mapped to ranges of addresses, or its blocks.

Contract: what `take` and `reserve` return has its address in `ptr`, and its memory goes back when nothing refers to it
any more; that of a range, when it is closed. Nothing here knows what the memory is for.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from stalloc.core.entry import page_entries
from stalloc.device import Device
from stalloc.device.capture import relaxed_capture
from stalloc.device.current_device import AtDevice
from stalloc.device.mapped_pages import Pages
from stalloc.figures import human_bytes
from stalloc.notices import say


class Source(Protocol):
    """What the runtime asks of the place that memory comes from."""

    ranges: list[Any]  #: of addresses that were reserved and are not closed; whoever closes one takes it off

    @property
    def paged(self) -> bool: ...  #: whether memory comes by pages; whoever asks has a request for this device
    @property
    def is_used(self) -> bool: ...  #: whether anything was asked of it so far: until then the device is not touched
    @property
    def refusal(self) -> str: ...  #: what the driver said when it refused pages, and memory comes in blocks; or empty
    @property
    def limit_bytes(self) -> int: ...  #: no more than this is taken from the device; 0: no limit
    @limit_bytes.setter
    def limit_bytes(self, size_bytes: int) -> None: ...
    def before_use(self, function: Callable[[], None]) -> None: ...  #: call it before the first request, or now
    def reserve(self, size_bytes: int) -> Any: ...  #: addresses without memory, as a PageRange; None if there are none
    def take(self, size_bytes: int) -> Any: ...  #: memory, None if there is no more
    def doubt_pages(self, size_bytes: int) -> None: ...  #: this was not mapped: if there is as much, the driver refuses
    def free_bytes(self) -> int: ...  #: what can still be taken, within the limit
    def wait(self) -> None: ...  #: until the device has done what it was given
    def collect(self) -> None: ...  #: give what is not referred to any more back to the device
    def forked(self) -> None: ...  #: what the parent took is neither given back nor counted any more
    def at_device(self, *, capturing: bool) -> contextlib.AbstractContextManager[Any]:
        """Where calls to the driver are made from, and while a CUDA graph is captured, allowed."""
        ...


class PoolSource:
    """The memory of a device through a pool of CuPy's."""

    def __init__(self, device: Device, *, by_pages: bool) -> None:
        """`by_pages`: as pages, if the device maps them, which is tried at the first request."""
        self._device, self._wants_pages = device, by_pages
        self._pages: Pages | None = None
        self._blocks: Any = None  # the pool that has memory once pages are refused
        self._pool: Any = None  # made at the first request: until then the device is not touched
        self._limit_bytes = 0
        self.ranges: list[Any] = []  #: all that were reserved and are not closed
        self._inherited: list[Any] = []
        self._before_use: Callable[[], None] | None = None

    @property
    def is_used(self) -> bool:
        return self._pool is not None or bool(self._inherited)

    def before_use(self, function: Callable[[], None]) -> None:
        self._before_use = function
        if self._pool is not None:
            with self.at_device(capturing=False):
                function()

    @property
    def pool(self) -> Any:
        """The `cupy.cuda.MemoryPool` that has the memory: as blocks, or as pages whose pointers are handles."""
        if self._pool is None:
            with self.at_device(capturing=False):
                if self._before_use is not None:
                    self._before_use()
                pages = self._device.new_pages(page_entries) if self._wants_pages else ""
                if isinstance(pages, str):
                    self._pool = self._device.new_pool()
                    if pages:
                        say(f"memory of device {self._device.index} comes in blocks, not by pages: {pages}.")
                else:
                    self._pages, self._pool = pages, pages.pool
                self._pool.set_limit(size=self._limit_bytes)
        return self._pool

    @pool.setter
    def pool(self, pool: Any) -> None:
        self._pool = pool
        if self._pages is not None:
            self._pages.pool = pool

    @property
    def paged(self) -> bool:
        return self.pool is not None and self._pages is not None

    def reserve(self, size_bytes: int) -> Any:
        if self.paged and self._pages is not None:
            self.ranges += [self._pages.reserve(size_bytes)]  # at once: an interruption loses none
            if self.ranges[-1] is not None:
                return self.ranges[-1]
            del self.ranges[-1]
        return None

    def take(self, size_bytes: int) -> Any:
        import cupy

        if self.paged and not self.refusal:
            memory = self.reserve(size_bytes)
            if memory is not None and memory.map(memory.ptr, size_bytes):
                return memory
            self.doubt_pages(size_bytes)
            if not self.refusal:
                return None
        with contextlib.suppress(cupy.cuda.memory.OutOfMemoryError):
            return (self._block_pool() if self.paged else self.pool).malloc(size_bytes)
        return None

    @property
    def refusal(self) -> str:
        return self._pages.refusal if self._pages is not None else ""

    def doubt_pages(self, size_bytes: int) -> None:
        if self._pages is None:
            return
        failure, self._pages.failure = self._pages.failure, ""
        if failure and not self.refusal and (free := self.free_bytes()) >= size_bytes:
            self._pages.refusal = f"{failure} where {human_bytes(free)} are free"

    def _block_pool(self) -> Any:
        if self._blocks is None:
            index = self._device.index
            say(f"memory of device {index} comes in blocks from here on, without a plan: {self.refusal}.")
            self._blocks = self._device.new_pool()
        if self._pages is not None:
            self._pages.free_unmapped()
        if self._limit_bytes:
            self._blocks.set_limit(size=max(1, self._limit_bytes - self.pool.total_bytes()))
        return self._blocks

    def free_bytes(self) -> int:
        spare = self.pool.free_bytes() + self._pages.unmapped_bytes if self.paged and self._pages is not None else 0
        taken = self.pool.total_bytes()
        if self._blocks is not None:
            spare, taken = spare + self._blocks.free_bytes(), taken + self._blocks.total_bytes()
        free, limit = self._device.memory_info()[0] + spare, self.limit_bytes
        return min(free, limit - taken + spare) if limit else free

    def wait(self) -> None:
        import cupy

        with self.at_device(capturing=False):  # whatever device the thread is at
            cupy.cuda.runtime.deviceSynchronize()

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, size_bytes: int) -> None:
        self._limit_bytes = size_bytes
        if self._pool is not None:
            with self.at_device(capturing=False):
                self._pool.set_limit(size=size_bytes)

    def at_device(self, *, capturing: bool) -> contextlib.AbstractContextManager[Any]:
        at_device = AtDevice(self._device.index)
        return _relaxed(at_device) if capturing else at_device

    def collect(self) -> None:
        if self._pool is not None:
            with self.at_device(capturing=False):
                if self._pages is not None:
                    self._pages.free_unmapped()
                else:
                    self._pool.free_all_blocks()
                if self._blocks is not None:
                    self._blocks.free_all_blocks()

    def forked(self) -> None:
        self._inherited += [self._pool, self._pages, self._blocks, self.ranges]
        self.ranges, self._pool, self._pages, self._blocks = [], None, None, None


@contextlib.contextmanager
def _relaxed(at_device: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with at_device, relaxed_capture():
        yield
