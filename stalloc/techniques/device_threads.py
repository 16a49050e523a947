"""Threads that work for one device.

Contract: each begins at that device. A thread is at GPU 0 by default, where leaving a stream of another one would put
it back, and with it a context on a GPU that may be another process's.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def threads_at(
    device: torch.device, number: int, name: str, begin: Callable[[], None] | None = None
) -> ThreadPoolExecutor:
    """So many threads whose current device is `device`; `begin` is called in each."""
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()

    def begin_at_device() -> None:
        if index is not None:
            torch.cuda.set_device(index)
        if begin is not None:
            begin()

    return ThreadPoolExecutor(number, thread_name_prefix=name, initializer=begin_at_device)
