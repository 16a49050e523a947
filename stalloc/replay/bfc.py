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

from typing import Any

from stalloc.compiled import njit
from stalloc.errors import BadInputError
from stalloc.replay.free_tree import best_fit, free_into, insert, release_whole, remove
from stalloc.replay.model import TableModel, parse_bytes, parse_flag, parse_percent, read_settings
from stalloc.replay.protocol import Kind
from stalloc.replay.tables import (
    CAPACITY,
    OWN,
    RESERVED,
    RETRIES,
    SIZE,
    give_up,
    has_room,
    hold,
    new_segment,
    note,
    split,
)

_UNIT = 256  # bytes
_FIRST_REGION = 2 << 20
_NO_LIMIT = 1 << 50
_LIMIT, _REGION, _BACKED_DOWN, _WASTE, _COLLECT = range(OWN, OWN + 5)
_ALLOC, _EMPTY_CACHE = int(Kind.ALLOC), int(Kind.EMPTY_CACHE)


@njit()
def _find(t, size):
    block = best_fit(t, 0, size)
    if block != 0:
        remove(t, block)
        whole = t.blocks[block, SIZE]
        if whole >= 2 * size or whole - size >= t.words[_WASTE]:
            insert(t, 0, split(t, block, size))
    return block


@njit()
def _extend(t, size):
    """Add a region for a request; whether there was room."""
    available = (t.words[_LIMIT] - t.words[RESERVED]) // _UNIT * _UNIT
    if size > available:
        return False
    increased = False
    while size > t.words[_REGION]:
        t.words[_REGION] *= 2
        increased = True
    region = min(t.words[_REGION], available)
    block = new_segment(t, region, 0, 0)
    if block < 0 and t.words[_BACKED_DOWN] == 0:
        t.words[_BACKED_DOWN] = 1
        while block < 0:
            region = (int(region * 0.9) + _UNIT - 1) // _UNIT * _UNIT
            if region < size:
                break
            block = new_segment(t, region, 0, 0)
    if block < 0:
        return False
    if not increased:
        t.words[_REGION] *= 2
    insert(t, 0, block)
    return True


@njit()
def _allocate(t, requested):
    size = (requested + _UNIT - 1) // _UNIT * _UNIT
    block = _find(t, size)
    if block == 0 and _extend(t, size):
        block = _find(t, size)
    if block == 0 and t.words[_COLLECT] == 1:
        t.words[RETRIES] += 1
        release_whole(t, 0)
        if _extend(t, size):
            block = _find(t, size)
    return block if block != 0 else -1


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
        elif kind[i] != _EMPTY_CACHE:
            block = give_up(t, row, kind[i])
            if block != 0:
                free_into(t, 0, block)
        note(t, i, reserved, allocated)
    return len(kind)


class BFC(TableModel):
    """`limit`, `max_internal_fragmentation` (bytes), `fraction` (percent), `growth`, `garbage_collection` (0 or 1)."""

    name = "bfc"
    kernel = _run
    num_words = 5
    trees_per_stream = 0
    common_trees = 1

    def __init__(self, settings: dict[str, Any] | None = None, capacity_bytes: int = 0) -> None:
        given = {
            "limit": 0,
            "fraction": 100,
            "growth": 1,
            "garbage_collection": 1,
            "max_internal_fragmentation": 128 << 20,
        }
        super().__init__(given | (settings or {}), capacity_bytes)

    def _start(self) -> None:
        settings = self.settings
        limit = settings["limit"] or int(self._tables.words[CAPACITY]) * settings["fraction"] // 100
        if limit == 0 and settings["growth"] == 0:
            raise BadInputError("bfc with growth:0 takes all of its limit at once: give a limit or a capacity.")
        limit = limit or _NO_LIMIT
        region = min(limit, _FIRST_REGION) if settings["growth"] else limit
        self._set(_LIMIT, limit)
        self._set(_REGION, max(_UNIT, (region + _UNIT - 1) // _UNIT * _UNIT))
        self._set(_WASTE, settings["max_internal_fragmentation"])
        self._set(_COLLECT, settings["garbage_collection"])


def parse_settings(text: str) -> dict[str, Any]:
    """Settings from "growth:0,fraction:75,…"."""
    readers = dict.fromkeys(("limit", "max_internal_fragmentation"), parse_bytes)
    flags = dict.fromkeys(("growth", "garbage_collection"), parse_flag)
    return read_settings("bfc", text, readers | flags | {"fraction": parse_percent})
