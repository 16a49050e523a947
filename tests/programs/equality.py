"""Whether what two trainings leave is equal to the last bit; imports torch, so the device has to be in place."""

from typing import Any

import torch


def same(one: Any, other: Any) -> bool:
    """Of tensors, and of dictionaries and lists of them: types of numbers count too."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
