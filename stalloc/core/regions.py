"""The regions of streams in an arena, and whether those of a plan fit into those that are there.

Contract: what a plan has of a stream is moved as a whole, and only to where that stream's region is already, so that no
byte passes from one stream to another.
"""

from dataclasses import dataclass, replace

import numpy as np

from stalloc.core.arena_tape import ArenaTape
from stalloc.core.constants import ALIGNMENT, GRANULE
from stalloc.core.record_types import Words


@dataclass(frozen=True)
class Region:
    """A part of an arena that belongs to one stream."""

    begin: int  # bytes from where the arena begins
    size_bytes: int
    stream: int  # index; with its strand above STREAM_BITS, where a plan has several


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


def on_pages(tape: ArenaTape) -> ArenaTape:
    """The same tape, what a strand has of a stream on pages of its own; as it is if streams share memory."""
    if tape.cross_streams:
        return replace(tape, arena_bytes=-(-tape.arena_bytes // GRANULE) * GRANULE)
    end, regions = 0, []
    for index in np.unique(tape.owner[tape.offset >= 0]).tolist():
        rows = (tape.owner == index) & (tape.offset >= 0)
        ends = tape.offset[rows] + ((tape.size[rows] + (ALIGNMENT - 1)) & -ALIGNMENT)
        size_bytes = int(ends.max() - tape.offset[rows].min())
        regions.append(Region(end, size_bytes, index))
        end += (size_bytes + GRANULE - 1) // GRANULE * GRANULE
    moved = moved_into(regions, tape.size, tape.owner, tape.offset)
    assert moved is not None  # each region is as large as what it is for
    return replace(tape, offset=moved, arena_bytes=max(end, GRANULE))
