"""Into how many blocks a call is cut, and how often a GPU fills with them before all have run.

Contract: both follow from the name of the call, its class, the sizes and strides that it is given and the number of
multiprocessors of the GPU, nothing else. Numbers are of kernels of PyTorch 2.6: those of elements do 512 in a block of
128 threads, those of layer norms a row in one; products are made in tiles, each on a multiprocessor of its own.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.operation_classes import (
    BROADCAST,
    MANY_STRIDES,
    MATRIX_PRODUCT,
    NORMALIZATION,
    ODD_PRODUCT,
    STRIDED,
    Shape,
    base_name,
)

_BLOCK_THREADS, _BLOCK_ELEMENTS = 128, 512
_TILES = (
    (128, 128),
    (128, 64),
    (64, 64),
)  #: the first is taken that gives half of the GPU something to do
_LEAST_TILE = 16  #: rows or columns
_IN_BLOCKS_OF_ELEMENTS = (STRIDED, MANY_STRIDES, BROADCAST)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Blocks(NamedTuple):
    """How a call fills a GPU."""

    waves: float = 1.0  #: how often the GPU is full of blocks; 1 where all run at once
    padding: float = 1.0  #: FLOPs that tiles and idle multiprocessors could do, by those that are asked for


def blocks_of(name: str, kind: str, shapes: Sequence[Shape], rates: GpuRates) -> Blocks:
    """How a call of class `kind` fills a GPU; `shapes` are of its tensors, in the order of its arguments."""
    if kind in (MATRIX_PRODUCT, ODD_PRODUCT):
        return Blocks(padding=_padding(name, shapes[-2:], rates.multiprocessors))
    at_once = rates.multiprocessors * rates.threads // _BLOCK_THREADS
    if kind in _IN_BLOCKS_OF_ELEMENTS:
        elements = max((math.prod(shape.sizes) for shape in shapes), default=0)
        return Blocks(waves=max(1.0, elements / _BLOCK_ELEMENTS / at_once))
    if kind == NORMALIZATION and shapes and base_name(name).startswith(("native_layer_norm", "_fused_rms_norm")):
        return Blocks(waves=max(1.0, math.prod(shapes[0].sizes[:-1]) / at_once))
    return Blocks()


def _padding(name: str, factors: Sequence[Shape], multiprocessors: int) -> float:
    """`Blocks.padding` of a product of matrices; 1 where its shapes do not tell."""
    if base_name(name) not in _PRODUCTS or len(factors) < 2 or min(len(shape.sizes) for shape in factors) < 2:
        return 1.0
    left, right = factors
    rows, columns, batch = left.sizes[-2], right.sizes[-1], math.prod(left.sizes[:-2])
    if min(rows, columns, batch) < 1:
        return 1.0
    for tile in _TILES:
        height, width = (min(side, _tile_of(size)) for side, size in zip(tile, (rows, columns), strict=True))
        tiles = batch * -(-rows // height) * -(-columns // width)
        if 2 * tiles >= multiprocessors:
            break
    return -(-tiles // multiprocessors) * multiprocessors * height * width / (batch * rows * columns)


def _tile_of(size: int) -> int:
    """The least tile that is as large; they come in powers of two."""
    return max(_LEAST_TILE, 1 << (size - 1).bit_length())
