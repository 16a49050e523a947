"""TLSF, "two-level segregated fit": constant time for every request, good fit, immediate coalescing.

Source: Masmano, Ripoll, Crespo and Real, "TLSF: a New Dynamic Memory Allocator for Real-Time Systems", ECRTS 2004.
There is no oracle for this model. Upheld from there:
- free blocks are in lists by size: the first level is the power of two, the second cuts it into `divisions` equal parts
  (a power of two up to 32); a request is rounded up to the next list, so that every block of a list holds it, and
  bitmaps find the first list that is not empty; within a list the block that was freed last is taken;
- a block is split where at least the smallest size (256 bytes, the unit) remains; a freed block merges with its free
  neighbours at once.

Growing, which the paper leaves to its user: memory comes in regions of `region` bytes, or, for a request beyond that,
of the smallest size of the list that is searched for it, in granules of 2 MiB, so that it is found again when it is
free. Free regions are given back when the device has no more, and when the cache is emptied. All streams share the
blocks.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import inner
from stalloc.core.record_types import row_of
from stalloc.core.records import Word
from stalloc.errors import BadInputError
from stalloc.replay.blocks import (
    FREE,
    GRANULE,
    absorb,
    at,
    drop_segment,
    fits,
    is_whole,
    log2,
    new_segment,
    round_up,
    segment_at,
    split,
)
from stalloc.replay.driver import driver_of
from stalloc.replay.model import TableModel, own_type
from stalloc.replay.settings import as_bytes, as_count, setting

_UNIT_BITS = 8
_UNIT = 1 << _UNIT_BITS  # bytes
_LEVELS = 48
_DIVISIONS = 32  # at most


@dataclass(frozen=True, kw_only=True)
class TlsfSettings:
    """The settings of TLSF."""

    region: int = setting(64 << 20, as_bytes)
    """Bytes that are taken from the device at a time."""
    divisions: int = setting(_DIVISIONS, as_count)
    """Lists that a power of two is cut into."""


_level_at = row_of("second_bits", Word)  # (_LEVELS,) bit of each list of a level that has blocks
_head_at = row_of("heads", Word)  # (_LEVELS * _DIVISIONS,) first block of each list, linked by `left` and `right`


@inner()
def _lowest(bits):
    return log2(bits & -bits)


@inner()
def _list_of(m, units):
    """The list that a block of so many units belongs to: level and division."""
    bits = m.bits
    if units < 1 << bits:
        return 0, units
    high = log2(units)
    return high - bits + 1, (units >> (high - bits)) - (1 << bits)


@inner()
def _insert(t, m, block):
    level, division = _list_of(m, at(t, block).size >> _UNIT_BITS)
    head = _head_at(m, level * _DIVISIONS + division)
    at(t, block).left = 0
    at(t, block).right = head.value
    if head.value != 0:
        at(t, head.value).left = block
    head.value = block
    m.first_bits |= 1 << level
    _level_at(m, level).value |= 1 << division


@inner()
def _remove(t, m, block):
    before, behind = at(t, block).left, at(t, block).right
    if behind != 0:
        at(t, behind).left = before
    if before != 0:
        at(t, before).right = behind
        return
    level, division = _list_of(m, at(t, block).size >> _UNIT_BITS)
    _head_at(m, level * _DIVISIONS + division).value = behind
    if behind == 0:
        _level_at(m, level).value &= ~(1 << division)
        if _level_at(m, level).value == 0:
            m.first_bits &= ~(1 << level)


@inner()
def _searched(m, units):
    """The units of the smallest block of the first list in which every block holds `units`."""
    return units if units < 1 << m.bits else round_up(units, 1 << (log2(units) - m.bits))


@inner()
def _find(t, m, units):
    """A block of a list in which every block holds so many units, out of its list; 0 for none."""
    level, division = _list_of(m, _searched(m, units))
    lists, levels = _level_at(m, level).value & (-1 << division), m.first_bits & (-1 << (level + 1))
    if lists == 0 and levels == 0:
        return 0
    if lists == 0:
        level = _lowest(levels)
        lists = _level_at(m, level).value
    block = _head_at(m, level * _DIVISIONS + _lowest(lists)).value
    _remove(t, m, block)
    return block


@inner()
def _empty(t, m, kind, request):
    for segment in range(1, t.segments_used):
        block = segment_at(t, segment).first
        if segment_at(t, segment).size > 0 and at(t, block).state == FREE and is_whole(t, block):
            _remove(t, m, block)
            drop_segment(t, block)


@inner()
def _allocate(t, m, request, requested, stream):
    size = (requested + _UNIT - 1) >> _UNIT_BITS << _UNIT_BITS
    block = _find(t, m, size >> _UNIT_BITS)
    if block == 0:
        region = m.region
        if size > region:
            region = round_up(_searched(m, size >> _UNIT_BITS) << _UNIT_BITS, GRANULE)
        if not fits(t, region):
            t.retries += 1
            _empty(t, m, 0, 0)
        block = new_segment(t, region, 0, 0)
        if block < 0:
            return -1
    if at(t, block).size > size:
        _insert(t, m, split(t, block, size))
    return block


@inner()
def _free(t, m, block):
    following, previous = at(t, block).next, at(t, block).previous
    if following != 0 and at(t, following).state == FREE:
        _remove(t, m, following)
        absorb(t, block, following)
    if previous != 0 and at(t, previous).state == FREE:
        _remove(t, m, previous)
        absorb(t, previous, block)
        block = previous
    _insert(t, m, block)


class TLSF(TableModel):
    """Two-level segregated fit."""

    name = "tlsf"
    settings_type = TlsfSettings
    own = own_type(TlsfSettings, "bits", "first_bits", "second_bits", "heads")  # `first_bits`: levels with a block
    driver = driver_of(name, own, allocate=_allocate, free=_free, empty=_empty)
    trees_per_stream = 0

    def _own_tables(self) -> dict[str, Column]:
        return {"second_bits": np.zeros(_LEVELS, np.int64), "heads": np.zeros(_LEVELS * _DIVISIONS, np.int64)}

    def _start(self, capacity_bytes: int) -> None:
        divisions, region = self.options.divisions, self.options.region
        if divisions not in (1, 2, 4, 8, 16, 32):
            raise BadInputError(f"tlsf cannot cut a power of two into {divisions} parts: give a power of two up to 32.")
        if region % _UNIT:
            raise BadInputError(f"the regions of tlsf are multiples of {_UNIT} bytes: give such a size.")
        self._own.write(bits=divisions.bit_length() - 1)
