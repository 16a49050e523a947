"""A move plan: waves of copies, each wave safe to execute in any order, one wave after the other.

Contract: within a wave no target shares a byte with another target or with a source of that wave; executed in order,
the waves leave every block's bytes at its target. Addresses from `BOUNCE` on (see `resolve`) stand for the bounce
buffer, which is chosen only when the plan is executed: one launch a wave, on one stream, and nothing is copied before
the whole plan is known to be complete.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from stalloc.columns import Column
from stalloc.errors import BadInputError

#: byte b of the bounce buffer is written as BOUNCE + b; no device has so many bytes
BOUNCE = 1 << 62
#: copies one wave: (k,) absolute source addresses, target addresses and bytes, in any order
Copy = Callable[[Column, Column, Column], None]


@dataclass(frozen=True, eq=False)
class Schedule:
    """k copies in w waves. All addresses are in the space of the blocks: offsets in an arena, or absolute."""

    source: Column  #: (k,) bytes
    target: Column  #: (k,) bytes
    size: Column  #: (k,) bytes, more than 0
    first: Column  #: (w + 1,) wave i is the copies [first[i], first[i + 1])
    moved_bytes: int  #: sum of the sizes of the blocks that change their place
    copied_bytes: int  #: what the copies read: more than moved_bytes where bytes go through the bounce buffer
    bounce_bytes: int  #: how large the bounce buffer has to be; 0: none is needed

    @property
    def num_waves(self) -> int:
        """Launches that it takes."""
        return len(self.first) - 1

    def waves(self) -> Iterator[tuple[Column, Column, Column]]:
        """Source, target and size of each wave."""
        for low, high in zip(self.first[:-1].tolist(), self.first[1:].tolist(), strict=True):
            yield self.source[low:high], self.target[low:high], self.size[low:high]

    def resolve(self, *, base: int = 0, bounce: int = 0) -> "Schedule":
        """This plan in absolute addresses: `base` is added to offsets, the bounce buffer begins at `bounce`.

        Raises BadInputError if a bounce buffer is needed and none is given (its address is 0).
        """
        if self.bounce_bytes and not bounce:
            raise BadInputError(f"this move plan needs a bounce buffer of {self.bounce_bytes} bytes: give its address.")
        source, target = (np.where(x >= BOUNCE, x - BOUNCE + bounce, x + base) for x in (self.source, self.target))
        return replace(self, source=source, target=target)


class Copies:
    """Copies as they are found, each with the wave that it belongs to."""

    def __init__(self) -> None:
        self._columns: list[tuple[Column, Column, Column, Column]] = []
        self._single: list[tuple[int, int, int, int]] = []

    def add(self, wave: int, source: int, target: int, size: int) -> None:
        """One copy."""
        self._single.append((wave, source, target, size))

    def add_columns(self, wave: Column, source: Column, target: Column, size: Column) -> None:
        """Several copies, (k,) each."""
        self._columns.append((wave, source, target, size))

    def schedule(self, moved_bytes: int) -> Schedule:
        """The finished record, its waves in order and without empty ones."""
        single = np.array(self._single, np.int64).reshape(-1, 4)
        parts = [*self._columns, tuple(single.T)]
        wave, source, target, size = (np.concatenate([part[i] for part in parts]) for i in range(4))
        order = np.lexsort((target, wave))
        wave, source, target, size = wave[order], source[order], target[order], size[order]
        first = np.append(np.flatnonzero(np.diff(wave, prepend=-1)), len(wave)) if len(wave) else np.zeros(1, np.int64)
        ends = [(x + size)[x >= BOUNCE] for x in (source, target)]
        top = int(np.concatenate(ends).max(initial=BOUNCE))
        return Schedule(source, target, size, first, moved_bytes, int(size.sum()), top - BOUNCE)


def column(values: ArrayLike, name: str) -> Column:
    """A column (n,) of integers. Raises BadInputError for anything else."""
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadInputError(f"{name} has to be one column of integers.")
    return array.astype(np.int64)


def execute(schedule: Schedule, *, copy: Copy | None = None, base: int = 0, bounce: int = 0) -> None:
    """Copy the waves of a plan, its offsets counted from `base`, its bounce buffer (if it needs one) at `bounce`.

    Without `copy` the batched kernel does it on torch's current device and stream, or on host memory in Triton's
    interpreter; `stalloc.kernels.host_copy` is the reference for host memory.

    Raises BadInputError, before anything is copied, if a bounce buffer is needed and not given; SetupError without
    Triton.
    """
    copy = copy or batched
    for source, target, size in schedule.resolve(base=base, bounce=bounce).waves():
        copy(source, target, size)


def batched(source: Column, target: Column, size: Column) -> None:
    """The kernel, on torch's current device and stream, for waves, whose copies are disjoint."""
    from stalloc.kernels import batched_copy

    batched_copy(source, target, size, check=False)
