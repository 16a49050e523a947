"""CuPy through `cupy.cuda.set_allocator`: arrays from the same runtime that serves torch.

CuPy's own C-function memory calls the compiled core directly; the current stream travels in its `param`. Memory hooks
are called as by CuPy's pool, for arrays that are made while a hook is in force.

Between `Stream.begin_capture` and `end_capture` everything is served from a pool that only captures of CuPy use, one a
device: what a graph writes to is given to no array outside. Before, free memory goes back to the device, as
torch.cuda.graph does it, since none can while the capture is on. CuPy's graphs do not say when they are gone, so their
memory stays; what a capture frees serves the next one.
"""

import ctypes
import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

from stalloc.core import constants
from stalloc.core.entry import cupy_entries
from stalloc.device.capture import PER_THREAD
from stalloc.integrations.cupy_default_pool import call_outside, hand_out, take_back
from stalloc.integrations.installation import installation
from stalloc.runtime import Runtime
from stalloc.runtime.captures import OF_CUPY
from stalloc.sizes import aligned

_own: dict[str, Callable[..., Any]] = {}  # methods of CuPy's streams


def _make_allocator(runtime: Runtime) -> Callable[[int], Any]:
    """A CuPy allocator: bytes -> MemoryPointer on the current device and stream.

    It raises CuPy's OutOfMemoryError when the device has no memory left, CUDARuntimeError when the driver fails.
    """
    from cupy.cuda import get_current_stream
    from cupy.cuda.device import get_device_id
    from cupy.cuda.memory import Memory, MemoryPointer
    from cupy.cuda.memory_hook import _has_memory_hooks

    malloc, free = cupy_entries(runtime.states.ctypes.data, runtime.entries, runtime.call_sites.malloc_word)
    pool_memory, may_have_hooks, part = _memory_class(free), False, constants.ALIGNMENT - 1

    def heed_hooks() -> None:
        nonlocal may_have_hooks
        may_have_hooks = True

    before_first_hook(heed_hooks)

    def allocate(nbytes: int, heard: bool = False) -> Any:
        # all of this is what a request costs beside what CuPy's own pool does for it: names are local, calls are few
        if may_have_hooks and not heard and _has_memory_hooks():
            return _allocate_with_hooks(runtime, allocate, operator.index(nbytes))
        stream = get_current_stream().ptr
        if stream == PER_THREAD:  # one handle of all threads; this name is told from handles by its last bits
            stream = threading.get_ident() << 4 | PER_THREAD
        memory = pool_memory(nbytes, stream, malloc, free, get_device_id())
        if not memory.ptr:
            if nbytes == 0:
                return MemoryPointer(Memory(0), 0)
            raise _out_of_memory(runtime, nbytes)
        if nbytes & part:
            memory.size = aligned(nbytes)
        return MemoryPointer(memory, 0)

    def allocate_and_tell(nbytes: int) -> Any:
        if runtime.watch is not None:
            runtime.watch.raise_found()
        return allocate(nbytes)

    return allocate if runtime.watch is None else allocate_and_tell


def _memory_class(free: int) -> Any:
    """Memory as of CuPy's pool: it knows its rounded size, it can be freed by hand, and hooks hear of its end."""
    from cupy.cuda.memory import CFunctionAllocatorMemory
    from cupy.cuda.memory_hook import _has_memory_hooks, get_memory_hooks

    free_now = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(free)

    class PoolMemory(CFunctionAllocatorMemory):
        __slots__ = ()

        def free(self) -> None:
            """Free it now; nothing happens the second time."""
            memory: Any = self  # the attributes are CuPy's
            hooks = list(get_memory_hooks().values()) if _has_memory_hooks() else ()
            facts = {"device_id": memory.device_id, "mem_size": memory.size, "mem_ptr": memory.ptr, "pmem_id": id(self)}
            address, memory.ptr = memory.ptr, 0
            if not address:
                return
            try:  # no call comes before it, so no interruption
                for hook in hooks:
                    hook.free_preprocess(**facts)
            finally:
                free_now(None, address, memory.device_id)
                for hook in hooks:
                    hook.free_postprocess(**facts)

    def tell_hooks() -> None:
        """Let hooks hear of the end of memory from now on, of such too that is there already."""
        PoolMemory.__del__ = lambda memory: memory.free() if _has_memory_hooks() else None

    before_first_hook(tell_hooks)
    return PoolMemory


def _out_of_memory(runtime: Runtime, nbytes: int) -> Exception:
    from cupy.cuda.device import get_device_id
    from cupy.cuda.memory import OutOfMemoryError
    from cupy.cuda.runtime import CUDARuntimeError

    controller = runtime.controllers[get_device_id()]
    state = controller.state
    if status := state.record.driver.driver_error:
        return CUDARuntimeError(status)
    error = OutOfMemoryError(nbytes, state.record.statistics.reserved_bytes, controller.memory.source.limit_bytes)
    error.args = (state.out_of_memory_text,)
    return error


def _allocate_with_hooks(runtime: Runtime, allocate: Callable[[int, bool], Any], nbytes: int) -> Any:
    from cupy.cuda.device import get_device_id
    from cupy.cuda.memory import MemoryPointer
    from cupy.cuda.memory_hook import get_memory_hooks

    in_force = get_memory_hooks()
    device, hooks, size = get_device_id(), list(in_force.values()), aligned(nbytes)
    state = runtime.controllers[device].state
    for hook in hooks:
        hook.malloc_preprocess(device_id=device, size=nbytes, mem_size=size)
    memory = None
    num_segments, reserved = state.record.statistics.num_segment_allocs, state.record.statistics.reserved_bytes
    try:
        kept = dict(in_force)
        in_force.clear()  # which the pool below has too, that gives segments: they are to hear of each allocation once
        try:
            memory = allocate(nbytes, True).mem
        finally:
            in_force.update(kept)
        if state.record.statistics.num_segment_allocs > num_segments:  # it came from the device just now
            taken = max(size, state.record.statistics.reserved_bytes - reserved)
            for hook in hooks:
                hook.alloc_preprocess(device_id=device, mem_size=taken)
                hook.alloc_postprocess(device_id=device, mem_size=taken, mem_ptr=memory.ptr)
    finally:
        address, identity = (memory.ptr, id(memory)) if memory is not None else (0, 0)
        for hook in hooks:
            hook.malloc_postprocess(device_id=device, size=nbytes, mem_size=size, mem_ptr=address, pmem_id=identity)
    return MemoryPointer(memory, 0)


def before_first_hook(function: Callable[[], None]) -> None:
    """Call a function before the first memory hook of this process is in force.

    Programs without hooks do not pay for them, and no interruption of theirs is lost in a finaliser.
    """
    from cupy.cuda.memory_hook import MemoryHook, _has_memory_hooks

    if _has_memory_hooks():
        function()
        return
    enter = MemoryHook.__enter__

    def call_and_enter(hook: Any) -> Any:
        MemoryHook.__enter__ = enter
        function()
        return enter(hook)

    MemoryHook.__enter__ = call_and_enter


def install(runtime: Runtime) -> None:
    """Make stalloc CuPy's allocator, and its default pool the one that answers for it.

    A thread that is inside `cupy.cuda.using_allocator` keeps the allocator that it chose.
    """
    import cupy

    if installation.cupy_allocator is not None:
        return
    installation.cupy_before = call_outside(cupy.cuda.get_allocator)
    installation.cupy_allocator = _make_allocator(runtime)
    hand_out().serve(runtime, installation.cupy_allocator)
    _heed_captures(runtime)
    call_outside(cupy.cuda.set_allocator, installation.cupy_allocator)


def uninstall() -> None:
    """Give CuPy back the allocator that it had; arrays made meanwhile stay valid."""
    import cupy

    if installation.cupy_allocator is None:
        return
    if call_outside(cupy.cuda.get_allocator) is installation.cupy_allocator:
        call_outside(cupy.cuda.set_allocator, installation.cupy_before)
    take_back()
    for name, function in _own.items():
        setattr(cupy.cuda.stream._BaseStream, name, function)
    _own.clear()
    installation.cupy_before = installation.cupy_allocator = None


def _heed_captures(runtime: Runtime) -> None:
    from cupy.cuda.device import get_device_id
    from cupy.cuda.stream import _BaseStream

    begin, end = _own["begin_capture"], _own["end_capture"] = _BaseStream.begin_capture, _BaseStream.end_capture

    @functools.wraps(begin)
    def begin_capture(stream: Any, *args: Any, **kwargs: Any) -> Any:
        controller = runtime.controllers[get_device_id()]
        captures = controller.captures
        if not controller.memory.is_capturing:
            controller.memory.release_unused()
        captures.begin(OF_CUPY)
        try:
            return begin(stream, *args, **kwargs)
        except BaseException:
            captures.end()
            raise

    @functools.wraps(end)
    def end_capture(stream: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(stream, *args, **kwargs)
        finally:
            runtime.controllers[get_device_id()].captures.end()

    _BaseStream.begin_capture, _BaseStream.end_capture = begin_capture, end_capture
