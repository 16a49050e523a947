"""The regions of streams in an arena, and whether those of a plan fit into those that are there.

Contract: what a plan has of a stream is moved as a whole, and only to where that stream's region is already, so that no
byte passes from one stream to another.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.core.constants import ALIGNMENT
from stalloc.core.record_types import Words


@dataclass(frozen=True)
class Region:
    """A part of an arena that belongs to one stream."""

    begin: int  # bytes from where the arena begins
    size_bytes: int
    stream: int  # index


def moved_into(regions: list[Region], size: Words, stream: Words, offset: Words) -> Words | None:
    """(k,) the offsets of a tape in an arena of these regions, -1 where it has none; None if it does not fit."""
    moved = np.full(len(offset), -1, np.int64)
    planned = offset >= 0
    for index in np.unique(stream[planned]).tolist():
        rows = planned & (stream == index)
        low = int(offset[rows].min())
        high = int((offset[rows] + ((size[rows] + (ALIGNMENT - 1)) & -ALIGNMENT)).max())
        own = [region for region in regions if region.stream == index]
        largest = max(own, key=lambda region: region.size_bytes, default=None)
        if largest is None or largest.size_bytes < high - low:
            return None
        moved[rows] = offset[rows] + (largest.begin - low)
    return moved
