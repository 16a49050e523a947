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

from typing import Any, NamedTuple

import numpy as np

from stalloc.compiled import njit
from stalloc.errors import BadInputError
from stalloc.replay.model import TableModel, parse_bytes, parse_count, read_settings
from stalloc.replay.protocol import Kind
from stalloc.replay.tables import (
    FREE,
    LEFT,
    NEXT,
    OWN,
    PREVIOUS,
    RETRIES,
    RIGHT,
    S_FIRST,
    S_SIZE,
    SEGMENTS_USED,
    SIZE,
    STATE,
    absorb,
    drop_segment,
    fits,
    give_up,
    has_room,
    hold,
    is_whole,
    new_segment,
    note,
    split,
)
from stalloc.trace.record import Column

_UNIT_BITS = 8
_UNIT = 1 << _UNIT_BITS  # bytes
_GRANULE = 2 << 20
_LEVELS = 48
_DIVISIONS = 32  # at most
_REGION, _BITS = OWN, OWN + 1
_ALLOC, _EMPTY_CACHE = int(Kind.ALLOC), int(Kind.EMPTY_CACHE)


class TLSFTables(NamedTuple):
    """Tables (see stalloc.replay.tables) and the lists; all int64."""

    words: Column
    blocks: Column
    segments: Column
    roots: Column
    place: Column
    address: Column
    first_bits: Column  #: (1,) bit of each level that has a list with blocks
    second_bits: Column  #: (_LEVELS,) bit of each list of a level that has blocks
    heads: Column  #: (_LEVELS, _DIVISIONS) first block of each list


@njit()
def _log2(value):
    """The position of the highest bit."""
    position = 0
    for step in (32, 16, 8, 4, 2, 1):
        if value >> step:
            value >>= step
            position += step
    return position


@njit()
def _lowest(bits):
    """The position of the lowest bit of a word that has one."""
    return _log2(bits & -bits)


@njit()
def _list_of(t, units):
    """The list that a block of so many units belongs to: level and division."""
    bits = t.words[_BITS]
    if units < 1 << bits:
        return 0, units
    high = _log2(units)
    return high - bits + 1, (units >> (high - bits)) - (1 << bits)


@njit()
def _insert(t, block):
    level, division = _list_of(t, t.blocks[block, SIZE] >> _UNIT_BITS)
    head = t.heads[level, division]
    t.blocks[block, LEFT] = 0
    t.blocks[block, RIGHT] = head
    if head != 0:
        t.blocks[head, LEFT] = block
    t.heads[level, division] = block
    t.first_bits[0] |= 1 << level
    t.second_bits[level] |= 1 << division


@njit()
def _remove(t, block):
    before, behind = t.blocks[block, LEFT], t.blocks[block, RIGHT]
    if behind != 0:
        t.blocks[behind, LEFT] = before
    if before != 0:
        t.blocks[before, RIGHT] = behind
        return
    level, division = _list_of(t, t.blocks[block, SIZE] >> _UNIT_BITS)
    t.heads[level, division] = behind
    if behind == 0:
        t.second_bits[level] &= ~(1 << division)
        if t.second_bits[level] == 0:
            t.first_bits[0] &= ~(1 << level)


@njit()
def _searched(t, units):
    """The units of the smallest block of the first list in which every block holds `units`."""
    bits = t.words[_BITS]
    if units < 1 << bits:
        return units
    step = 1 << (_log2(units) - bits)
    return (units + step - 1) // step * step


@njit()
def _find(t, units):
    """A block of a list in which every block holds so many units, out of its list; 0 for none."""
    units = _searched(t, units)
    level, division = _list_of(t, units)
    lists = t.second_bits[level] & (-1 << division)
    if lists == 0:
        levels = t.first_bits[0] & (-1 << (level + 1))
        if levels == 0:
            return 0
        level = _lowest(levels)
        lists = t.second_bits[level]
    block = t.heads[level, _lowest(lists)]
    _remove(t, block)
    return block


@njit()
def _release(t):
    """Give back every region without live blocks."""
    for segment in range(1, t.words[SEGMENTS_USED]):
        if t.segments[segment, S_SIZE] == 0:
            continue
        block = t.segments[segment, S_FIRST]
        if t.blocks[block, STATE] == FREE and is_whole(t, block):
            _remove(t, block)
            drop_segment(t, block)


@njit()
def _allocate(t, requested):
    size = (requested + _UNIT - 1) >> _UNIT_BITS << _UNIT_BITS
    block = _find(t, size >> _UNIT_BITS)
    if block == 0:
        region = t.words[_REGION]
        if size > region:
            least = _searched(t, size >> _UNIT_BITS) << _UNIT_BITS
            region = (least + _GRANULE - 1) // _GRANULE * _GRANULE
        if not fits(t, region):
            t.words[RETRIES] += 1
            _release(t)
        block = new_segment(t, region, 0, 0)
        if block < 0:
            return -1
    if t.blocks[block, SIZE] > size:
        _insert(t, split(t, block, size))
    return block


@njit()
def _free(t, block):
    following, previous = t.blocks[block, NEXT], t.blocks[block, PREVIOUS]
    if following != 0 and t.blocks[following, STATE] == FREE:
        _remove(t, following)
        absorb(t, block, following)
    if previous != 0 and t.blocks[previous, STATE] == FREE:
        _remove(t, previous)
        absorb(t, previous, block)
        block = previous
    _insert(t, block)


@njit(nogil=True)
def _run(t, kind, request, size, stream, start, reserved, allocated):
    for i in range(start, len(kind)):
        row = request[i]
        if kind[i] == _ALLOC:
            if not has_room(t):
                return i
            block = _allocate(t, size[row]) if size[row] > 0 else 0
            if not hold(t, row, block, size[row]):
                return i
        elif kind[i] == _EMPTY_CACHE:
            _release(t)
        else:
            block = give_up(t, row, kind[i])
            if block != 0:
                _free(t, block)
        note(t, i, reserved, allocated)
    return len(kind)


class TLSF(TableModel):
    """`region` (bytes), `divisions` (of a power of two)."""

    name = "tlsf"
    kernel = _run
    num_words = 2
    trees_per_stream = 0

    def __init__(self, settings: dict[str, Any] | None = None, capacity_bytes: int = 0) -> None:
        super().__init__({"region": 64 << 20, "divisions": _DIVISIONS} | (settings or {}), capacity_bytes)

    def _start(self) -> None:
        divisions, region = self.settings["divisions"], self.settings["region"]
        if divisions not in (1, 2, 4, 8, 16, 32):
            raise BadInputError(f"tlsf cannot cut a power of two into {divisions} parts: give a power of two up to 32.")
        if region % _UNIT:
            raise BadInputError(f"the regions of tlsf are multiples of {_UNIT} bytes: give such a size.")
        self._set(_REGION, region)
        self._set(_BITS, divisions.bit_length() - 1)
        t, heads = self._tables, np.zeros((_LEVELS, _DIVISIONS), np.int64)
        first, second = np.zeros(1, np.int64), np.zeros(_LEVELS, np.int64)
        self._tables: Any = TLSFTables(t.words, t.blocks, t.segments, t.roots, t.place, t.address, first, second, heads)


def parse_settings(text: str) -> dict[str, Any]:
    """Settings from "region:256MiB,divisions:16"."""
    return read_settings("tlsf", text, {"region": parse_bytes, "divisions": parse_count})
