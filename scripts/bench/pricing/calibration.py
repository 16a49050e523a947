"""Finding the shares of classes of operations from calls whose time on a GPU was recorded.

Contract: the same calls give the same shares. Each distinct call of a program counts with the fourth root of its time,
so that neither what takes longest nor what is called most decides alone; a class of which little is known stays near
the class that it is like.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stalloc.cost.class_seconds import ClassShares, WorkSeconds, time_of
from stalloc.cost.operation_classes import AFTER_START, ATTENTION, CONVOLUTION, PARENTS, POINTWISE

_FLOPS = (0.02, 0.03, 0.05, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_BANDWIDTH = (0.1, 0.13, 0.16, 0.18, 0.2, 0.22, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9)
_START_US = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 25, 50, 100)
_UNKNOWN = (0.5, 0.5, 4.0)  #: what the first class is near, where nothing speaks against it
_PUBLISHED_FLOPS = {ATTENTION: 0.35}
"""Shares of the FLOP/s that are known without any recording. Attention: FlashAttention-2 on an H100 by Shah et al.,
"FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024."""
_POWER, _PULL = 0.25, 0.4
_ORDER = (POINTWISE, *PARENTS)  #: parents before what is like them


@dataclass(frozen=True)
class TimedCall:
    program: str
    kind: str
    call: str  #: as text, to tell distinct ones
    seconds: float
    work: WorkSeconds


def calibrate(calls: Sequence[TimedCall], source: str) -> dict[str, ClassShares]:
    """The shares of all classes; `error` is that of the calls that they were found from."""
    by_class: dict[str, list[TimedCall]] = defaultdict(list)
    for call in calls:
        by_class[call.kind].append(call)
    found: dict[str, ClassShares] = {}
    for kind in _ORDER:
        parent_kind = PARENTS.get(kind, "")
        parent = found.get(parent_kind)
        near = (parent.of_flops, parent.of_bandwidth, parent.start_us) if parent else _UNKNOWN
        near = (_PUBLISHED_FLOPS.get(kind, near[0]), *near[1:])
        known = by_class.get(kind, [])
        if not known or kind == CONVOLUTION:
            error = parent.error if parent else 1.0
            found[kind] = ClassShares(kind, *near, error, 0, f"not measured: as {parent_kind}")
            continue
        shares = _best(kind, known, near)
        error = error_of(known, [time_of(shares, call.work) for call in known])
        found[kind] = dataclasses.replace(shares, error=round(error, 3), source=source)
    return found


def error_of(calls: Iterable[TimedCall], seconds: Sequence[float]) -> float:
    """How far estimates are off, as a share of the recorded time of all calls."""
    recorded = np.array([call.seconds for call in calls])
    return float(np.abs(np.array(seconds) - recorded).sum() / max(recorded.sum(), 1e-12))


def _best(kind: str, calls: Sequence[TimedCall], near: tuple[float, float, float]) -> ClassShares:
    """The shares, from a grid of them, whose estimates of these calls have the least error in logarithms."""
    distinct: dict[tuple[str, str], list[TimedCall]] = defaultdict(list)
    for call in calls:
        distinct[call.program, call.call].append(call)
    groups = list(distinct.values())
    recorded = np.array([np.mean([call.seconds for call in group]) for group in groups])
    weight = (recorded * [len(group) for group in groups]) ** _POWER
    flops_seconds, bytes_seconds, waves = np.array([group[0].work for group in groups]).T
    grid = np.meshgrid(_FLOPS if flops_seconds.any() else near[:1], _BANDWIDTH, _START_US, indexing="ij")
    of_flops, of_bandwidth, start_us = (axis.reshape(-1, 1) for axis in grid)
    busy = np.maximum(flops_seconds / of_flops, bytes_seconds / of_bandwidth)
    start = 1e-6 * start_us * waves
    estimated = start + busy if kind in AFTER_START else np.sqrt(start**2 + busy**2)
    off = (np.abs(np.log(estimated / recorded)) * weight).sum(axis=1) / weight.sum()
    axes = zip((of_flops, of_bandwidth, start_us), near, strict=True)
    distance = np.sum([np.abs(np.log(axis[:, 0] / value)) for axis, value in axes], axis=0)
    best = int(np.argmin(off + _PULL / len(groups) * distance))
    shares = (float(axis[best, 0]) for axis in (of_flops, of_bandwidth, start_us))
    return ClassShares(kind, *shares, 0.0, len(calls), "")
