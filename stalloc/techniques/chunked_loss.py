"""Cross entropy of a linear head, a part of the rows at a time (TSPLIT, Nie et al. 2022, for the operation that is most
often the peak): logits of all rows never exist at once.

Contract: the loss and its gradients are those of `F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)` but
for the order of sums, so equal within rounding, not to the last bit. This module loads no torch until it is asked.
"""

from typing import TYPE_CHECKING, Any, Literal

from stalloc.errors import BadInputError

if TYPE_CHECKING:
    from torch import Tensor


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
    from torch.utils.checkpoint import checkpoint

    if hidden.shape[:-1] != targets.shape or hidden.shape[-1:] != weight.shape[1:]:
        shapes = ", ".join(str(tuple(one.shape)) for one in (hidden, weight, targets))
        raise BadInputError(f"hidden, weight and targets of shapes {shapes} do not fit: give (…, D), (V, D) and (…).")
    if chunks < 1 or reduction not in ("mean", "sum"):
        raise BadInputError(f"chunks={chunks}, reduction={reduction!r} is not possible: give 1 or more, mean or sum.")
    rows, wanted = hidden.flatten(0, -2), targets.flatten()
    total: Any = 0
    for part, classes in zip(rows.chunk(chunks), wanted.chunk(chunks), strict=True):
        total = total + checkpoint(
            _sum_of_part, part, weight, bias, classes, ignore_index, label_smoothing, use_reentrant=False
        )
    loss: Tensor = total / (wanted != ignore_index).sum() if reduction == "mean" else total
    return loss


def _sum_of_part(
    part: "Tensor", weight: "Tensor", bias: "Tensor | None", classes: "Tensor", ignore_index: int, smoothing: float
) -> "Tensor":
    from torch.nn import functional

    logits = functional.linear(part, weight, bias).float()
    return functional.cross_entropy(
        logits, classes, ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum"
    )
