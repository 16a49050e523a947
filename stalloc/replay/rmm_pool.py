"""RMM's pool_memory_resource: best fit with coalescing, a free list for every stream, growth by doubling.

Source: the documentation and the public headers of rmm (mr/device/pool_memory_resource.hpp,
detail/stream_ordered_memory_resource.hpp, detail/coalescing_free_list.hpp). There is no oracle for this model. Upheld
from there:
- sizes are multiples of 256 bytes; a request takes the smallest free block of its stream that holds it, at the lowest
  address, and what remains stays in the stream's list; a freed block merges with neighbours in the same list, never
  across what came from the device in one piece;
- where its own list has nothing, the first other list that has a fitting block gives it, and everything else in that
  list moves over; where none has, the other lists are merged in, one after the other, until a block fits;
- where that fails the pool grows: with a `maximum` by half of what is left to it, without one by as much as it has, at
  least by the request; when that fails, by half of it each time;
- the pool begins with `initial` bytes, by default, as from Python, with half of the device's memory (nothing where the
  capacity is unknown), and never gives anything back.

RMM orders the lists of streams by where their events lie in memory; the model by the number of the stream.
"""

from typing import Any, ClassVar

from stalloc.compiled import njit
from stalloc.errors import BadInputError
from stalloc.replay.free_tree import best_fit, free_into, insert, remove
from stalloc.replay.model import TableModel, parse_bytes, read_settings
from stalloc.replay.protocol import Kind
from stalloc.replay.tables import (
    LIVE,
    OWN,
    RESERVED,
    SIZE,
    STATE,
    STREAM,
    give_up,
    has_room,
    hold,
    new_segment,
    note,
    split,
)

UNIT = 256  # bytes
_BEGUN, _INITIAL, _MAXIMUM, _TAKEN_OVER = range(OWN, OWN + 4)
NUM_POOL_WORDS = 4
_ALLOC, _EMPTY_CACHE = int(Kind.ALLOC), int(Kind.EMPTY_CACHE)


@njit()
def begin(t):
    """Take the initial memory, once; False if the device has no room for it."""
    if t.words[_BEGUN] == 0:
        if t.words[_INITIAL] > 0:
            block = new_segment(t, t.words[_INITIAL], 0, 0)
            if block < 0:
                return False
            insert(t, 0, block)
        t.words[_BEGUN] = 1
    return True


@njit()
def _take_over(t, stream, other):
    """Move all free blocks of another stream to the list of this one."""
    t.words[_TAKEN_OVER] += 1
    while t.roots[other] != 0:
        block = t.roots[other]
        remove(t, block)
        t.blocks[block, STREAM] = stream
        free_into(t, stream, block)


@njit()
def _from_others(t, size, stream):
    for other in range(len(t.roots)):
        if other != stream and t.roots[other] != 0:
            block = best_fit(t, other, size)
            if block != 0:
                remove(t, block)
                t.blocks[block, STREAM] = stream
                _take_over(t, stream, other)
                return block
    for other in range(len(t.roots)):
        if other != stream and t.roots[other] != 0:
            _take_over(t, stream, other)
            block = best_fit(t, stream, size)
            if block != 0:
                remove(t, block)
                return block
    return 0


@njit()
def _grow(t, size, stream):
    held = t.words[RESERVED]
    if t.words[_MAXIMUM] != 0:
        left = (t.words[_MAXIMUM] - held + UNIT - 1) // UNIT * UNIT
        wanted = max(size, left // 2) if size <= left else 0
    else:
        wanted = max(size, held)
    while wanted >= size:
        block = new_segment(t, wanted, stream, 0)
        if block > 0 or wanted == size:
            return block
        wanted = max(size, wanted // 2)
    return -1


@njit()
def allocate(t, requested, stream):
    """A block for a request; -1 if the pool cannot grow."""
    size = (requested + UNIT - 1) // UNIT * UNIT
    block = best_fit(t, stream, size)
    if block != 0:
        remove(t, block)
    else:
        block = _from_others(t, size, stream)
    if block == 0:
        block = _grow(t, size, stream)
        if block < 0:
            return -1
    if t.blocks[block, SIZE] > size:
        t.blocks[block, STATE] = LIVE  # or the rest would merge with it
        free_into(t, stream, split(t, block, size))
    return block


@njit()
def free(t, block):
    """Free a block of the pool."""
    free_into(t, t.blocks[block, STREAM], block)


@njit(nogil=True)
def _run(t, kind, request, size, stream, start, reserved, allocated):
    for i in range(start, len(kind)):
        row = request[i]
        if kind[i] == _ALLOC:
            if not has_room(t):
                return i
            block = 0
            if size[row] > 0:
                block = allocate(t, size[row], stream[row]) if begin(t) else -1
            if not hold(t, row, block, size[row]):
                return i
        elif kind[i] != _EMPTY_CACHE:
            block = give_up(t, row, kind[i])
            if block != 0:
                free(t, block)
        note(t, i, reserved, allocated)
    return len(kind)


class RmmPool(TableModel):
    """`initial`, `maximum` (bytes; a maximum of 0 is none)."""

    name = "rmm_pool"
    kernel = _run
    num_words = NUM_POOL_WORDS
    own_words: ClassVar[dict[str, int]] = {"lists_taken_over": _TAKEN_OVER - OWN}

    def __init__(self, settings: dict[str, Any] | None = None, capacity_bytes: int = 0) -> None:
        given = {"initial": capacity_bytes // 2 // UNIT * UNIT, "maximum": 0}
        super().__init__(given | (settings or {}), capacity_bytes)

    def _start(self) -> None:
        initial, maximum = self.settings["initial"], self.settings["maximum"]
        if initial % UNIT or maximum % UNIT:
            raise BadInputError(f"the sizes of {self.name} are multiples of {UNIT} bytes: give such ones.")
        if maximum and initial > maximum:
            raise BadInputError(f"{self.name} cannot begin with {initial} bytes and stay below {maximum} bytes.")
        self._set(_INITIAL, initial)
        self._set(_MAXIMUM, maximum)


def parse_settings(text: str) -> dict[str, Any]:
    """Settings from "initial:1GiB,maximum:8GiB"."""
    return read_settings("rmm_pool", text, dict.fromkeys(("initial", "maximum"), parse_bytes))
