"""The segments of one device, what goes back to it, and freed blocks that other streams still use (record_stream).

Contract: what the core's tables name is held here, and what is held is named there, whatever ends a call in the middle;
`release_unused` gives back whatever holds no live block. A block that other streams use is handed out again only after
every stream that was recorded for it has done all the work it had when the block was freed. The host never blocks for
it, unless memory has run out. The core does the rest (core/frees.py).
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from stalloc.core import constants, frees
from stalloc.core.state import DeviceState
from stalloc.device import Device
from stalloc.device.capture import is_captured, relaxed_capture
from stalloc.device.current_device import AtDevice
from stalloc.device.ordering import ordering
from stalloc.runtime.paging import Paging
from stalloc.runtime.sources import Source

if TYPE_CHECKING:
    from stalloc.poison.poison import Watch
    from stalloc.runtime.arenas import Arenas

_FIRST_EVENTS = 64  # each time as many are added as there are


class Deferred:
    """The shared blocks of one device, and the freed ones that wait for events."""

    def __init__(self, state: DeviceState, device: int) -> None:
        self._state, self._device = state, device
        self._on_end: Callable[[list[int]], None] | None = None
        if (functions := ordering()) is not None:
            state.order_streams(functions)

    def tell_first(self, on_end: Callable[[list[int]], None]) -> None:
        """Have something be called with the addresses of blocks that waited before they are free."""
        self._on_end = on_end
        self._state.write(frees_in_python=1)

    def add_events(self) -> None:
        import cupy

        runtime = cupy.cuda.runtime
        with AtDevice(self._device), relaxed_capture():
            number = max(_FIRST_EVENTS, self._state.record.shared.stream_uses_used - 1)
            events = [int(runtime.eventCreateWithFlags(runtime.eventDisableTiming)) for _ in range(number)]
        self._state.give_events(events)

    def poll(self) -> None:
        import cupy

        with AtDevice(self._device), relaxed_capture():  # what has no event yet gets it on a stream of this device
            if not self._ask():  # a stream of another device has none of these events: has it anything left to do?
                num_idle = self._state.record.shared.num_unrecorded
                _, streams = self._state.awaited()
                query = cupy.cuda.runtime.streamQuery
                if not any(map(is_captured, streams)) and all(query(stream) == 0 for stream in streams):
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


class DeviceMemory:
    """Segments of one device, from `source`."""

    def __init__(self, device: Device, source: Source, slow_function: int, watch: "Watch | None" = None) -> None:
        self.device, self.source = device, source
        self.state = DeviceState(device.index, slow_function)
        self.lock = threading.RLock()
        self.segments: dict[int, Any] = {}  #: base address -> what keeps it
        self.arenas: Arenas  #: who uses this memory; to be set before any of it is asked for
        self.paging = Paging(self)
        self.kept: list[Any] = []  #: what a capture kept from being given back
        self._inherited: list[Any] = []  # what a parent of this process held when it forked
        self.deferred = Deferred(self.state, device.index)
        self.poison = watch.add(device, self.state) if watch is not None else None
        if self.poison is not None:
            self.deferred.tell_first(self.poison.ending)
        self._budget_bytes = 0  # 0: none
        self.lacking_bytes = 0  #: the most that there was hardly room for, or none, since the last mark
        self.asleep_bytes = 0  #: of what is reserved: what sleeps, so that the device has it
        self._is_captured = False

    @property
    def is_capturing(self) -> bool:
        """Whether a graph is being captured: nothing is waited for, and no page moves."""
        return self._is_captured or self.state.record.hot.private_kind != 0

    def is_captured_now(self) -> bool:
        with self.lock, self.serving():
            return self.is_capturing

    @contextlib.contextmanager
    def serving(self) -> Iterator[int]:
        """Heed a capture of the stream that the last request was made on: the stream, 0: none. With the lock held."""
        was_captured, stream = self._is_captured, int(self.state.record.hot.last_stream)
        self._is_captured = is_captured(stream)
        try:
            yield stream if self._is_captured else 0
        finally:
            self._is_captured = was_captured

    def malloc(self, size_bytes: int) -> Any:
        """Memory from the device, None if it has no more, even after everything unused was given back."""
        with self.source.at_device(capturing=self.is_capturing):
            for retry in (False, True):
                if retry and self._is_captured:
                    return None  # what is unused goes back to the device only once that has done its work
                if retry:
                    self.state.record.statistics.num_retries += 1
                    self.wait_for_deferred()
                    self.release_unused()
                if not self.has_room(size_bytes):
                    continue
                memory = self.source.take(size_bytes)
                if memory is None:
                    continue
                if retry:
                    self.lacking_bytes = max(self.lacking_bytes, size_bytes)
                if self.poison is not None:
                    self.poison.taken(memory.ptr, size_bytes)
                return memory
        return None

    def limit(self, fraction: float) -> None:
        share_bytes = int(fraction * self.device.total_bytes)
        self.source.limit_bytes = min(share_bytes, self._budget_bytes) if self._budget_bytes else share_bytes
        self.paging.forget_room()

    def keep_within(self, budget_bytes: int) -> None:
        """Take no more than a budget from the device, whatever share the program allows itself later."""
        self._budget_bytes = budget_bytes
        limit_bytes = self.source.limit_bytes
        self.source.limit_bytes = min(limit_bytes, budget_bytes) if limit_bytes else budget_bytes
        self.paging.forget_room()

    def has_room(self, size_bytes: int) -> bool:
        return size_bytes <= self.source.free_bytes()

    def take_segment(self, pool: int, size_bytes: int) -> bool:
        """Add a segment of so many bytes to a pool; False if the device has none, or the tables are full."""
        if not self.has_room(size_bytes):
            self.save()
        memory = self.malloc(size_bytes)
        if memory is None:
            return False
        self.segments[memory.ptr] = memory
        if self.state.heap.give_segment(pool, memory.ptr, size_bytes):
            return True
        del self.segments[memory.ptr]
        return False

    def save(self) -> None:
        """The device is short of memory: no segment is cut for less than it holds any more, and holes are used."""
        if not self.state.record.policy.memory_is_short and self.state.record.hot.mode != constants.MODE_PLANNED:
            self.state.write(memory_is_short=1)

    def release_unused(self, idle_iterations: int = 0) -> None:
        """Give back to the device what holds no live block: free segments, an arena that is no longer served.

        With `idle_iterations` only segments that served nothing in the last so many iterations over the plan.
        """
        if not self.source.is_used:
            return
        with self.lock, self.serving():  # torch.cuda.empty_cache() calls this from any thread
            try:
                self.arenas.before_release()
                self._release_segments(idle_iterations)
                if self.source.paged and not idle_iterations:
                    self.paging.release()
            except BaseException:
                self.arenas.match()
                raise

    def _release_segments(self, idle_iterations: int) -> None:
        for base, size_bytes in self.state.heap.remove_free_segments(idle_iterations).items():
            if self.poison is not None:
                self.poison.returned(base, size_bytes)
            self.let_go(self.segments.pop(base))
        self.source.collect()

    def holder_of(self, base: int) -> Any:
        if base in self.segments:
            return self.segments[base]
        ranges = self.source.ranges
        return next((one for one in ranges if one.ptr <= base < one.ptr + one.size_bytes), self.arenas.arena)

    def let_go(self, memory: Any) -> None:
        if self.is_capturing:
            self.kept.append(memory)
            return
        self.kept.clear()
        if self.source.paged:
            self.source.wait()
            self.paging.sweep()

    def wait_for_deferred(self) -> None:
        with self.lock, self.serving():  # torch.cuda.empty_cache() calls this from any thread
            if not self.is_capturing:  # a capture must not wait for events
                self.deferred.wait()

    def free_deferred(self) -> bool:
        before = self.state.record.hot.num_deferred
        if before == 0 or self.is_capturing:
            return False  # events must not be asked for while a graph is captured
        self.deferred.poll()
        return self.state.record.hot.num_deferred < before

    def forked(self) -> None:
        self.lock = threading.RLock()
        self.state.write(is_asking=0)  # whoever asked is gone
        self._inherited = [self.segments, self.kept]
        self.source.forked()
        self.state.heap.keep_ranges()
        # threads that are gone may have left others
        self.segments = dict.fromkeys(self.state.heap.segments()[0].tolist())
