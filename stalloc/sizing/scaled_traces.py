"""What a program would ask for at a value that it was not run with, from runs with two other values.

Contract: only a guess, which tells where to look: most requests grow in proportion to a batch or a length, and two runs
that make the same requests in the same order tell by how much each grows. Other pairs of runs tell nothing.
"""

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np

from stalloc.trace import Trace


class ScaledTraces:
    """Runs of a program by value, and what they let one guess."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[Sequence[Trace], bytes]] = {}

    def add(self, value: int, traces: Sequence[Trace]) -> None:
        """A run was seen."""
        self._runs[value] = traces, _structure(traces)

    def at(self, value: int) -> list[Trace] | None:
        """The traces of a value, from the two nearest runs around it that are alike, else any two; None without any."""
        known = sorted(self._runs, key=lambda other: abs(other - value))
        alike = [pair for pair in itertools.combinations(known, 2) if self._runs[pair[0]][1] == self._runs[pair[1]][1]]
        if not alike:
            return None
        low, high = min(
            (sorted(pair) for pair in alike),
            key=lambda pair: (not pair[0] < value < pair[1], pair[1] - pair[0]),
        )
        share = (value - low) / (high - low)
        return [_scaled(*pair, share) for pair in zip(self._runs[low][0], self._runs[high][0], strict=True)]


def _scaled(low: Trace, high: Trace, share: float) -> Trace:
    size = np.rint(low.size + (high.size - low.size) * share).astype(np.int64)
    return low.replace(size=np.maximum(size, 1))


def _structure(traces: Sequence[Trace]) -> bytes:
    """A key that is equal for two runs which make the same requests in the same order, whatever their sizes."""
    made = hashlib.sha256()
    for trace in traces:
        kept = trace.event_request >= 0
        for column in (trace.action[kept], trace.event_request[kept], trace.stream):
            made.update(np.ascontiguousarray(column).tobytes() + b"|")
    return made.digest()
