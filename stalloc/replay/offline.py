"""The runtime's controllers over a device of numbers: its pages and blocks are counted, and nobody can touch them.

Contract: what serves requests is the code that serves torch and CuPy; only the memory is made up.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from stalloc.core.entry import slow_entry
from stalloc.device.mapped_pages import PAGE_BYTES, PageRange
from stalloc.replay.blocks import FIRST_ADDRESS, GRANULE, round_up
from stalloc.runtime.controller import Controller
from stalloc.runtime.runtime_settings import Settings

_MAX_BYTES = 1 << 40  # of any device: more than any GPU has; each of its pages is counted


@dataclass(eq=False)
class _Memory:
    """Bytes of the made-up device, with the names that CuPy's memory has; they go back with the last reference."""

    ptr: int
    mem: SimpleNamespace
    device: "NumbersDevice"

    def __del__(self) -> None:
        self.device.taken -= self.mem.size
        self.device.num_frees += 1


class NumbersDevice:
    """A device without memory, and the source of its memory: both only count bytes."""

    kind: Literal["virtual"] = "virtual"
    name = "a device of numbers"
    compute_capability = (0, 0)
    limit_bytes = 0
    is_used = True  #: there is no device to be touched first

    def __init__(self, index: int, capacity_bytes: int, *, paged: bool) -> None:
        self.index = index
        self.paged = paged
        self.ranges: list[PageRange] = []
        self.total_bytes = min(capacity_bytes or _MAX_BYTES, _MAX_BYTES)
        self.taken = 0
        self.num_allocs = self.num_frees = 0
        self._next = FIRST_ADDRESS

    def new_pool(self) -> None:
        return None

    def new_pages(self, entries: Any) -> str:
        return "it has none"

    def memory_info(self) -> tuple[int, int]:
        return self.free_bytes(), self.total_bytes

    def free_bytes(self) -> int:
        return self.total_bytes - self.taken

    def _addresses(self, size_bytes: int) -> int:
        address, self._next = self._next, self._next + round_up(size_bytes + 2 * GRANULE, GRANULE)
        return address

    def take(self, size_bytes: int) -> Any:
        if self.taken + size_bytes > self.total_bytes:
            return None
        if self.paged:
            memory = self.reserve(size_bytes)
            memory.map(memory.ptr, size_bytes)
            return memory
        self.taken += size_bytes
        self.num_allocs += 1
        return _Memory(self._addresses(size_bytes), SimpleNamespace(size=size_bytes), self)

    refusal = ""

    def doubt_pages(self, size_bytes: int) -> None:
        """Nothing to doubt: there is no driver."""

    def reserve(self, size_bytes: int) -> PageRange:
        self.ranges.append(PageRange(self, self._addresses(size_bytes), size_bytes))
        return self.ranges[-1]

    def map(self, address: int, count: int, held: dict[int, Any]) -> bool:
        """As `Pages` does."""
        if self.taken + count * PAGE_BYTES > self.total_bytes:
            return False
        self.taken += count * PAGE_BYTES
        self.num_allocs += count
        held.update(dict.fromkeys(range(address, address + count * PAGE_BYTES, PAGE_BYTES)))
        return True

    def share(self, address: int, page: Any, held: dict[int, Any]) -> bool:
        """As `Pages` does; such a page is counted once."""
        held[address] = self
        return True

    def unmap(self, address: int, count: int, held: dict[int, Any]) -> None:
        """As `Pages` does."""
        pages = [at for at in range(address, address + count * PAGE_BYTES, PAGE_BYTES) if at in held]
        num_own = sum(held.pop(at) is None for at in pages)
        self.taken -= num_own * PAGE_BYTES
        self.num_frees += num_own

    def free_addresses(self, address: int, size_bytes: int) -> None:
        """Nothing to do: there are always more addresses."""

    def wait(self) -> None:
        """Return at once: nothing is queued."""

    def before_use(self, function: Callable[[], None]) -> None:
        """Nothing to do: nobody served it before."""

    def at_device(self, *, capturing: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def collect(self) -> None:
        """Nothing to collect: nothing is kept."""

    def forked(self) -> None:
        """The numbers are the child's own."""


_controllers: dict[int, Controller] = {}  # by the number of the device, for the entry that all share
_lock = threading.Lock()


def _help(device: int, request: int, argument: int) -> int:
    return int(_controllers[device].help(request, argument))


@functools.cache
def _entry() -> int:
    return slow_entry(_help)


def make_controller(capacity_bytes: int, settings: Settings) -> Controller:
    """A controller over a made-up device of `capacity_bytes`; 0, or more than any GPU has, stands for a tebibyte."""
    with _lock:
        index = next(one for one in itertools.count(len(_controllers)) if one not in _controllers)
        device = NumbersDevice(index, capacity_bytes, paged=settings.arena == "pages")
        controller = Controller(device, device, _entry(), settings)
        _controllers[index] = controller
    return controller


def let_go(controller: Controller) -> None:
    """Let go of a controller; it serves nothing any more."""
    _controllers.pop(controller.device.index, None)
