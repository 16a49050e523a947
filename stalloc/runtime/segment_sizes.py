"""How much to take from the device at a time.

Contract: a segment is a multiple of 2 MiB, the granularity in which the driver hands out memory, so that what is
counted as reserved is what the device really gives up.
"""

from stalloc.core.constants import (
    GENERAL_KIND,
    MAX_SHARED_SEGMENT,
    PERSISTENT_KIND,
    PRIVATE_KINDS,
    SMALL_KIND,
    SMALL_LIMIT,
    WASTE_SHIFT,
)
from stalloc.runtime import thresholds
from stalloc.sizes import PAGE_BYTES, whole_pages


def segment_bytes(kind: int, size_bytes: int) -> int:
    """The size of a new segment for a pool of `kind` that lacks room for a request of `size_bytes` (rounded)."""
    if kind >= PRIVATE_KINDS:
        kind = SMALL_KIND if size_bytes <= SMALL_LIMIT else GENERAL_KIND
    if kind == SMALL_KIND:
        return PAGE_BYTES
    if size_bytes >= thresholds.LARGE_BYTES:
        return whole_pages(size_bytes)
    if kind != PERSISTENT_KIND:
        return thresholds.GENERAL_SEGMENT_BYTES
    return _for_several(size_bytes, thresholds.SLAB_BYTES, thresholds.SLAB_WASTE)


def tight_segment_bytes(size_bytes: int) -> int:
    """The size of a new segment for a large request where memory is short: little is lost to rounding."""
    return _for_several(size_bytes, max(size_bytes, MAX_SHARED_SEGMENT), 1 / (1 << WASTE_SHIFT))


def _for_several(size_bytes: int, most_bytes: int, waste: float) -> int:
    """The smallest segment for equal requests of which no more than `waste` is lost, else the one that loses least."""
    counts = range(1, most_bytes // size_bytes + 1)
    slabs = [(1 - n * size_bytes / whole_pages(n * size_bytes), n) for n in counts]
    _, count = next((slab for slab in slabs if slab[0] <= waste), min(slabs))
    return whole_pages(count * size_bytes)
