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

A stitched block is a row of the block table outside of all segments; its chunks are listed by nodes, in the order of
its addresses. It is in its stream's tree of stitched blocks exactly while all its chunks are free and nobody holds it.
A chunk is busy while the primitive block that it lies in is taken. Numbers of chunks are never used again. The map
shows physical memory: a request that holds a stitched block holds several blocks of it.
"""

from dataclasses import dataclass

from stalloc.columns import Column
from stalloc.compiled import inner
from stalloc.core.record_types import Record, row_of, table
from stalloc.errors import BadInputError
from stalloc.inputs import memory_limit_bytes
from stalloc.replay.blocks import (
    FREE,
    GRANULE,
    LARGE_SEGMENT,
    LIVE,
    ROWS_AHEAD,
    SMALL_BYTES,
    WAITING,
    at,
    drop_block,
    drop_segment,
    fits,
    give_up,
    is_whole,
    new_block,
    new_segment,
    place_at,
    round_up,
    segment_at,
    split,
    torch_segment_size,
)
from stalloc.replay.driver import driver_of
from stalloc.replay.model import TableModel, own_type
from stalloc.replay.settings import as_bytes, as_count, as_flag, setting
from stalloc.replay.treap import (
    after,
    best_fit,
    cut_off,
    first,
    free_into,
    insert,
    last,
    merge,
    release_whole,
    remove,
    take_best,
)
from stalloc.sizes import ALIGNMENT_BYTES

_CHUNK_BYTES = 2 << 20
_SMALL, _LARGE, _STITCHED = range(3)  # trees of a stream
_TREES = 3
_FIRST_STITCHED = 1 << 46
_MAX_CHUNKS = 1 << 20  # of one request: 2 TiB


@dataclass(frozen=True, kw_only=True)
class GMLakeSettings:
    """The settings of GMLake."""

    fragmentation_limit: int = setting(512 << 20, as_bytes)
    """Requests below this are never stitched for."""
    smallest_part: int = setting(_CHUNK_BYTES, as_bytes)
    """Blocks below this are never stitched."""
    stitch_limit: int = setting(1000 << 30, as_bytes)
    """Total of stitched bytes from which on stitched blocks that nobody holds are forgotten."""
    reuse_limit: int = setting(10, as_count)
    """How many times as large as the request a stitched block may be."""
    allocate_and_stitch: int = setting(1, as_flag)
    """Whether new memory is stitched to free blocks."""


_COUNTS = ("exact", "splits", "larger_stitched", "stitches", "stitches_with_new_memory", "maps", "forgotten")
_CHUNK_FIELDS = ("chunks", "num_chunks", "chunks_used", "nodes", "num_nodes", "nodes_used", "nodes_spare")
_STITCH_FIELDS = (
    "stitched_first",  # all stitched blocks are a list by their `previous` and `next`
    "stitched_bytes",
    "stitched_address",  # where the next one goes
)


class Chunk(Record):
    """2 MiB of physical memory."""

    owner: int  # primitive block that it belongs to
    busy: int
    first_node: int  # of those that show it


class Node(Record):
    """One chunk of a stitched block."""

    block: int
    chunk: int
    following: int  # of the same block
    before: int  # of the same chunk
    after: int


_chunk_at, _node_at = row_of("chunks", Chunk), row_of("nodes", Node)  # row 0 of either is none
# in the row of a stitched block, `segment` counts its free chunks, `other` those in use; `extra` is its first node


@inner()
def _num_chunks(t, block):
    return at(t, block).size // _CHUNK_BYTES


@inner()
def _chunks_of(t, block):
    """The numbers of a primitive block's chunks: [begin, end)."""
    segment = segment_at(t, at(t, block).segment)
    begin = segment.tag + (at(t, block).address - segment.address) // _CHUNK_BYTES
    return begin, begin + _num_chunks(t, block)


@inner()
def _own_chunks(t, m, block):
    begin, end = _chunks_of(t, block)
    for chunk in range(begin, end):
        _chunk_at(m, chunk).owner = block


@inner()
def _new_chunks(t, m, size, stream):
    """New physical memory as one free block in no tree, -1 if the device has no room."""
    block = new_segment(t, size, stream, 0)
    if block > 0:
        segment_at(t, at(t, block).segment).tag = m.chunks_used
        count = _num_chunks(t, block)
        for chunk in range(m.chunks_used, m.chunks_used + count):
            _chunk_at(m, chunk).busy = _chunk_at(m, chunk).first_node = 0
        m.chunks_used += count
        _own_chunks(t, m, block)
        t.device_allocs += count - 1
        m.maps += count
    return block


@inner()
def _tree(t, block, which):
    return at(t, block).stream * _TREES + which


@inner()
def _set_busy(t, m, block, busy):
    """The chunks of a primitive block are taken, or free again, for all stitched blocks that show them."""
    begin, end = _chunks_of(t, block)
    for chunk in range(begin, end):
        _chunk_at(m, chunk).busy = busy
        row = _chunk_at(m, chunk).first_node
        while row != 0:
            node = _node_at(m, row)
            shown = at(t, node.block)
            count = _num_chunks(t, node.block)
            if busy and shown.segment == count and shown.state == FREE:
                remove(t, node.block)
            shown.segment += -1 if busy else 1
            if not busy and shown.segment == count and shown.state == FREE:
                insert(t, _tree(t, node.block, _STITCHED), node.block)
            row = node.after


@inner()
def _take_block(t, m, block, row):
    at(t, block).state, at(t, block).request = LIVE, row
    _set_busy(t, m, block, 1)


@inner()
def _cut(t, m, block, size):
    rest = split(t, block, size)
    _own_chunks(t, m, rest)
    insert(t, _tree(t, rest, _LARGE), rest)


@inner()
def _take_range(t, m, low, high, row):
    """Take the free chunks [low, high), which follow each other in one segment, out of the blocks that hold them."""
    while low < high:
        block = _chunk_at(m, low).owner
        remove(t, block)
        begin, _ = _chunks_of(t, block)
        if low > begin:
            rest = split(t, block, (low - begin) * _CHUNK_BYTES)
            _own_chunks(t, m, rest)
            insert(t, _tree(t, block, _LARGE), block)
            block = rest
        if _num_chunks(t, block) > high - low:
            _cut(t, m, block, (high - low) * _CHUNK_BYTES)
        _take_block(t, m, block, row)
        low += _num_chunks(t, block)


@inner()
def _free_block(t, m, block):
    at(t, block).state, at(t, block).request = FREE, -1
    _set_busy(t, m, block, 0)
    tree = _tree(t, block, _LARGE)
    block = merge(t, tree, FREE, block)
    _own_chunks(t, m, block)
    insert(t, tree, block)


@inner()
def _new_stitched(t, m, count, stream):
    """A stitched block for `count` chunks, none of them known yet, that is taken."""
    row = new_block(t)
    block = at(t, row)
    block.address, block.size = m.stitched_address, count * _CHUNK_BYTES
    block.state, block.stream, block.segment, block.other = LIVE, stream, 0, count
    block.previous, block.next = 0, m.stitched_first
    if m.stitched_first != 0:
        at(t, m.stitched_first).previous = row
    m.stitched_first = row
    m.stitched_address += (count + 1) * _CHUNK_BYTES
    m.stitched_bytes += count * _CHUNK_BYTES
    return row


@inner()
def _add_chunks(t, m, stitched, tail, block):
    """Let a stitched block, whose last node is `tail`, end with the busy chunks of a primitive one; the new tail."""
    begin, end = _chunks_of(t, block)
    for chunk in range(begin, end):
        row = m.nodes_spare
        if row != 0:
            m.nodes_spare = _node_at(m, row).following
        else:
            row = m.nodes_used
            m.nodes_used += 1
        node, head = _node_at(m, row), _chunk_at(m, chunk).first_node
        node.block, node.chunk, node.following, node.before, node.after = stitched, chunk, 0, 0, head
        if head != 0:
            _node_at(m, head).before = row
        _chunk_at(m, chunk).first_node = row
        if tail == 0:
            at(t, stitched).extra = row
        else:
            _node_at(m, tail).following = row
        tail = row
    return tail


@inner()
def _take_stitched(t, m, stitched, count, row):
    """A stitched block whose chunks are all free is taken by a request, which needs its first `count` chunks."""
    remove(t, stitched)
    at(t, stitched).state, at(t, stitched).other = LIVE, count
    node = at(t, stitched).extra
    while count > 0:
        low = _node_at(m, node).chunk
        high = low
        # as far as the chunks follow each other in one segment: numbers of two segments may be neighbours too
        segment = at(t, _chunk_at(m, low).owner).segment
        while count > 0 and _node_at(m, node).chunk == high:
            if at(t, _chunk_at(m, high).owner).segment != segment:
                break
            high += 1
            count -= 1
            node = _node_at(m, node).following
        _take_range(t, m, low, high, row)


@inner()
def _free_stitched(t, m, stitched):
    """Free the primitive blocks of a stitched block that nobody holds any more; it stays known."""
    at(t, stitched).state = FREE
    node = at(t, stitched).extra
    for _ in range(at(t, stitched).other):
        chunk = _chunk_at(m, _node_at(m, node).chunk)
        if chunk.busy != 0:
            _free_block(t, m, chunk.owner)
        node = _node_at(m, node).following
    at(t, stitched).other = 0


@inner()
def _forget(t, m, stitched):
    """Forget a stitched block that nobody holds; the memory stays where it is."""
    if at(t, stitched).segment == _num_chunks(t, stitched):
        remove(t, stitched)
    row = at(t, stitched).extra
    while row != 0:
        node = _node_at(m, row)
        following = node.following
        if node.before == 0:
            _chunk_at(m, node.chunk).first_node = node.after
        else:
            _node_at(m, node.before).after = node.after
        if node.after != 0:
            _node_at(m, node.after).before = node.before
        node.following = m.nodes_spare
        m.nodes_spare = row
        row = following
    previous, following = at(t, stitched).previous, at(t, stitched).next
    if previous == 0:
        m.stitched_first = following
    else:
        at(t, previous).next = following
    if following != 0:
        at(t, following).previous = previous
    m.stitched_bytes -= at(t, stitched).size
    drop_block(t, stitched)


@inner()
def _release(t, m):
    """Give back every segment without live blocks, with every stitched block that shows a chunk of it."""
    for tree in range(t.num_headers):
        if tree % _TREES == _SMALL:
            release_whole(t, tree, 0)
        if tree % _TREES != _LARGE:
            continue
        block = first(t, tree)
        while block != 0:
            size, address = at(t, block).size, at(t, block).address
            if is_whole(t, block):
                remove(t, block)
                begin, end = _chunks_of(t, block)
                before = m.stitched_bytes
                for chunk in range(begin, end):
                    while _chunk_at(m, chunk).first_node != 0:
                        _forget(t, m, _node_at(m, _chunk_at(m, chunk).first_node).block)
                m.forgotten += before != m.stitched_bytes
                t.device_frees += end - begin - 1
                drop_segment(t, block)
            block = after(t, tree, size, address)


@inner()
def _allocate_small(t, m, requested, stream):
    size, tree = round_up(requested, ALIGNMENT_BYTES), stream * _TREES + _SMALL
    block = take_best(t, tree, size)
    if block == 0:
        if not fits(t, GRANULE):
            t.retries += 1
            _release(t, m)
        block = new_segment(t, GRANULE, stream, 0)
    if block > 0:
        cut_off(t, tree, block, size)
    return block


@inner()
def _collect_garbage(t, m):
    block = m.stitched_first
    while block != 0:
        following = at(t, block).next
        if at(t, block).state == FREE:
            _forget(t, m, block)
            m.forgotten += 1
        block = following


@inner()
def _stitch(t, m, size, stream, row):
    """Stitch free blocks, the largest first, and if allowed new memory for the rest; 0 if impossible."""
    tree = stream * _TREES + _LARGE
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
            _cut(t, m, taken, at(t, taken).size + lacking)
        m.stitches += 1
    # turn the list round: the largest comes first
    forward = 0
    while taken != 0:
        before = at(t, taken).other
        at(t, taken).other = forward
        forward, taken = taken, before
    stitched, tail = _new_stitched(t, m, size // _CHUNK_BYTES, stream), 0
    while forward != 0:
        _take_block(t, m, forward, row)
        tail = _add_chunks(t, m, stitched, tail, forward)
        forward = at(t, forward).other
    m.maps += size // _CHUNK_BYTES
    return stitched


@inner()
def _find(t, m, size, stream, row):
    """Go through GMLake's states up to stitching with new memory; 0 if none serves the request."""
    block = best_fit(t, stream * _TREES + _LARGE, size)
    stitched = best_fit(t, stream * _TREES + _STITCHED, size)
    is_exact = block != 0 and at(t, block).size == size
    if is_exact or (block != 0 and not (stitched != 0 and at(t, stitched).size == size)):
        m.exact += is_exact
        m.splits += not is_exact
        remove(t, block)
        if not is_exact:
            _cut(t, m, block, size)
        _take_block(t, m, block, row)
        return block
    if stitched != 0 and (at(t, stitched).size == size or at(t, stitched).size <= size * m.reuse_limit):
        is_exact = at(t, stitched).size == size
        m.exact += is_exact
        m.larger_stitched += not is_exact
        _take_stitched(t, m, stitched, size // _CHUNK_BYTES, row)
        return stitched
    return 0 if size < m.fragmentation_limit else _stitch(t, m, size, stream, row)


@inner()
def _find_or_new(t, m, size, stream, row):
    """A block by one of the states, or one of new memory without stitching; -1 if the device has no room."""
    block = _find(t, m, size, stream, row)
    if block != 0:
        return block
    whole = torch_segment_size(size, LARGE_SEGMENT)
    block = _new_chunks(t, m, whole, stream)
    if block > 0:
        if whole > size:
            _cut(t, m, block, size)
        _take_block(t, m, block, row)
    return block


@inner()
def _has_room(t, m, size):
    chunks = size // _CHUNK_BYTES + LARGE_SEGMENT // _CHUNK_BYTES + ROWS_AHEAD
    m.need = chunks
    return (
        t.num_blocks - t.blocks_used >= 2 * chunks
        and t.num_segments - t.segments_used >= ROWS_AHEAD
        and m.num_chunks - m.chunks_used >= chunks
        and m.num_nodes - m.nodes_used >= chunks
    )


@inner()
def _allocate(t, m, request, requested, stream):
    if requested <= SMALL_BYTES:
        return _allocate_small(t, m, requested, stream)
    size = round_up(requested, _CHUNK_BYTES)
    if m.stitched_bytes > m.stitch_limit:
        _collect_garbage(t, m)
    block = _find_or_new(t, m, size, stream, request)
    if block < 0:
        t.retries += 1
        _release(t, m)
        block = _find_or_new(t, m, size, stream, request)
    return block


@inner()
def _give_up(t, m, request, kind):
    block = give_up(t, request, kind)
    held = place_at(t, request).value
    if held != 0 and at(t, held).address >= _FIRST_STITCHED:
        node = at(t, held).extra
        for _ in range(at(t, held).other):  # the primitive blocks that it is made of wait too
            at(t, _chunk_at(m, _node_at(m, node).chunk).owner).state = WAITING
            node = _node_at(m, node).following
    return block


@inner()
def _free(t, m, block):
    if at(t, block).address >= _FIRST_STITCHED:
        _free_stitched(t, m, block)
    elif at(t, block).requested <= SMALL_BYTES:
        free_into(t, _tree(t, block, _SMALL), block)
    else:
        _free_block(t, m, block)


@inner()
def _empty(t, m, kind, request):
    _release(t, m)


class GMLake(TableModel):
    """Virtual memory stitching."""

    name = "gmlake"
    settings_type = GMLakeSettings
    own = own_type(GMLakeSettings, *_CHUNK_FIELDS, *_STITCH_FIELDS, *_COUNTS, "need")
    driver = driver_of(name, own, allocate=_allocate, free=_free, has_room=_has_room, empty=_empty, give_up=_give_up)
    shows = (*_COUNTS, "stitched_bytes")
    trees_per_stream = _TREES
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
