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

from dataclasses import dataclass
from typing import Any, ClassVar

from stalloc.compiled import inner
from stalloc.errors import BadInputError
from stalloc.replay.blocks import LIVE, at, new_segment, split
from stalloc.replay.driver import driver_of
from stalloc.replay.model import TableModel, own_type
from stalloc.replay.rounding import round_up
from stalloc.replay.settings import as_bytes, setting
from stalloc.replay.treap import best_fit, free_into, insert, remove, root

UNIT = 256  # bytes


@dataclass(frozen=True, kw_only=True)
class RmmPoolSettings:
    """The settings of the pool."""

    initial: int | None = setting(None, as_bytes)
    """Bytes that it begins with; None: half of the capacity."""
    maximum: int = setting(0, as_bytes)
    """Bytes that it may have; 0: no limit."""


OWN = ("begun", "lists_taken_over")
_OWN = own_type(RmmPoolSettings, *OWN)


@inner()
def begin(t, m):
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
    """Move all free blocks of another stream to the list of this one."""
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
        block = best_fit(t, other, size) if other != stream else 0
        if block != 0:
            remove(t, block)
            at(t, block).stream = stream
            _take_over(t, m, stream, other)
            return block
    for other in range(t.num_headers):
        if other != stream and root(t, other) != 0:
            _take_over(t, m, stream, other)
            block = best_fit(t, stream, size)
            if block != 0:
                remove(t, block)
                return block
    return 0


@inner()
def _grow(t, m, size, stream):
    held, maximum = t.reserved, m.maximum
    if maximum != 0:
        left = (maximum - held + UNIT - 1) // UNIT * UNIT
        wanted = max(size, left // 2) if size <= left else 0
    else:
        wanted = max(size, held)
    while wanted >= size:
        block = new_segment(t, wanted, stream, 0)
        if block > 0 or wanted == size:
            return block
        wanted = max(size, wanted // 2)
    return -1


@inner()
def take(t, m, requested, stream):
    """A block for a request; -1 if the pool cannot grow."""
    size = round_up(requested, UNIT)
    block = best_fit(t, stream, size)
    if block != 0:
        remove(t, block)
    else:
        block = _from_others(t, m, size, stream)
    if block == 0:
        block = _grow(t, m, size, stream)
        if block < 0:
            return -1
    if at(t, block).size > size:
        at(t, block).state = LIVE  # or the rest would merge with it
        free_into(t, stream, split(t, block, size))
    return block


@inner()
def _allocate(t, m, request, requested, stream):
    return take(t, m, requested, stream) if begin(t, m) else -1


@inner()
def free(t, m, block):
    """Free a block of the pool."""
    free_into(t, at(t, block).stream, block)


class RmmPool(TableModel):
    """RMM's pool."""

    name = "rmm_pool"
    settings_type: ClassVar[type[Any]] = RmmPoolSettings
    own = _OWN
    driver = driver_of(name, own, allocate=_allocate, free=free)
    shows: ClassVar[tuple[str, ...]] = ("lists_taken_over",)

    def _start(self, capacity_bytes: int) -> None:
        initial, maximum = self.options.initial, self.options.maximum
        initial = capacity_bytes // 2 // UNIT * UNIT if initial is None else initial
        if initial % UNIT or maximum % UNIT:
            raise BadInputError(f"the sizes of {self.name} are multiples of {UNIT} bytes: give such ones.")
        if maximum and initial > maximum:
            raise BadInputError(
                f"{self.name} cannot begin with {initial} bytes and stay below {maximum} bytes: change one of them."
            )
        self._own.write(initial=initial)
