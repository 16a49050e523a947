"""How STALLOC_POISON writes and reads patterns: on a GPU, or where a virtual GPU's memory is plain host memory.

Contract: nothing here takes memory from stalloc, which would call itself: the fill of one range is the driver's, and
so is the little device memory that the kernels for many ranges need. A fill of one range is queued on the block's
stream; a fill of several, and a check, waits until it is done.
"""

import importlib.util
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stalloc import kernels
from stalloc.device import Device
from stalloc.device.capture import PER_THREAD, is_per_thread
from stalloc.device.current_device import AtDevice

if TYPE_CHECKING:
    from stalloc.kernels import Tables

Ranges = Sequence[tuple[int, int]]  #: address and bytes of each

_PIECE = 32 << 20  # bytes read to the host at a time where no kernel can look


class HostMemory:
    """A virtual GPU whose memory is plain memory of this process: nothing runs beside the host."""

    def fill(self, ranges: Ranges, byte: int, stream: int) -> None:
        """Fill ranges that share no byte, in the order of a stream (raw handle)."""
        kernels.host_fill(*_columns(ranges), byte)

    def mismatches(self, ranges: Ranges, byte: int, stream: int | None) -> list[int]:
        """How many bytes of each range differ; after what the stream (None: any) was given so far."""
        return [int(count) for count in kernels.host_mismatches(*_columns(ranges), byte)]

    def read(self, address: int, size_bytes: int) -> np.ndarray:
        """A copy of the bytes of a range."""
        copy = np.empty(size_bytes, np.uint8)
        kernels.host_copy([address], [copy.ctypes.data], [size_bytes])
        return copy


class GpuMemory:
    """A device behind CuPy: one range by the driver, many by the batched kernels, or without them one by one."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._of_thread = threading.local()  # each thread has tables of its own, so that launches may run side by side

    def fill(self, ranges: Ranges, byte: int, stream: int) -> None:
        """Queue the fill of a range on a stream; several are filled by one launch, which is waited for."""
        import cupy

        ranges = [one for one in ranges if one[1]]
        tables = self._tables() if len(ranges) > 1 else None
        if tables is not None:
            import torch

            self._wait(stream)
            with torch.cuda.device(self._index):
                kernels.batched_fill(*_columns(ranges), byte, check=False, tables=tables)
            return
        with AtDevice(self._index):
            handle = _handle(stream)
            if handle is None:  # of another thread: nothing can be queued on it from here
                cupy.cuda.runtime.deviceSynchronize()
            for address, size_bytes in ranges:
                cupy.cuda.runtime.memsetAsync(address, byte, size_bytes, handle or 0)
            if handle is None:
                cupy.cuda.runtime.deviceSynchronize()

    def mismatches(self, ranges: Ranges, byte: int, stream: int | None) -> list[int]:
        """How many bytes of each range differ; waits."""
        self._wait(stream)
        tables = self._tables()
        if tables is None:
            return [self._mismatches_through_host(*one, byte) for one in ranges]
        import torch

        with torch.cuda.device(self._index):
            return [int(count) for count in kernels.batched_mismatches(*_columns(ranges), byte, tables=tables)]

    def read(self, address: int, size_bytes: int) -> np.ndarray:
        """A copy of the bytes of a range; waits for the device."""
        import cupy

        copy = np.empty(size_bytes, np.uint8)
        with AtDevice(self._index):
            cupy.cuda.runtime.deviceSynchronize()
            cupy.cuda.runtime.memcpy(copy.ctypes.data, address, size_bytes, cupy.cuda.runtime.memcpyDeviceToHost)
        return copy

    def _wait(self, stream: int | None) -> None:
        """Until a stream (None: any) has done what it was given."""
        import cupy

        with AtDevice(self._index):
            handle = _handle(stream) if stream is not None else None
            if handle is None:
                cupy.cuda.runtime.deviceSynchronize()
            else:
                cupy.cuda.runtime.streamSynchronize(handle)

    def _tables(self) -> "Tables | None":
        """Where the tables of this thread's launches go; None unless torch and Triton are there and at work."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized() or importlib.util.find_spec("triton") is None:
            return None
        if not hasattr(self._of_thread, "tables"):
            self._of_thread.tables = kernels.Tables()
        return self._of_thread.tables

    def _mismatches_through_host(self, address: int, size_bytes: int, byte: int) -> int:
        pieces = [(address + at, min(_PIECE, size_bytes - at)) for at in range(0, size_bytes, _PIECE)]
        return sum(int(np.count_nonzero(self.read(*piece) != byte)) for piece in pieces)


PoisonMemory = HostMemory | GpuMemory  #: writes and checks the poison in the memory of one device


def memory_of(device: Device) -> PoisonMemory | None:
    """The bytes of a device; None for a virtual GPU that keeps none."""
    if device.kind == "cuda":
        return GpuMemory(device.index)
    from stalloc.device import virtual

    gpu = virtual.active_gpu()
    return HostMemory() if gpu is not None and gpu.copy_limit_bytes is None else None


def _columns(ranges: Ranges) -> tuple[list[int], list[int]]:
    """The addresses and the bytes of ranges, as the kernels take them."""
    return [address for address, _ in ranges], [size_bytes for _, size_bytes in ranges]


def _handle(stream: int) -> int | None:
    """What the driver knows a stream by; None for the default stream of another thread. Those have one handle for all
    threads, and go by a name of the thread's (stalloc.integrations.cupy_allocator)."""
    if not is_per_thread(stream):
        return stream
    return PER_THREAD if stream >> 4 == threading.get_ident() else None
