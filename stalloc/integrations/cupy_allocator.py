"""CuPy through `cupy.cuda.set_allocator`: arrays from the same runtime that serves torch.

CuPy's own C-function memory calls the compiled core directly; the current stream travels in its `param`.
"""

from collections.abc import Callable
from typing import Any

from stalloc.runtime import Runtime, entry

_previous: Any = None
_installed: Any = None


def make_allocator(runtime: Runtime) -> Callable[[int], Any]:
    """A CuPy allocator: bytes -> MemoryPointer on the current device and stream.

    It raises cupy.cuda.memory.OutOfMemoryError when the device has no memory left.
    """
    from cupy.cuda import get_current_stream
    from cupy.cuda.device import get_device_id
    from cupy.cuda.memory import CFunctionAllocatorMemory, MemoryPointer, OutOfMemoryError

    malloc, free = entry.cupy_entries(runtime.states.ctypes.data)

    def allocate(nbytes: int) -> Any:
        memory = CFunctionAllocatorMemory(nbytes, get_current_stream().ptr, malloc, free, get_device_id())
        if memory.ptr == 0 and nbytes > 0:
            state = runtime.controllers[get_device_id()].state
            error = OutOfMemoryError(nbytes, state["ALLOCATED"])
            error.args = (state.out_of_memory_text,)
            raise error
        return MemoryPointer(memory, 0)

    return allocate


def install(runtime: Runtime) -> None:
    """Make stalloc CuPy's allocator."""
    global _previous, _installed
    import cupy

    if _installed is None:
        _previous = cupy.cuda.get_allocator()
        _installed = make_allocator(runtime)
        cupy.cuda.set_allocator(_installed)


def uninstall() -> None:
    """Give CuPy back the allocator that it had; arrays made meanwhile stay valid."""
    global _previous, _installed
    import cupy

    if _installed is not None:
        if cupy.cuda.get_allocator() is _installed:
            cupy.cuda.set_allocator(_previous)
        _previous = _installed = None
