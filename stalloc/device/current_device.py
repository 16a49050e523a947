"""The device that a thread is at, changed for a while.

Contract: inside of it calls of the driver and the runtime concern that device; afterwards the thread is where it was.
No other device gets a context: to go back by cudaSetDevice, as `cupy.cuda.Device` does, makes one on the GPU that a
thread is at by default, which the process may never use, or which somebody else has for himself. So the device's
primary context, which is the runtime's too, is pushed and popped (CUDA runtime API, "Interactions with the CUDA Driver
API").
"""

import ctypes
from functools import cache
from typing import Any


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _primary_context(index: int) -> ctypes.c_void_p:
    """Made if need be, and kept until the process ends. Raises CUDARuntimeError if the device does not allow it."""
    from cupy.cuda import runtime

    device, context = ctypes.c_int(0), ctypes.c_void_p()
    status = _driver().cuDeviceGet(ctypes.byref(device), index)
    status = status or _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if status:
        raise runtime.CUDARuntimeError(status)
    return context


class AtDevice:
    """`with AtDevice(1):` the calling thread is at device 1. One object serves one `with` at a time."""

    __slots__ = ("_index", "_is_changed")

    def __init__(self, index: int) -> None:
        self._index, self._is_changed = index, False

    def __enter__(self) -> None:
        from cupy.cuda import runtime

        if runtime.getDevice() != self._index:
            context = _primary_context(self._index)
            self._is_changed = True
            _driver().cuCtxPushCurrent_v2(context)

    def __exit__(self, *_: object) -> None:
        if self._is_changed:
            self._is_changed = False
            _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
