"""The driver's functions that order streams, for code that calls them by address.

Contract: they take handles of the runtime as well (a stream or an event is one thing to both), return 0 if all is well,
and are the same for a real and a virtual GPU.
"""

import ctypes
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Ordering:
    """Addresses of functions; each returns the driver's 32-bit status."""

    record_event: int  #: (event, stream)
    wait_event: int  #: (stream, event, flags)
    is_capturing: int  #: (stream, address of an int: not 0 while the stream is captured into a graph)
    query_event: int  #: (event): 600 as long as what came before it is not done
    exchange_mode: int  #: (address of an int): how this thread heeds captures, for how it did


@cache
def ordering() -> Ordering | None:
    """The functions of the driver that this process uses; None where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        functions = (
            *(driver.cuEventRecord, driver.cuStreamWaitEvent, driver.cuStreamIsCapturing, driver.cuEventQuery),
            driver.cuThreadExchangeStreamCaptureMode,
        )
    except (OSError, AttributeError):
        return None
    return Ordering(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions))
