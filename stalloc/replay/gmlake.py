"""GMLake: free chunks of physical memory are stitched together behind one range of virtual addresses.

Source: Guo et al., "GMLake: Efficient and Transparent GPU Memory Defragmentation for Large-scale DNN Training with
Virtual Memory Stitching", ASPLOS 2024, and the allocator published with it, whose choices count where the paper leaves
one. There is no oracle for this model. Upheld from there:
- requests up to 1 MiB follow the rules of torch's small pool; larger ones are whole chunks of 2 MiB, and new memory for
  less than 10 MiB comes in segments of 20 MiB;
- a request goes through the states of the paper: a block of exactly its size, primitive or stitched; a larger primitive
  block, which is split; a stitched block that is larger, up to `reuse_limit` times; free blocks, the largest first,
  stitched together; all free blocks and as much new memory as they lack, stitched together (`allocate_and_stitch`: 0
  leaves this state out, as the published allocator does by default); plain new memory;
- requests below `fragmentation_limit` are never stitched for, and blocks below `smallest_part` are never stitched;
- stitching costs no memory and moves nothing; a stitched block stays known and can be had again whenever all its
  chunks are free, until a segment that it lies in is given back or `stitch_limit` bytes have been stitched;
- where the device has no more, segments without live blocks are given back, and the states are gone through once more.

The map shows physical memory: a request that holds a stitched block holds several blocks of it.
"""

from typing import Any, ClassVar

import numpy as np

from stalloc.compiled import njit
from stalloc.errors import BadInputError
from stalloc.inputs import memory_limit_bytes
from stalloc.replay.free_tree import after, best_fit, free_into, insert, last, remove
from stalloc.replay.gmlake_chunks import (
    CHUNK_BYTES,
    CHUNK_COLUMNS,
    CHUNKS_USED,
    LARGE,
    NODE_COLUMNS,
    NODES_USED,
    NUM_CHUNK_WORDS,
    SMALL,
    STITCHED,
    STITCHED_ADDRESS,
    STITCHED_BYTES,
    STITCHED_FIRST,
    TREES,
    USED_CHUNKS,
    GMLakeTables,
    add_chunks,
    cut,
    drop_stitched,
    forget_chunks,
    free_block,
    free_stitched,
    mark_parts,
    new_stitched,
    num_chunks,
    number_chunks,
    take_block,
    take_stitched,
)
from stalloc.replay.model import TableModel, parse_bytes, parse_count, parse_flag, read_settings
from stalloc.replay.protocol import Kind
from stalloc.replay.tables import (
    ADDRESS,
    BLOCKS_USED,
    DEVICE_ALLOCS,
    DEVICE_FREES,
    FREE,
    LIVE,
    NEXT,
    OTHER,
    OWN,
    REQUESTED,
    RETRIES,
    ROWS_AHEAD,
    SEGMENTS_USED,
    SIZE,
    STATE,
    STREAM,
    WAITING,
    drop_segment,
    fits,
    give_up,
    hold,
    is_whole,
    lengthen,
    new_segment,
    note,
    split,
)

_UNIT = 512  # bytes
_SMALL_BYTES = 1 << 20  # requests up to this size share small segments
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_OWN_SEGMENT = 10 << 20  # requests from this size on get segments of their own size
_FIRST_STITCHED = 1 << 46

_BASE = OWN + NUM_CHUNK_WORDS
_MOST_CHUNKS = 1 << 20  # of one request: 2 TiB
_LIMIT, _SMALLEST_PART, _REUSE, _STITCH_LIMIT, _BOTH, _NEED = range(_BASE, _BASE + 6)
_EXACT, _SPLIT, _LARGER, _STITCH, _ALLOCATE_AND_STITCH, _MAPS, _FORGOTTEN = range(_BASE + 6, _BASE + 13)
_ALLOC, _EMPTY_CACHE = int(Kind.ALLOC), int(Kind.EMPTY_CACHE)


@njit()
def _has_room(t, size):
    """Whether the tables have room for an event with a request of `size` bytes."""
    chunks = size // CHUNK_BYTES + _LARGE_SEGMENT // CHUNK_BYTES + ROWS_AHEAD
    t.words[_NEED] = chunks
    return (
        len(t.blocks) - t.words[BLOCKS_USED] >= 2 * chunks
        and len(t.segments) - t.words[SEGMENTS_USED] >= ROWS_AHEAD
        and len(t.chunks) - t.words[CHUNKS_USED] >= chunks
        and len(t.nodes) - t.words[NODES_USED] >= chunks
    )


@njit()
def _release(t):
    """Give back every segment without live blocks."""
    for tree in range(len(t.roots)):
        if tree % TREES == STITCHED:
            continue
        block = after(t, tree, 0, 0)
        while block != 0:
            size, address = t.blocks[block, SIZE], t.blocks[block, ADDRESS]
            if is_whole(t, block):
                remove(t, block)
                if tree % TREES == LARGE:
                    before = t.words[STITCHED_BYTES]
                    forget_chunks(t, block)
                    t.words[_FORGOTTEN] += before != t.words[STITCHED_BYTES]
                    t.words[DEVICE_FREES] += num_chunks(t, block) - 1
                drop_segment(t, block)
            block = after(t, tree, size, address)


@njit()
def _new_chunks(t, size, stream):
    """New physical memory as one free block in no tree, -1 if the device has no room."""
    block = new_segment(t, size, stream, 0)
    if block > 0:
        number_chunks(t, block)
        t.words[DEVICE_ALLOCS] += num_chunks(t, block) - 1
        t.words[_MAPS] += num_chunks(t, block)
    return block


@njit()
def _allocate_small(t, requested, stream):
    size, tree = (requested + _UNIT - 1) // _UNIT * _UNIT, stream * TREES + SMALL
    block = best_fit(t, tree, size)
    if block != 0:
        remove(t, block)
    else:
        if not fits(t, _SMALL_SEGMENT):
            t.words[RETRIES] += 1
            _release(t)
        block = new_segment(t, _SMALL_SEGMENT, stream, 0)
        if block < 0:
            return -1
    if t.blocks[block, SIZE] > size:
        insert(t, tree, split(t, block, size))
    return block


@njit()
def _collect_garbage(t):
    """Forget every stitched block that nobody holds."""
    block = t.words[STITCHED_FIRST]
    while block != 0:
        following = t.blocks[block, NEXT]
        if t.blocks[block, STATE] == FREE:
            drop_stitched(t, block)
            t.words[_FORGOTTEN] += 1
        block = following


@njit()
def _stitch(t, size, stream, row):
    """Stitch free blocks, the largest first, with new memory for what they lack if that is allowed; 0 if impossible."""
    tree = stream * TREES + LARGE
    taken, total, block = 0, 0, last(t, tree)
    while block != 0 and total < size and t.blocks[block, SIZE] >= t.words[_SMALLEST_PART]:
        remove(t, block)
        t.blocks[block, OTHER] = taken  # a list of what was taken, the last one first
        taken, total = block, total + t.blocks[block, SIZE]
        block = last(t, tree)
    lacking = size - total
    possible = taken != 0 and (lacking <= 0 or (t.words[_BOTH] != 0 and fits(t, lacking)))
    if not possible:
        while taken != 0:
            insert(t, tree, taken)
            taken = t.blocks[taken, OTHER]
        return 0
    if lacking > 0:
        block = _new_chunks(t, lacking, stream)
        t.blocks[block, OTHER] = taken
        taken = block
        t.words[_ALLOCATE_AND_STITCH] += 1
    else:
        if lacking < 0:
            cut(t, taken, t.blocks[taken, SIZE] + lacking)
        t.words[_STITCH] += 1
    # turn the list round: the largest comes first
    forward = 0
    while taken != 0:
        before = t.blocks[taken, OTHER]
        t.blocks[taken, OTHER] = forward
        forward, taken = taken, before
    stitched, tail = new_stitched(t, size // CHUNK_BYTES, stream), 0
    t.blocks[stitched, STATE] = LIVE
    t.blocks[stitched, USED_CHUNKS] = size // CHUNK_BYTES
    while forward != 0:
        take_block(t, forward, row)
        tail = add_chunks(t, stitched, tail, forward)
        forward = t.blocks[forward, OTHER]
    t.words[_MAPS] += size // CHUNK_BYTES
    return stitched


@njit()
def _find(t, size, stream, row):
    """Go through the states with what there is, as far as stitching with new memory; 0 if they do not serve."""
    tree = stream * TREES + LARGE
    block = best_fit(t, tree, size)
    if block != 0 and t.blocks[block, SIZE] == size:
        t.words[_EXACT] += 1
        remove(t, block)
        take_block(t, block, row)
        return block
    stitched = best_fit(t, stream * TREES + STITCHED, size)
    if stitched != 0 and t.blocks[stitched, SIZE] == size:
        t.words[_EXACT] += 1
        take_stitched(t, stitched, size // CHUNK_BYTES, row)
        return stitched
    if block != 0:
        t.words[_SPLIT] += 1
        remove(t, block)
        cut(t, block, size)
        take_block(t, block, row)
        return block
    if stitched != 0 and t.blocks[stitched, SIZE] <= size * t.words[_REUSE]:
        t.words[_LARGER] += 1
        take_stitched(t, stitched, size // CHUNK_BYTES, row)
        return stitched
    if size < t.words[_LIMIT]:
        return 0
    return _stitch(t, size, stream, row)


@njit()
def _new(t, size, stream, row):
    """Plain new memory; -1 if the device has no room."""
    whole = size if size >= _OWN_SEGMENT else _LARGE_SEGMENT
    block = _new_chunks(t, whole, stream)
    if block > 0:
        if whole > size:
            cut(t, block, size)
        take_block(t, block, row)
    return block


@njit()
def _allocate_large(t, requested, stream, row):
    size = (requested + CHUNK_BYTES - 1) // CHUNK_BYTES * CHUNK_BYTES
    if t.words[STITCHED_BYTES] > t.words[_STITCH_LIMIT]:
        _collect_garbage(t)
    block = _find(t, size, stream, row)
    if block == 0:
        block = _new(t, size, stream, row)
    if block < 0:
        t.words[RETRIES] += 1
        _release(t)
        block = _find(t, size, stream, row)
        if block == 0:
            block = _new(t, size, stream, row)
    return block


@njit(nogil=True)
def _run(t, kind, request, size, stream, start, reserved, allocated):
    for i in range(start, len(kind)):
        row = request[i]
        if kind[i] == _ALLOC:
            if not _has_room(t, size[row]):
                return i
            if size[row] <= 0:
                block = 0
            elif size[row] <= _SMALL_BYTES:
                block = _allocate_small(t, size[row], stream[row])
            else:
                block = _allocate_large(t, size[row], stream[row], row)
            if not hold(t, row, block, size[row]):
                return i
        elif kind[i] == _EMPTY_CACHE:
            _release(t)
        else:
            held = t.place[row]
            stitched = held != 0 and t.blocks[held, ADDRESS] >= _FIRST_STITCHED
            small = held != 0 and t.blocks[held, REQUESTED] <= _SMALL_BYTES
            block = give_up(t, row, kind[i])
            if stitched and block == 0:
                mark_parts(t, held, WAITING)
            elif block != 0 and stitched:
                free_stitched(t, block)
            elif block != 0 and small:
                free_into(t, t.blocks[block, STREAM] * TREES + SMALL, block)
            elif block != 0:
                free_block(t, block)
        note(t, i, reserved, allocated)
    return len(kind)


class GMLake(TableModel):
    """`fragmentation_limit`, `smallest_part`, `stitch_limit` (bytes), `reuse_limit`, `allocate_and_stitch` (0 or 1)."""

    name = "gmlake"
    kernel = _run
    own_words: ClassVar[dict[str, int]] = {
        "exact": _EXACT - OWN,
        "splits": _SPLIT - OWN,
        "larger_stitched": _LARGER - OWN,
        "stitches": _STITCH - OWN,
        "stitches_with_new_memory": _ALLOCATE_AND_STITCH - OWN,
        "maps": _MAPS - OWN,
        "forgotten": _FORGOTTEN - OWN,
        "stitched_bytes": STITCHED_BYTES - OWN,
    }
    num_words = NUM_CHUNK_WORDS + 13
    trees_per_stream = TREES

    def __init__(self, settings: dict[str, Any] | None = None, capacity_bytes: int = 0) -> None:
        given = {
            "fragmentation_limit": 512 << 20,
            "smallest_part": CHUNK_BYTES,
            "stitch_limit": 1000 << 30,
            "reuse_limit": 10,
            "allocate_and_stitch": 1,
        }
        super().__init__(given | (settings or {}), capacity_bytes)

    def _start(self) -> None:
        words = (_LIMIT, _SMALLEST_PART, _STITCH_LIMIT, _REUSE, _BOTH)
        keys = ("fragmentation_limit", "smallest_part", "stitch_limit", "reuse_limit", "allocate_and_stitch")
        for word, key in zip(words, keys, strict=True):
            self._set(word, self.settings[key])
        self._set(CHUNKS_USED, 1)
        self._set(NODES_USED, 1)
        self._set(STITCHED_ADDRESS, _FIRST_STITCHED)
        chunks, nodes = np.zeros((256, CHUNK_COLUMNS), np.int64), np.zeros((256, NODE_COLUMNS), np.int64)
        t = self._tables
        self._tables: Any = GMLakeTables(t.words, t.blocks, t.segments, t.roots, t.place, t.address, chunks, nodes)

    def _grow(self) -> None:
        t = self._tables
        need = int(t.words[_NEED])
        if need > _MOST_CHUNKS or t.blocks.nbytes + t.chunks.nbytes + t.nodes.nbytes > memory_limit_bytes() // 8:
            raise BadInputError(
                "gmlake keeps a row for every chunk of 2 MiB, and a request of the trace needs more rows than fit: "
                "choose other models with --allocator."
            )
        self._tables = t._replace(
            blocks=lengthen(t.blocks, 2 * len(t.blocks) + 2 * need),
            segments=lengthen(t.segments, 2 * len(t.segments)),
            chunks=lengthen(t.chunks, 2 * len(t.chunks) + need),
            nodes=lengthen(t.nodes, 2 * len(t.nodes) + need),
        )


def parse_settings(text: str) -> dict[str, Any]:
    """Settings from "fragmentation_limit:128MiB,allocate_and_stitch:0,…"."""
    sizes = dict.fromkeys(("fragmentation_limit", "smallest_part", "stitch_limit"), parse_bytes)
    return read_settings("gmlake", text, sizes | {"reuse_limit": parse_count, "allocate_and_stitch": parse_flag})
