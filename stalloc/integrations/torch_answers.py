"""What torch refuses to say or do under a pluggable allocator, said and done by stalloc under torch's own names.

Contract: a function of torch.cuda and torch.accelerator that asks for memory behaves as with torch's own allocator,
errors included. CUDA graphs of torch.compile are captured one by one, since their trees need to save and restore the
state of torch's own allocator.

Of a snapshot segments are what the device holds now, blocks cover them without a gap, and sizes add up to what
torch.cuda.memory_stats says. The history is stalloc's recording, written by stalloc.writers, with the Python stacks of
what was requested since the program asked for a history.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stalloc.core import constants
from stalloc.core.snapshot import HeapSegment, live_addresses, segments
from stalloc.imports import after_import
from stalloc.integrations import torch_pools
from stalloc.runtime import Controller, Phase, Runtime
from stalloc.runtime.call_sites import CallSites, Stack
from stalloc.runtime.interruptions import persistent_entry
from stalloc.runtime.statistics import torch_statistics

_ACCUMULATED = (
    *("allocated", "freed", "num_alloc_retries", "num_ooms"),
    *("num_device_alloc", "num_device_free", "num_sync_all_streams"),
)


def install(torch: Any, runtime: Runtime) -> None:
    _answer_statistics(torch, runtime)
    _answer_histories(torch, runtime)
    torch_pools.serve(torch)
    own_delete = torch._C._cuda_cudaCachingAllocator_raw_delete
    torch._C._cuda_cudaCachingAllocator_raw_delete = lambda address: own_delete(address) if address else None
    name = "torch._inductor.config"
    after_import(name, lambda: setattr(sys.modules[name].triton, "cudagraph_trees", False))


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

    def reset_accumulated(device: int) -> None:
        baselines[device] = torch_statistics(controller(device))

    def set_memory_fraction(fraction: float, device: int) -> None:
        set_fraction(fraction, device)
        fractions[device] = fraction

    names = {
        "_cuda_memoryStats": statistics,
        "_cuda_resetPeakMemoryStats": lambda device: controller(device).state.reset_peaks(),
        "_cuda_resetAccumulatedMemoryStats": reset_accumulated,
        "_cuda_setMemoryFraction": set_memory_fraction,
        "_cuda_getMemoryFraction": lambda device: fractions.get(device, 1.0),
        # torch.accelerator, in versions that have it
        "_accelerator_isAllocatorInitialized": torch.cuda.is_initialized,
        "_accelerator_getDeviceStats": statistics,
        "_accelerator_resetPeakStats": lambda device: controller(device).state.reset_peaks(),
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
    torch._C._cuda_setMemoryMetadata = lambda metadata: setattr(history, "metadata", metadata)
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
        else:
            result[name] = value - before if name in _ACCUMULATED and before is not None else value
    return result


_STATES = {
    constants.BLOCK_FREE: "inactive",
    constants.BLOCK_LIVE: "active_allocated",
    constants.BLOCK_SHARED: "active_allocated",
    constants.BLOCK_DEFERRED: "active_pending_free",
    constants.BLOCK_IN_HANDOVER: "active_pending_free",
}


_OURS = {"notes": [], "source": "stalloc recorder"}  # so that nobody takes the addresses for those of torch's allocator


class History:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.enabled = False
        self.metadata = ""  #: what the program noted for its memory (torch.cuda.memory._set_memory_metadata)
        self._begin_us = 0  # monotonic time since when the program wants it
        self._max_entries = sys.maxsize

    def record(
        self,
        enabled: Any = "all",
        context: Any = "all",
        stacks: Any = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        *options: Any,
        **more: Any,
    ) -> None:
        """Begin or, with None, end recording on all devices (torch.cuda.memory._record_memory_history).

        Stacks are those of Python, whatever `stacks` says; and the last four million events are kept at most. With a
        `context` of None there are no stacks, and once a plan is in force times are exact to a few milliseconds.
        """
        was_enabled = self.enabled
        self.enabled = enabled is not None and enabled is not False
        self._max_entries = max_entries
        is_exact = context is not None
        if not was_enabled or clear_history:
            self._begin_us = time.clock_gettime_ns(constants.CLOCK if is_exact else constants.COARSE_CLOCK) // 1000
        if self.enabled and is_exact:
            self._runtime.begin_call_sites()
        elif not self.enabled:
            self._runtime.end_call_sites()
        for controller in self._runtime.controllers:
            settings = dataclasses.replace(
                controller.status.settings,
                keep_recording=self.enabled,
                keep_events=max_entries,
                exact_times=is_exact,
            )
            controller.status.settings = settings
            controller.state.write(events_wrap=int(self.enabled))
            if self.enabled:
                controller.steady.end()
                controller.recording.go_on(settings)
            elif was_enabled and controller.status.phase in (Phase.PLANNED, Phase.RESTING):
                controller.recording.end(settings)

    def record_legacy(
        self, enabled: bool, record_context: Any = True, max_entries: int = 1, *options: Any, **more: Any
    ) -> None:
        """As `record`, for callers that give a bool, as torch's function once took."""
        self.record(enabled, record_context, "all", max_entries)

    def snapshot(self, pool: Any = (0, 0), include_traces: bool | None = None) -> dict[str, Any]:
        """What torch._C._cuda_memorySnapshot gives; of one memory pool only if its id is not (0, 0)."""
        if isinstance(pool, tuple) and len(pool) == 3:
            pool, include_traces = pool[:2], pool[2]
        if pool is not None and tuple(pool) != (0, 0):
            return {"segments": [], "device_traces": [], "external_annotations": [], "allocator_settings": {}}
        controllers = self._runtime.controllers
        found = [entry for controller in controllers for entry in _segments(controller, self._runtime.call_sites)]
        traces: list[list[Any]] = [[] for _ in controllers]
        annotations: list[Any] = []
        if self.enabled and include_traces is not False:
            from stalloc.writers.snapshot_writer import snapshot_of

            recorded, _ = snapshot_of(self._runtime.recorded())
            for index, history in enumerate(recorded["device_traces"]):
                wanted = [event for event in history if event["time_us"] >= self._begin_us]
                # with the keys that torch's have besides; stalloc records nothing for them
                more = {"compile_context": "N/A", "user_metadata": ""}
                traces[index] = [event | more for event in wanted[max(0, len(wanted) - self._max_entries) :]]
                left_out = len(history) - len(traces[index])  # marks count from the first event that is there
                annotations += [
                    {**one, "mark": [event - left_out, kind]}
                    for one in recorded["external_annotations"]
                    for event, kind in [one["mark"]]
                    if one["device"] == index and event >= left_out
                ]
        return {
            "segments": found,
            "device_traces": traces,
            "external_annotations": annotations,
            "allocator_settings": {},
            "stalloc": {"devices": {str(index): _OURS for index in range(len(controllers))}},
        }


def _segments(controller: Controller, call_sites: CallSites) -> list[dict[str, Any]]:
    found = segments(controller.state)
    stacks: dict[int, Stack] = {}
    if call_sites.is_on:
        addresses = live_addresses(controller.state)
        stacks = dict(zip(addresses, call_sites.stacks_at(controller.state.address, addresses), strict=True))
    return [_segment(controller.device.index, segment, stacks) for segment in found]


def _segment(device: int, segment: HeapSegment, stacks: Mapping[int, Stack]) -> dict[str, Any]:
    live = [block for block in segment.blocks if block.state in (constants.BLOCK_LIVE, constants.BLOCK_SHARED)]
    active = [block for block in segment.blocks if block.state != constants.BLOCK_FREE]
    return {
        "device": device,
        "address": segment.address,
        "total_size": segment.size_bytes,
        "allocated_size": sum(block.size_bytes for block in live),
        "active_size": sum(block.size_bytes for block in active),
        "requested_size": sum(block.requested_bytes for block in active),
        "stream": segment.stream,
        "segment_type": "small" if segment.kind == constants.SMALL_KIND else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size_bytes,
                "requested_size": block.requested_bytes,
                "state": _STATES[block.state],
                "frames": stacks.get(block.address, []),
            }
            for block in segment.blocks
        ],
    }


_FUNCTION = "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator9cacheInfoE{}Pm"
_INDEX_TYPES = {"a": 0x7F, "i": 0x7FFF_FFFF}  # a device's index is a byte, before torch 2.3 an int
_LIBRARIES = ("libtorch_cuda.so", "libtorch_python.so")
_WORD, _MOST_FUNCTIONS = 8, 64
_BEFORE = 2  # words of a table in front of its functions: where the object begins, and its type
_HELD_AT = 16  # bytes: after the head of a Python object, pybind11 has the address of what it holds


def answer_cache_info(torch: Any, allocator: Any) -> None:
    """Say how much memory torch may try cuDNN's algorithms with, which it does not ask a pluggable allocator.

    What torch asks with `cacheInfo` (under `torch.backends.cudnn.benchmark`, before it tries a convolution's
    algorithms) is answered with all that is free, where torch's pluggable allocator raises an error. The allocator has
    this one virtual function replaced, in a table of its own; where it is not found where the C++ ABI has it, or the
    process may not read its own memory as a file, everything stays as it was.
    """
    function, mask = _refusal(Path(torch.__file__).parent / "lib")
    words: tuple[int, ...] = ()
    with contextlib.suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:  # which may not be mounted
        held = _words(memory, id(allocator) + _HELD_AT, 1)
        table = _words(memory, held[0], 1) if held else ()
        words = _words(memory, table[0] - _BEFORE * _WORD, _BEFORE + _MOST_FUNCTIONS) if table else ()
    if function == 0 or words.count(function) != 1:
        return

    def say_what_is_free(_: int, device: int, largest: int) -> int:
        index = device & mask
        unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        ctypes.c_size_t.from_address(largest).value = torch.cuda.mem_get_info(index)[0] + unused
        return 1

    entry = persistent_entry(say_what_is_free)
    made = (ctypes.c_uint64 * len(words))(*(entry if one == function else one for one in words))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # for ever: torch gives memory back after Python has ended
    ctypes.c_uint64.from_address(held[0]).value = ctypes.addressof(made) + _BEFORE * _WORD


def _refusal(folder: Path) -> tuple[int, int]:
    """The address of torch's function, and the bits of a device's index in a word; 0 if there is none."""
    for library, (kind, mask) in itertools.product(_LIBRARIES, _INDEX_TYPES.items()):
        with contextlib.suppress(OSError, AttributeError):
            function = getattr(ctypes.CDLL(str(folder / library)), _FUNCTION.format(kind))
            return ctypes.cast(function, ctypes.c_void_p).value or 0, mask
    return 0, 0


def _words(memory: Any, address: int, num: int) -> tuple[int, ...]:
    """Words of this process at an address that may be none; fewer, or nothing, where it has no memory."""
    try:
        memory.seek(address)
        found = memory.read(num * _WORD)
    except (OSError, OverflowError, ValueError):
        return ()
    return struct.unpack(f"{len(found) // _WORD}Q", found[: len(found) // _WORD * _WORD])
