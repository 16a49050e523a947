"""TorchScript in blocks that are recomputed: a call whose results have gradients is refused.

Contract: TorchScript computes the first calls of a function operation by operation, and later ones with derivatives of
its own, which save other tensors for backward; so what a second run of a block saves is not what the first one would
have. Calls elsewhere, and results without gradients, are as they were.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stalloc.errors import RecomputeError
from stalloc.techniques.block_tape import current_block


@functools.cache
def refuse_scripts_in_blocks() -> None:
    """Check each call of TorchScript from here on, and refuse those in blocks."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        kind.__call__ = _watched(kind.__call__)


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def call_and_look(script: Any, *args: Any, **kwargs: Any) -> Any:
        results = call(script, *args, **kwargs)
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves(results)):
            _check(script)
        return results

    return call_and_look


def _check(script: Any) -> None:
    block = current_block()
    if block:
        raise RecomputeError(
            f"{block} cannot be computed twice: it calls {script.name}, which is TorchScript and saves other tensors "
            "for backward from its second call on. Leave this block as it is."
        )
