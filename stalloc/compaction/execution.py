"""Doing a move plan: one launch a wave, through the kernels or through any function that copies blocks.

Contract: waves are given to `copy` in order and each is queued before the next one, on one stream; nothing is copied
before the whole plan is known to be complete (addresses, bounce buffer).
"""

from collections.abc import Callable

from stalloc.columns import Column
from stalloc.compaction.schedule import Schedule

#: copies one wave: (k,) absolute source addresses, target addresses and bytes, in any order
Copy = Callable[[Column, Column, Column], None]


def execute(schedule: Schedule, *, copy: Copy | None = None, base: int = 0, bounce: int = 0) -> None:
    """Copy the waves of a plan, its offsets counted from `base`, its bounce buffer (if it needs one) at `bounce`.

    Without `copy` the batched kernel does it on torch's current device and stream, or on host memory in Triton's
    interpreter; `stalloc.kernels.host_copy` is the reference for host memory.

    Raises BadInputError, before anything is copied, if a bounce buffer is needed and not given; SetupError without
    Triton.
    """
    if copy is None:
        copy = _batched
    for source, target, size in schedule.resolve(base=base, bounce=bounce).waves():
        copy(source, target, size)


def _batched(source: Column, target: Column, size: Column) -> None:
    from stalloc.kernels import batched_copy

    batched_copy(source, target, size, check=False)  # the waves of a schedule are disjoint
