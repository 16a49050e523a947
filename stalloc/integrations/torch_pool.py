"""The compatible way: a torch.cuda.MemPool whose segments stalloc takes from the device.

torch's caching allocator stays in charge: its statistics, snapshots, histories and CUDA graphs are its own, and it may
have used CUDA before. For the same reason there is no plan: stalloc sees segments, not tensors.

Contract: torch holds a lock of its allocator while it calls, so nothing here enters Python, which could wait for that
lock; the two functions are compiled and call the driver.
"""

import ctypes
from functools import cache
from typing import Any

from stalloc.core.entry import link
from stalloc.errors import SetupError


@cache
def _allocator() -> Any:
    import torch

    try:
        driver = ctypes.CDLL("libcuda.so.1")
        allocate, free = link(__package__, "torch_pool.ll", "allocate", "free", set_to={}, libraries=(driver,))
    except OSError:
        raise SetupError("no NVIDIA driver was found: a memory pool of torch needs a GPU, real or virtual.") from None
    return torch._C._cuda_customAllocator(allocate, free)


def mem_pool(**options: bool) -> Any:
    """A torch.cuda.MemPool with stalloc below it; `options` are those of torch.cuda.MemPool.

    Use it as any: `with torch.cuda.use_mem_pool(pool): …` serves the calling thread from it. torch frees its memory
    when the pool and all that was allocated from it are gone. Raises SetupError where stalloc is torch's allocator
    already, or torch has no CUDA.
    """
    import torch

    if not torch.backends.cuda.is_built():
        raise SetupError("this torch is built without CUDA: install a CUDA build.")
    if torch.cuda.memory.get_allocator_backend() != "native":
        raise SetupError(
            "memory pools need torch's own allocator, which does not manage CUDA memory in this process: use "
            "stalloc.mem_pool() without installing stalloc, or stalloc without it."
        )
    return torch.cuda.MemPool(_allocator(), **options)
