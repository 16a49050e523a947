"""RMM's pool_memory_resource, and the binning_memory_resource above it.

Source: the documentation and the public headers of rmm (mr/device/pool_memory_resource.hpp,
binning_memory_resource.hpp, fixed_size_memory_resource.hpp, detail/stream_ordered_memory_resource.hpp,
detail/coalescing_free_list.hpp). There is no oracle for these models. Upheld from there, of the pool:
- sizes are multiples of 256 bytes; a request takes the smallest free block of its stream that holds it, at the lowest
  address, and what remains stays in the stream's list; a freed block merges with neighbours in the same list, never
  across what came from the device in one piece;
- where its own list has nothing, the first other list that has a fitting block gives it, and everything else in that
  list moves over; where none has, the other lists are merged in, one after the other, until a block fits;
- where that fails the pool grows: with a `maximum` by half of what is left to it, without one by as much as it has, at
  least by the request; when that fails, by half of it each time;
- the pool begins with `initial` bytes, by default, as from Python, with half of the device's memory (nothing where the
  capacity is unknown), and never gives anything back.

RMM orders the lists of streams by where their events lie in memory; the model by the number of the stream. Of the bins:
- a request up to 2^`largest_exponent` bytes takes a block of the smallest bin that holds it, the bins being the powers
  of two from 2^`smallest_exponent` on; a larger one goes to the pool;
- a bin takes 128 blocks at a time from the pool, the first of them when the resource is made, and returns none;
- blocks of a bin never merge, so that it makes no difference which of them a request gets.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from stalloc.columns import Column
from stalloc.compiled import inner
from stalloc.core.record_types import row_of
from stalloc.core.records import Word
from stalloc.errors import BadInputError
from stalloc.replay.blocks import LIVE, ROWS_AHEAD, at, has_room, new_segment, round_up, split
from stalloc.replay.driver import driver_of, free
from stalloc.replay.model import TableModel, own_type
from stalloc.replay.settings import as_bytes, as_count, setting
from stalloc.replay.treap import free_into, insert, remove, root, take_best

_UNIT = 256  # bytes
_BLOCKS = 128  # that a bin takes at a time
_NO_TREE = -1


@dataclass(frozen=True, kw_only=True)
class RmmPoolSettings:
    """The settings of the pool."""

    initial: int | None = setting(None, as_bytes)
    """Bytes that it begins with; None: half of the capacity."""
    maximum: int = setting(0, as_bytes)
    """Bytes that it may have; 0: no limit."""


@dataclass(frozen=True, kw_only=True)
class RmmBinningSettings(RmmPoolSettings):
    """The settings of the bins and of the pool below them."""

    smallest_exponent: int = setting(18, as_count)
    """The smallest bin has blocks of 2^smallest_exponent bytes."""
    largest_exponent: int = setting(22, as_count)


_FIELDS = ("begun", "lists_taken_over")
_head_at = row_of("heads", Word)  # (k,) first free block of each bin, 0 for none


@inner()
def _begin(t, m):
    """Take the initial memory, once; False if the device has no room for it."""
    if m.begun == 0:
        if m.initial > 0:
            block = new_segment(t, m.initial, 0, 0)
            if block < 0:
                return False
            insert(t, 0, block)
        m.begun = 1
    return True


@inner()
def _take_over(t, m, stream, other):
    m.lists_taken_over += 1
    block = root(t, other)
    while block != 0:
        remove(t, block)
        at(t, block).stream = stream
        free_into(t, stream, block)
        block = root(t, other)


@inner()
def _from_others(t, m, size, stream):
    for other in range(t.num_headers):
        block = take_best(t, other, size) if other != stream else 0
        if block != 0:
            at(t, block).stream = stream
            _take_over(t, m, stream, other)
            return block
    for other in range(t.num_headers):
        if other != stream and root(t, other) != 0:
            _take_over(t, m, stream, other)
            block = take_best(t, stream, size)
            if block != 0:
                return block
    return 0


@inner()
def _grow(t, m, size, stream):
    held = t.reserved
    wanted = max(size, held)
    if m.maximum != 0:
        left = round_up(m.maximum - held, _UNIT)
        wanted = max(size, left // 2) if size <= left else 0
    while wanted >= size:
        block = new_segment(t, wanted, stream, 0)
        if block > 0 or wanted == size:
            return block
        wanted = max(size, wanted // 2)
    return -1


@inner()
def _take(t, m, requested, stream):
    """A block for a request; -1 if the pool cannot grow."""
    size = round_up(requested, _UNIT)
    block = take_best(t, stream, size)
    if block == 0:
        block = _from_others(t, m, size, stream)
    if block == 0:
        block = _grow(t, m, size, stream)
    if block > 0 and at(t, block).size > size:
        at(t, block).state = LIVE  # or the rest would merge with it
        free_into(t, stream, split(t, block, size))
    return block


@inner()
def _allocate(t, m, request, requested, stream):
    return _take(t, m, requested, stream) if _begin(t, m) else -1


class RmmPool(TableModel):
    """RMM's pool."""

    name = "rmm_pool"
    settings_type: ClassVar[type[Any]] = RmmPoolSettings
    own = own_type(RmmPoolSettings, *_FIELDS)
    driver = driver_of(name, own, allocate=_allocate)
    shows: ClassVar[tuple[str, ...]] = ("lists_taken_over",)

    def _start(self, capacity_bytes: int) -> None:
        initial, maximum = self.options.initial, self.options.maximum
        initial = capacity_bytes // 2 // _UNIT * _UNIT if initial is None else initial
        if initial % _UNIT or maximum % _UNIT:
            raise BadInputError(f"the sizes of {self.name} are multiples of {_UNIT} bytes: give such ones.")
        if maximum and initial > maximum:
            raise BadInputError(
                f"{self.name} cannot begin with {initial} bytes and stay below {maximum} bytes: change one of them."
            )
        self._own.write(initial=initial)


@inner()
def _fill(t, m, number, stream):
    """Take blocks for a bin from the pool; whether the pool had them."""
    size = 1 << (m.smallest_exponent + number)
    block = _take(t, m, size * _BLOCKS, stream)
    if block < 0:
        return False
    m.bin_chunks += 1
    for left in range(_BLOCKS - 1, -1, -1):
        rest = split(t, block, size) if left > 0 else 0
        at(t, block).extra, at(t, block).tree = number + 1, _NO_TREE
        at(t, block).left = _head_at(m, number).value
        _head_at(m, number).value = block
        block = rest
    return True


@inner()
def _prepare(t, m):
    if not _begin(t, m):
        return False
    while m.prepared <= m.largest_exponent - m.smallest_exponent:
        if not _fill(t, m, m.prepared, 0):
            return False
        m.prepared += 1
    return True


@inner()
def _allocate_in_bin(t, m, request, requested, stream):
    if not _prepare(t, m):
        return -1
    if requested > 1 << m.largest_exponent:
        return _take(t, m, requested, stream)
    number = 0
    while 1 << (m.smallest_exponent + number) < requested:
        number += 1
    if _head_at(m, number).value == 0 and not _fill(t, m, number, stream):
        return -1
    block = _head_at(m, number).value
    _head_at(m, number).value = at(t, block).left
    return block


@inner()
def _free_in_bin(t, m, block):
    number = at(t, block).extra - 1
    if number < 0:
        free(t, m, block)
    else:
        at(t, block).left = _head_at(m, number).value
        _head_at(m, number).value = block


@inner()
def _has_room(t, m, size):
    rows = _BLOCKS * (m.num_heads + 1 - m.prepared) + ROWS_AHEAD
    return has_room(t) and t.num_blocks - t.blocks_used >= rows


class RmmBinning(RmmPool):
    """RMM's bins above a pool."""

    name = "rmm_binning"
    settings_type = RmmBinningSettings
    own = own_type(RmmBinningSettings, *_FIELDS, "prepared", "bin_chunks", "heads", "num_heads")
    driver = driver_of(name, own, allocate=_allocate_in_bin, free=_free_in_bin, has_room=_has_room)
    shows = (*RmmPool.shows, "bin_chunks")

    def _own_tables(self) -> dict[str, Column]:
        smallest, largest = self.options.smallest_exponent, self.options.largest_exponent
        if not (1 << smallest >= _UNIT and smallest <= largest <= 40):
            raise BadInputError(f"rmm_binning cannot have bins from 2^{smallest} to 2^{largest} bytes: give 8 to 40.")
        return {"heads": np.zeros(largest - smallest + 1, np.int64)}
