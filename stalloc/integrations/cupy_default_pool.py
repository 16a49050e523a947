"""What `cupy.get_default_memory_pool()` is while stalloc serves CuPy: the same questions, answered truly.

Contract: sizes are those of stalloc's one pool for torch and CuPy on the current device, plus what CuPy's own default
pool still holds from before; limits and releases concern both. Uninstalled, only CuPy's own pool is left in it, so a
program may keep the object.
"""

import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from stalloc.integrations.installation import installation

if TYPE_CHECKING:
    from stalloc.runtime import Controller, Runtime


class Pool:
    """The methods of cupy.cuda.MemoryPool, for the current device."""

    def __init__(self, own: Any, before_first: Callable[[], object] | None) -> None:
        """`own` is CuPy's default pool, which serves until stalloc does; `before_first` is called once before."""
        self._own, self._allocate, self._before_first = own, own.malloc, before_first
        self._runtime: Runtime | None = None

    def serve(self, runtime: "Runtime", allocate: Any) -> None:
        """Answer for `runtime`, within the limits that were set on CuPy's pool."""
        self._runtime, self._allocate, self._before_first = runtime, allocate, None
        for controller in runtime.controllers:
            controller.memory.source.before_use(partial(self._hand_over, controller))

    def _hand_over(self, controller: "Controller") -> None:
        if self._runtime is not None:
            self._own.free_all_blocks()  # nobody asks there any more
            controller.memory.source.limit_bytes = self.get_limit()

    def leave(self) -> None:
        self._runtime, self._allocate = None, self._own.malloc

    def _controller(self) -> "Controller | None":
        from cupy.cuda.device import get_device_id

        return self._runtime.controllers[get_device_id()] if self._runtime is not None else None

    def malloc(self, size: int) -> Any:
        before_first = self._before_first
        if before_first is not None:
            before_first()  # other threads wait there too
            self._before_first = None
        return self._allocate(size)

    def used_bytes(self) -> int:
        controller = self._controller()
        return self._own.used_bytes() + (controller.state.record.total.allocated_bytes if controller is not None else 0)

    def total_bytes(self) -> int:
        controller = self._controller()
        ours = controller.state.record.statistics.reserved_bytes if controller is not None else 0
        return self._own.total_bytes() + ours

    def free_bytes(self) -> int:
        return self.total_bytes() - self.used_bytes()

    def n_free_blocks(self) -> int:
        own, controller = self._own.n_free_blocks(), self._controller()
        if controller is None:
            return own
        from stalloc.core.constants import BLOCK_FREE
        from stalloc.core.snapshot import segments

        ours = (block for segment in segments(controller.state) for block in segment.blocks)
        return own + sum(block.state == BLOCK_FREE for block in ours)

    def free_all_blocks(self, stream: Any = None) -> None:
        """Give unused memory back to the device: of all streams, stalloc parts segments by stream already."""
        controller = self._controller()
        if controller is not None:
            controller.memory.release_unused()
        self._own.free_all_blocks(stream)

    def free_all_free(self) -> None:
        warnings.warn("free_all_free is deprecated: use free_all_blocks.", DeprecationWarning, stacklevel=2)
        self.free_all_blocks()

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """Take at most `size` bytes, or a `fraction` of the device's memory; 0 or neither: no limit.

        Raises ValueError if both are given or one is out of range.
        """
        self._own.set_limit(size=size, fraction=fraction)
        controller = self._controller()
        if controller is not None:
            controller.memory.source.limit_bytes = self._own.get_limit()

    def get_limit(self) -> int:
        """The less of what is set on CuPy's pool and on stalloc's source."""
        controller = self._controller()
        ours = controller.memory.source.limit_bytes if controller is not None else 0
        return min((int(limit) for limit in (self._own.get_limit(), ours) if limit), default=0)


def hand_out(before_first: Callable[[], object] | None = None) -> Pool:
    """Let `cupy.get_default_memory_pool()` be a Pool, the same one each time, and return it."""
    import cupy

    if installation.cupy_pool_before is None:
        installation.cupy_pool_before = cupy.get_default_memory_pool
        pool = installation.cupy_pool = installation.cupy_pool or Pool(installation.cupy_pool_before(), before_first)
        cupy.get_default_memory_pool = lambda: pool
    assert installation.cupy_pool is not None
    return installation.cupy_pool


def take_back() -> None:
    """Let it be CuPy's own again; a Pool that the program keeps answers for that one."""
    import cupy

    if installation.cupy_pool_before is not None and installation.cupy_pool is not None:
        cupy.get_default_memory_pool = installation.cupy_pool_before
        installation.cupy_pool_before = None
        installation.cupy_pool.leave()


def call_outside(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function as from outside of any `cupy.cuda.using_allocator`, which binds the thread that is in it."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments)), name="stalloc set-up")
    thread.start()
    thread.join()
    return results[0]
