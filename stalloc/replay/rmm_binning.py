"""RMM's binning_memory_resource: fixed sizes of 2^k bytes, and a pool above and below them.

Source: the public headers of rmm (mr/device/binning_memory_resource.hpp and fixed_size_memory_resource.hpp). There is
no oracle for this model. Upheld from there:
- a request up to 2^`largest_exponent` bytes takes a block of the smallest bin that holds it, the bins being the powers
  of two from 2^`smallest_exponent` on; a larger one goes to the pool (see rmm_pool, whose settings it has too);
- a bin takes 128 blocks at a time from the pool, the first of them when the resource is made, and returns none;
- blocks of a bin never merge, so that it makes no difference which of them a request gets.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import inner
from stalloc.core.record_types import row_of
from stalloc.core.records import Word
from stalloc.errors import BadInputError
from stalloc.replay import rmm_pool
from stalloc.replay.blocks import ROWS_AHEAD, at, split
from stalloc.replay.blocks import has_room as has_room_for_one
from stalloc.replay.driver import driver_of
from stalloc.replay.model import own_type
from stalloc.replay.rmm_pool import UNIT, RmmPool, begin, free, take
from stalloc.replay.settings import as_count, setting

_BLOCKS = 128  # that a bin takes at a time
_NO_TREE = -1


@dataclass(frozen=True, kw_only=True)
class RmmBinningSettings(rmm_pool.RmmPoolSettings):
    """The settings of the resource and of the pool below it."""

    smallest_exponent: int = setting(18, as_count)
    """The smallest bin has blocks of 2^smallest_exponent bytes."""
    largest_exponent: int = setting(22, as_count)


_OWN = own_type(RmmBinningSettings, *rmm_pool.OWN, "prepared", "bin_chunks", "heads", "num_heads")
_head_at = row_of("heads", Word)  # (k,) first free block of each bin, 0 for none


@inner()
def _fill(t, m, number, stream):
    """Take blocks for a bin from the pool; whether the pool had them."""
    size = 1 << (m.smallest_exponent + number)
    block = take(t, m, size * _BLOCKS, stream)
    if block < 0:
        return False
    m.bin_chunks += 1
    for left in range(_BLOCKS - 1, -1, -1):
        rest = split(t, block, size) if left > 0 else 0
        at(t, block).extra = number + 1
        at(t, block).tree = _NO_TREE
        at(t, block).left = _head_at(m, number).value
        _head_at(m, number).value = block
        block = rest
    return True


@inner()
def _prepare(t, m):
    if not begin(t, m):
        return False
    while m.prepared <= m.largest_exponent - m.smallest_exponent:
        if not _fill(t, m, m.prepared, 0):
            return False
        m.prepared += 1
    return True


@inner()
def _allocate(t, m, request, requested, stream):
    if not _prepare(t, m):
        return -1
    if requested > 1 << m.largest_exponent:
        return take(t, m, requested, stream)
    number = 0
    while 1 << (m.smallest_exponent + number) < requested:
        number += 1
    if _head_at(m, number).value == 0 and not _fill(t, m, number, stream):
        return -1
    block = _head_at(m, number).value
    _head_at(m, number).value = at(t, block).left
    return block


@inner()
def _free(t, m, block):
    number = at(t, block).extra - 1
    if number < 0:
        free(t, m, block)
    else:
        at(t, block).left = _head_at(m, number).value
        _head_at(m, number).value = block


@inner()
def _has_room(t, m, size):
    rows = _BLOCKS * (m.num_heads + 1 - m.prepared) + ROWS_AHEAD
    return has_room_for_one(t) and t.num_blocks - t.blocks_used >= rows


class RmmBinning(RmmPool):
    """RMM's bins above a pool."""

    name = "rmm_binning"
    settings_type = RmmBinningSettings
    own = _OWN
    driver = driver_of(name, own, allocate=_allocate, free=_free, has_room=_has_room)
    shows = (*RmmPool.shows, "bin_chunks")

    def _own_tables(self) -> dict[str, Column]:
        smallest, largest = self.options.smallest_exponent, self.options.largest_exponent
        if not (1 << smallest >= UNIT and smallest <= largest <= 40):
            raise BadInputError(f"rmm_binning cannot have bins from 2^{smallest} to 2^{largest} bytes: give 8 to 40.")
        return {"heads": np.zeros(largest - smallest + 1, np.int64)}
