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

The map shows physical memory: a request that holds a stitched block holds several blocks of it. A block that a function
here returns is taken by the request; -1 says that the device has no room for it.
"""

from dataclasses import dataclass

from stalloc.columns import Column
from stalloc.compiled import inner
from stalloc.core.record_types import table
from stalloc.errors import BadInputError
from stalloc.inputs import memory_limit_bytes
from stalloc.replay.blocks import (
    FREE,
    LIVE,
    ROWS_AHEAD,
    WAITING,
    at,
    drop_segment,
    fits,
    give_up,
    is_whole,
    new_segment,
    place_at,
    split,
)
from stalloc.replay.driver import driver_of
from stalloc.replay.gmlake_chunks import (
    CHUNK_BYTES,
    CHUNK_FIELDS,
    LARGE,
    SMALL,
    STITCHED,
    TREES,
    Chunk,
    Node,
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
from stalloc.replay.model import TableModel, own_type
from stalloc.replay.rounding import GRANULE, LARGE_SEGMENT, SMALL_BYTES, round_up, torch_segment_size
from stalloc.replay.settings import as_bytes, as_count, as_flag, setting
from stalloc.replay.treap import after, best_fit, first, free_into, insert, last, remove
from stalloc.sizes import ALIGNMENT_BYTES

_FIRST_STITCHED = 1 << 46
_MAX_CHUNKS = 1 << 20  # of one request: 2 TiB


@dataclass(frozen=True, kw_only=True)
class GMLakeSettings:
    """The settings of GMLake."""

    fragmentation_limit: int = setting(512 << 20, as_bytes)
    """Requests below this are never stitched for."""
    smallest_part: int = setting(CHUNK_BYTES, as_bytes)
    """Blocks below this are never stitched."""
    stitch_limit: int = setting(1000 << 30, as_bytes)
    """Total of stitched bytes from which on stitched blocks that nobody holds are forgotten."""
    reuse_limit: int = setting(10, as_count)
    """How many times as large as the request a stitched block may be."""
    allocate_and_stitch: int = setting(1, as_flag)
    """Whether new memory is stitched to free blocks."""


_COUNTS = (
    "exact",
    "splits",
    "larger_stitched",
    "stitches",
    "stitches_with_new_memory",
    "maps",
    "forgotten",
)
_OWN = own_type(GMLakeSettings, *CHUNK_FIELDS, *_COUNTS, "need")


@inner()
def _release(t, m):
    """Give back every segment without live blocks."""
    for tree in range(t.num_headers):
        if tree % TREES == STITCHED:
            continue
        block = first(t, tree)
        while block != 0:
            size, address = at(t, block).size, at(t, block).address
            if is_whole(t, block):
                remove(t, block)
                if tree % TREES == LARGE:
                    before = m.stitched_bytes
                    forget_chunks(t, m, block)
                    m.forgotten += before != m.stitched_bytes
                    t.device_frees += num_chunks(t, block) - 1
                drop_segment(t, block)
            block = after(t, tree, size, address)


@inner()
def _new_chunks(t, m, size, stream):
    """New physical memory as one free block in no tree, -1 if the device has no room."""
    block = new_segment(t, size, stream, 0)
    if block > 0:
        number_chunks(t, m, block)
        t.device_allocs += num_chunks(t, block) - 1
        m.maps += num_chunks(t, block)
    return block


@inner()
def _allocate_small(t, m, requested, stream):
    size, tree = round_up(requested, ALIGNMENT_BYTES), stream * TREES + SMALL
    block = best_fit(t, tree, size)
    if block != 0:
        remove(t, block)
    else:
        if not fits(t, GRANULE):
            t.retries += 1
            _release(t, m)
        block = new_segment(t, GRANULE, stream, 0)
        if block < 0:
            return -1
    if at(t, block).size > size:
        insert(t, tree, split(t, block, size))
    return block


@inner()
def _collect_garbage(t, m):
    """Forget every stitched block that nobody holds."""
    block = m.stitched_first
    while block != 0:
        following = at(t, block).next
        if at(t, block).state == FREE:
            drop_stitched(t, m, block)
            m.forgotten += 1
        block = following


@inner()
def _stitch(t, m, size, stream, row):
    """Stitch free blocks, the largest first, and if allowed new memory for the rest; 0 if impossible."""
    tree = stream * TREES + LARGE
    taken, total, block = 0, 0, last(t, tree)
    while block != 0 and total < size and at(t, block).size >= m.smallest_part:
        remove(t, block)
        at(t, block).other = taken  # a list of what was taken, the last one first
        taken, total = block, total + at(t, block).size
        block = last(t, tree)
    lacking = size - total
    possible = taken != 0 and (lacking <= 0 or (m.allocate_and_stitch != 0 and fits(t, lacking)))
    if not possible:
        while taken != 0:
            insert(t, tree, taken)
            taken = at(t, taken).other
        return 0
    if lacking > 0:
        block = _new_chunks(t, m, lacking, stream)
        at(t, block).other = taken
        taken = block
        m.stitches_with_new_memory += 1
    else:
        if lacking < 0:
            cut(t, m, taken, at(t, taken).size + lacking)
        m.stitches += 1
    # turn the list round: the largest comes first
    forward = 0
    while taken != 0:
        before = at(t, taken).other
        at(t, taken).other = forward
        forward, taken = taken, before
    stitched, tail = new_stitched(t, m, size // CHUNK_BYTES, stream), 0
    at(t, stitched).state = LIVE
    at(t, stitched).other = size // CHUNK_BYTES
    while forward != 0:
        take_block(t, m, forward, row)
        tail = add_chunks(t, m, stitched, tail, forward)
        forward = at(t, forward).other
    m.maps += size // CHUNK_BYTES
    return stitched


@inner()
def _find(t, m, size, stream, row):
    """Go through GMLake's states up to stitching with new memory; 0 if none serves the request."""
    tree = stream * TREES + LARGE
    block = best_fit(t, tree, size)
    if block != 0 and at(t, block).size == size:
        m.exact += 1
        remove(t, block)
        take_block(t, m, block, row)
        return block
    stitched = best_fit(t, stream * TREES + STITCHED, size)
    if stitched != 0 and at(t, stitched).size == size:
        m.exact += 1
        take_stitched(t, m, stitched, size // CHUNK_BYTES, row)
        return stitched
    if block != 0:
        m.splits += 1
        remove(t, block)
        cut(t, m, block, size)
        take_block(t, m, block, row)
        return block
    if stitched != 0 and at(t, stitched).size <= size * m.reuse_limit:
        m.larger_stitched += 1
        take_stitched(t, m, stitched, size // CHUNK_BYTES, row)
        return stitched
    if size < m.fragmentation_limit:
        return 0
    return _stitch(t, m, size, stream, row)


@inner()
def _new(t, m, size, stream, row):
    """A block of new memory without stitching; -1 if the device has no room."""
    whole = torch_segment_size(size, LARGE_SEGMENT)
    block = _new_chunks(t, m, whole, stream)
    if block > 0:
        if whole > size:
            cut(t, m, block, size)
        take_block(t, m, block, row)
    return block


@inner()
def _allocate_large(t, m, requested, stream, row):
    size = round_up(requested, CHUNK_BYTES)
    if m.stitched_bytes > m.stitch_limit:
        _collect_garbage(t, m)
    block = _find(t, m, size, stream, row)
    if block == 0:
        block = _new(t, m, size, stream, row)
    if block < 0:
        t.retries += 1
        _release(t, m)
        block = _find(t, m, size, stream, row)
        if block == 0:
            block = _new(t, m, size, stream, row)
    return block


@inner()
def _has_room(t, m, size):
    """Whether the tables have room for an event with a request of `size` bytes."""
    chunks = size // CHUNK_BYTES + LARGE_SEGMENT // CHUNK_BYTES + ROWS_AHEAD
    m.need = chunks
    return (
        t.num_blocks - t.blocks_used >= 2 * chunks
        and t.num_segments - t.segments_used >= ROWS_AHEAD
        and m.num_chunks - m.chunks_used >= chunks
        and m.num_nodes - m.nodes_used >= chunks
    )


@inner()
def _allocate(t, m, request, size, stream):
    if size <= SMALL_BYTES:
        return _allocate_small(t, m, size, stream)
    return _allocate_large(t, m, size, stream, request)


@inner()
def _give_up(t, m, request, kind):
    block = give_up(t, request, kind)
    held = place_at(t, request).value
    if held != 0 and at(t, held).address >= _FIRST_STITCHED:
        mark_parts(t, m, held, WAITING)
    return block


@inner()
def _free(t, m, block):
    if at(t, block).address >= _FIRST_STITCHED:
        free_stitched(t, m, block)
    elif at(t, block).requested <= SMALL_BYTES:
        free_into(t, at(t, block).stream * TREES + SMALL, block)
    else:
        free_block(t, m, block)


@inner()
def _empty(t, m, kind, request):
    _release(t, m)


class GMLake(TableModel):
    """Virtual memory stitching."""

    name = "gmlake"
    settings_type = GMLakeSettings
    own = _OWN
    driver = driver_of(name, own, allocate=_allocate, free=_free, has_room=_has_room, empty=_empty, give_up=_give_up)
    shows = (*_COUNTS, "stitched_bytes")
    trees_per_stream = TREES
    memory_end = _FIRST_STITCHED

    def _own_tables(self) -> dict[str, Column]:
        return {"chunks": table(Chunk, 256), "nodes": table(Node, 256)}

    def _start(self, capacity_bytes: int) -> None:
        self._own.write(chunks_used=1, nodes_used=1, stitched_address=_FIRST_STITCHED)

    def _grow(self) -> None:
        store, own, need = self._store, self._own, self._own["need"]
        held = sum(rows.nbytes for rows in (store.tables["blocks"], *own.tables.values()))
        if need > _MAX_CHUNKS or held > memory_limit_bytes() // 8:
            raise BadInputError(
                "gmlake keeps a row for every chunk of 2 MiB, and a request of the trace needs more rows than fit: "
                "choose other models with --allocator."
            )
        store.lengthen(blocks=2 * store["num_blocks"] + 2 * need, segments=2 * store["num_segments"])
        own.lengthen(chunks=2 * own["num_chunks"] + need, nodes=2 * own["num_nodes"] + need)
