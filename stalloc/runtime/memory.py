"""The memory that one device gives to the heap and to arenas: from CuPy's pool, or mapped.

Contract: what the core's tables name is held here, and what is held is named there, whatever ends a call in the middle;
`release_unused` gives back whatever holds no live block.
"""

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

from stalloc.core import constants
from stalloc.core.state import DeviceState
from stalloc.device import Device
from stalloc.device.capture import relaxed_capture
from stalloc.device.mapped import MappedRange
from stalloc.runtime.deferred import Deferred
from stalloc.runtime.settings import Phase, Settings

if TYPE_CHECKING:
    from stalloc.runtime import poison


class DeviceMemory:
    """Segments of one device, and what goes back to it."""

    def __init__(
        self, device: Device, slow_function: int, settings: Settings, watch: "poison.Watch | None" = None
    ) -> None:
        self.device = device
        self.settings = settings
        self.phase = Phase.OBSERVING
        self.state = DeviceState(device.index, slow_function)
        self.pool = device.new_pool()
        self._segments: dict[int, Any] = {}  # base address -> what keeps it
        self._ranges: weakref.WeakSet[MappedRange] = weakref.WeakSet()  # that hold memory
        self._kept_mapped: list[Any] = []  # what a capture kept from being given back
        self._private: dict[tuple[int, int], tuple[int, int]] = {}  # torch's pool of graphs -> kind, graphs
        self._spare_kinds: list[int] = []  # of pools whose graphs are gone
        self._counted: dict[int, bool] = {}  # by thread: whether the call that is under way has counted its graph
        self._deferred = Deferred(self.state.address, device.index)
        self.poison = watch.add(device, self.state) if watch is not None else None
        if self.poison is not None:
            self._deferred.on_end = self.poison.ending
        self._lacking_bytes = 0  # the most that there was hardly room for, or none, since the last mark
        self._lock = threading.RLock()

    # --- segments

    def limit(self, fraction: float) -> None:
        """Take at most this share of the device's memory (torch.cuda.set_per_process_memory_fraction)."""
        import cupy

        with cupy.cuda.Device(self.device.index):
            self.pool.set_limit(size=int(fraction * self.device.total_bytes))

    def _malloc(self, size_bytes: int, *, for_arena: bool = False) -> Any:
        """Memory from the device, None if it has no more, even after everything unused was given back.

        It comes from the pool, or, for an arena that is to be mapped, as a range of addresses.
        """
        import cupy

        capturing = relaxed_capture() if self.state.record.private_kind else contextlib.nullcontext()
        with cupy.cuda.Device(self.device.index), capturing:
            for retry in (False, True):
                if retry:
                    self.state.record.num_retries += 1
                    if not self.state.record.private_kind:  # a capture must not wait for events
                        self._find_deferred()
                        self._deferred.wait()
                    self.release_unused()
                if self._has_room(size_bytes):
                    with contextlib.suppress(cupy.cuda.memory.OutOfMemoryError):
                        memory = self._new_range(size_bytes) if for_arena else None
                        memory = memory if memory is not None else self.pool.malloc(size_bytes)
                        if retry:
                            self._lacking_bytes = max(self._lacking_bytes, size_bytes)
                        if self.poison is not None:
                            self.poison.taken(memory.ptr, size_bytes)
                        return memory
        return None

    def _new_range(self, size_bytes: int) -> MappedRange | None:
        """A range of addresses with so much memory; None if arenas are not to be mapped, or cannot be."""
        memory = (
            self.device.new_range() if self.settings.arena == "mapped" and not self.state.record.private_kind else None
        )
        if memory is None or not memory.grow(size_bytes):
            return None
        self._ranges.add(memory)
        return memory

    def _has_room(self, size_bytes: int) -> bool:
        """Whether it is worth asking: CuPy's pool collects garbage, at length, before it says no."""
        return size_bytes <= self.free_bytes()

    def free_bytes(self) -> int:
        """What can still be taken from the device, within the limit."""
        free, _ = self.device.memory_info()
        limit = self.pool.get_limit()
        mapped = sum(memory.size_bytes for memory in self._ranges)
        return min(free, limit - self.pool.total_bytes() - mapped) if limit else free

    def _take_segment(self, pool: int, size_bytes: int) -> bool:
        if not self._has_room(size_bytes):
            self._save_memory()
        memory = self._malloc(size_bytes)
        if memory is None:
            return False
        self._segments[memory.ptr] = memory
        if self.state.give_segment(pool, memory.ptr, size_bytes):
            return True
        del self._segments[memory.ptr]
        return False

    def _save_memory(self) -> None:
        """The device is short of memory: no segment is cut for less than it holds any more, and holes are used."""
        if not self.state.record.memory_is_short and self.phase is not Phase.PLANNED:
            self.state.write(memory_is_short=1)

    def release_unused(self, idle_passes: int = 0) -> None:
        """Give back to the device what holds no live block: free segments, an arena that is no longer served.

        With `idle_passes` only segments that served nothing in the last so many passes over the plan.
        """
        with self._lock:  # torch.cuda.empty_cache() calls this from any thread
            try:
                self._release(idle_passes)
            except BaseException:
                self._match_segments()
                raise

    def _release(self, idle_passes: int) -> None:
        import cupy

        for base, size_bytes in self._take_free_segments(idle_passes).items():
            if self.poison is not None:
                self.poison.returned(base, size_bytes)
            self._let_go(self._segments.pop(base))
        with cupy.cuda.Device(self.device.index):
            self.pool.free_all_blocks()

    def _take_free_segments(self, idle_passes: int) -> dict[int, int]:
        """Take every segment without live blocks out of the core's tables: base -> bytes."""
        return self.state.remove_free_segments(idle_passes)

    def _match_segments(self) -> None:
        """Hold the memory that the core's tables name, and no other: an error may have come between the two."""
        raise NotImplementedError

    def _let_go(self, memory: Any) -> None:
        """Memory is not used any more; what is mapped waits until no graph is captured."""
        if not self.state.record.private_kind:
            self._kept_mapped.clear()
        elif isinstance(memory, MappedRange):
            self._kept_mapped.append(memory)

    # --- what other streams still use

    def share(self, address: int, stream: int) -> None:
        """A stream other than the one that a block was allocated on uses it: its free has to wait for that stream."""
        with self._lock:
            self._deferred.share(address, stream)

    def _find_deferred(self) -> None:
        """Know of freed blocks of which an interruption kept the word back."""
        if self.state.record.num_deferred > len(self._deferred):
            for address in self.state.deferred_blocks():
                self._deferred.add(address, capturing=True)  # its events come later

    # --- CUDA graphs
    #
    # A call that an interruption ends is made again. Python handles signals only at calls and loops, so lines without
    # any are done together, and what has been counted is known.

    def begin_capture(self, graph_pool: tuple[int, int]) -> None:
        """A graph is being captured into a pool of torch's: serve everything from a private pool until end_capture."""
        me = threading.get_ident()
        with self._lock:
            kind, users = self._private.get(graph_pool, (0, 0))
            if not self._counted.get(me):
                if users == 0:
                    unused = constants.PRIVATE_KINDS + len(self._private)
                    kind = self._spare_kinds[-1] if self._spare_kinds else unused
                if users == 0 and self._spare_kinds:
                    del self._spare_kinds[-1]
                self._private[graph_pool] = kind, users + 1
                self._counted[me] = True
            self.state.record.private_kind = kind
        self._counted[me] = False

    def end_capture(self) -> None:
        """The capture is over; what it allocated stays where it is."""
        self.state.record.private_kind = 0

    def release_capture(self, graph_pool: tuple[int, int]) -> None:
        """A graph is gone; with the last one of its pool the pool's memory may be given back."""
        me = threading.get_ident()
        with self._lock:
            kind, users = self._private.get(graph_pool, (0, 0))
            if not self._counted.get(me):
                if users > 1:
                    self._private[graph_pool] = kind, users - 1
                elif users == 1:
                    self.state.unpin_pools(kind)
                    del self._private[graph_pool]
                    self._spare_kinds += (kind,)
                self._counted[me] = True
        self._counted[me] = False
