"""Recomputing a model, or the loss of a language model, of one's own, without a budget; names of ways to recompute.

Contract: a name means the same to `stalloc.checkpoint(policy=…)` as to `stalloc fit --policy`. The loss in chunks and
its gradients are those of `F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)` but for the order of sums,
so equal within rounding, not to the last bit. This module loads no torch until it is given a model or a tensor.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from stalloc.errors import BadInputError
from stalloc.techniques.repeated_blocks import Block, find_blocks, is_replicated

if TYPE_CHECKING:
    from torch import Tensor

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


def checkpoint(
    model: Any, *, keep: Iterable[int | str] = (), blocks: int | Iterable[str] | None = None, policy: str | None = None
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
        why = "nn.DataParallel copies a model at each call"
        raise BadInputError(f"{why}: recompute with DistributedDataParallel instead.")
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
    if policy.partition(":")[0] == BLOCKS:
        return _by_name_or_position(()), num_blocks_of(policy)
    if policy in KEEP_ATTENTION:
        return (lambda _, name: any(part in name for part in ATTENTION)), None
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
    if missing := sorted(named - {block.name for block in found}):
        raise BadInputError(f"the model has no repeated block {missing[0]!r}: there are {found[0].name} and so on.")
    return [block for block in found if block.name in named]


def _by_name_or_position(keep: Iterable[int | str]) -> "Wanted":
    if isinstance(keep, str):
        raise BadInputError(f"keep is {keep!r}: give a list of names or positions of operations.")
    given = {one.removeprefix("aten.") if isinstance(one, str) else one for one in keep}

    def wanted(position: int, name: str) -> bool:
        parts = name.removeprefix("aten.")
        return not given.isdisjoint((position, parts, parts.partition(".")[0]))

    return wanted


def chunked_cross_entropy(
    hidden: "Tensor",
    weight: "Tensor",
    targets: "Tensor",
    *,
    bias: "Tensor | None" = None,
    chunks: int = 8,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> "Tensor":
    """The loss of a language model's head; logits of one of `chunks` parts of the rows exist at a time, in float32.

    `hidden`: (…, D), what the head is given; `weight`: (V, D) and `bias`: (V,), of the head; `targets`: (…), classes.
    Each part's logits are recomputed in backward. The other arguments are those of `F.cross_entropy`. Works under
    autocast, with hooks on saved tensors and in checkpoints.

    Raises BadInputError for shapes that do not fit, or another reduction.
    """
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint as recomputed

    if hidden.shape[:-1] != targets.shape or hidden.shape[-1:] != weight.shape[1:]:
        shapes = ", ".join(str(tuple(one.shape)) for one in (hidden, weight, targets))
        raise BadInputError(f"hidden, weight and targets of shapes {shapes} do not fit: give (…, D), (V, D) and (…).")
    if chunks < 1 or reduction not in ("mean", "sum"):
        raise BadInputError(f"chunks={chunks}, reduction={reduction!r} is not possible: give 1 or more, mean or sum.")
    rows, wanted = hidden.flatten(0, -2), targets.flatten()

    def sum_of_part(part: "Tensor", classes: "Tensor") -> "Tensor":
        logits = functional.linear(part, weight, bias).float()
        options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "sum"}
        return functional.cross_entropy(logits, classes, **options)

    parts = zip(rows.chunk(chunks), wanted.chunk(chunks), strict=True)
    total: Any = sum(recomputed(sum_of_part, *part, use_reentrant=False) for part in parts)
    return total / (wanted != ignore_index).sum() if reduction == "mean" else total
