"""What `cupy.get_default_memory_pool()` is while stalloc serves CuPy: the same questions, answered truly.

Contract: sizes are those of stalloc's one pool for torch and CuPy on the current device, plus what CuPy's own default
pool still holds from before; limits and releases concern both. Uninstalled, only CuPy's own pool is left in it, so a
program may keep the object.
"""

from typing import Any

from stalloc.runtime import Controller, Runtime, layout
from stalloc.runtime.statistics import segments


class Pool:
    """The methods of cupy.cuda.MemoryPool, for the current device."""

    def __init__(self, runtime: Runtime, allocate: Any, own: Any) -> None:
        self._runtime = runtime
        self._allocate = allocate
        self._own = own  # CuPy's default pool
        self.installed = True

    def _controller(self) -> Controller:
        from cupy.cuda.device import get_device_id

        return self._runtime.controllers[get_device_id()]

    def malloc(self, size: int) -> Any:
        """A MemoryPointer of `size` bytes on the current device and stream."""
        return (self._allocate if self.installed else self._own.malloc)(size)

    def used_bytes(self) -> int:
        """Bytes that are allocated now, rounded up to 512 each."""
        used = self._controller().state["ALLOCATED"] if self.installed else 0
        return used + self._own.used_bytes()

    def total_bytes(self) -> int:
        """Bytes taken from the device, used or not."""
        total = self._controller().state["RESERVED"] if self.installed else 0
        return total + self._own.total_bytes()

    def free_bytes(self) -> int:
        """Bytes taken from the device that nobody uses now."""
        return self.total_bytes() - self.used_bytes()

    def n_free_blocks(self) -> int:
        """How many free ranges there are."""
        free = 0
        if self.installed:
            free = sum(
                block.state == layout.BLOCK_FREE
                for segment in segments(self._controller().state)
                for block in segment.blocks
            )
        return free + self._own.n_free_blocks()

    def free_all_blocks(self, stream: Any = None) -> None:
        """Give unused memory back to the device: of all streams, stalloc parts segments by stream already."""
        if self.installed:
            self._controller().release_unused()
        self._own.free_all_blocks(stream)

    def free_all_free(self) -> None:
        """The old name of free_all_blocks."""
        self.free_all_blocks()

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """Take at most `size` bytes, or a `fraction` of the device's memory; 0 or neither: no limit.

        Raises ValueError if both are given or one is out of range.
        """
        self._own.set_limit(size=size, fraction=fraction)
        if self.installed:
            self._controller().pool.set_limit(size=self._own.get_limit())

    def get_limit(self) -> int:
        """The limit in bytes; 0: none."""
        return int(self._controller().pool.get_limit() if self.installed else self._own.get_limit())
