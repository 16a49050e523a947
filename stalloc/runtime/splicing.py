"""Splices of one device: requests that are served from what other pages have left over, before they are refused.

Contract: that of `core.splices`. A splice is made only where whole pages do not suffice, and ends, once nothing
lives in it, before the next one is made. None is made while a graph is captured, or where patterns are written to free
memory.
"""

from typing import TYPE_CHECKING, Any

from stalloc.core.constants import GRANULE, PRIVATE_KINDS, SMALL_KIND

if TYPE_CHECKING:
    from stalloc.runtime.memory import DeviceMemory


class Splices:
    """The splices of one device."""

    def __init__(self, memory: "DeviceMemory") -> None:
        self._memory, self._heap, self._source = memory, memory.state.heap, memory.source

    def make(self, pool: int, size_bytes: int) -> bool:
        """Make one that serves a request (bytes, rounded) of a pool; False if there is not enough left over for it."""
        kind = self._heap.pool_kind(pool)
        if kind == SMALL_KIND or kind >= PRIVATE_KINDS or self._memory.poison is not None:
            return False
        tail, head = self._heap.find_splice(pool, size_bytes)
        own_bytes = -(-max(size_bytes - tail[1] - head[1], 0) // GRANULE) * GRANULE
        if not (tail[1] or head[1]) or own_bytes > self._source.free_bytes():
            return False
        memory = self._source.reserve(own_bytes + 2 * GRANULE)
        if memory is None:
            return False
        begin = memory.ptr + GRANULE
        address = begin - tail[1]
        self._memory.segments[address] = memory
        with self._source.at_device(capturing=False):
            done = self._shares(memory, begin - GRANULE, tail) and self._shares(memory, begin + own_bytes, head)
            done = done and (own_bytes == 0 or memory.map(begin, own_bytes))
        if done and self._heap.begin_splice(pool, begin, own_bytes, tail, head):
            return True
        del self._memory.segments[address]
        self._memory.paging.sweep()
        return False

    def _shares(self, memory: Any, address: int, remnant: tuple[int, int]) -> bool:
        """Give a page the memory of the one that a remnant (address and bytes) is in, if there is a remnant."""
        return remnant[1] == 0 or memory.share(address, self._memory.paging.range_of(remnant[0]), remnant[0])

    def end(self) -> bool:
        """End those in which nothing lives; whether there were any."""
        ended = self._heap.end_splices()
        for address in ended:
            del self._memory.segments[address]
        if ended:
            with self._source.at_device(capturing=False):
                self._source.wait()
                self._memory.paging.sweep()
        return bool(ended)
