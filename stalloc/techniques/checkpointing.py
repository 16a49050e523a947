"""Recomputing a model of one's own, without a budget, and the names of published ways to recompute.

Contract: a name means the same to `stalloc.checkpoint(policy=…)` as to `stalloc fit --policy`. This module loads no
torch until it is given a model.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stalloc.errors import BadInputError
from stalloc.techniques.repeated_blocks import Block, find_blocks, is_replicated

if TYPE_CHECKING:
    from stalloc.techniques.block_tape import Wanted
    from stalloc.techniques.recompute import Recomputation

BLOCKS = "blocks"  #: blocks:N, the first N as a whole
KEEP_ATTENTION = ("keep-attention", "remat-aware")  #: one name, and the other of DistFlashAttn, for one thing
ATTENTION = ("attention", "flash")  #: parts of the names of operators that compute attention as a whole
NEED_A_FIT = ("recompute", "checkmate", "selective")  #: what is kept is known when a program was looked at


def num_blocks_of(policy: str) -> int | None:
    """The number in `blocks:N`, None for `blocks`, which is all. Raises BadInputError if it is none."""
    _, colon, number = policy.partition(":")
    if not colon:
        return None
    if not (number.isascii() and number.isdecimal()):
        raise BadInputError(f"{policy[:40]!r} has no number of blocks: give blocks:4, for example.")
    return int(number)


def is_attention(operation: str) -> bool:
    """Whether an operation computes attention as a whole."""
    return any(part in operation for part in ATTENTION)


def checkpoint(
    model: Any,
    *,
    keep: Iterable[int | str] = (),
    blocks: int | Iterable[str] | None = None,
    policy: str | None = None,
) -> "Recomputation":
    """Recompute the repeated blocks of a model, a torch module, in backward, instead of saving what they compute.

    `keep`: operations whose results are saved all the same, by name ("aten.mm", or "mm") or by position in the block,
    counted below autograd. `blocks`: how many, from the first, or their names; all by default. `policy` is a name in
    their place, as in `stalloc fit --policy`: "keep-attention" (LoongTrain; the same as DistFlashAttn's "remat-aware"),
    "blocks:N". What is done comes back, with `undo()`. Gradients are those without it, to the last bit; what cannot be
    computed twice with the same result is a RecomputeError. What the program itself calls in a checkpoint runs as it
    is.

    Raises BadInputError if the model has no repeated blocks, or none of a name, and for a policy that is none.
    """
    wanted, number = _by_name_or_position(keep), None
    if policy is not None:
        if keep or blocks is not None:
            raise BadInputError(f"policy is {policy!r:.42}, with keep or blocks beside it: give one or the other.")
        wanted, number = _of_policy(policy)
    import torch

    from stalloc.techniques.recompute import wrap

    if not isinstance(model, torch.nn.Module):
        raise BadInputError(f"{type(model).__name__} is no torch module: give checkpoint() a model.")
    if is_replicated(model):
        raise BadInputError(
            "nn.DataParallel copies a model at each call: recompute with DistributedDataParallel instead."
        )
    found = find_blocks(model)
    if not found:
        raise BadInputError(
            f"{type(model).__name__} has no repeated blocks (two modules of one class with children of their own, "
            "or a long nn.Sequential): there is nothing to recompute. With STALLOC_CUT_FORWARD=1 a forward pass is cut "
            "that calls four layers with weights, each in a statement of its own."
        )
    chosen = _chosen(found, blocks if number is None else number)
    return wrap(chosen, [wanted] * len(chosen))


def _of_policy(policy: str) -> "tuple[Wanted, int | None]":
    """What is kept, and how many blocks are recomputed."""
    if policy.partition(":")[0] == BLOCKS:
        return _by_name_or_position(()), num_blocks_of(policy)
    if policy in KEEP_ATTENTION:
        return (lambda _, name: is_attention(name)), None
    if policy in NEED_A_FIT:
        raise BadInputError(
            f"{policy} looks at a run of the program to choose what is kept: use stalloc fit --policy {policy}, and "
            "stalloc run --budget."
        )
    raise BadInputError(f"there is no policy {policy!r:.42} for one model: give {KEEP_ATTENTION[0]} or blocks:N.")


def _chosen(found: list[Block], blocks: int | Iterable[str] | None) -> list[Block]:
    if blocks is None:
        return found
    if isinstance(blocks, int):
        if not 0 <= blocks <= len(found):
            raise BadInputError(f"{blocks} blocks are not possible: the model has {len(found)}.")
        return found[:blocks]
    named = set(blocks)
    missing = sorted(named - {block.name for block in found})
    if missing:
        raise BadInputError(f"the model has no repeated block {missing[0]!r}: there are {found[0].name} and so on.")
    return [block for block in found if block.name in named]


def _by_name_or_position(keep: Iterable[int | str]) -> "Wanted":
    if isinstance(keep, str):
        raise BadInputError(f"keep is {keep!r}: give a list of names or positions of operations.")
    given = list(keep)
    positions = frozenset(one for one in given if isinstance(one, int))
    names = {one.removeprefix("aten.") for one in given if isinstance(one, str)}

    def wanted(position: int, name: str) -> bool:
        parts = name.removeprefix("aten.")
        return position in positions or parts in names or parts.partition(".")[0] in names

    return wanted
