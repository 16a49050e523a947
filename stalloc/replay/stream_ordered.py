"""A stream-ordered pool as cudaMallocAsync has it.

A model of documented behaviour (CUDA C++ programming guide, "Stream Ordered Memory Allocator"), without an oracle: the
driver is closed, and what the guide leaves open is chosen here and said below. Upheld:
- memory that was freed on a stream is reused at once on that stream;
- `opportunistic` (1 by default): memory freed on another stream may be reused if that stream is past the free. The
  model has no clock: with 1 every stream is, with 0 none ever is;
- `internal_dependencies` (1 by default): where the device has no more, memory of another stream is taken all the same,
  behind a dependency between the streams;
- every `synchronize_every` events (0, the default, for never) the program waits for the device; what is not in use
  beyond `release_threshold` bytes (default: no limit, as frameworks set it) goes back to the device then. Emptying the
  cache trims the pool to nothing, and so does a lack of memory before it fails.

Chosen: sizes are multiples of 512 bytes; the pool takes chunks of 32 MiB, or the request in granules of 2 MiB if that
is more; best fit, split to the unit; neighbours of one stream merge.
"""

from dataclasses import dataclass

from stalloc.compiled import inner
from stalloc.replay.blocks import GRANULE, at, fits, new_segment, round_up, split
from stalloc.replay.driver import driver_of, note
from stalloc.replay.model import TableModel, own_type
from stalloc.replay.settings import as_bytes, as_count, as_flag, setting
from stalloc.replay.treap import best_fit, free_into, insert, release_whole, remove, root, take_best
from stalloc.sizes import ALIGNMENT_BYTES

_CHUNK = 32 << 20


@dataclass(frozen=True, kw_only=True)
class StreamOrderedSettings:
    """The settings of the pool."""

    release_threshold: int = setting(1 << 50, as_bytes)
    """Bytes that stay reserved when the program waits for the device."""
    opportunistic: int = setting(1, as_flag)
    """Whether memory that another stream has freed is reused."""
    internal_dependencies: int = setting(1, as_flag)
    """Whether a stream is made to wait for memory of another where the device has no more."""
    synchronize_every: int = setting(0, as_count)
    """Events after which the program waits for the device; 0: never."""


_COUNTS = ("reused_across_streams", "dependencies_inserted")


@inner()
def _trim(t, keep):
    """Give free chunks back, in the order of their sizes, as long as more than `keep` bytes are held.

    The device is idle: whatever is free is free for every stream, and neighbours merge.
    """
    for tree in range(1, t.num_headers):
        block = root(t, tree)
        while block != 0:
            remove(t, block)
            at(t, block).stream = 0
            free_into(t, 0, block)
            block = root(t, tree)
    release_whole(t, 0, keep)


@inner()
def _from_others(t, size, stream):
    """The best block that another stream has freed, in no tree; 0 for none."""
    best = 0
    for other in range(t.num_headers):
        if other != stream:
            block = best_fit(t, other, size)
            if block != 0 and (best == 0 or at(t, block).size < at(t, best).size):
                best = block
    if best != 0:
        remove(t, best)
    return best


@inner()
def _take(t, m, size, stream):
    """A block that the device or, where it has no more, another stream gives; -1 if neither can."""
    chunk, block = max(_CHUNK, round_up(size, GRANULE)), 0
    if not fits(t, chunk):
        if m.internal_dependencies == 1:
            block = _from_others(t, size, stream)
            m.dependencies_inserted += block != 0
        if block == 0:
            t.retries += 1
            _trim(t, 0)
            block = take_best(t, 0, size)
    return block if block != 0 else new_segment(t, chunk, stream, 0)


@inner()
def _allocate(t, m, request, requested, stream):
    size = round_up(requested, ALIGNMENT_BYTES)
    block = take_best(t, stream, size)
    if block == 0 and m.opportunistic == 1:
        block = _from_others(t, size, stream)
        m.reused_across_streams += block != 0
    if block == 0:
        block = _take(t, m, size, stream)
        if block < 0:
            return -1
    if at(t, block).size > size:
        rest = split(t, block, size)
        insert(t, at(t, rest).stream, rest)  # it stays with the stream that freed it
    at(t, block).stream = stream
    return block


@inner()
def _empty(t, m, kind, request):
    _trim(t, 0)


@inner()
def _wait_and_note(t, m, at, columns):
    m.events += 1
    if m.synchronize_every != 0 and m.events % m.synchronize_every == 0:
        _trim(t, m.release_threshold)
    note(t, m, at, columns)


class StreamOrdered(TableModel):
    """CUDA's stream-ordered pool."""

    name = "stream_ordered"
    settings_type = StreamOrderedSettings
    own = own_type(StreamOrderedSettings, "events", *_COUNTS)
    driver = driver_of(name, own, allocate=_allocate, empty=_empty, note=_wait_and_note)
    shows = _COUNTS
