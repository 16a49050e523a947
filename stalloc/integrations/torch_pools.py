"""torch.cuda.MemPool: under stalloc, which torch refuses under any allocator that is not its own, and above it.

Contract: under stalloc a pool is a name. What is allocated while it is used is served as everything else is, from the
plan or from the heap, and goes back there. The memory of a CUDA graph that is captured into a pool stays private, as
ever. Only a pool with an allocator of its own is refused: its memory would not come from where the program wants it.
Where stalloc does not serve torch, pools are torch's.

`mem_pool` is the compatible way: a pool of torch's whose segments stalloc takes from the device. torch's caching
allocator stays in charge: its statistics, snapshots, histories and CUDA graphs are its own, and it may have used CUDA
before. For the same reason there is no plan: stalloc sees segments, not tensors. torch holds a lock of its allocator
while it calls, so nothing there enters Python, which could wait for that lock: both functions are compiled and call the
driver.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from stalloc.errors import SetupError
from stalloc.imports import after_import
from stalloc.integrations.installation import installation
from stalloc.notices import say

_torch: dict[str, Callable[..., Any]] = {}  # what stood under these names before


def serve(torch: Any) -> None:
    """Stalloc is torch's allocator from now on: pools are its own."""
    answer(torch)
    after_import("torch.distributed.distributed_c10d", _answer_registration)


def _answer_registration() -> None:
    """Let a pool of ours be registered with NCCL for nothing, which wants segments of torch's allocator."""
    backend = getattr(sys.modules["torch.distributed.distributed_c10d"], "ProcessGroupNCCL", None)
    for name in ("register_mem_pool", "deregister_mem_pool"):
        if hasattr(backend, name):
            setattr(backend, name, _heeding_ours(getattr(backend, name)))


def _heeding_ours(own: Callable[..., Any]) -> Callable[..., Any]:
    def register(backend: Any, pool: Any, *options: Any, **more: Any) -> Any:
        if not isinstance(pool, MemPool):
            return own(backend, pool, *options, **more)
        return _say_that_none_is_registered()

    return register


@cache
def _say_that_none_is_registered() -> None:
    say(
        "a pool is not registered with NCCL, whose collectives copy as without it: the memory of a pool is not "
        "apart under stalloc."
    )


def answer(torch: Any) -> None:
    """Put these pools in the place of torch's, in versions that have any; who serves shows when one is made."""
    memory = torch.cuda.memory
    if _torch or not hasattr(memory, "use_mem_pool"):
        return
    for name, ours in (("MemPool", MemPool), ("use_mem_pool", use_mem_pool)):
        _torch[name] = getattr(memory, name)
        for module in (memory, torch.cuda):
            setattr(module, name, ours)


class MemPool:
    """What a program holds of a pool: the options of torch.cuda.MemPool are taken, and change nothing."""

    def __new__(cls, allocator: Any = None, *options: Any, **more: Any) -> Any:
        """One of torch's where stalloc does not serve torch."""
        import torch

        torch.cuda.init()  # stalloc may be put in its place only now
        if not installation.serves_torch:
            return _torch["MemPool"](allocator, *options, **more)
        if allocator is not None:
            raise RuntimeError(
                "stalloc: a torch.cuda.MemPool with an allocator of its own needs torch's allocator: run this program "
                "without stalloc."
            )
        return super().__new__(cls)

    def __init__(self, *options: Any, **more: Any) -> None:
        import torch

        self.id: tuple[int, int] = torch.cuda.graph_pool_handle()  #: for CUDA graphs that share the pool
        self.allocator = None
        self.num_users = 1  #: itself, and every block of the program that uses it now

    def use_count(self) -> int:
        return self.num_users

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        import torch

        found: list[dict[str, Any]] = torch.cuda.memory_snapshot(self.id)
        return found


@contextmanager
def use_mem_pool(pool: Any, device: Any = None) -> Iterator[None]:
    """Use a pool on this thread, as torch.cuda.use_mem_pool does."""
    if not isinstance(pool, MemPool):
        with _torch["use_mem_pool"](pool, device):
            yield
        return
    pool.num_users += 1
    try:
        yield
    finally:
        pool.num_users -= 1


@cache
def _allocator() -> Any:
    import torch

    from stalloc.core.entry import link

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
