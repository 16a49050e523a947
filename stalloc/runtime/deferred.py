"""Blocks that other streams still use when they are freed (torch's record_stream).

Contract: such a block is handed out again only after every stream that was recorded for it has done all the work it
had when the block was freed. The host never blocks for it, unless memory has run out.
"""

from collections.abc import Callable
from typing import Any

from stalloc.runtime import core


class Deferred:
    """The shared blocks of one device, and the freed ones that wait for events."""

    def __init__(self, state_address: int, device: int) -> None:
        self._state = state_address
        self._device = device
        self._streams: dict[int, set[int]] = {}  # live block -> other streams that use it
        self.on_end: Callable[[int], None] | None = None  #: called before a block that waited is free
        self._waiting: list[tuple[int, list[int], list[Any]]] = []  # freed block, streams, their events once recorded

    def share(self, address: int, stream: int) -> None:
        """Note a stream that uses the live block at `address`; an address that is not stalloc's is left alone."""
        if address in self._streams or core.share(self._state, address):
            self._streams.setdefault(address, set()).add(stream)

    def add(self, address: int, *, capturing: bool) -> None:
        """A shared block was freed: wait for what its streams have been given so far.

        While a CUDA graph is captured the events wait for its end: one recorded in a capture can never be asked.
        """
        streams = sorted(self._streams.pop(address, ()))
        self._waiting.append((address, streams, [] if capturing else self._record(streams)))

    def _record(self, streams: list[int]) -> list[Any]:
        import cupy

        events = []
        with cupy.cuda.Device(self._device):  # the thread that frees may be at another device
            for stream in streams:
                event = cupy.cuda.Event(disable_timing=True)
                cupy.cuda.runtime.eventRecord(event.ptr, stream)
                events.append(event)
        return events

    def poll(self) -> None:
        """Free the waiting blocks whose events are over; not while a graph is captured."""
        waiting, self._waiting = self._waiting, []
        try:
            while waiting:
                address, streams, events = waiting[-1]
                events = events or self._record(streams)
                if all(event.done for event in events):
                    if self.on_end is not None:
                        self.on_end(address)
                    core.finish_deferred(self._state, address)
                else:
                    self._waiting.append((address, streams, events))
                waiting.pop()
        finally:
            self._waiting += waiting  # an error loses none

    def wait(self) -> None:
        """Wait for all events, since memory has run out."""
        for _, streams, events in list(self._waiting):
            for event in events or self._record(streams):
                event.synchronize()
        self.poll()
