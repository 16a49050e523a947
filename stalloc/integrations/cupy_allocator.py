"""CuPy through `cupy.cuda.set_allocator`: arrays from the same runtime that serves torch.

CuPy's own C-function memory calls the compiled core directly; the current stream travels in its `param`. Memory hooks
are called as by CuPy's pool, for arrays that are made while a hook is in force.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from stalloc.integrations.cupy_pool import Pool
from stalloc.runtime import Runtime, entry, layout

_PER_THREAD = 2  # cudaStreamPerThread

_previous: Any = None
_installed: Any = None
_own_pool_function: Any = None
_pool: Pool | None = None


def make_allocator(runtime: Runtime) -> Callable[[int], Any]:
    """A CuPy allocator: bytes -> MemoryPointer on the current device and stream.

    It raises cupy.cuda.memory.OutOfMemoryError when the device has no memory left.
    """
    from cupy.cuda import get_current_stream
    from cupy.cuda.device import get_device_id
    from cupy.cuda.memory import CFunctionAllocatorMemory, MemoryPointer, OutOfMemoryError
    from cupy.cuda.memory_hook import _has_memory_hooks, get_memory_hooks

    malloc, free = entry.cupy_entries(runtime.states.ctypes.data, runtime.entries)

    def current_stream() -> int:
        """The current stream's handle; for the default stream of a thread, whose handle all threads share, a name.

        It is told from handles, which are addresses, by its last bits.
        """
        handle = get_current_stream().ptr
        return threading.get_ident() << 4 | handle if handle == _PER_THREAD else handle

    class HookedMemory(CFunctionAllocatorMemory):
        """Memory whose end the hooks hear of."""

        rounded_bytes = 0

        def __del__(self) -> None:
            if self.ptr and _has_memory_hooks():
                facts = {"mem_size": self.rounded_bytes, "mem_ptr": self.ptr, "pmem_id": id(self)}
                for hook in get_memory_hooks().values():
                    hook.free_preprocess(device_id=self.device_id, **facts)
                    hook.free_postprocess(device_id=self.device_id, **facts)

    def allocate(nbytes: int) -> Any:
        if _has_memory_hooks():
            return allocate_with_hooks(nbytes)
        memory = CFunctionAllocatorMemory(nbytes, current_stream(), malloc, free, get_device_id())
        if memory.ptr == 0 and nbytes > 0:
            raise out_of_memory(nbytes)
        return MemoryPointer(memory, 0)

    def out_of_memory(nbytes: int) -> Exception:
        state = runtime.controllers[get_device_id()].state
        error = OutOfMemoryError(nbytes, state["ALLOCATED"])
        error.args = (state.out_of_memory_text,)
        return error

    @contextlib.contextmanager
    def without_hooks() -> Iterator[None]:
        """The pool below, which gives segments, has the same hooks; they are to hear of each allocation once."""
        hooks = get_memory_hooks()
        kept = dict(hooks)
        hooks.clear()
        try:
            yield
        finally:
            hooks.update(kept)

    def allocate_with_hooks(nbytes: int) -> Any:
        device, hooks = get_device_id(), list(get_memory_hooks().values())
        rounded = (nbytes + layout.ALIGNMENT - 1) & -layout.ALIGNMENT
        state = runtime.controllers[device].state
        for hook in hooks:
            hook.malloc_preprocess(device_id=device, size=nbytes, mem_size=rounded)
        address, memory = 0, None
        num_segments, reserved = state["NUM_SEGMENT_ALLOCS"], state["RESERVED"]
        try:
            with without_hooks():
                memory = HookedMemory(nbytes, current_stream(), malloc, free, device)
            if memory.ptr == 0 and nbytes > 0:
                raise out_of_memory(nbytes)
            memory.rounded_bytes, address = rounded, memory.ptr
            if state["NUM_SEGMENT_ALLOCS"] > num_segments:  # it came from the device just now
                taken = max(rounded, state["RESERVED"] - reserved)
                for hook in hooks:
                    hook.alloc_preprocess(device_id=device, mem_size=taken)
                    hook.alloc_postprocess(device_id=device, mem_size=taken, mem_ptr=address)
        finally:
            facts = {"mem_size": rounded, "mem_ptr": address, "pmem_id": id(memory) if address else 0}
            for hook in hooks:
                hook.malloc_postprocess(device_id=device, size=nbytes, **facts)
        return MemoryPointer(memory, 0)

    def allocate_and_tell(nbytes: int) -> Any:
        if runtime.watch is not None:
            runtime.watch.raise_found()
        return allocate(nbytes)

    return allocate if runtime.watch is None else allocate_and_tell


def install(runtime: Runtime) -> None:
    """Make stalloc CuPy's allocator, and its default pool the one that answers for it."""
    global _previous, _installed, _own_pool_function, _pool
    import cupy

    if _installed is not None:
        return
    _previous, _own_pool_function = cupy.cuda.get_allocator(), cupy.get_default_memory_pool
    _installed = make_allocator(runtime)
    _pool = pool = Pool(runtime, _installed, _own_pool_function())
    cupy.cuda.set_allocator(_installed)
    cupy.get_default_memory_pool = lambda: pool


def uninstall() -> None:
    """Give CuPy back the allocator that it had; arrays made meanwhile stay valid."""
    global _previous, _installed, _own_pool_function, _pool
    import cupy

    if _installed is None:
        return
    if cupy.cuda.get_allocator() is _installed:
        cupy.cuda.set_allocator(_previous)
    cupy.get_default_memory_pool = _own_pool_function
    if _pool is not None:
        _pool.installed = False
    _previous = _installed = _own_pool_function = _pool = None
