"""Contiguous buffers for what lives long, as DeepSpeed's ZeRO keeps them, and torch-like best fit for the rest.

An interpretation, without an oracle: ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020, section 6.3, memory defragmentation) moves activation checkpoints and gradients, which live
long among much that lives shortly, into buffers that are taken beforehand; which requests those are, the framework
knows. Here lifespans tell. Upheld:
- what is never freed is persistent; what lives for at least `scoped_percent` of the program's events is scoped. Each
  class has one buffer, taken with the first request, of the most bytes that the class ever holds, in units of 512;
- a request of a class takes the smallest free part of its buffer that holds it, at the lowest address; one that finds
  none is served like the rest;
- the rest is served by rules like those of torch's caching allocator: requests up to 1 MiB from segments of 2 MiB,
  others from segments of 20 MiB, from 10 MiB on of their own size in granules of 2 MiB; best fit by stream; a block is
  split where 512 bytes (small) or more than 1 MiB (large) remain; free segments are given back when the device has no
  more, and when the cache is emptied. The buffers stay.

The first feed is what lifespans are taken from, unless `plan_for` was called before; a request that comes later is one
of the rest.
"""

from typing import Any, ClassVar, NamedTuple

import numpy as np

from stalloc.compiled import njit
from stalloc.replay.free_tree import best_fit, free_into, insert, release_whole, remove
from stalloc.replay.model import TableModel, check_rows, parse_percent, read_settings
from stalloc.replay.protocol import Events, Fed, Kind
from stalloc.replay.tables import (
    OWN,
    RETRIES,
    SIZE,
    STREAM,
    TREE,
    fits,
    give_up,
    has_room,
    hold,
    lengthen,
    new_segment,
    note,
    split,
)
from stalloc.trace.record import Column

_UNIT = 512  # bytes
_SMALL_BYTES, _SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT, _GRANULE = 1 << 20, 2 << 20, 20 << 20, 10 << 20, 2 << 20
_REST, _PERSISTENT, _SCOPED = range(3)  # classes; the trees of the buffers are 0 and 1
_BUFFERS = 2
_PERSISTENT_BYTES, _SCOPED_BYTES, _TAKEN, _SPILLED = range(OWN, OWN + 4)
_ALLOC, _EMPTY_CACHE = int(Kind.ALLOC), int(Kind.EMPTY_CACHE)


class ContiguousTables(NamedTuple):
    """Tables (see stalloc.replay.tables) and classes; all int64."""

    words: Column
    blocks: Column
    segments: Column
    roots: Column
    place: Column
    address: Column
    classes: Column  #: (n,) class of each request


@njit()
def _peaks(kind, request, size, classes, peaks):
    """The most bytes that each class holds at a time, in units."""
    held = np.zeros(3, np.int64)
    live = np.zeros(len(size), np.int64)
    for i in range(len(kind)):
        row = request[i]
        if kind[i] == _ALLOC:
            live[row] = (size[row] + _UNIT - 1) // _UNIT * _UNIT
            held[classes[row]] += live[row]
            peaks[classes[row]] = max(peaks[classes[row]], held[classes[row]])
        elif kind[i] == 2:
            held[classes[row]] -= live[row]
            live[row] = 0


@njit()
def _release(t):
    for tree in range(_BUFFERS, len(t.roots)):
        release_whole(t, tree)


@njit()
def _begin(t):
    """Take the buffers; False if the device has no room for them."""
    for which in range(_BUFFERS):
        if not t.words[_TAKEN] >> which & 1:
            size = t.words[_PERSISTENT_BYTES + which]
            if size > 0:
                block = new_segment(t, size, 0, 0)
                if block < 0:
                    return False
                insert(t, which, block)
            t.words[_TAKEN] |= 1 << which
    return True


@njit()
def _from_rest(t, size, stream):
    small = size <= _SMALL_BYTES
    tree = _BUFFERS + 2 * stream + (0 if small else 1)
    block = best_fit(t, tree, size)
    if block != 0:
        remove(t, block)
    else:
        if small:
            segment = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = (size + _GRANULE - 1) // _GRANULE * _GRANULE
        if not fits(t, segment):
            t.words[RETRIES] += 1
            _release(t)
        block = new_segment(t, segment, stream, 0)
        if block < 0:
            return -1
        t.blocks[block, TREE] = tree
    remaining = t.blocks[block, SIZE] - size
    if remaining >= _UNIT if small else remaining > _SMALL_BYTES:
        insert(t, tree, split(t, block, size))
    return block


@njit()
def _allocate(t, requested, stream, which):
    if not _begin(t):
        return -1
    size = (requested + _UNIT - 1) // _UNIT * _UNIT
    if which != _REST:
        tree = which - _PERSISTENT
        block = best_fit(t, tree, size)
        if block != 0:
            remove(t, block)
            if t.blocks[block, SIZE] > size:
                insert(t, tree, split(t, block, size))
            t.blocks[block, STREAM] = stream
            return block
        t.words[_SPILLED] += 1
    return _from_rest(t, size, stream)


@njit(nogil=True)
def _run(t, kind, request, size, stream, start, reserved, allocated):
    for i in range(start, len(kind)):
        row = request[i]
        if kind[i] == _ALLOC:
            if not has_room(t):
                return i
            block = _allocate(t, size[row], stream[row], t.classes[row]) if size[row] > 0 else 0
            if not hold(t, row, block, size[row]):
                return i
        elif kind[i] == _EMPTY_CACHE:
            _release(t)
        else:
            block = give_up(t, row, kind[i])
            if block != 0:
                free_into(t, t.blocks[block, TREE], block)
        note(t, i, reserved, allocated)
    return len(kind)


class Contiguous(TableModel):
    """`scoped_percent` of the program's events from which a lifespan is long."""

    name = "contiguous"
    kernel = _run
    num_words = 4
    trees_per_stream = 2
    common_trees = _BUFFERS
    own_words: ClassVar[dict[str, int]] = {
        "persistent_buffer_bytes": _PERSISTENT_BYTES - OWN,
        "scoped_buffer_bytes": _SCOPED_BYTES - OWN,
        "spilled": _SPILLED - OWN,
    }

    def __init__(self, settings: dict[str, Any] | None = None, capacity_bytes: int = 0) -> None:
        self._planned = False
        super().__init__({"scoped_percent": 5} | (settings or {}), capacity_bytes)

    def _start(self) -> None:
        t = self._tables
        self._tables: Any = ContiguousTables(
            t.words, t.blocks, t.segments, t.roots, t.place, t.address, np.zeros(0, np.int64)
        )

    def _make_room(self, num_requests: int, num_streams: int) -> None:
        super()._make_room(num_requests, num_streams)
        self._tables = self._tables._replace(classes=lengthen(self._tables.classes, num_requests))

    def plan_for(self, events: Events) -> None:
        """Take lifespans, and with them the sizes of the buffers, from a whole program."""
        if self._planned:
            return
        check_rows(events)
        self._planned = True
        num_events, num_requests = len(events.kind), len(events.size)
        start, end = np.full(num_requests, -1), np.full(num_requests, num_events)
        allocs, frees = (np.flatnonzero(events.kind == kind) for kind in (Kind.ALLOC, Kind.FREE_COMPLETED))
        start[events.request[allocs]] = allocs
        end[events.request[frees]] = frees
        classes = np.full(num_requests, _REST, np.int64)
        classes[100 * (end - start) >= self.settings["scoped_percent"] * num_events] = _SCOPED
        classes[end == num_events] = _PERSISTENT
        classes[start < 0] = _REST
        peaks = np.zeros(3, np.int64)
        _peaks(events.kind, events.request, events.size, classes, peaks)
        self._set(_PERSISTENT_BYTES, int(peaks[_PERSISTENT]))
        self._set(_SCOPED_BYTES, int(peaks[_SCOPED]))
        self._tables = self._tables._replace(classes=classes)

    def feed(self, events: Events) -> Fed:
        """Go on with these events; see Allocator.feed."""
        self.plan_for(events)
        return super().feed(events)


def parse_settings(text: str) -> dict[str, Any]:
    """Settings from "scoped_percent:10"."""
    return read_settings("contiguous", text, {"scoped_percent": parse_percent})
