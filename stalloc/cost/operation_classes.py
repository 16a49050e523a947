"""Classes of operations that take about the same share of what a GPU promises.

Contract: the class of a call follows from its name and from the sizes and strides of what it is given, nothing else, so
that a recorded call and one that is being made are of one class.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

MATRIX_PRODUCT, ODD_PRODUCT, ATTENTION = "matrix product", "matrix product of odd sizes", "attention"
CONVOLUTION, FEW_CHANNELS = "convolution", "convolution of few channels"
SOFTMAX, NORMALIZATION, REDUCTION = "softmax", "normalization", "reduction"
POINTWISE, BROADCAST, STRIDED, JOIN, LOOKUP = "pointwise", "broadcast", "strided copy", "join", "lookup"
MANY_STRIDES, TRANSPOSED = "many strides", "transposed copy"

PARENTS = {
    MATRIX_PRODUCT: POINTWISE,
    ODD_PRODUCT: MATRIX_PRODUCT,
    ATTENTION: MATRIX_PRODUCT,
    CONVOLUTION: MATRIX_PRODUCT,
    FEW_CHANNELS: MATRIX_PRODUCT,
    STRIDED: POINTWISE,
    MANY_STRIDES: STRIDED,
    NORMALIZATION: POINTWISE,
    BROADCAST: POINTWISE,
    LOOKUP: POINTWISE,
    JOIN: STRIDED,
    TRANSPOSED: JOIN,
    SOFTMAX: NORMALIZATION,
    REDUCTION: NORMALIZATION,
}
"""What a class is like of which nothing, or little, was measured."""
AFTER_START = frozenset((MATRIX_PRODUCT, ODD_PRODUCT, ATTENTION, CONVOLUTION, FEW_CHANNELS, POINTWISE))
"""Classes whose kernels do their work when they have started; those of the others move bytes while they start."""

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear")
_COPIES = ("clone", "copy_", "_to_copy", "contiguous")
_REDUCTIONS = ("sum", "mean", "prod", "std", "var", "linalg_vector_norm", "argmax", "argmin", "all", "any", "amax",
               "amin", "max", "min", "cumsum", "nll_loss_forward", "_foreach_norm")  # fmt: skip
_LOOKUPS = ("embedding", "embedding_dense_backward", "index", "gather", "index_select", "index_put_", "scatter_add_")
_ALIGNED = 8  # elements of half precision, 16 bytes: what tensor cores load at a time
_DIMENSIONS = 3  # more of them make the search for an element's address the longer part
_WARP, _APART = 32, 16  # threads that read at once; elements of half precision, 32 bytes: what is read together


class Shape(NamedTuple):
    """The shape of a tensor: sizes and strides, both in elements."""

    sizes: Sequence[int]
    strides: Sequence[int]


_NUMBER = Shape((), ())


def class_of_call(call: Sequence[Any]) -> str:
    """The class of a recorded call: see stalloc.cost.calls."""
    return class_of(call[0], list(shapes_of(call[2])))


def class_of(name: str, shapes: Sequence[Shape]) -> str:
    """The class of a call, given its tensors in the order in which it was given them."""
    base = base_name(name)
    if base in _PRODUCTS:
        return MATRIX_PRODUCT if len(shapes) > 1 and all(map(_is_aligned, shapes[-2:])) else ODD_PRODUCT
    if "attention" in base:
        return ATTENTION
    if "conv" in base:
        weights = [shape for shape in shapes if len(shape.sizes) > 2][-1:]
        return FEW_CHANNELS if weights and weights[0].sizes[1] < _ALIGNED else CONVOLUTION
    if "softmax" in base:
        return SOFTMAX
    if base in _REDUCTIONS:
        return REDUCTION
    if "_norm" in base and "foreach" not in base:
        return NORMALIZATION
    if base in ("cat", "stack"):
        return TRANSPOSED if _transposes(shapes) else JOIN
    if base in _LOOKUPS:
        return LOOKUP
    if base in _COPIES:
        if all(map(_is_dense, shapes)):
            return POINTWISE
        if base in ("clone", "contiguous", "copy_") and _transposes(shapes if base == "copy_" else (*shapes, _NUMBER)):
            return TRANSPOSED
        return MANY_STRIDES if _have_many_strides(shapes) else STRIDED
    if _are_alike(shapes) or "foreach" in base or "fused" in base:
        return POINTWISE
    return MANY_STRIDES if _have_many_strides(shapes) else BROADCAST


def base_name(name: str) -> str:
    """The name of an operation without its namespace: mm for aten::mm and for aten.mm."""
    return name.rpartition("::")[2].rpartition(".")[2] if "::" in name else name.split(".")[-1]


def _are_alike(shapes: Sequence[Shape]) -> bool:
    """Whether all tensors of more than one number are as large as the largest, and dense."""
    large = [shape for shape in shapes if math.prod(shape.sizes) > 1]
    most = max((math.prod(shape.sizes) for shape in large), default=0)
    return all(_is_dense(shape) and math.prod(shape.sizes) == most for shape in large)


def shapes_of(arguments: Any) -> Iterator[Shape]:
    """The tensors of a recorded call."""
    for given in arguments if isinstance(arguments, list) else ():
        if isinstance(given, dict) and "tensor" in given:
            yield Shape(given["tensor"][1], given["tensor"][2])
        elif isinstance(given, dict):
            yield from shapes_of(given.get("list", []))


def _is_aligned(shape: Shape) -> bool:
    """Whether tensor cores can load the rows of a matrix, or its columns, in whole pieces."""
    if len(shape.sizes) < 2:
        return False
    near, far = sorted(shape.strides[-2:])
    return near == 1 and far % _ALIGNED == 0 and shape.sizes[-1] % _ALIGNED == 0


def _have_many_strides(shapes: Sequence[Shape]) -> bool:
    return any(len(_joined(shape)) > _DIMENSIONS for shape in shapes)


def _transposes(shapes: Sequence[Shape]) -> bool:
    """Whether neighbours in some tensors lie apart in others, so that what is read together is not used together."""
    apart = [bool(dims) and dims[-1][0] >= _WARP and dims[-1][1] >= _APART for dims in map(_joined, shapes)]
    return any(apart) and not all(apart)


def _joined(shape: Shape) -> list[tuple[int, int]]:
    """Sizes and strides, without those of 1, as few as say the same."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape.sizes, shape.strides, strict=False):
        if size != 1 and dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        elif size != 1:
            dims.append((size, stride))
    return dims


def _is_dense(shape: Shape) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape.sizes), reversed(shape.strides), strict=False):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
