"""Blocks that other streams still use when they are freed (torch's record_stream): their events, and waiting for them.

Contract: such a block is handed out again only after every stream that was recorded for it has done all the work it
had when the block was freed. The host never blocks for it, unless memory has run out. The core does it all
(core/frees.py) but for what is here.
"""

import time
from collections.abc import Callable

import numpy as np

from stalloc.core import frees
from stalloc.core.state import DeviceState
from stalloc.device.capture import is_captured, relaxed_capture
from stalloc.device.current_device import AtDevice
from stalloc.device.ordering import ordering

_FIRST_EVENTS = 64  # each time as many are added as there are


class Deferred:
    """The shared blocks of one device, and the freed ones that wait for events."""

    def __init__(self, state: DeviceState, device: int) -> None:
        self._state = state
        self._device = device
        self._on_end: Callable[[list[int]], None] | None = None
        if (functions := ordering()) is not None:
            state.order_streams(functions)

    def tell_first(self, on_end: Callable[[list[int]], None]) -> None:
        """Have something be called with the addresses of blocks that waited before they are free."""
        self._on_end = on_end
        self._state.write(frees_in_python=1)

    def add_events(self) -> None:
        """Make events for more blocks; they are never given back, since the core asks for them as long as it serves."""
        import cupy

        runtime = cupy.cuda.runtime
        with AtDevice(self._device), relaxed_capture():
            number = max(_FIRST_EVENTS, self._state.record.shared.stream_uses_used - 1)
            events = [int(runtime.eventCreateWithFlags(runtime.eventDisableTiming)) for _ in range(number)]
        self._state.give_events(events)

    def poll(self) -> None:
        """Free the waiting blocks that other streams are done with; not while a graph is captured."""
        import cupy

        with AtDevice(self._device), relaxed_capture():  # what has no event yet gets it on a stream of this device
            if not self._ask():  # a stream of another device has none of these events: has it anything left to do?
                num_idle = self._state.record.shared.num_unrecorded
                _, streams = self._state.awaited()
                if not any(map(is_captured, streams)) and all(
                    cupy.cuda.runtime.streamQuery(stream) == 0 for stream in streams
                ):
                    self._ask(num_idle)

    def wait(self) -> None:
        """Wait for all that other streams have been given, since memory has run out."""
        if not self._state.record.hot.num_deferred:
            return
        import cupy

        with AtDevice(self._device), relaxed_capture():
            self._ask()
            num_idle = self._state.record.shared.num_unrecorded
            events, streams = self._state.awaited()
            for event in events:
                cupy.cuda.runtime.eventSynchronize(event)
            if any(map(is_captured, streams)):  # what they were given is done once the graph is launched
                num_idle, streams = 0, []
            for stream in streams:
                cupy.cuda.runtime.streamSynchronize(stream)
            self._ask(num_idle)

    def _ask(self, num_idle: int = 0) -> bool:
        """Free the blocks of which the driver says that their uses are over; whether it knew of all.

        The first `num_idle` uses ever of which it cannot know are over: their streams were seen idle since.
        """
        address = self._state.address
        if self._on_end is None:
            while (answer := frees.poll(address, num_idle)) == frees.BUSY:
                time.sleep(0)
            return bool(answer == frees.KNOWN)
        found = np.empty(self._state.record.shared.stream_uses_used, np.int64)
        while (asked := frees.ask(address, num_idle, found))[0] == frees.BUSY:
            time.sleep(0)
        if asked[0]:
            self._on_end(found[: asked[0]].tolist())
            frees.release_those_over(address)
        return bool(asked[1])
