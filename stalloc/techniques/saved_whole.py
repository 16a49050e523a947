"""Checkpoints of a program that is divided over ranks: whole, as one process would write them, and written once.

Contract: a state dictionary of the model, or of its optimizer, holds whole tensors in host memory, the same on every
rank; every rank must ask for it, as an unmodified program does. `torch.save` to a path writes on the first rank alone.
"""

import functools
from collections.abc import Iterable
from os import PathLike
from typing import Any

import torch


def keep_whole(model: Any, optimizers: Iterable[Any]) -> None:
    """Let state dictionaries of a model in shards, and of its optimizers, have whole tensors."""
    model.register_state_dict_post_hook(lambda _, state, *__: state.update(_whole(dict(state))))
    for one in optimizers:
        one.register_state_dict_post_hook(lambda _, state: _whole(state))


def _whole(state: Any) -> Any:
    from torch.distributed.tensor import DTensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(DTensor, lambda one: one.detach().full_tensor().cpu(), state)


def save_once(rank: int) -> None:
    """Let `torch.save` write to a path on the first rank only; it still writes to open files on every rank."""
    save = torch.save

    @functools.wraps(save)
    def save_on_first(obj: Any, f: Any, *args: Any, **named: Any) -> None:
        if rank == 0 or not isinstance(f, str | PathLike):
            save(obj, f, *args, **named)

    torch.save = save_on_first
