"""CuPy's MemoryPool: 512-byte units, a free list for every size, an arena for every stream.

Source: the documentation of cupy.cuda.MemoryPool and its public source (memory.pyx, SingleDeviceMemoryPool),
checked event by event against the real pool of CuPy 14.2 (tests/programs/cupy_pool_oracle.py). Upheld from there:
- a request takes a cached chunk of the smallest size that holds it and is split to the unit, however small the rest;
- without one, exactly the rounded size comes from the device; where the device or the pool's limit has no room for it,
  the pool gives every chunk back that is not split, and tries once more;
- a freed chunk merges with free neighbours of its stream, which all parts of a chunk share.

Which one of several cached chunks of one size is taken, CuPy leaves to the order of a Python set, which depends on
where objects happen to lie; the model takes the one at the lowest address, unless it is told (`feed_as_chosen`).
"""

from dataclasses import dataclass, replace

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import inner
from stalloc.core.record_types import row_of
from stalloc.core.records import Word
from stalloc.errors import BadInputError
from stalloc.replay.blocks import FREE, LIVE, WAITING, at, fits, new_segment, round_up
from stalloc.replay.driver import driver_of
from stalloc.replay.model import TableModel, own_type
from stalloc.replay.protocol import Counters, Events, Fed, Kind
from stalloc.replay.settings import as_bytes, setting
from stalloc.replay.treap import best_fit, cut_off, find, release_whole, remove
from stalloc.sizes import ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class CupyPoolSettings:
    """The settings of the pool."""

    limit: int = setting(0, as_bytes)
    """Bytes that cupy.cuda.MemoryPool.set_limit was given; 0 for none."""


_chosen_at = row_of("chosen", Word)  # (n,) address of the chunk that a real pool took for each request, 0 for any


@inner()
def _empty(t, m, kind, request):
    for tree in range(t.num_headers):
        release_whole(t, tree, 0)


@inner()
def _within_limit(t, m, size):
    limit = m.limit
    return limit == 0 or t.reserved + size <= limit


@inner()
def _allocate(t, m, request, requested, stream):
    size = round_up(requested, ALIGNMENT_BYTES)
    block, chosen = best_fit(t, stream, size), _chosen_at(m, request).value
    if block != 0 and chosen != 0 and at(t, block).address != chosen:
        other = find(t, stream, at(t, block).size, chosen)
        block = other if other != 0 else block
    if block != 0:
        remove(t, block)
        cut_off(t, stream, block, size)
        return block
    if not (_within_limit(t, m, size) and fits(t, size)):
        t.retries += 1
        _empty(t, m, 0, 0)
    return new_segment(t, size, stream, 0) if _within_limit(t, m, size) else -1


class CupyPool(TableModel):
    """CuPy's default pool."""

    name = "cupy"
    settings_type = CupyPoolSettings
    own = own_type(CupyPoolSettings, "chosen")
    driver = driver_of(name, own, allocate=_allocate, empty=_empty)
    of_requests = ("chosen",)

    def feed_as_chosen(self, events: Events, address: Column) -> Fed:
        """As `feed`, but among cached chunks of one size take the one that a real pool took: `address` (m,), 0: any."""
        if len(address) != len(events.kind):
            raise BadInputError(f"{len(address)} chosen addresses for {len(events.kind)} events: give one each.")
        allocs = events.kind == Kind.ALLOC
        self._own.lengthen(chosen=len(events.size))
        self._own.tables["chosen"][events.request[allocs]] = address[allocs]
        return self.feed(events)

    def counters(self) -> Counters:
        rows = self.used_rows()
        used = rows["size"][np.isin(rows["state"], (LIVE, WAITING))].sum()
        free = np.count_nonzero(rows["state"] == FREE)
        return replace(super().counters(), more={"used_bytes": int(used), "free_blocks": int(free)})
