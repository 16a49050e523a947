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

from typing import Any, ClassVar

from stalloc.compiled import njit
from stalloc.replay.free_tree import after, best_fit, free_into, insert, remove
from stalloc.replay.model import TableModel, parse_bytes, parse_count, parse_flag, read_settings
from stalloc.replay.protocol import Kind
from stalloc.replay.tables import (
    ADDRESS,
    OWN,
    RESERVED,
    RETRIES,
    SIZE,
    STREAM,
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

_UNIT = 512  # bytes
_CHUNK = 32 << 20
_GRANULE = 2 << 20
_NO_LIMIT = 1 << 50
_THRESHOLD, _OPPORTUNISTIC, _DEPENDENCIES, _EVERY, _EVENTS, _CROSSED, _DEPENDED = range(OWN, OWN + 7)
_ALLOC, _EMPTY_CACHE = int(Kind.ALLOC), int(Kind.EMPTY_CACHE)


@njit()
def _merge_streams(t):
    """The device is idle: whatever is free is free for every stream, and neighbours merge."""
    for tree in range(1, len(t.roots)):
        while t.roots[tree] != 0:
            block = t.roots[tree]
            remove(t, block)
            t.blocks[block, STREAM] = 0
            free_into(t, 0, block)


@njit()
def _trim(t, keep):
    """Give free chunks back, in the order of their sizes, as long as more than `keep` bytes are held."""
    _merge_streams(t)
    block = after(t, 0, 0, 0)
    while block != 0 and t.words[RESERVED] > keep:
        size, address = t.blocks[block, SIZE], t.blocks[block, ADDRESS]
        if is_whole(t, block):
            remove(t, block)
            drop_segment(t, block)
        block = after(t, 0, size, address)


@njit()
def _from_others(t, size, stream):
    """The best block that another stream has freed, in no tree; 0 for none."""
    best = 0
    for other in range(len(t.roots)):
        if other != stream:
            block = best_fit(t, other, size)
            if block != 0 and (best == 0 or t.blocks[block, SIZE] < t.blocks[best, SIZE]):
                best = block
    if best != 0:
        remove(t, best)
    return best


@njit()
def _allocate(t, requested, stream):
    size = (requested + _UNIT - 1) // _UNIT * _UNIT
    block = best_fit(t, stream, size)
    if block != 0:
        remove(t, block)
    elif t.words[_OPPORTUNISTIC] == 1:
        block = _from_others(t, size, stream)
        t.words[_CROSSED] += block != 0
    if block == 0:
        chunk = max(_CHUNK, (size + _GRANULE - 1) // _GRANULE * _GRANULE)
        if not fits(t, chunk) and t.words[_DEPENDENCIES] == 1:
            block = _from_others(t, size, stream)
            t.words[_DEPENDED] += block != 0
        if block == 0:
            if not fits(t, chunk):
                t.words[RETRIES] += 1
                _trim(t, 0)
                block = best_fit(t, 0, size)
                if block != 0:
                    remove(t, block)
            if block == 0:
                block = new_segment(t, chunk, stream, 0)
            if block < 0:
                return -1
    rest = split(t, block, size) if t.blocks[block, SIZE] > size else 0
    if rest != 0:  # it stays with the stream that freed it
        insert(t, t.blocks[rest, STREAM], rest)
    t.blocks[block, STREAM] = stream
    return block


@njit(nogil=True)
def _run(t, kind, request, size, stream, start, reserved, allocated):
    for i in range(start, len(kind)):
        row = request[i]
        if kind[i] == _ALLOC:
            if not has_room(t):
                return i
            block = _allocate(t, size[row], stream[row]) if size[row] > 0 else 0
            if not hold(t, row, block, size[row]):
                return i
        elif kind[i] == _EMPTY_CACHE:
            _trim(t, 0)
        else:
            block = give_up(t, row, kind[i])
            if block != 0:
                free_into(t, t.blocks[block, STREAM], block)
        t.words[_EVENTS] += 1
        if t.words[_EVERY] != 0 and t.words[_EVENTS] % t.words[_EVERY] == 0:
            _trim(t, t.words[_THRESHOLD])
        note(t, i, reserved, allocated)
    return len(kind)


class StreamOrdered(TableModel):
    """`release_threshold` (bytes), `opportunistic`, `internal_dependencies` (0 or 1), `synchronize_every` (events)."""

    name = "stream_ordered"
    kernel = _run
    num_words = 7
    own_words: ClassVar[dict[str, int]] = {
        "reused_across_streams": _CROSSED - OWN,
        "dependencies_inserted": _DEPENDED - OWN,
    }

    def __init__(self, settings: dict[str, Any] | None = None, capacity_bytes: int = 0) -> None:
        given = {
            "release_threshold": _NO_LIMIT,
            "opportunistic": 1,
            "internal_dependencies": 1,
            "synchronize_every": 0,
        }
        super().__init__(given | (settings or {}), capacity_bytes)

    def _start(self) -> None:
        self._set(_THRESHOLD, self.settings["release_threshold"])
        self._set(_OPPORTUNISTIC, self.settings["opportunistic"])
        self._set(_DEPENDENCIES, self.settings["internal_dependencies"])
        self._set(_EVERY, self.settings["synchronize_every"])


def parse_settings(text: str) -> dict[str, Any]:
    """Settings from "release_threshold:0,synchronize_every:1000,…"."""
    flags = dict.fromkeys(("opportunistic", "internal_dependencies"), parse_flag)
    counts = {"release_threshold": parse_bytes, "synchronize_every": parse_count}
    return read_settings("stream_ordered", text, flags | counts)
