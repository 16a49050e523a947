"""The segments of one device, and what goes back to it.

Contract: what the core's tables name is held here, and what is held is named there, whatever ends a call in the middle;
`release_unused` gives back whatever holds no live block.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from stalloc.core import constants
from stalloc.core.state import DeviceState
from stalloc.device import Device
from stalloc.device.capture import is_captured
from stalloc.runtime.deferred import Deferred
from stalloc.runtime.eviction import Eviction
from stalloc.runtime.paging import Paging
from stalloc.runtime.sources import Source

if TYPE_CHECKING:
    from stalloc.core.arena_schedule import ArenaSchedule
    from stalloc.poison.poison_watch import Watch


class ArenaHolder(Protocol):
    """Who has memory of the device beside the segments."""

    arena: Any  #: the memory of the arena in place; None: there is none
    schedule: "ArenaSchedule | None"  #: what is served by pages

    def before_release(self) -> None:
        """Segments without live blocks are about to go back."""

    def match(self) -> None:
        """Make the memory that is held agree with the core's tables after an interrupted call."""


class DeviceMemory:
    """Segments of one device, from `source`."""

    def __init__(self, device: Device, source: Source, slow_function: int, watch: "Watch | None" = None) -> None:
        self.device, self.source = device, source
        self.state = DeviceState(device.index, slow_function)
        self.lock = threading.RLock()
        self.segments: dict[int, Any] = {}  #: base address -> what keeps it
        self.arenas: ArenaHolder  #: who uses this memory; to be set before any of it is asked for
        self.paging = Paging(self)
        self.eviction = Eviction(self.state)
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
        """Heed a capture of the stream that the last request was made on, by whomever: the stream, 0: none is captured.

        With the lock held.
        """
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
        """Take at most this share of the device's memory (torch.cuda.set_per_process_memory_fraction)."""
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
        """This process is a fork: use what the parent took from the device, but never give it back."""
        self.lock = threading.RLock()
        self.state.write(is_asking=0)  # whoever asked is gone
        self._inherited = [self.segments, self.kept]
        self.source.forked()
        self.state.heap.keep_ranges()
        # threads that are gone may have left others
        self.segments = dict.fromkeys(self.state.heap.segments()[0].tolist())
