"""torch through its pluggable allocator: compiled callbacks, statistics under torch's own names, steps from optimizers.

torch takes a pluggable allocator only before CUDA is first used, and never gives it back. What torch then refuses to
answer (statistics, peaks) is answered here from the runtime's counters.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalloc.errors import SetupError
from stalloc.runtime import Runtime, entry
from stalloc.runtime.statistics import torch_statistics

_keep: list[Any] = []  # what torch holds addresses of


def check_untouched() -> None:
    """Raise SetupError if torch has used CUDA already, since its allocator cannot be changed then."""
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        raise SetupError(
            "torch has used CUDA before stalloc was installed: call stalloc.install() before the first CUDA tensor, "
            "or start the program with `stalloc run`."
        )


def install(runtime: Runtime, stepped: Callable[[], None]) -> None:
    """Make stalloc torch's CUDA allocator; `stepped` is called after every step of any torch optimizer."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if not torch.backends.cuda.is_built():
        return  # a CPU build: nothing to serve
    check_untouched()
    allocate, free = entry.torch_entries(runtime.states.ctypes.data, Path(torch.__file__).parent)
    allocator = torch._C._cuda_customAllocator(allocate, free)
    _set_callbacks(allocator, runtime)
    torch.cuda.memory.change_current_allocator(torch.cuda.memory._CUDAAllocator(allocator))
    _answer_statistics(torch, runtime)
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: stepped())
    _keep.append(allocator)


def _set_callbacks(allocator: Any, runtime: Runtime) -> None:
    """record_stream and empty_cache: rare, so they may be Python."""

    def record_stream(address: int | None, stream: int | None) -> None:
        if address:
            for controller in runtime.controllers:
                controller.share(address, stream or 0)

    def empty_cache() -> None:
        for controller in runtime.controllers:
            controller.release_unused()

    share = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(record_stream)
    reset = ctypes.CFUNCTYPE(None)(empty_cache)
    _keep.extend((share, reset))
    allocator.set_record_stream_fn(ctypes.cast(share, ctypes.c_void_p).value)
    allocator.set_reset_fn(ctypes.cast(reset, ctypes.c_void_p).value)


def _answer_statistics(torch: Any, runtime: Runtime) -> None:
    """Answer torch.cuda.memory_stats and its relatives, which torch refuses under a pluggable allocator."""

    def statistics(device: int) -> dict[str, Any]:
        return torch_statistics(runtime.controllers[device])

    def reset_peaks(device: int) -> None:
        runtime.controllers[device].state.reset_peaks()

    def reset_accumulated(device: int) -> None:
        """The accumulated counters are the run's own; torch's tests of them do not apply."""

    torch._C._cuda_memoryStats = statistics
    torch._C._cuda_resetPeakMemoryStats = reset_peaks
    torch._C._cuda_resetAccumulatedMemoryStats = reset_accumulated
