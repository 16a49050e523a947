"""Blocks that other streams still use when they are freed (torch's record_stream).

Contract: such a block is handed out again only after every stream that was recorded for it has done all the work it
had when the block was freed. The host never blocks for it, unless memory has run out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stalloc.core.constants import BLOCK_DEFERRED, BLOCK_FREE, BLOCK_SHARED
from stalloc.core.frees import finish_deferred, share
from stalloc.core.snapshot import owner_of


@dataclass(eq=False)
class _Freed:
    """A block that was freed while other streams used it."""

    streams: list[int]
    events: list[Any] | None = None  # of what the streams had been given; None: not recorded yet


class Deferred:
    """The shared blocks of one device, and the freed ones that wait for events.

    No error, wherever it comes from, loses a block: what waits is noted before anything else is done, and forgotten
    after it was freed.
    """

    def __init__(self, state_address: int, device: int) -> None:
        self._state = state_address
        self._device = device
        self._streams: dict[int, set[int]] = {}  # live block -> other streams that use it
        self.on_end: Callable[[list[int]], None] | None = None  #: called before blocks that waited are free
        self._waiting: dict[int, _Freed] = {}  # by address

    def __len__(self) -> int:
        """How many freed blocks wait."""
        return len(self._waiting)

    def share(self, address: int, stream: int) -> None:
        """Note a stream that uses the live block at `address`; an address that is not stalloc's is left alone."""
        if share(self._state, address) or self._held(address) == BLOCK_SHARED:
            self._streams.setdefault(address, set()).add(stream)

    def add(self, address: int, *, capturing: bool) -> None:
        """A shared block was freed: wait for what its streams have been given so far.

        While a CUDA graph is captured the events wait for its end: one recorded in a capture can never be asked.
        """
        if self._held(address) != BLOCK_DEFERRED:
            return  # it was found before its word came, and may live again, shared with others
        streams = self._streams.get(address)
        if streams is None and address in self._waiting:
            return  # told again after an interruption
        freed = self._waiting[address] = _Freed(sorted(streams or ()))
        self._streams.pop(address, None)
        if not capturing:
            freed.events = self._record(freed.streams)

    def _held(self, address: int) -> int:
        """The BLOCK_ state of what lives at an address."""
        owner = owner_of(self._state, address)
        return owner.state if owner is not None else BLOCK_FREE

    def _record(self, streams: list[int]) -> list[Any]:
        import cupy

        events = []
        with cupy.cuda.Device(self._device):  # the thread that frees may be at another device
            for stream in streams:
                event = cupy.cuda.Event(disable_timing=True)
                cupy.cuda.runtime.eventRecord(event.ptr, stream)
                events.append(event)
        return events

    def _events(self, freed: _Freed) -> list[Any]:
        if freed.events is None:
            freed.events = self._record(freed.streams)
        return freed.events

    def poll(self) -> None:
        """Free the waiting blocks whose events are over; not while a graph is captured."""
        waiting = list(self._waiting.items())
        over = {address: freed for address, freed in waiting if all(event.done for event in self._events(freed))}
        if over and self.on_end is not None:
            self.on_end(list(over))
        for address, freed in over.items():
            finish_deferred(self._state, address)
            if self._waiting.get(address) is freed:
                del self._waiting[address]

    def wait(self) -> None:
        """Wait for all events, since memory has run out."""
        for freed in list(self._waiting.values()):
            for event in self._events(freed):
                event.synchronize()
        self.poll()
