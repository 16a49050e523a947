"""RMM's arena_memory_resource: one global arena of superblocks, an arena of borrowed superblocks for every stream.

Source: the public headers of rmm (mr/device/arena_memory_resource.hpp and detail/arena.hpp, the versions with an arena
of fixed size). There is no oracle for this model. Upheld from there:
- all memory is taken at once, `size` bytes, by default half of the capacity. A size of 0, the default where the
  capacity is unknown, stands for an arena as large as the program needs it: it begins empty and grows at its end;
- sizes are multiples of 256 bytes. Requests above 1 MiB are served by the global arena, others by the arena of their
  stream, which borrows superblocks of 1 MiB or more; everywhere the first block that fits in the order of addresses is
  taken and split;
- a superblock that is empty and larger than what is needed by 1 MiB or more is split before it is used; blocks merge
  inside their superblock only, and superblocks only while both are empty and in the global arena;
- superblocks of streams return to the global arena when a request fails, which is then tried once more.

Every stream has an arena, the default stream too (in RMM: each thread's default stream). What is reserved never changes
after the first request, unless the size is 0: `touched_bytes` says how far up addresses were ever used.
"""

from typing import Any, ClassVar, NamedTuple

import numpy as np

from stalloc.compiled import njit
from stalloc.errors import BadInputError
from stalloc.replay.first_fit_tree import first_fit, insert, remove
from stalloc.replay.model import TableModel, parse_bytes, read_settings
from stalloc.replay.protocol import Kind
from stalloc.replay.tables import (
    ADDRESS,
    EXTRA,
    FIRST_ADDRESS,
    FREE,
    NEXT,
    OWN,
    PREVIOUS,
    RETRIES,
    ROWS_AHEAD,
    S_FIRST,
    S_SIZE,
    SEGMENT,
    SEGMENTS_USED,
    SIZE,
    STATE,
    STREAM,
    absorb,
    count_reserved,
    fits,
    give_up,
    has_room,
    hold,
    lengthen,
    new_block,
    new_segment,
    note,
    split,
)
from stalloc.trace.record import Column

_UNIT = 256  # bytes
_SUPERBLOCK = 1 << 20  # bytes, at least; requests above it are the global arena's
_GLOBAL = 0  # tree of the global arena; that of a stream is its number + 1
_SIZE, _TOUCHED, _SUPERS_USED, _SUPERS_SPARE = range(OWN, OWN + 4)
_ALLOC, _EMPTY_CACHE = int(Kind.ALLOC), int(Kind.EMPTY_CACHE)

SUPER_SIZE, SUPER_TREE, SUPER_FIRST = range(3)


class ArenaTables(NamedTuple):
    """Tables (see stalloc.replay.tables) and superblocks; a block's EXTRA is the superblock that it lies in."""

    words: Column
    blocks: Column
    segments: Column
    roots: Column
    place: Column
    address: Column
    supers: Column  #: (s, 3) bytes, tree of its arena, first block; row 0 is none


@njit()
def _new_super(t, block, size):
    row = t.words[_SUPERS_SPARE]
    if row != 0:
        t.words[_SUPERS_SPARE] = t.supers[row, SUPER_FIRST]
    else:
        row = t.words[_SUPERS_USED]
        t.words[_SUPERS_USED] = row + 1
    t.supers[row, SUPER_SIZE] = size
    t.supers[row, SUPER_TREE] = _GLOBAL
    t.supers[row, SUPER_FIRST] = block
    t.blocks[block, EXTRA] = row
    return row


@njit()
def _is_empty(t, block):
    """Whether a free block is all of its superblock."""
    return t.blocks[block, SIZE] == t.supers[t.blocks[block, EXTRA], SUPER_SIZE]


@njit()
def _begin(t):
    """Take all memory; False if the device has no room for it."""
    if t.words[_SUPERS_USED] > 1 or t.words[_SIZE] == 0:
        return True
    block = new_segment(t, t.words[_SIZE], 0, 0)
    if block < 0:
        return False
    _new_super(t, block, t.words[_SIZE])
    insert(t, _GLOBAL, block)
    return True


@njit()
def _take_global(t, size):
    """A block that fits, out of its tree, in a superblock that is no larger than it has to be; 0 for none."""
    block = first_fit(t, _GLOBAL, size)
    if block == 0:
        return 0
    remove(t, block)
    least = max(_SUPERBLOCK, size)
    if _is_empty(t, block) and t.blocks[block, SIZE] >= least + _SUPERBLOCK:
        rest = split(t, block, least)
        t.supers[t.blocks[block, EXTRA], SUPER_SIZE] = least
        _new_super(t, rest, t.blocks[rest, SIZE])
        insert(t, _GLOBAL, rest)
    return block


@njit()
def _shorten(t, block, size, tree):
    if t.blocks[block, SIZE] > size:
        rest = split(t, block, size)
        t.blocks[rest, EXTRA] = t.blocks[block, EXTRA]
        insert(t, tree, rest)


@njit()
def _move_super(t, row, tree, without):
    """Move the free blocks of a superblock, all but one, to the tree of another arena."""
    t.supers[row, SUPER_TREE] = tree
    block = t.supers[row, SUPER_FIRST]
    while block != 0 and t.blocks[block, EXTRA] == row:
        if t.blocks[block, STATE] == FREE and block != without:
            remove(t, block)
            insert(t, tree, block)
        block = t.blocks[block, NEXT]


@njit()
def _try(t, size, stream):
    if size > _SUPERBLOCK:
        block = _take_global(t, size)
        if block != 0:
            _shorten(t, block, size, _GLOBAL)
        return block
    tree = stream + 1
    block = first_fit(t, tree, size)
    if block != 0:
        remove(t, block)
    else:
        block = _take_global(t, size)
        if block == 0:
            return 0
        _move_super(t, t.blocks[block, EXTRA], tree, block)
    _shorten(t, block, size, tree)
    return block


@njit()
def _join_supers(t, block):
    """Merge an empty superblock of the global arena, in its tree, with empty neighbours there."""
    following, previous = t.blocks[block, NEXT], t.blocks[block, PREVIOUS]
    if following != 0 and _is_free_super(t, following):
        _swallow(t, block, following)
    if previous != 0 and _is_free_super(t, previous):
        _swallow(t, previous, block)


@njit()
def _is_free_super(t, block):
    if t.blocks[block, STATE] != FREE or not _is_empty(t, block):
        return False
    return t.supers[t.blocks[block, EXTRA], SUPER_TREE] == _GLOBAL


@njit()
def _swallow(t, block, following):
    gone = t.blocks[following, EXTRA]
    remove(t, block)
    remove(t, following)
    t.supers[t.blocks[block, EXTRA], SUPER_SIZE] += t.supers[gone, SUPER_SIZE]
    t.supers[gone, SUPER_SIZE] = 0
    t.supers[gone, SUPER_FIRST] = t.words[_SUPERS_SPARE]
    t.words[_SUPERS_SPARE] = gone
    absorb(t, block, following)
    insert(t, _GLOBAL, block)


@njit()
def _defragment(t):
    """Return every superblock to the global arena."""
    block = t.segments[1, S_FIRST]
    while block != 0:
        row = t.blocks[block, EXTRA]
        if t.supers[row, SUPER_TREE] != _GLOBAL:
            _move_super(t, row, _GLOBAL, 0)
        block = t.blocks[block, NEXT]
    block = t.segments[1, S_FIRST]
    while block != 0:
        following = t.blocks[block, NEXT]
        if following != 0 and _is_free_super(t, block) and _is_free_super(t, following):
            _swallow(t, block, following)
        else:
            block = following


@njit()
def _extend(t, size):
    """Lengthen an arena without a size of its own by an empty superblock at its end; whether there was room."""
    least = max(_SUPERBLOCK, size)
    if t.words[SEGMENTS_USED] == 1:
        block = new_segment(t, least, 0, 0)
        if block < 0:
            return False
        _new_super(t, block, least)
        insert(t, _GLOBAL, block)
        return True
    end = t.segments[1, S_FIRST]
    while t.blocks[end, NEXT] != 0:
        end = t.blocks[end, NEXT]
    lengthens = _is_free_super(t, end)
    more = least - t.blocks[end, SIZE] if lengthens else least
    if not fits(t, more):
        return False
    t.segments[1, S_SIZE] += more
    count_reserved(t, more)
    if lengthens:
        remove(t, end)
        t.supers[t.blocks[end, EXTRA], SUPER_SIZE] += more
        t.blocks[end, SIZE] += more
        insert(t, _GLOBAL, end)
        return True
    block = new_block(t)
    t.blocks[block, ADDRESS] = t.blocks[end, ADDRESS] + t.blocks[end, SIZE]
    t.blocks[block, SIZE] = more
    t.blocks[block, PREVIOUS] = end
    t.blocks[block, NEXT] = 0
    t.blocks[block, SEGMENT] = 1
    t.blocks[block, STREAM] = 0
    t.blocks[end, NEXT] = block
    _new_super(t, block, more)
    insert(t, _GLOBAL, block)
    return True


@njit()
def _allocate(t, requested, stream):
    if not _begin(t):
        return -1
    size = (requested + _UNIT - 1) // _UNIT * _UNIT
    block = _try(t, size, stream)
    if block == 0 and t.words[_SIZE] == 0 and _extend(t, size):
        block = _try(t, size, stream)
    if block == 0 and t.words[SEGMENTS_USED] > 1:
        t.words[RETRIES] += 1
        _defragment(t)
        block = _try(t, size, stream)
    if block == 0:
        return -1
    t.blocks[block, STREAM] = stream
    t.words[_TOUCHED] = max(t.words[_TOUCHED], t.blocks[block, ADDRESS] + size - FIRST_ADDRESS)
    return block


@njit()
def _free(t, block):
    row = t.blocks[block, EXTRA]
    following, previous = t.blocks[block, NEXT], t.blocks[block, PREVIOUS]
    if following != 0 and t.blocks[following, STATE] == FREE and t.blocks[following, EXTRA] == row:
        remove(t, following)
        absorb(t, block, following)
    if previous != 0 and t.blocks[previous, STATE] == FREE and t.blocks[previous, EXTRA] == row:
        remove(t, previous)
        absorb(t, previous, block)
        block = previous
    insert(t, t.supers[row, SUPER_TREE], block)
    if t.supers[row, SUPER_TREE] == _GLOBAL and _is_empty(t, block):
        _join_supers(t, block)


@njit(nogil=True)
def _run(t, kind, request, size, stream, start, reserved, allocated):
    for i in range(start, len(kind)):
        row = request[i]
        if kind[i] == _ALLOC:
            if not has_room(t) or len(t.supers) - t.words[_SUPERS_USED] < ROWS_AHEAD:
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


class RmmArena(TableModel):
    """`size` (bytes) of the global arena."""

    name = "rmm_arena"
    kernel = _run
    num_words = 4
    common_trees = 1
    own_words: ClassVar[dict[str, int]] = {"touched_bytes": _TOUCHED - OWN}

    def __init__(self, settings: dict[str, Any] | None = None, capacity_bytes: int = 0) -> None:
        half = capacity_bytes // 2 // _UNIT * _UNIT
        super().__init__({"size": half} | (settings or {}), capacity_bytes)

    def _start(self) -> None:
        size = self.settings["size"]
        if size and (size < _SUPERBLOCK or size % _UNIT):
            raise BadInputError(f"rmm_arena cannot have {size} bytes: give a multiple of 256, from 1 MiB on, or 0.")
        self._set(_SIZE, size)
        self._set(_SUPERS_USED, 1)
        t = self._tables
        self._tables: Any = ArenaTables(
            t.words, t.blocks, t.segments, t.roots, t.place, t.address, np.zeros((256, 3), np.int64)
        )

    def _grow(self) -> None:
        super()._grow()
        self._tables = self._tables._replace(supers=lengthen(self._tables.supers, 2 * len(self._tables.supers)))


def parse_settings(text: str) -> dict[str, Any]:
    """Settings from "size:16GiB"."""
    return read_settings("rmm_arena", text, {"size": parse_bytes})
