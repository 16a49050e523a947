"""Paging an optimizer of one's own: the technique without a budget.

Contract: this module loads no torch until it is given an optimizer.
"""

from typing import TYPE_CHECKING, Any

from stalloc.device.known_gpus import parse_memory
from stalloc.errors import BadInputError

if TYPE_CHECKING:
    from stalloc.techniques.paged_optimizer import PagedOptimizer


def page_optimizer(optimizer: Any, *, host: str | int | None = None, window: str | int = "256MiB") -> "PagedOptimizer":
    """Keep the state of a torch optimizer in pinned host memory, and on the device only while it is used.

    In each step the optimizer updates a part of its parameters at a time: the state of the next part comes while one is
    updated, at most `window` of it on the device at once, or what a single part needs. `host` bounds the host memory
    (all there is by default); what has no room there stays on the device. What comes back has `undo(optimizer)`.
    Parameters are those without it, to the last bit. To be called before a scheduler is made of the optimizer.

    Raises BadInputError for an optimizer that is not known to update each parameter by itself.
    """
    import torch

    from stalloc.techniques.host_store import HostStore
    from stalloc.techniques.paged_optimizer import PagedOptimizer

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInputError(f"{type(optimizer).__name__} is no torch optimizer: give page_optimizer() one.")
    store = HostStore(None if host is None else parse_memory(host))
    return PagedOptimizer(optimizer, store, max(parse_memory(window), 1))
