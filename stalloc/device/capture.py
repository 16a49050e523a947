"""Calls that CUDA forbids while a graph is captured, made permissible on the calling thread.

Taking memory from the device or giving it back does not touch the streams that are captured, but in the default mode
the driver invalidates any capture of the process at such a call (CUDA driver API, cuThreadExchangeStreamCaptureMode).
"""

import contextlib
import ctypes
from collections.abc import Iterator

from stalloc.device.ordering import ordering

_RELAXED = 2
PER_THREAD = 2  # cudaStreamPerThread: one handle, a stream for each thread
HANDLE_BITS = 0xF  # which are PER_THREAD in a name of ours for that stream, too; other handles are addresses


def is_per_thread(stream: int) -> bool:
    """Whether a stream, by its handle or by a name of ours, is the default one of a thread."""
    return stream & HANDLE_BITS == PER_THREAD


def is_captured(stream: int) -> bool:
    """Whether a stream is being captured, or (the default one) may not be asked since another one is."""
    functions = ordering()
    if functions is None:
        return False
    if is_per_thread(stream):  # maybe a name of ours: the driver has one handle for all threads
        stream = PER_THREAD
    status = ctypes.c_int(0)
    ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(functions.is_capturing)
    return ask(stream, ctypes.byref(status)) != 0 or status.value != 0


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow this thread such calls; without a driver that knows captures there is nothing to allow."""
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # mode now holds what was in force
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
