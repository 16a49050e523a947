"""Seconds of an operation by its class, its floating point operations and its bytes: an estimate, with its error.

Contract: a time is ((waves * start)^k + max(padded FLOPs / reached FLOP/s, bytes / reached bytes/s)^k)^(1/k), where k
is 1 for kernels that begin their work when they have started and 2 for those that move bytes meanwhile, waves and
padding are those of stalloc.cost.thread_blocks, and what is reached is a share of what the data sheet promises. The
shares in class_shares.csv are those that kernels of recorded programs reached; `scripts/bench/cost` finds them anew.
"""

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.operation_classes import AFTER_START, Shape, class_of
from stalloc.cost.thread_blocks import Blocks, blocks_of

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
    with (Path(__file__).parent / "class_shares.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            ClassShares(
                row["class"],
                float(row["share_of_flops"]),
                float(row["share_of_bandwidth"]),
                float(row["start_us"]),
                float(row["error"]),
                int(row["calls"]),
                row["source"],
            )
            for row in csv.DictReader(file)
        ]
    return {row.kind: row for row in rows}


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
