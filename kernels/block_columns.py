"""Tables of blocks as callers give them: absolute addresses and byte counts, checked once for all kernels.

Contract: what leaves `columns` are int64 columns of one length without empty blocks; a batch that `check_disjoint`
passes may be executed in any order, by any number of programs at once.
"""

import numpy as np
from numpy.typing import ArrayLike

from stalloc.columns import Column
from stalloc.errors import BadInputError

PATTERN_BYTES = 16


def columns(*given: ArrayLike) -> tuple[Column, ...]:
    """Columns (n,) of addresses, the last one of sizes in bytes; empty blocks are left out.

    Raises BadInputError for columns of several lengths or shapes and for negative sizes.
    """
    made = [_column(values) for values in given]
    if len({len(column) for column in made}) > 1:
        raise BadInputError(f"tables of {[len(column) for column in made]} blocks do not belong together.")
    size = made[-1]
    if (size < 0).any():
        raise BadInputError(f"block {int(np.flatnonzero(size < 0)[0])} has a negative size: give 0 bytes or more.")
    some = size > 0
    return tuple(made) if some.all() else tuple(column[some] for column in made)


def _column(values: ArrayLike) -> Column:
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadInputError("a table of blocks has to be one column of integers: addresses or bytes.")
    return array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64, copy=False)


def check_disjoint(source: Column | None, target: Column, size: Column) -> None:
    """Raise BadInputError if two targets share a byte, or a target and a source: their order would matter.

    (n,) addresses and bytes; `source` None: only the targets count.
    """
    starts = [target] if source is None else [target, source]
    low = np.concatenate(starts)
    high = low + np.tile(size, len(starts))
    written = np.repeat(np.arange(len(starts)) == 0, len(target))
    order = np.argsort(low, kind="stable")
    low, high, written = low[order], high[order], written[order]
    # the highest end of any range, and of any written one, before each range in order of address
    for blocker, blocked in ((high, written), (np.where(written, high, low), np.ones_like(written))):
        reach = np.maximum.accumulate(blocker)
        clash = np.flatnonzero((low[1:] < reach[:-1]) & blocked[1:])
        if len(clash):
            block = int(order[clash[0] + 1]) % len(target)
            raise BadInputError(
                f"block {block} at {int(low[clash[0] + 1]):#x} shares bytes with another block that is written: "
                "split the table into waves (stalloc.compaction does)."
            )


def pattern_bytes(value: int | bytes) -> bytes:
    """A fill value as 16 bytes: a byte 0 to 255, or a pattern of 1, 2, 4, 8 or 16 bytes that repeats.

    Raises BadInputError for anything else.
    """
    if isinstance(value, int):
        if not 0 <= value <= 255:
            raise BadInputError(f"a fill value is a byte, 0 to 255, not {value}: give a pattern as bytes.")
        return bytes([value]) * PATTERN_BYTES
    if len(value) not in (1, 2, 4, 8, 16):
        raise BadInputError(f"a pattern of {len(value)} bytes cannot repeat: give 1, 2, 4, 8 or 16.")
    return bytes(value) * (PATTERN_BYTES // len(value))
