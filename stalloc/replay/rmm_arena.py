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

from dataclasses import dataclass

from stalloc.columns import Column
from stalloc.compiled import inner
from stalloc.core.record_types import Record, row_of, table
from stalloc.errors import BadInputError
from stalloc.replay.blocks import (
    FIRST_ADDRESS,
    FREE,
    ROWS_AHEAD,
    absorb,
    at,
    count_reserved,
    fits,
    has_room,
    new_segment,
    round_up,
    segment_at,
    split,
    whole_block,
)
from stalloc.replay.driver import driver_of
from stalloc.replay.model import TableModel, own_type
from stalloc.replay.settings import as_bytes, setting
from stalloc.replay.treap import first_fit, insert_fit, remove_fit

_UNIT = 256  # bytes
_SUPERBLOCK = 1 << 20  # bytes, at least; requests above it are the global arena's
_GLOBAL = 0  # tree of the global arena; that of a stream is its number + 1


@dataclass(frozen=True, kw_only=True)
class RmmArenaSettings:
    """The settings of the resource."""

    size: int | None = setting(None, as_bytes)
    """Bytes of the global arena; None: half of the capacity; 0: as many as the program needs."""


_SUPERS = ("supers_used", "supers_spare", "supers", "num_supers")


class Superblock(Record):
    """Row 0 is none; the `extra` of a block is the superblock that it lies in."""

    size: int  # bytes
    tree: int  # of its arena
    first: int  # block


_super_at = row_of("supers", Superblock)


@inner()
def _new_super(t, m, block, size):
    row = m.supers_spare
    if row != 0:
        m.supers_spare = _super_at(m, row).first
    else:
        row = m.supers_used
        m.supers_used += 1
    new = _super_at(m, row)
    new.size, new.tree, new.first = size, _GLOBAL, block
    at(t, block).extra = row


@inner()
def _is_empty(t, m, block):
    return at(t, block).size == _super_at(m, at(t, block).extra).size


@inner()
def _take_memory(t, m, size):
    """An arena of so many bytes, one superblock; False if the device has no room for it."""
    block = new_segment(t, size, 0, 0)
    if block < 0:
        return False
    _new_super(t, m, block, size)
    insert_fit(t, _GLOBAL, block)
    return True


@inner()
def _take_global(t, m, size):
    """A block that fits, taken out of its tree, 0 for none; an empty superblock is cut to the size that is needed."""
    block = first_fit(t, _GLOBAL, size)
    if block == 0:
        return 0
    remove_fit(t, block)
    least = max(_SUPERBLOCK, size)
    if _is_empty(t, m, block) and at(t, block).size >= least + _SUPERBLOCK:
        rest = split(t, block, least)
        _super_at(m, at(t, block).extra).size = least
        _new_super(t, m, rest, at(t, rest).size)
        insert_fit(t, _GLOBAL, rest)
    return block


@inner()
def _move_super(t, m, row, tree, without):
    """Move the free blocks of a superblock, all but one, to the tree of another arena."""
    _super_at(m, row).tree = tree
    block = _super_at(m, row).first
    while block != 0 and at(t, block).extra == row:
        if at(t, block).state == FREE and block != without:
            remove_fit(t, block)
            insert_fit(t, tree, block)
        block = at(t, block).next


@inner()
def _try(t, m, size, stream):
    tree = _GLOBAL if size > _SUPERBLOCK else stream + 1
    block = first_fit(t, tree, size) if tree != _GLOBAL else 0
    if block != 0:
        remove_fit(t, block)
    else:
        block = _take_global(t, m, size)
        if block != 0 and tree != _GLOBAL:
            _move_super(t, m, at(t, block).extra, tree, block)
    if block != 0 and at(t, block).size > size:
        rest = split(t, block, size)
        at(t, rest).extra = at(t, block).extra
        insert_fit(t, tree, rest)
    return block


@inner()
def _is_free_super(t, m, block):
    """Whether a block is an empty superblock of the global arena."""
    one = _super_at(m, at(t, block).extra)
    return at(t, block).state == FREE and at(t, block).size == one.size and one.tree == _GLOBAL


@inner()
def _swallow(t, m, block, following):
    """Merge two empty superblocks, which are in the tree of the global arena."""
    gone = at(t, following).extra
    remove_fit(t, block)
    remove_fit(t, following)
    _super_at(m, at(t, block).extra).size += _super_at(m, gone).size
    _super_at(m, gone).size, _super_at(m, gone).first = 0, m.supers_spare
    m.supers_spare = gone
    absorb(t, block, following)
    insert_fit(t, _GLOBAL, block)


@inner()
def _defragment(t, m):
    block = segment_at(t, 1).first
    while block != 0:
        row = at(t, block).extra
        if _super_at(m, row).tree != _GLOBAL:
            _move_super(t, m, row, _GLOBAL, 0)
        block = at(t, block).next
    block = segment_at(t, 1).first
    while block != 0:
        following = at(t, block).next
        if following != 0 and _is_free_super(t, m, block) and _is_free_super(t, m, following):
            _swallow(t, m, block, following)
        else:
            block = following


@inner()
def _extend(t, m, size):
    """Lengthen an arena without a size of its own by an empty superblock at its end; whether there was room."""
    least = max(_SUPERBLOCK, size)
    if t.segments_used == 1:
        return _take_memory(t, m, least)
    end = segment_at(t, 1).first
    while at(t, end).next != 0:
        end = at(t, end).next
    lengthens = _is_free_super(t, m, end)
    more = least - at(t, end).size if lengthens else least
    if not fits(t, more):
        return False
    segment_at(t, 1).size += more
    count_reserved(t, more)
    block = whole_block(t, at(t, end).address + at(t, end).size, more)
    at(t, block).previous, at(t, block).segment, at(t, block).stream = end, 1, 0
    at(t, end).next = block
    _new_super(t, m, block, more)
    insert_fit(t, _GLOBAL, block)
    if lengthens:
        _swallow(t, m, end, block)
    return True


@inner()
def _allocate(t, m, request, requested, stream):
    if m.supers_used == 1 and m.size > 0 and not _take_memory(t, m, m.size):  # the first request
        return -1
    size = round_up(requested, _UNIT)
    block = _try(t, m, size, stream)
    if block == 0 and m.size == 0 and _extend(t, m, size):
        block = _try(t, m, size, stream)
    if block == 0 and t.segments_used > 1:
        t.retries += 1
        _defragment(t, m)
        block = _try(t, m, size, stream)
    if block == 0:
        return -1
    at(t, block).stream = stream
    m.touched_bytes = max(m.touched_bytes, at(t, block).address + size - FIRST_ADDRESS)
    return block


@inner()
def _free(t, m, block):
    row = at(t, block).extra
    following, previous = at(t, block).next, at(t, block).previous
    if following != 0 and at(t, following).state == FREE and at(t, following).extra == row:
        remove_fit(t, following)
        absorb(t, block, following)
    if previous != 0 and at(t, previous).state == FREE and at(t, previous).extra == row:
        remove_fit(t, previous)
        absorb(t, previous, block)
        block = previous
    insert_fit(t, _super_at(m, row).tree, block)
    if _super_at(m, row).tree == _GLOBAL and _is_empty(t, m, block):  # it joins empty ones beside it
        following, previous = at(t, block).next, at(t, block).previous
        if following != 0 and _is_free_super(t, m, following):
            _swallow(t, m, block, following)
        if previous != 0 and _is_free_super(t, m, previous):
            _swallow(t, m, previous, block)


@inner()
def _has_room(t, m, size):
    return has_room(t) and m.num_supers - m.supers_used >= ROWS_AHEAD


class RmmArena(TableModel):
    """RMM's arenas."""

    name = "rmm_arena"
    settings_type = RmmArenaSettings
    own = own_type(RmmArenaSettings, "touched_bytes", *_SUPERS)
    driver = driver_of(name, own, allocate=_allocate, free=_free, has_room=_has_room)
    shows = ("touched_bytes",)
    common_trees = 1

    def _own_tables(self) -> dict[str, Column]:
        return {"supers": table(Superblock, 256)}

    def _start(self, capacity_bytes: int) -> None:
        size = capacity_bytes // 2 // _UNIT * _UNIT if self.options.size is None else self.options.size
        if size and (size < _SUPERBLOCK or size % _UNIT):
            raise BadInputError(f"rmm_arena cannot have {size} bytes: give a multiple of 256, from 1 MiB on, or 0.")
        self._own.write(size=size, supers_used=1)

    def _grow(self) -> None:
        super()._grow()
        self._own.lengthen(supers=2 * self._own["num_supers"])
