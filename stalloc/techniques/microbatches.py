"""A block that takes a batch in microbatches, one after the other, while its parameters are there: the loop of L2L.

Contract: what comes back is what the block makes of each microbatch by itself, put together; in backward a parameter's
gradients are added from the first microbatch to the last, as by a loop over them around the whole model. What shows
that rows of a batch are not treated each by itself, or that a loop would have other values, is an error in one
sentence: random numbers that are drawn, results that do not have the rows. (Pudipeddi et al., L2L, 2020, algorithm 3.)
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from stalloc.errors import StreamError

_ADVICE = "Stream this model without microbatches."


def why_not_in_microbatches(block: Any) -> str:
    """Why a block cannot take a batch in parts; empty if nothing shows that it cannot."""
    for name, module in block.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            return f"{name or type(module).__name__} normalizes over the whole batch"
    return ""


def in_microbatches(
    call: Callable[..., Any], number: int, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a block with a batch in `number` parts, or in as many as it has rows.

    The first dimension of the first tensor counts the rows of the batch; other tensors with as many rows are divided
    too. Raises StreamError.
    """
    first = next((one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor) and one.dim()), None)
    rows = 0 if first is None else len(first)
    number = min(number, rows)
    if number < 2:
        return call(*args, **kwargs)
    begins = [rows * part // number for part in range(number + 1)]
    before = _random_state(first)
    parts: list[Any] = []
    for begin, end in reversed(list(itertools.pairwise(begins))):  # backward begins with what came last

        def rows_of(value: Any, begin: int = begin, end: int = end) -> Any:
            is_batch = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows
            return value[begin:end] if is_batch else value

        part = call(*tree_map(rows_of, args), **tree_map(rows_of, kwargs))
        for one in tree_leaves(part):
            if not isinstance(one, torch.Tensor) or not one.dim() or len(one) != end - begin:
                raise StreamError(
                    f"{name} makes something else of {end - begin} rows of a batch than as many rows. {_ADVICE}"
                )
        parts.insert(0, part)
    if any(not torch.equal(one, other) for one, other in zip(before, _random_state(first), strict=True)):
        raise StreamError(f"{name} draws random numbers, in another order for microbatches. {_ADVICE}")
    flat = [tree_flatten(part) for part in parts]
    return tree_unflatten([torch.cat(values) for values in zip(*(one for one, _ in flat), strict=True)], flat[0][1])


def _random_state(tensor: Any) -> list[torch.Tensor]:
    of_device = [torch.cuda.get_rng_state(tensor.device)] if tensor.is_cuda else []
    return [torch.get_rng_state(), *of_device]
