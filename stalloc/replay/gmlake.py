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

from dataclasses import dataclass

from stalloc.columns import Column
from stalloc.compiled import inner
from stalloc.core.record_types import table
from stalloc.errors import BadInputError
from stalloc.inputs import memory_limit_bytes
from stalloc.replay.blocks import ROWS_AHEAD, WAITING, at, give_up, place_at
from stalloc.replay.driver import driver_of
from stalloc.replay.gmlake_chunks import (
    CHUNK_BYTES,
    CHUNK_FIELDS,
    SMALL,
    TREES,
    Chunk,
    Node,
    free_block,
    free_stitched,
    mark_parts,
)
from stalloc.replay.gmlake_states import allocate_large, allocate_small, release
from stalloc.replay.model import TableModel, own_type
from stalloc.replay.rounding import LARGE_SEGMENT, SMALL_BYTES
from stalloc.replay.settings import as_bytes, as_count, as_flag, setting
from stalloc.replay.treap import free_into

_FIRST_STITCHED = 1 << 46
_MAX_CHUNKS = 1 << 20  # of one request: 2 TiB


@dataclass(frozen=True, kw_only=True)
class GMLakeSettings:
    """What GMLake can be told."""

    fragmentation_limit: int = setting(512 << 20, as_bytes)
    """Requests below this are never stitched for."""
    smallest_part: int = setting(CHUNK_BYTES, as_bytes)
    """Blocks below this are never stitched."""
    stitch_limit: int = setting(1000 << 30, as_bytes)
    """Stitched bytes from which what nobody holds is forgotten."""
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
        return allocate_small(t, m, size, stream)
    return allocate_large(t, m, size, stream, request)


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
    release(t, m)


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
