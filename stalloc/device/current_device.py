"""The device that a thread is at, changed for a while.

Contract: inside of it calls of the driver and the runtime concern that device; afterwards the thread is where it was.
No other device gets a context: to go back by cudaSetDevice, as `cupy.cuda.Device` does, makes one on the GPU that a
thread is at by default, which the process may never use, or which somebody else has for himself.
"""

import ctypes
from functools import cache
from typing import Any


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuCtxGetCurrent.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
    driver.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
    return driver


class AtDevice:
    """`with AtDevice(1):` the calling thread is at device 1. One object serves one `with` at a time."""

    __slots__ = ("_before", "_index", "_is_changed")

    def __init__(self, index: int) -> None:
        self._index, self._is_changed, self._before = index, False, ctypes.c_void_p()

    def __enter__(self) -> None:
        from cupy.cuda import runtime

        if runtime.getDevice() != self._index:
            _driver().cuCtxGetCurrent(ctypes.byref(self._before))  # none as long as the thread has used no device
            self._is_changed = True
            runtime.setDevice(self._index)

    def __exit__(self, *_: object) -> None:
        if self._is_changed:
            self._is_changed = False
            _driver().cuCtxSetCurrent(self._before)
