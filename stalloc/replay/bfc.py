"""BFC, "best fit with coalescing": the allocator of TensorFlow and JAX.

Source: the public source of tensorflow/core/common_runtime/bfc_allocator.cc (later tsl/framework). There is no oracle
for this model. Upheld from there:
- sizes are multiples of 256 bytes; a request takes the smallest free chunk that holds it, at the lowest address: the
  bins of 256 * 2^k bytes, each ordered by size and address, are one such order;
- a chunk is split if it is twice as large as the request, or `max_internal_fragmentation` bytes larger, and is handed
  out whole otherwise; a freed chunk merges with free neighbours of its region;
- memory comes in regions: the first of 2 MiB, doubled with each region (`growth`: 1, the default), or all of the limit
  at once (`growth`: 0, preallocation); a region is never larger than what the limit leaves; when the device cannot give
  one, smaller ones are tried, by a tenth each time, but only once in a program's life;
- the limit is `limit` bytes, else the share `fraction` (percent) of the capacity; JAX takes 75 percent;
- when nothing helps and `garbage_collection` is 1, regions without live chunks are given back, and one more region is
  tried. Emptying a cache is nothing that BFC knows.

Chunks are shared between streams, as in TensorFlow, whose allocations all belong to the compute stream.
"""

from dataclasses import dataclass

from stalloc.compiled import inner
from stalloc.errors import BadInputError
from stalloc.replay.blocks import at, new_segment, round_up, split
from stalloc.replay.driver import driver_of
from stalloc.replay.model import TableModel, own_type
from stalloc.replay.settings import as_bytes, as_flag, as_percent, setting
from stalloc.replay.treap import free_into, insert, release_whole, take_best

_UNIT = 256  # bytes
_FIRST_REGION = 2 << 20
_NO_LIMIT = 1 << 50


@dataclass(frozen=True, kw_only=True)
class BfcSettings:
    """The settings of BFC."""

    limit: int = setting(0, as_bytes)
    """Bytes that it may reserve; 0: what `fraction` says."""
    fraction: int = setting(100, as_percent)
    """Percent of the capacity."""
    growth: int = setting(1, as_flag)
    """Whether memory is taken as it is needed, or all at once."""
    garbage_collection: int = setting(1, as_flag)
    """Whether regions without live chunks go back when nothing else helps."""
    max_internal_fragmentation: int = setting(128 << 20, as_bytes)
    """Bytes that a chunk may be larger than its request."""


@inner()
def _find(t, m, size):
    block = take_best(t, 0, size)
    whole = at(t, block).size
    if block != 0 and (whole >= 2 * size or whole - size >= m.max_internal_fragmentation):
        insert(t, 0, split(t, block, size))
    return block


@inner()
def _extend(t, m, size):
    """Add a region for a request; whether there was room."""
    available = (m.limit - t.reserved) // _UNIT * _UNIT
    if size > available:
        return False
    increased = size > m.region
    while size > m.region:
        m.region *= 2
    region = min(m.region, available)
    block = new_segment(t, region, 0, 0)
    if block < 0 and m.backed_down == 0:
        m.backed_down = 1
        while block < 0:
            region = round_up(int(region * 0.9), _UNIT)
            if region < size:
                break
            block = new_segment(t, region, 0, 0)
    if block < 0:
        return False
    if not increased:
        m.region *= 2
    insert(t, 0, block)
    return True


@inner()
def _allocate(t, m, request, requested, stream):
    size = round_up(requested, _UNIT)
    block = _find(t, m, size)
    if block == 0 and _extend(t, m, size):
        block = _find(t, m, size)
    if block == 0 and m.garbage_collection == 1:
        t.retries += 1
        release_whole(t, 0, 0)
        if _extend(t, m, size):
            block = _find(t, m, size)
    return block if block != 0 else -1


@inner()
def _free(t, m, block):
    free_into(t, 0, block)


class BFC(TableModel):
    """TensorFlow's and JAX's allocator."""

    name = "bfc"
    settings_type = BfcSettings
    own = own_type(BfcSettings, "region", "backed_down")
    driver = driver_of(name, own, allocate=_allocate, free=_free)
    trees_per_stream = 0
    common_trees = 1

    def _start(self, capacity_bytes: int) -> None:
        limit = self.options.limit or capacity_bytes * self.options.fraction // 100
        if limit == 0 and self.options.growth == 0:
            raise BadInputError("bfc with growth:0 takes all of its limit at once: give a limit or a capacity.")
        limit = limit or _NO_LIMIT
        region = min(limit, _FIRST_REGION) if self.options.growth else limit
        self._own.write(limit=limit, region=max(_UNIT, round_up(region, _UNIT)))
