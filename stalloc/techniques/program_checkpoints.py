"""Whether a block is called in a checkpoint of the program's own, whose forward pass runs twice by the program's will.

Contract: what such a block changes (running statistics, counts) is changed twice in the unmodified program; recomputed
in our way it would change once, and give other numbers. Our own checkpoints (`ours`), in which blocks within a block
of ours run, and hooks of other kinds are told apart, wherever they lie; nothing is changed.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_HOOKS = torch._C._autograd
_OF_CHECKPOINTS = ("_checkpoint_hook.", "_recomputation_hook.")  # torch's classes for the two runs of a checkpoint


class _Place(threading.local):
    """Where the innermost run of one of our blocks began: how many checkpoints, and which backward pass (-1: none)."""

    mark = (0, -1)


_place = _Place()


def in_program_checkpoint() -> bool:
    """Whether what is called now is in a checkpoint of the program's, in its forward pass or its second one."""
    return _here() != _place.mark


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """A context for a run of one of our blocks, within our checkpoint."""
    before, _place.mark = _place.mark, _here()
    try:
        yield
    finally:
        _place.mark = before


def _here() -> tuple[int, int]:
    return _num_checkpoints(), torch._C._current_graph_task_id()


def _num_checkpoints() -> int:
    """The number of checkpoints whose hooks on saved tensors are in force; torch shows only the uppermost hooks."""
    above, found = [], 0
    try:
        while (hooks := _uppermost()) is not None:
            above.append(hooks)
            _HOOKS._pop_saved_tensors_default_hooks()
            pack = hooks[0]
            is_torchs = getattr(pack, "__module__", "") == "torch.utils.checkpoint"
            found += is_torchs and getattr(pack, "__qualname__", "").startswith(_OF_CHECKPOINTS)
    finally:
        for hooks in reversed(above):
            _HOOKS._push_saved_tensors_default_hooks(*hooks)
    return found


def _uppermost() -> Any:
    """The hooks (pack, unpack) in force, None without any."""
    try:
        return _HOOKS._top_saved_tensors_default_hooks(False)
    except TypeError:  # older releases take no argument
        return _HOOKS._top_saved_tensors_default_hooks()
