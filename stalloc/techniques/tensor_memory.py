"""The memory of tensors in nested containers: which it is, how often it was changed in place, how many bytes it has.

Contract: storages are told apart by a number that is theirs as long as they live.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stalloc.sizes import aligned

_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))  # most of what operators are given


def storages_of(values: Any) -> set[int]:
    """Numbers for the memory of all tensors in nested containers; a tensor not in one piece of memory has none."""
    return {storage for one in tensors_of(values) if (storage := storage_of(one))}


def versions_of(values: Any) -> list[tuple[int, int]]:
    """The memory, as a number, of all tensors in lists and dictionaries, and how often autograd saw each changed."""
    return [(storage_of(one), -1 if one.is_inference() else one._version) for one in tensors_of(values)]


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor; 0 for one that is not in one piece of memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a sparse one
        return 0


def tensors_of(values: Any) -> list[Any]:
    """All tensors in lists and dictionaries, in one order for each structure."""
    found: list[Any] = []
    rest = [values]
    for value in rest:  # which grows meanwhile
        if type(value) in _PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):  # asking for a union of types takes four times as long
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


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a tensor lie in its storage as they are."""
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def unseen() -> Any:
    """A context for operations of stalloc's own, which no mode of the program or of stalloc is to see."""
    return torch._C._DisableTorchDispatch()
