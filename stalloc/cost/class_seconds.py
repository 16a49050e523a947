"""Seconds of an operation by its class, its floating point operations and its bytes: an estimate, with its error.

Contract: a time is ((waves * start)^k + max(padded FLOPs / reached FLOP/s, bytes / reached bytes/s)^k)^(1/k), where k
is 1 for kernels that begin their work when they have started and 2 for those that move bytes meanwhile, and what is
reached is a share of what the data sheet promises. The shares in class_shares.csv are those that kernels of recorded
programs reached; `scripts/bench/cost` finds them anew.

Waves and padding, how a GPU fills with the blocks of a call, follow from the name of the call, its class, the sizes and
strides that it is given and the number of multiprocessors, nothing else. Numbers are of kernels of PyTorch 2.6: those
of elements do 512 in a block of 128 threads, those of layer norms a row in one; products are made in tiles, each on a
multiprocessor of its own.
"""

import csv
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.operation_classes import (
    AFTER_START,
    BROADCAST,
    MANY_STRIDES,
    MATRIX_PRODUCT,
    NORMALIZATION,
    ODD_PRODUCT,
    STRIDED,
    Shape,
    base_name,
    class_of,
)

_BLOCK_THREADS, _BLOCK_ELEMENTS = 128, 512
_TILES = ((128, 128), (128, 64), (64, 64))  #: the first is taken that gives half of the GPU something to do
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
    return max(_LEAST_TILE, 1 << (size - 1).bit_length())


TOTAL_ERROR = 0.25
"""What a whole step may be off by: each of five recorded programs was within it by what the other four taught."""
ERROR = (
    f"calibrated by class on recorded H100 programs, ±{100 * TOTAL_ERROR:.0f} % for a step; single operations "
    "and other GPUs are less certain"
)
"""How the estimate is made, for whoever is shown one."""
_AT_ONCE = Blocks()


@dataclass(frozen=True)
class ClassShares:
    """What calls of a class reach."""

    kind: str
    of_flops: float  #: of the data sheet's FLOP/s
    of_bandwidth: float  #: of its bytes a second
    start_us: float  #: microseconds until anything is done
    error: float  #: of calls of programs that were not learnt from, weighted by their time
    calls: int  #: that it was learnt from; 0: what is said is its parent's
    source: str


class WorkSeconds(NamedTuple):
    """What a call would take at the full rates of the data sheet."""

    flops_seconds: float  #: padded
    bytes_seconds: float
    waves: float


@dataclass(frozen=True)
class Estimate:
    """A time that nobody measured."""

    seconds: float
    error: float  #: relative, such as 0.2 for 20 %

    def __str__(self) -> str:
        return f"est. {1e6 * self.seconds:.0f} µs ± {100 * self.error:.0f} %"


@functools.cache
def known_shares() -> dict[str, ClassShares]:
    """All classes, by name."""
    numbers = {
        "of_flops": "share_of_flops",
        "of_bandwidth": "share_of_bandwidth",
        "start_us": "start_us",
        "error": "error",
    }
    with (Path(__file__).parent / "class_shares.csv").open(encoding="utf-8", newline="") as file:
        found = []
        for row in csv.DictReader(file):
            told = {name: float(row[column]) for name, column in numbers.items()}
            found.append(ClassShares(kind=row["class"], **told, calls=int(row["calls"]), source=row["source"]))
    return {row.kind: row for row in found}


def estimate(
    kind: str, flops: float, num_bytes: float, rates: GpuRates, *, half: bool = True, blocks: Blocks = _AT_ONCE
) -> Estimate:
    """About how long a call takes, of `kind` of stalloc.cost.operation_classes; `half`: in float16 or bfloat16.

    A call that computes nothing and moves nothing, such as a view, takes no time.
    """
    if not flops and not num_bytes:
        return Estimate(0.0, 0.0)
    shares = known_shares()[kind]
    work = work_seconds(flops, num_bytes, rates, half=half, blocks=blocks)
    return Estimate(time_of(shares, work), shares.error)


def estimate_call(
    name: str, shapes: Sequence[Shape], flops: float, num_bytes: float, rates: GpuRates, *, half: bool
) -> tuple[str, Estimate]:
    """The class of a call, given its tensors in the order in which it was given them, and about how long it takes."""
    kind = class_of(name, shapes)
    blocks = blocks_of(name, kind, shapes, rates)
    return kind, estimate(kind, flops, num_bytes, rates, half=half, blocks=blocks)


def work_seconds(flops: float, num_bytes: float, rates: GpuRates, *, half: bool, blocks: Blocks) -> WorkSeconds:
    """What a call would take at the full rates of the data sheet, in seconds, and how often it fills the GPU."""
    peak = rates.half_flops if half else rates.single_flops
    return WorkSeconds(blocks.padding * flops / peak, num_bytes / rates.bytes_per_second, blocks.waves)


def time_of(shares: ClassShares, work: WorkSeconds) -> float:
    """Seconds of a call."""
    busy = max(work.flops_seconds / shares.of_flops, work.bytes_seconds / shares.of_bandwidth)
    start = 1e-6 * shares.start_us * work.waves
    return start + busy if shares.kind in AFTER_START else (start**2 + busy**2) ** 0.5
