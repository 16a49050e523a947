"""The regions of streams in an arena: each on pages of its own.

Contract: requests that shared no byte share none afterwards.
"""

from dataclasses import replace

import numpy as np

from stalloc.columns import distinct
from stalloc.core.arena_schedule import ArenaSchedule
from stalloc.core.constants import GRANULE, LITTLE
from stalloc.core.record_types import Words
from stalloc.sizes import aligned, whole_pages

_FEW_SHIFT = 6  # little requests lie apart where they, and a page, are no more than 1 / 2 ** shift of the others


def on_pages(schedule: ArenaSchedule, *, apart: bool = True) -> ArenaSchedule:
    """The schedule with each stream on pages of its own; with the offsets as they are if streams share memory.

    Requests that are much smaller than a page lie `apart` behind the others: one that lives on alone would keep a page
    from whoever needs memory.
    """
    if schedule.cross_streams:
        return replace(schedule, arena_bytes=whole_pages(schedule.arena_bytes))
    end, moved = 0, np.full(len(schedule.offset), -1, np.int64)
    for index in distinct(schedule.stream[schedule.offset >= 0]).tolist():
        end = whole_pages(end)
        own = np.flatnonzero((schedule.stream == index) & (schedule.offset >= 0))
        for rows in _apart(schedule, own) if apart else (own,):
            packed, size_bytes = _without_gaps(schedule.offset[rows], aligned(schedule.size[rows]))
            moved[rows] = packed + end
            end += size_bytes
    return replace(schedule, offset=moved, arena_bytes=max(whole_pages(end), GRANULE))


def _apart(schedule: ArenaSchedule, rows: Words) -> tuple[Words, ...]:
    """An owner's rows, small ones for themselves where that takes few bytes more."""
    is_small = schedule.size[rows] < LITTLE
    small, others = rows[is_small], rows[~is_small]
    small_bytes, other_bytes = (
        _without_gaps(schedule.offset[part], aligned(schedule.size[part]))[1] for part in (small, others)
    )
    few = small_bytes > 0 and max(small_bytes, GRANULE) <= other_bytes >> _FEW_SHIFT
    return (others, small) if few else (rows,)


def _without_gaps(offset: Words, size: Words) -> tuple[Words, int]:
    """(k,) offsets from 0 on without the bytes that no row uses, and where they end; nothing else changes."""
    order = np.argsort(offset, kind="stable")
    low, high = offset[order], np.maximum.accumulate(offset[order] + size[order])
    unused = np.cumsum(np.maximum(low - np.append(0, high[:-1]), 0))
    packed = np.empty_like(offset)
    packed[order] = low - unused
    return packed, int((packed + size).max(initial=0))
