"""RMM's binning_memory_resource: fixed sizes of 2^k bytes, and a pool above and below them.

Source: the public headers of rmm (mr/device/binning_memory_resource.hpp and fixed_size_memory_resource.hpp). There is
no oracle for this model. Upheld from there:
- a request up to 2^`largest_exponent` bytes takes a block of the smallest bin that holds it, the bins being the powers
  of two from 2^`smallest_exponent` on; a larger one goes to the pool (see rmm_pool, whose settings it has too);
- a bin takes 128 blocks at a time from the pool, the first of them when the resource is made, and returns none;
- blocks of a bin never merge, so that it makes no difference which of them a request gets.
"""

from typing import Any, ClassVar, NamedTuple

import numpy as np

from stalloc.compiled import njit
from stalloc.errors import BadInputError
from stalloc.replay.model import parse_bytes, parse_count, read_settings
from stalloc.replay.protocol import Kind
from stalloc.replay.rmm_pool import NUM_POOL_WORDS, UNIT, RmmPool, allocate, begin, free
from stalloc.replay.tables import (
    BLOCKS_USED,
    EXTRA,
    LEFT,
    OWN,
    ROWS_AHEAD,
    TREE,
    give_up,
    has_room,
    hold,
    note,
    split,
)
from stalloc.trace.record import Column

_BLOCKS = 128  # that a bin takes at a time
_PREPARED, _SMALLEST, _LARGEST, _NUM_CHUNKS = range(OWN + NUM_POOL_WORDS, OWN + NUM_POOL_WORDS + 4)
_NO_TREE = -1
_ALLOC, _EMPTY_CACHE = int(Kind.ALLOC), int(Kind.EMPTY_CACHE)


class BinTables(NamedTuple):
    """Tables (see stalloc.replay.tables) and bins; the EXTRA of a bin's block is the bin's number + 1."""

    words: Column
    blocks: Column
    segments: Column
    roots: Column
    place: Column
    address: Column
    heads: Column  #: (k,) first free block of each bin, 0 for none


@njit()
def _fill(t, number, stream):
    """Take blocks for a bin from the pool; whether it had them."""
    size = 1 << (t.words[_SMALLEST] + number)
    block = allocate(t, size * _BLOCKS, stream)
    if block < 0:
        return False
    t.words[_NUM_CHUNKS] += 1
    for left in range(_BLOCKS - 1, -1, -1):
        rest = split(t, block, size) if left > 0 else 0
        t.blocks[block, EXTRA] = number + 1
        t.blocks[block, TREE] = _NO_TREE
        t.blocks[block, LEFT] = t.heads[number]
        t.heads[number] = block
        block = rest
    return True


@njit()
def _prepare(t):
    if not begin(t):
        return False
    while t.words[_PREPARED] <= t.words[_LARGEST] - t.words[_SMALLEST]:
        if not _fill(t, t.words[_PREPARED], 0):
            return False
        t.words[_PREPARED] += 1
    return True


@njit()
def _allocate(t, requested, stream):
    if not _prepare(t):
        return -1
    if requested > 1 << t.words[_LARGEST]:
        return allocate(t, requested, stream)
    number = 0
    while 1 << (t.words[_SMALLEST] + number) < requested:
        number += 1
    if t.heads[number] == 0 and not _fill(t, number, stream):
        return -1
    block = t.heads[number]
    t.heads[number] = t.blocks[block, LEFT]
    return block


@njit()
def _free(t, block):
    number = t.blocks[block, EXTRA] - 1
    if number < 0:
        free(t, block)
    else:
        t.blocks[block, LEFT] = t.heads[number]
        t.heads[number] = block


@njit(nogil=True)
def _run(t, kind, request, size, stream, start, reserved, allocated):
    for i in range(start, len(kind)):
        row = request[i]
        if kind[i] == _ALLOC:
            rows = _BLOCKS * (len(t.heads) + 1 - t.words[_PREPARED]) + ROWS_AHEAD
            if not has_room(t) or len(t.blocks) - t.words[BLOCKS_USED] < rows:
                return i
            block = _allocate(t, size[row], stream[row]) if size[row] > 0 else 0
            if not hold(t, row, block, size[row]):
                return i
        elif kind[i] != _EMPTY_CACHE:
            block = give_up(t, row, kind[i])
            if block != 0:
                _free(t, block)
        note(t, i, reserved, allocated)
    return len(kind)


class RmmBinning(RmmPool):
    """`smallest_exponent`, `largest_exponent` of the bins; `initial`, `maximum` of the pool."""

    name = "rmm_binning"
    kernel = _run
    num_words = NUM_POOL_WORDS + 4
    own_words: ClassVar[dict[str, int]] = RmmPool.own_words | {"bin_chunks": _NUM_CHUNKS - OWN}

    def __init__(self, settings: dict[str, Any] | None = None, capacity_bytes: int = 0) -> None:
        given = {"smallest_exponent": 18, "largest_exponent": 22}
        super().__init__(given | (settings or {}), capacity_bytes)

    def _start(self) -> None:
        super()._start()
        smallest, largest = self.settings["smallest_exponent"], self.settings["largest_exponent"]
        if not (1 << smallest >= UNIT and smallest <= largest <= 40):
            raise BadInputError(f"rmm_binning cannot have bins from 2^{smallest} to 2^{largest} bytes: give 8 to 40.")
        self._set(_SMALLEST, smallest)
        self._set(_LARGEST, largest)
        t, heads = self._tables, np.zeros(largest - smallest + 1, np.int64)
        self._tables: Any = BinTables(t.words, t.blocks, t.segments, t.roots, t.place, t.address, heads)


def parse_settings(text: str) -> dict[str, Any]:
    """Settings from "smallest_exponent:18,largest_exponent:22,initial:1GiB"."""
    sizes = dict.fromkeys(("initial", "maximum"), parse_bytes)
    return read_settings(
        "rmm_binning", text, sizes | dict.fromkeys(("smallest_exponent", "largest_exponent"), parse_count)
    )
