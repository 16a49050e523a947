"""Recomputing a model of one's own: the technique without a budget.

Contract: this module loads no torch until it is given a model.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from stalloc.errors import BadInputError
from stalloc.techniques.repeated_blocks import Block, find_blocks, is_replicated

if TYPE_CHECKING:
    from stalloc.techniques.block_tape import Wanted
    from stalloc.techniques.recompute import Recomputation


def checkpoint(
    model: Any, *, keep: Iterable[int | str] = (), blocks: int | Iterable[str] | None = None
) -> "Recomputation":
    """Recompute the repeated blocks of a model, a torch module, in backward, instead of saving what they compute.

    `keep`: operations whose results are saved all the same, by name ("aten.mm", or "mm") or by position in the block,
    counted below autograd. `blocks`: how many, from the first, or their names; all by default. What is done comes
    back, with `undo()`. Gradients are those without it, to the last bit; what cannot be computed twice with the same
    result is a RecomputeError.

    Raises BadInputError if the model has no repeated blocks, or none of a name.
    """
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
            f"{type(model).__name__} has no repeated blocks (two modules of one class side by side, with children of "
            "their own): there is nothing to recompute."
        )
    chosen = _chosen(found, blocks)
    wanted = _by_name_or_position(keep)
    return wrap(chosen, [wanted] * len(chosen))


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
