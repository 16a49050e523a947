"""Blocks that other streams still use when they are freed (torch's record_stream).

Contract: such a block is handed out again only after every stream that was recorded for it has done all the work it
had when the block was freed. The host never blocks for it, unless memory has run out.
"""

from typing import Any

from stalloc.runtime import core


class Deferred:
    """The shared blocks of one device, and the freed ones that wait for events."""

    def __init__(self, state_address: int) -> None:
        self._state = state_address
        self._streams: dict[int, set[int]] = {}  # live block -> other streams that use it
        self._waiting: list[tuple[int, list[Any]]] = []  # freed block, events

    def share(self, address: int, stream: int) -> None:
        """Note a stream that uses the live block at `address`; an address that is not stalloc's is left alone."""
        if address in self._streams or core.share(self._state, address):
            self._streams.setdefault(address, set()).add(stream)

    def add(self, address: int) -> None:
        """A shared block was freed: wait for what its streams have been given so far."""
        import cupy

        events = []
        for stream in sorted(self._streams.pop(address, ())):
            event = cupy.cuda.Event(disable_timing=True)
            event.record(cupy.cuda.ExternalStream(stream))
            events.append(event)
        self._waiting.append((address, events))

    def poll(self) -> None:
        """Free the waiting blocks whose events are over."""
        waiting, self._waiting = self._waiting, []
        for address, events in waiting:
            if all(event.done for event in events):
                core.finish_deferred(self._state, address)
            else:
                self._waiting.append((address, events))

    def wait(self) -> None:
        """Wait for all events, since memory has run out."""
        for _, events in self._waiting:
            for event in events:
                event.synchronize()
        self.poll()
