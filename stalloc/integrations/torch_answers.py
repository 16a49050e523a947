"""What torch refuses to say or do under a pluggable allocator, said and done by stalloc under torch's own names.

Contract: a function of torch.cuda and torch.accelerator that asks for memory behaves as with torch's own allocator,
errors included. CUDA graphs of torch.compile are captured one by one, since their trees need to save and restore the
state of torch's own allocator.
"""

import sys
from typing import Any

from stalloc.imports import after_import
from stalloc.integrations import torch_own_pools
from stalloc.integrations.memory_snapshot import History
from stalloc.runtime import Controller, Runtime
from stalloc.runtime.statistics import torch_statistics

_ACCUMULATED = (
    *("allocated", "freed", "num_alloc_retries", "num_ooms"),
    *("num_device_alloc", "num_device_free", "num_sync_all_streams"),
)


def install(torch: Any, runtime: Runtime) -> None:
    """Put stalloc's answers in the place of torch's refusals."""
    _answer_statistics(torch, runtime)
    _answer_histories(torch, runtime)
    torch_own_pools.serve(torch)
    own_delete = torch._C._cuda_cudaCachingAllocator_raw_delete
    torch._C._cuda_cudaCachingAllocator_raw_delete = lambda address: own_delete(address) if address else None
    after_import("torch._inductor.config", _capture_graphs_one_by_one)


def _capture_graphs_one_by_one() -> None:
    sys.modules["torch._inductor.config"].triton.cudagraph_trees = False


def _answer_statistics(torch: Any, runtime: Runtime) -> None:
    baselines: dict[int, dict[str, Any]] = {}  # what was accumulated when the program last reset that
    fractions: dict[int, float] = {}
    set_fraction = torch._C._cuda_setMemoryFraction

    def controller(device: int) -> Controller:
        if not 0 <= device < len(runtime.controllers):
            raise RuntimeError(f"Invalid device argument {device}: did you call init?")
        return runtime.controllers[device]

    def statistics(device: int) -> dict[str, Any]:
        return _less(torch_statistics(controller(device)), baselines.get(device, {}))

    def reset_peaks(device: int) -> None:
        controller(device).state.reset_peaks()

    def reset_accumulated(device: int) -> None:
        baselines[device] = torch_statistics(controller(device))

    def set_memory_fraction(fraction: float, device: int) -> None:
        set_fraction(fraction, device)
        fractions[device] = fraction

    names = {
        "_cuda_memoryStats": statistics,
        "_cuda_resetPeakMemoryStats": reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": reset_accumulated,
        "_cuda_setMemoryFraction": set_memory_fraction,
        "_cuda_getMemoryFraction": lambda device: fractions.get(device, 1.0),
        # torch.accelerator, in versions that have it
        "_accelerator_isAllocatorInitialized": torch.cuda.is_initialized,
        "_accelerator_getDeviceStats": statistics,
        "_accelerator_resetPeakStats": reset_peaks,
        "_accelerator_resetAccumulatedStats": reset_accumulated,
    }
    for name, function in names.items():
        if hasattr(torch._C, name):
            setattr(torch._C, name, function)


def _answer_histories(torch: Any, runtime: Runtime) -> None:
    history = History(runtime)
    torch._C._cuda_memorySnapshot = history.snapshot
    torch._C._cuda_record_memory_history = history.record
    torch._C._cuda_record_memory_history_legacy = history.record_legacy
    torch._C._cuda_setMemoryMetadata = history.set_metadata
    torch._C._cuda_getMemoryMetadata = lambda: history.metadata
    torch._C._cuda_attach_out_of_memory_observer = runtime.observers.append
    torch._C._cuda_isHistoryEnabled = lambda: history.enabled


def _less(statistics: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """Statistics in which everything accumulated counts from a baseline of the same form."""
    result: dict[str, Any] = {}
    for name, value in statistics.items():
        before = baseline.get(name)
        if isinstance(value, dict):
            result[name] = _less(value, before or {})
        elif name in _ACCUMULATED and before is not None:
            result[name] = value - before
        else:
            result[name] = value
    return result
