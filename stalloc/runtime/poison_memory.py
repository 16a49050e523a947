"""How STALLOC_POISON writes and reads patterns: on a GPU, or where a virtual GPU's memory is plain host memory.

Contract: nothing here takes memory from stalloc, which would call itself: fills are the driver's, and the little device
memory that checks need is the driver's too. A fill is queued on the block's stream; a check waits for its result.
"""

import contextlib
import ctypes
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from stalloc.device import Device

_PER_THREAD = 2  # cudaStreamPerThread
_PIECE = 32 << 20  # bytes read to the host at a time where no kernel can look


class PoisonMemory(Protocol):
    """Bytes of one device."""

    def fill(self, address: int, size_bytes: int, byte: int, stream: int) -> None:
        """Fill a range, in the order of a stream (raw handle)."""

    def mismatches(self, ranges: Sequence[tuple[int, int]], byte: int, stream: int | None) -> list[int]:
        """How many bytes of each range (address, bytes) differ; after what the stream (None: any) was given so far."""

    def read(self, address: int, size_bytes: int) -> np.ndarray:
        """A copy of the bytes of a range."""


def memory_of(device: Device) -> PoisonMemory | None:
    """The bytes of a device; None for a virtual GPU that keeps none."""
    if device.kind == "cuda":
        return GpuMemory(device.index)
    from stalloc.device import virtual

    gpu = virtual.active_gpu()
    return HostMemory() if gpu is not None and gpu.copy_limit_bytes is None else None


class HostMemory:
    """A virtual GPU whose memory is plain memory of this process."""

    def fill(self, address: int, size_bytes: int, byte: int, stream: int) -> None:
        """Fill a range at once: nothing runs beside the host."""
        ctypes.memset(address, byte, size_bytes)

    def mismatches(self, ranges: Sequence[tuple[int, int]], byte: int, stream: int | None) -> list[int]:
        """How many bytes of each range differ."""
        return [int(np.count_nonzero(_bytes_at(*one) != byte)) if one[1] else 0 for one in ranges]

    def read(self, address: int, size_bytes: int) -> np.ndarray:
        """A copy of the bytes of a range."""
        return _bytes_at(address, size_bytes).copy()


class GpuMemory:
    """A device behind CuPy: fills by the driver, checks by the batched kernel, or through the host without one."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._tables = threading.local()  # each thread's own, so that checks may run at the same time

    def fill(self, address: int, size_bytes: int, byte: int, stream: int) -> None:
        """Queue a fill on a stream."""
        import cupy

        if size_bytes:
            with cupy.cuda.Device(self._index):
                handle = _handle(stream)
                if handle is None:  # of another thread: nothing can be queued on it from here
                    cupy.cuda.runtime.deviceSynchronize()
                cupy.cuda.runtime.memsetAsync(address, byte, size_bytes, handle or 0)
                if handle is None:
                    cupy.cuda.runtime.deviceSynchronize()

    def mismatches(self, ranges: Sequence[tuple[int, int]], byte: int, stream: int | None) -> list[int]:
        """How many bytes of each range differ; waits."""
        import cupy

        with cupy.cuda.Device(self._index):
            handle = _handle(stream) if stream is not None else None
            if handle is None:
                cupy.cuda.runtime.deviceSynchronize()
            else:
                cupy.cuda.runtime.streamSynchronize(handle)
        with self._check() as check:
            return [int(count) for count in check([a for a, _ in ranges], [n for _, n in ranges], byte)]

    def read(self, address: int, size_bytes: int) -> np.ndarray:
        """A copy of the bytes of a range; waits for the device."""
        import cupy

        copy = np.empty(size_bytes, np.uint8)
        with cupy.cuda.Device(self._index):
            cupy.cuda.runtime.deviceSynchronize()
            cupy.cuda.runtime.memcpy(copy.ctypes.data, address, size_bytes, cupy.cuda.runtime.memcpyDeviceToHost)
        return copy

    @contextlib.contextmanager
    def _check(self) -> Iterator[Callable[[list[int], list[int], int], Any]]:
        """The kernel where torch and Triton are there and at work; else a copy to the host."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized() or importlib.util.find_spec("triton") is None:
            yield self._through_host
            return
        from stalloc.kernels import Tables, batched_mismatches

        if not hasattr(self._tables, "own"):
            self._tables.own = Tables()
        with torch.cuda.device(self._index):
            yield lambda low, size, byte: batched_mismatches(low, size, byte, tables=self._tables.own)

    def _through_host(self, low: list[int], size: list[int], byte: int) -> list[int]:
        counts = []
        for address, count in zip(low, size, strict=True):
            pieces = [(address + at, min(_PIECE, count - at)) for at in range(0, count, _PIECE)]
            counts.append(sum(int(np.count_nonzero(self.read(*piece) != byte)) for piece in pieces))
        return counts


def _handle(stream: int) -> int | None:
    """What the driver knows a stream by; None for the default stream of another thread.

    Those have one handle for all threads, and go by a name of the thread's (stalloc.integrations.cupy_allocator).
    """
    if stream & 7 != _PER_THREAD:
        return stream
    return _PER_THREAD if stream >> 4 == threading.get_ident() else None


def _bytes_at(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))
