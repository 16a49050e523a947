"""What a recorded step saves for its backward pass: how large each tensor is, and when it is saved, needed and over.

Contract: moments are seconds of computing since the begin of the forward pass, estimated, as if nothing was waited for.
Tensors of less than 64 KiB, which are not worth swapping, are left out.
"""

import enum
import functools
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass

from stalloc.cost.disjoint_sets import LEAST_BYTES
from stalloc.cost.swapping.recorded_passes import RecordedPasses
from stalloc.trace.operations import Role


class Use(enum.IntEnum):
    """What happens to a tensor; at the same moment in this order."""

    OVER = 0
    SAVED = 1
    NEEDED = 2


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that a step saves for its backward pass."""

    size_bytes: int
    saved: float  #: after the last operation of the forward pass that uses it
    needed: float  #: before the first operation of the backward pass that does
    over: float  #: after the last one, which is later


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that one step saves for its backward pass, in the order in which they are saved."""

    tensors: tuple[SavedTensor, ...]
    seconds: float  #: of computing, both passes

    def peak_bytes(self, without: Collection[int] = ()) -> int:
        """What is there at once, at the most, of all of them but some."""
        left_out = frozenset(without)
        most = held = 0
        for _, kind, number in self.events:
            if kind is not Use.NEEDED and number not in left_out:
                held += self.tensors[number].size_bytes * (1 if kind is Use.SAVED else -1)
                most = max(most, held)
        return most

    @property
    def at_once_bytes(self) -> int:
        """What the backward pass uses at the same moment, and what is saved then, at the most."""
        most = used = 0
        for _, kind, number in self.events:
            size_bytes = self.tensors[number].size_bytes
            most = max(most, used + size_bytes * (kind is not Use.OVER))
            used += {Use.SAVED: 0, Use.NEEDED: size_bytes, Use.OVER: -size_bytes}[kind]
        return most

    @functools.cached_property
    def events(self) -> list[tuple[float, Use, int]]:
        """When what happens to which tensor, in order."""
        found = []
        for number, one in enumerate(self.tensors):
            found += [(one.saved, Use.SAVED, number), (one.needed, Use.NEEDED, number), (one.over, Use.OVER, number)]
        return sorted(found)


def saved_tensors(passes: RecordedPasses) -> SavedTensors:
    """The tensors that a recorded step saves for its backward pass."""
    trace, operations, in_backward = passes.trace, passes.operations, passes.in_backward
    ends = list(itertools.accumulate(passes.seconds, initial=0.0))
    times = dict(zip(passes.rows.tolist(), itertools.pairwise(ends), strict=True))  # begin and end of each operation
    uses: dict[int, tuple[list[int], list[int]]] = {}  # of each request: operations of the forward, and the other pass
    for operation, request in zip(operations.access_op.tolist(), operations.access_request.tolist(), strict=True):
        if operation in times and operations.role[request] == Role.SAVED_ACTIVATION:
            uses.setdefault(request, ([], []))[int(in_backward[operation])].append(operation)
    found = []
    for request, (forward, backward) in uses.items():
        makers = [row for row in (int(operations.made_by[request]),) if row in times and not in_backward[row]]
        if not backward or not (forward or makers) or trace.size[request] < LEAST_BYTES:
            continue
        saved = max(times[row][1] for row in (*forward, *makers))
        needed, over = min(times[row][0] for row in backward), max(times[row][1] for row in backward)
        needed = max(saved, needed)
        over = max(over, math.nextafter(needed, math.inf))  # some operations take no time
        found.append(SavedTensor(int(trace.size[request]), saved, needed, over))
    return SavedTensors(tuple(sorted(found, key=lambda one: (one.saved, one.needed))), ends[-1])
