"""A cap in force in this process: what is saved for backward goes when a request does not fit, and comes back for it.

Contract: from the first allocation on no more than the cap is taken from the device. Nothing of the program is changed:
losses and gradients are those without it, to the last bit. What cannot be evicted stays; where that is more than the
cap, it is an out-of-memory error which says how much it is.
"""

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from stalloc.device.known_gpus import VirtualGPU, parse_memory
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.fitting.trials import TRIAL_VARIABLE
from stalloc.sizes import PAGE_BYTES
from stalloc.techniques.cap_policies import DEFAULT, policy_named

if TYPE_CHECKING:
    from stalloc.runtime import Runtime
    from stalloc.techniques.evictable import EvictableMemory
    from stalloc.techniques.idle_memory import IdleMemory

AUTO = "auto"  #: a cap of all that there is: eviction is the last resort before an out-of-memory error


class Cap:
    """A cap that is in force from the import of torch on; a context, whose end lifts it. 0 bytes: "auto".

    Raises BadInputError for more than a device has, or less than it gives at once.
    """

    def __init__(
        self, runtime: "Runtime", cap_bytes: int, host_bytes: int | None, policy: str, *, caches: bool
    ) -> None:
        from stalloc.imports import after_import

        self.cap_bytes, self._host_bytes, self._policy, self._caches = cap_bytes, host_bytes, policy, caches
        self._runtime = runtime
        self._memory: EvictableMemory | None = None
        self._idle: IdleMemory | None = None
        least = min(controller.device.total_bytes for controller in runtime.controllers)
        if 0 < cap_bytes < PAGE_BYTES:
            raise BadInputError(
                f"a cap of {human_bytes(cap_bytes)} is not possible: the device gives memory by "
                f"{human_bytes(PAGE_BYTES)}. Give what the parameters, gradients and the optimizer's state need at "
                "least."
            )
        if cap_bytes > least:
            raise BadInputError(
                f"a cap of {human_bytes(cap_bytes)} is not possible: the device has {human_bytes(least)}. Give less, "
                'or "auto" for all there is.'
            )
        if cap_bytes:
            for controller in runtime.controllers:
                controller.memory.keep_within(cap_bytes)
        after_import("torch", self._begin)

    def _begin(self) -> None:
        import torch

        from stalloc.cost.gpu_rates import rates_of
        from stalloc.techniques.capped_blocks import drop_blocks_of_models
        from stalloc.techniques.evictable import EvictableMemory
        from stalloc.techniques.host_store import HostStore
        from stalloc.techniques.late_checkpoint import LateCheckpoint

        rates = rates_of(self._runtime.controllers[0].device.name)
        memory = EvictableMemory(HostStore(self._host_bytes), rates, policy_named(self._policy))
        drop_blocks_of_models(LateCheckpoint(memory))
        memory.__enter__()  # for the rest of the program, or until `end`
        for controller in self._runtime.controllers:
            device = torch.device("cuda", controller.device.index)
            controller.cap(self.cap_bytes, functools.partial(memory.evict, device))
        if self._caches:
            from stalloc.techniques.idle_memory import IdleMemory

            self._idle = IdleMemory(memory)
            memory.more = self._idle.evict
        self._memory = memory

    def told(self) -> dict[str, Any]:
        """What it cost so far; `estimated_seconds` is an estimate."""
        if self._memory is None:
            return {"cap_bytes": self.cap_bytes, "evictions": 0}
        evicted, store = self._memory.evicted, self._memory.store
        return {
            "cap_bytes": self.cap_bytes,
            "evictions": evicted.num_evictions,
            "recomputed_blocks": evicted.num_recomputed,
            **{
                f"{how}_bytes": getattr(evicted, f"{how}_bytes")
                for how in ("dropped", "recomputed", "moved", "brought")
            },
            "estimated_seconds": evicted.seconds,
            "host_bytes": store.peak_bytes,
        }

    def __enter__(self) -> "Cap":
        return self

    def __exit__(self, *_: object) -> None:
        if self._memory is not None:
            self._memory.__exit__()
        if self._idle is not None:
            self._idle.end()
        for controller in self._runtime.controllers:
            controller.end_cap()


def cap(
    size: str | int,
    *,
    host: str | int | None = None,
    policy: str = DEFAULT,
    caches: bool = False,
    device: Any = "auto",
    gpu: VirtualGPU | None = None,
) -> Cap | None:
    """Hold what this process takes of each device below `size`, whatever the shapes; to be called before CUDA is used.

    What is saved for backward is evicted when a request does not fit: its block runs again, or it is moved to pinned
    host memory, of which `host` may be used (all there is by default; 0: nothing is moved). `policy` says what goes
    first: "dtr", "lru", "size", "msps", "random". With a size of "auto" nothing is evicted before the device has no
    more. `caches`: what a model makes without gradients and keeps, such as key and value caches, is moved too, which is
    right only where nothing but operations of torch in the same thread reads it. `device` and `gpu` as in `install`.
    As a context it ends with the block, and holds nothing back any more; `told()` says what it cost. None in a trial of
    stalloc's own.

    Raises BadInputError for a size or a policy that is none, SetupError where CUDA was used.
    """
    cap_bytes = 0 if size == AUTO else parse_memory(size)
    host_bytes = None if host is None else parse_memory(host, at_least=0)
    policy_named(policy)
    if os.environ.get(TRIAL_VARIABLE):
        return None
    from stalloc import integrations

    if "torch" in sys.modules:
        from stalloc.integrations.torch_allocator import check_untouched

        check_untouched()
    return Cap(integrations.install(device=device, gpu=gpu), cap_bytes, host_bytes, policy, caches=caches)
