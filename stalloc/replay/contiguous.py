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

from dataclasses import dataclass

import numpy as np

from stalloc.compiled import inner
from stalloc.core.record_types import row_of
from stalloc.core.records import Word
from stalloc.replay.blocks import LARGE_SEGMENT, SMALL_BYTES, at, fits, new_segment, round_up, split, torch_segment_size
from stalloc.replay.driver import driver_of
from stalloc.replay.model import TableModel, check_rows, own_type
from stalloc.replay.protocol import Events, Fed, Kind
from stalloc.replay.settings import as_percent, setting
from stalloc.replay.treap import cut_off, free_into, insert, release_whole, take_best
from stalloc.sizes import ALIGNMENT_BYTES, aligned

_REST, _PERSISTENT, _SCOPED = range(3)  # classes; the trees of the buffers are 0 and 1
_BUFFERS = 2


@dataclass(frozen=True, kw_only=True)
class ContiguousSettings:
    """The settings that decide which lifespans are long."""

    scoped_percent: int = setting(5, as_percent)
    """Percent of the program's events from which on a lifespan is long."""


_BUFFER_FIELDS = ("persistent_buffer_bytes", "scoped_buffer_bytes")
_class_at = row_of("classes", Word)  # (n,) class of each request


@inner()
def _release(t):
    for tree in range(_BUFFERS, t.num_headers):
        release_whole(t, tree, 0)


@inner()
def _begin(t, m):
    """Take the buffers; False if the device has no room for them."""
    while m.taken < _BUFFERS:
        size = m.persistent_buffer_bytes if m.taken == 0 else m.scoped_buffer_bytes
        if size > 0:
            block = new_segment(t, size, 0, 0)
            if block < 0:
                return False
            insert(t, m.taken, block)
        m.taken += 1
    return True


@inner()
def _from_rest(t, size, stream):
    small = size <= SMALL_BYTES
    tree = _BUFFERS + 2 * stream + (0 if small else 1)
    block = take_best(t, tree, size)
    if block == 0:
        segment = torch_segment_size(size, LARGE_SEGMENT)
        if not fits(t, segment):
            t.retries += 1
            _release(t)
        block = new_segment(t, segment, stream, 0)
        if block < 0:
            return -1
        at(t, block).tree = tree
    remaining = at(t, block).size - size
    if remaining >= ALIGNMENT_BYTES if small else remaining > SMALL_BYTES:
        insert(t, tree, split(t, block, size))
    return block


@inner()
def _allocate(t, m, request, requested, stream):
    which = _class_at(m, request).value
    if not _begin(t, m):
        return -1
    size = round_up(requested, ALIGNMENT_BYTES)
    if which != _REST:
        tree = which - _PERSISTENT
        block = take_best(t, tree, size)
        if block != 0:
            cut_off(t, tree, block, size)
            at(t, block).stream = stream
            return block
        m.spilled += 1
    return _from_rest(t, size, stream)


@inner()
def _free(t, m, block):
    free_into(t, at(t, block).tree, block)


@inner()
def _empty(t, m, kind, request):
    _release(t)


class Contiguous(TableModel):
    """Buffers for what lives long, and a cache for the rest."""

    name = "contiguous"
    settings_type = ContiguousSettings
    own = own_type(ContiguousSettings, *_BUFFER_FIELDS, "taken", "spilled", "classes")
    driver = driver_of(name, own, allocate=_allocate, free=_free, empty=_empty)
    shows = (*_BUFFER_FIELDS, "spilled")
    trees_per_stream = 2
    common_trees = _BUFFERS
    of_requests = ("classes",)
    _planned = False

    def plan_for(self, events: Events) -> None:
        """Learn the lifespans, and so the sizes of the buffers, from a whole program."""
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
        classes[100 * (end - start) >= self.options.scoped_percent * num_events] = _SCOPED
        classes[end == num_events] = _PERSISTENT
        classes[start < 0] = _REST
        size = aligned(events.size)
        for name, which in zip(_BUFFER_FIELDS, (_PERSISTENT, _SCOPED), strict=True):
            rows, change = np.flatnonzero(classes == which), np.zeros(num_events + 1, np.int64)
            np.add.at(change, start[rows], size[rows])
            np.add.at(change, end[rows], -size[rows])
            self._own.write(**{name: int(np.cumsum(change).max())})
        self._own.lengthen(classes=num_requests)
        self._own.tables["classes"][:num_requests] = classes

    def feed(self, events: Events) -> Fed:
        self.plan_for(events)
        return super().feed(events)
