"""The memory of tensors in nested containers: which it is, how often it was changed in place, how many bytes it has.

Contract: storages are told apart by a number that is theirs as long as they live.
"""

import contextlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stalloc.sizes import aligned


def storages_of(values: Any) -> set[int]:
    """Numbers for the memory of all tensors in nested containers; a tensor not in one piece of memory has none."""
    return {storage for storage, _ in versions_of(values) if storage}


def versions_of(values: Any) -> list[tuple[int, int]]:
    """The memory, as a number, of all tensors in lists and dictionaries, and how often autograd saw each changed."""
    found = []
    for value in tensors_of(values):
        storage = 0
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a sparse one
            storage = value.untyped_storage()._cdata
        found.append((storage, -1 if value.is_inference() else value._version))
    return found


def tensors_of(values: Any) -> list[Any]:
    """All tensors in lists and dictionaries, in one order for each structure."""
    found, rest = [], [values]
    while rest:
        value = rest.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            rest += value
        elif isinstance(value, dict):
            rest += value.values()
    return found


def sizes_of(values: Any) -> dict[int, int]:
    """The bytes of the memory of all tensors, by the numbers of `storages_of`."""
    return {
        one.untyped_storage()._cdata: aligned(one.untyped_storage().nbytes())
        for one in tree_leaves(values)
        if isinstance(one, torch.Tensor) and one.layout == torch.strided
    }
