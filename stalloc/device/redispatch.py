"""Calling an operator of PyTorch as it was before a kernel of ours was put in front of it.

Contract: `below(torch)` gives a function for kernels that are registered as BackendSelect, where an operator still
chooses its device: it goes on with what comes after that.
"""

from collections.abc import Callable
from typing import Any


def below(torch: Any) -> Callable[..., Any]:
    """A function that calls (operator, first argument, a tensor, others …) below BackendSelect."""
    later = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def call(operator: Any, first: Any, *args: Any) -> Any:
        if hasattr(operator, "redispatch"):
            return operator.redispatch(torch._C._dispatch_keys(first) & later, first, *args)
        key = torch._C.DispatchKey.CUDA if first.is_cuda else torch._C.DispatchKey.CPU  # before torch 2.3
        return operator._op_dk(key, first, *args)

    return call
