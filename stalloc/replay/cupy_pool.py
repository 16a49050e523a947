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

from typing import Any, ClassVar

import numpy as np

from stalloc.compiled import njit
from stalloc.errors import BadInputError
from stalloc.replay.free_tree import after, best_fit, find, insert, remove
from stalloc.replay.model import TableModel, parse_bytes, read_settings
from stalloc.replay.protocol import Events, Fed, Kind
from stalloc.replay.tables import (
    ADDRESS,
    FREE,
    NEXT,
    OWN,
    PREVIOUS,
    RESERVED,
    RETRIES,
    SIZE,
    STATE,
    STREAM,
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

_UNIT = 512  # bytes
_LIMIT, _USED, _CACHED = OWN, OWN + 1, OWN + 2
_ALLOC, _EMPTY_CACHE = int(Kind.ALLOC), int(Kind.EMPTY_CACHE)


@njit()
def _free_all_blocks(t):
    """Give back every cached chunk that is all of what came from the device."""
    for tree in range(len(t.roots)):
        block = after(t, tree, 0, 0)
        while block != 0:
            size, address = t.blocks[block, SIZE], t.blocks[block, ADDRESS]
            if is_whole(t, block):
                remove(t, block)
                t.words[_CACHED] -= 1
                drop_segment(t, block)
            block = after(t, tree, size, address)


@njit()
def _within_limit(t, size):
    return t.words[_LIMIT] == 0 or t.words[RESERVED] + size <= t.words[_LIMIT]


@njit()
def _allocate(t, requested, stream, chosen):
    size = (requested + _UNIT - 1) // _UNIT * _UNIT
    block = best_fit(t, stream, size)
    if block != 0 and chosen != 0 and t.blocks[block, ADDRESS] != chosen:
        other = find(t, stream, t.blocks[block, SIZE], chosen)
        block = other if other != 0 else block
    if block != 0:
        remove(t, block)
        t.words[_CACHED] -= 1
        if t.blocks[block, SIZE] > size:
            insert(t, stream, split(t, block, size))
            t.words[_CACHED] += 1
    else:
        if not (_within_limit(t, size) and fits(t, size)):
            t.words[RETRIES] += 1
            _free_all_blocks(t)
        block = new_segment(t, size, stream, 0) if _within_limit(t, size) else -1
        if block < 0:
            return -1
    t.words[_USED] += size
    return block


@njit()
def _free(t, block):
    t.words[_USED] -= t.blocks[block, SIZE]
    following, previous = t.blocks[block, NEXT], t.blocks[block, PREVIOUS]
    if following != 0 and t.blocks[following, STATE] == FREE:
        remove(t, following)
        t.words[_CACHED] -= 1
        absorb(t, block, following)
    if previous != 0 and t.blocks[previous, STATE] == FREE:
        remove(t, previous)
        t.words[_CACHED] -= 1
        absorb(t, previous, block)
        block = previous
    insert(t, t.blocks[block, STREAM], block)
    t.words[_CACHED] += 1


@njit(nogil=True)
def _run(t, kind, request, size, stream, chosen, start, reserved, allocated):
    for i in range(start, len(kind)):
        row = request[i]
        if kind[i] == _ALLOC:
            if not has_room(t):
                return i
            block = _allocate(t, size[row], stream[row], chosen[i]) if size[row] > 0 else 0
            if not hold(t, row, block, size[row]):
                return i
        elif kind[i] == _EMPTY_CACHE:
            _free_all_blocks(t)
        else:
            block = give_up(t, row, kind[i])
            if block != 0:
                _free(t, block)
        note(t, i, reserved, allocated)
    return len(kind)


class CupyPool(TableModel):
    """`limit` (bytes): what cupy.cuda.MemoryPool.set_limit was given."""

    name = "cupy"
    kernel = _run
    own_words: ClassVar[dict[str, int]] = {"used_bytes": _USED - OWN, "free_blocks": _CACHED - OWN}
    num_words = 3

    def __init__(self, settings: dict[str, Any] | None = None, capacity_bytes: int = 0) -> None:
        self._chosen: Column | None = None
        super().__init__({"limit": 0} | (settings or {}), capacity_bytes)

    def _start(self) -> None:
        self._set(_LIMIT, self.settings["limit"])

    def _extra_columns(self, events: Events) -> tuple[Column, ...]:
        if self._chosen is None:
            return (np.zeros(len(events.kind), np.int64),)
        if len(self._chosen) != len(events.kind):
            raise BadInputError(f"{len(self._chosen)} chosen addresses for {len(events.kind)} events: give one each.")
        return (np.ascontiguousarray(self._chosen, np.int64),)

    def feed_as_chosen(self, events: Events, address: Column) -> Fed:
        """As `feed`, but of cached chunks of one size take the one that a real pool took: `address` (m,), 0: any."""
        self._chosen = address
        try:
            return self.feed(events)
        finally:
            self._chosen = None


def parse_settings(text: str) -> dict[str, Any]:
    """Settings from "limit:10GiB"."""
    return read_settings("cupy", text, {"limit": parse_bytes})
