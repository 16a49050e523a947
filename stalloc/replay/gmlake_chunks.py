"""GMLake's chunks: which block each 2 MiB of physical memory belongs to, and which stitched blocks show it.

Contract: a stitched block is a row of the block table outside of all segments; its chunks are listed by nodes, in the
order of its addresses. It counts how many of its chunks are free, and it is in its stream's tree of stitched blocks
exactly while all are free and nobody holds it. A chunk is busy while the primitive block that it lies in is taken.
Numbers of chunks are never used again.
"""

from stalloc.compiled import inner
from stalloc.core.record_types import Record, row_of
from stalloc.replay.blocks import FREE, LIVE, absorb, at, drop_block, new_block, segment_at, split
from stalloc.replay.treap import insert, remove

CHUNK_BYTES = 2 << 20
SMALL, LARGE, STITCHED = range(3)  #: trees of a stream
TREES = 3

#: fields of the model's own record that are for chunks
CHUNK_FIELDS = (
    "chunks",
    "num_chunks",
    "chunks_used",
    "nodes",
    "num_nodes",
    "nodes_used",
    "nodes_spare",
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


chunk_at, node_at = row_of("chunks", Chunk), row_of("nodes", Node)  # row 0 of either is none
# in the row of a stitched block, `segment` counts its free chunks, `other` those in use; `extra` is its first node


@inner()
def first_chunk(t, block):
    """The number of a primitive block's first chunk."""
    segment = at(t, block).segment
    return segment_at(t, segment).tag + (at(t, block).address - segment_at(t, segment).address) // CHUNK_BYTES


@inner()
def num_chunks(t, block):
    """How many chunks a block has."""
    return at(t, block).size // CHUNK_BYTES


@inner()
def own_chunks(t, m, block):
    """Note a primitive block as the owner of its chunks."""
    first = first_chunk(t, block)
    for chunk in range(first, first + num_chunks(t, block)):
        chunk_at(m, chunk).owner = block


@inner()
def number_chunks(t, m, block):
    """Give numbers to the chunks of a new segment."""
    segment_at(t, at(t, block).segment).tag = m.chunks_used
    first, count = m.chunks_used, num_chunks(t, block)
    for chunk in range(first, first + count):
        chunk_at(m, chunk).busy = 0
        chunk_at(m, chunk).first_node = 0
    m.chunks_used = first + count
    own_chunks(t, m, block)


@inner()
def _tree(t, block, which):
    return at(t, block).stream * TREES + which


@inner()
def _set_busy(t, m, chunk, busy):
    chunk_at(m, chunk).busy = busy
    node = chunk_at(m, chunk).first_node
    while node != 0:
        block = node_at(m, node).block
        count = num_chunks(t, block)
        if busy and at(t, block).segment == count and at(t, block).state == FREE:
            remove(t, block)
        at(t, block).segment += -1 if busy else 1
        if not busy and at(t, block).segment == count and at(t, block).state == FREE:
            insert(t, _tree(t, block, STITCHED), block)
        node = node_at(m, node).after


@inner()
def take_block(t, m, block, row):
    """A free primitive block, in no tree, is taken by a request."""
    at(t, block).state = LIVE
    at(t, block).request = row
    first = first_chunk(t, block)
    for chunk in range(first, first + num_chunks(t, block)):
        _set_busy(t, m, chunk, 1)


@inner()
def cut(t, m, block, size):
    """Cut a block in no tree after `size` bytes and put the rest into the tree."""
    rest = split(t, block, size)
    own_chunks(t, m, rest)
    insert(t, _tree(t, rest, LARGE), rest)


@inner()
def take_range(t, m, low, high, row):
    """Take the free chunks [low, high), which follow each other in one segment, out of the blocks that hold them."""
    while low < high:
        block = chunk_at(m, low).owner
        remove(t, block)
        before = low - first_chunk(t, block)
        if before > 0:
            rest = split(t, block, before * CHUNK_BYTES)
            own_chunks(t, m, rest)
            insert(t, _tree(t, block, LARGE), block)
            block = rest
        if num_chunks(t, block) > high - low:
            cut(t, m, block, (high - low) * CHUNK_BYTES)
        take_block(t, m, block, row)
        low += num_chunks(t, block)


@inner()
def free_block(t, m, block):
    """Free a primitive block; it merges with free neighbours."""
    first = first_chunk(t, block)
    at(t, block).state = FREE
    at(t, block).request = -1
    for chunk in range(first, first + num_chunks(t, block)):
        _set_busy(t, m, chunk, 0)
    following, previous = at(t, block).next, at(t, block).previous
    if following != 0 and at(t, following).state == FREE:
        remove(t, following)
        absorb(t, block, following)
    if previous != 0 and at(t, previous).state == FREE:
        remove(t, previous)
        absorb(t, previous, block)
        block = previous
    own_chunks(t, m, block)
    insert(t, _tree(t, block, LARGE), block)


@inner()
def new_stitched(t, m, count, stream):
    """A stitched block for `count` chunks, none of them known yet."""
    block = new_block(t)
    at(t, block).address = m.stitched_address
    m.stitched_address += (count + 1) * CHUNK_BYTES
    at(t, block).size = count * CHUNK_BYTES
    at(t, block).stream = stream
    at(t, block).segment = 0
    at(t, block).extra = 0
    at(t, block).previous = 0
    at(t, block).next = m.stitched_first
    if m.stitched_first != 0:
        at(t, m.stitched_first).previous = block
    m.stitched_first = block
    m.stitched_bytes += count * CHUNK_BYTES
    return block


@inner()
def add_chunks(t, m, stitched, tail, block):
    """Let a stitched block, whose last node is `tail`, end with the busy chunks of a primitive one; the new tail."""
    first = first_chunk(t, block)
    for chunk in range(first, first + num_chunks(t, block)):
        node = m.nodes_spare
        if node != 0:
            m.nodes_spare = node_at(m, node).following
        else:
            node = m.nodes_used
            m.nodes_used = node + 1
        head = chunk_at(m, chunk).first_node
        node_at(m, node).block = stitched
        node_at(m, node).chunk = chunk
        node_at(m, node).following = 0
        node_at(m, node).before = 0
        node_at(m, node).after = head
        if head != 0:
            node_at(m, head).before = node
        chunk_at(m, chunk).first_node = node
        if tail == 0:
            at(t, stitched).extra = node
        else:
            node_at(m, tail).following = node
        tail = node
    return tail


@inner()
def take_stitched(t, m, stitched, count, row):
    """A stitched block whose chunks are all free is taken by a request, which needs its first `count` chunks."""
    remove(t, stitched)
    at(t, stitched).state = LIVE
    at(t, stitched).other = count
    node = at(t, stitched).extra
    while count > 0:
        low = node_at(m, node).chunk
        high = low
        # as far as the chunks follow each other in one segment: numbers of two segments may be neighbours too
        segment = at(t, chunk_at(m, low).owner).segment
        while count > 0 and node_at(m, node).chunk == high:
            if at(t, chunk_at(m, high).owner).segment != segment:
                break
            high += 1
            count -= 1
            node = node_at(m, node).following
        take_range(t, m, low, high, row)


@inner()
def mark_parts(t, m, stitched, state):
    """Set the state of the primitive blocks that a held stitched block is made of."""
    node = at(t, stitched).extra
    for _ in range(at(t, stitched).other):
        at(t, chunk_at(m, node_at(m, node).chunk).owner).state = state
        node = node_at(m, node).following


@inner()
def free_stitched(t, m, stitched):
    """Free the primitive blocks of a stitched block that nobody holds any more; it stays known."""
    at(t, stitched).state = FREE
    node = at(t, stitched).extra
    for _ in range(at(t, stitched).other):
        chunk = node_at(m, node).chunk
        if chunk_at(m, chunk).busy != 0:
            free_block(t, m, chunk_at(m, chunk).owner)
        node = node_at(m, node).following
    at(t, stitched).other = 0


@inner()
def drop_stitched(t, m, stitched):
    """Forget a stitched block that nobody holds; the memory stays where it is."""
    if at(t, stitched).segment == num_chunks(t, stitched):
        remove(t, stitched)
    node = at(t, stitched).extra
    while node != 0:
        before, after = node_at(m, node).before, node_at(m, node).after
        if before == 0:
            chunk_at(m, node_at(m, node).chunk).first_node = after
        else:
            node_at(m, before).after = after
        if after != 0:
            node_at(m, after).before = before
        following = node_at(m, node).following
        node_at(m, node).following = m.nodes_spare
        m.nodes_spare = node
        node = following
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
def forget_chunks(t, m, block):
    """Forget every stitched block that shows a chunk of a free primitive block."""
    first = first_chunk(t, block)
    for chunk in range(first, first + num_chunks(t, block)):
        while chunk_at(m, chunk).first_node != 0:
            drop_stitched(t, m, node_at(m, chunk_at(m, chunk).first_node).block)
