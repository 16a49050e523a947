"""GMLake's chunks: which block each 2 MiB of physical memory belongs to, and which stitched blocks show it.

Contract: a stitched block is a row of the block table outside of all segments; its chunks are listed by nodes, in the
order of its addresses. It counts how many of its chunks are free, and it is in its stream's tree of stitched blocks
exactly while all are free and nobody holds it. A chunk is busy while the primitive block that it lies in is taken.
Numbers of chunks are never used again.
"""

from typing import NamedTuple

from stalloc.compiled import njit
from stalloc.replay.free_tree import insert, remove
from stalloc.replay.tables import (
    ADDRESS,
    EXTRA,
    FREE,
    LIVE,
    NEXT,
    OTHER,
    OWN,
    PREVIOUS,
    REQUEST,
    S_ADDRESS,
    S_TAG,
    SEGMENT,
    SIZE,
    STATE,
    STREAM,
    absorb,
    drop_block,
    new_block,
    split,
)
from stalloc.trace.record import Column

CHUNK_BYTES = 2 << 20
SMALL, LARGE, STITCHED = range(3)  #: trees of a stream
TREES = 3

# words of the model
CHUNKS_USED, NODES_USED, NODES_SPARE = OWN, OWN + 1, OWN + 2
STITCHED_FIRST = OWN + 3  #: all stitched blocks are a list by their PREVIOUS and NEXT
STITCHED_BYTES = OWN + 4
STITCHED_ADDRESS = OWN + 5  #: where the next one goes
NUM_CHUNK_WORDS = 6

# columns of GMLakeTables.chunks
OWNER, BUSY, FIRST_NODE = range(3)
CHUNK_COLUMNS = 3

# columns of GMLakeTables.nodes: one chunk of a stitched block
N_BLOCK, N_CHUNK, N_FOLLOWING, N_BEFORE, N_AFTER = range(5)
NODE_COLUMNS = 5

# in the row of a stitched block
FREE_CHUNKS, USED_CHUNKS, NODES = SEGMENT, OTHER, EXTRA


class GMLakeTables(NamedTuple):
    """Tables (see stalloc.replay.tables) and what is known of chunks; all int64."""

    words: Column
    blocks: Column
    segments: Column
    roots: Column
    place: Column
    address: Column
    chunks: Column  #: (c, CHUNK_COLUMNS); row 0 is none
    nodes: Column  #: (k, NODE_COLUMNS); row 0 is none


@njit()
def first_chunk(t, block):
    """The number of a primitive block's first chunk."""
    segment = t.blocks[block, SEGMENT]
    return t.segments[segment, S_TAG] + (t.blocks[block, ADDRESS] - t.segments[segment, S_ADDRESS]) // CHUNK_BYTES


@njit()
def num_chunks(t, block):
    """How many chunks a block has."""
    return t.blocks[block, SIZE] // CHUNK_BYTES


@njit()
def own_chunks(t, block):
    """Note that a primitive block's chunks are its own."""
    first = first_chunk(t, block)
    for chunk in range(first, first + num_chunks(t, block)):
        t.chunks[chunk, OWNER] = block


@njit()
def number_chunks(t, block):
    """Give numbers to the chunks of a new segment."""
    t.segments[t.blocks[block, SEGMENT], S_TAG] = t.words[CHUNKS_USED]
    first, count = t.words[CHUNKS_USED], num_chunks(t, block)
    for chunk in range(first, first + count):
        t.chunks[chunk, BUSY] = 0
        t.chunks[chunk, FIRST_NODE] = 0
    t.words[CHUNKS_USED] = first + count
    own_chunks(t, block)


@njit()
def _tree(t, block, which):
    return t.blocks[block, STREAM] * TREES + which


@njit()
def _set_busy(t, chunk, busy):
    t.chunks[chunk, BUSY] = busy
    node = t.chunks[chunk, FIRST_NODE]
    while node != 0:
        block = t.nodes[node, N_BLOCK]
        count = num_chunks(t, block)
        if busy and t.blocks[block, FREE_CHUNKS] == count and t.blocks[block, STATE] == FREE:
            remove(t, block)
        t.blocks[block, FREE_CHUNKS] += -1 if busy else 1
        if not busy and t.blocks[block, FREE_CHUNKS] == count and t.blocks[block, STATE] == FREE:
            insert(t, _tree(t, block, STITCHED), block)
        node = t.nodes[node, N_AFTER]


@njit()
def take_block(t, block, row):
    """A free primitive block, in no tree, is taken by a request."""
    t.blocks[block, STATE] = LIVE
    t.blocks[block, REQUEST] = row
    first = first_chunk(t, block)
    for chunk in range(first, first + num_chunks(t, block)):
        _set_busy(t, chunk, 1)


@njit()
def cut(t, block, size):
    """Cut a block in no tree after `size` bytes and put the rest into the tree."""
    rest = split(t, block, size)
    own_chunks(t, rest)
    insert(t, _tree(t, rest, LARGE), rest)


@njit()
def take_range(t, low, high, row):
    """Take the free chunks [low, high), which follow each other in one segment, out of the blocks that hold them."""
    while low < high:
        block = t.chunks[low, OWNER]
        remove(t, block)
        before = low - first_chunk(t, block)
        if before > 0:
            rest = split(t, block, before * CHUNK_BYTES)
            own_chunks(t, rest)
            insert(t, _tree(t, block, LARGE), block)
            block = rest
        if num_chunks(t, block) > high - low:
            cut(t, block, (high - low) * CHUNK_BYTES)
        take_block(t, block, row)
        low += num_chunks(t, block)


@njit()
def free_block(t, block):
    """Free a primitive block; it merges with free neighbours."""
    first = first_chunk(t, block)
    t.blocks[block, STATE] = FREE
    t.blocks[block, REQUEST] = -1
    for chunk in range(first, first + num_chunks(t, block)):
        _set_busy(t, chunk, 0)
    following, previous = t.blocks[block, NEXT], t.blocks[block, PREVIOUS]
    if following != 0 and t.blocks[following, STATE] == FREE:
        remove(t, following)
        absorb(t, block, following)
    if previous != 0 and t.blocks[previous, STATE] == FREE:
        remove(t, previous)
        absorb(t, previous, block)
        block = previous
    own_chunks(t, block)
    insert(t, _tree(t, block, LARGE), block)


@njit()
def new_stitched(t, count, stream):
    """A stitched block for `count` chunks, none of them known yet."""
    block = new_block(t)
    t.blocks[block, ADDRESS] = t.words[STITCHED_ADDRESS]
    t.words[STITCHED_ADDRESS] += (count + 1) * CHUNK_BYTES
    t.blocks[block, SIZE] = count * CHUNK_BYTES
    t.blocks[block, STREAM] = stream
    t.blocks[block, FREE_CHUNKS] = 0
    t.blocks[block, NODES] = 0
    t.blocks[block, PREVIOUS] = 0
    t.blocks[block, NEXT] = t.words[STITCHED_FIRST]
    if t.words[STITCHED_FIRST] != 0:
        t.blocks[t.words[STITCHED_FIRST], PREVIOUS] = block
    t.words[STITCHED_FIRST] = block
    t.words[STITCHED_BYTES] += count * CHUNK_BYTES
    return block


@njit()
def add_chunks(t, stitched, tail, block):
    """Let a stitched block, whose last node is `tail`, end with the busy chunks of a primitive one; the new tail."""
    first = first_chunk(t, block)
    for chunk in range(first, first + num_chunks(t, block)):
        node = t.words[NODES_SPARE]
        if node != 0:
            t.words[NODES_SPARE] = t.nodes[node, N_FOLLOWING]
        else:
            node = t.words[NODES_USED]
            t.words[NODES_USED] = node + 1
        head = t.chunks[chunk, FIRST_NODE]
        t.nodes[node, N_BLOCK] = stitched
        t.nodes[node, N_CHUNK] = chunk
        t.nodes[node, N_FOLLOWING] = 0
        t.nodes[node, N_BEFORE] = 0
        t.nodes[node, N_AFTER] = head
        if head != 0:
            t.nodes[head, N_BEFORE] = node
        t.chunks[chunk, FIRST_NODE] = node
        if tail == 0:
            t.blocks[stitched, NODES] = node
        else:
            t.nodes[tail, N_FOLLOWING] = node
        tail = node
    return tail


@njit()
def take_stitched(t, stitched, count, row):
    """A stitched block whose chunks are all free is taken by a request, which needs its first `count` chunks."""
    remove(t, stitched)
    t.blocks[stitched, STATE] = LIVE
    t.blocks[stitched, USED_CHUNKS] = count
    node = t.blocks[stitched, NODES]
    while count > 0:
        low = t.nodes[node, N_CHUNK]
        high = low
        # as far as the chunks follow each other in one segment: numbers of two segments may be neighbours too
        segment = t.blocks[t.chunks[low, OWNER], SEGMENT]
        while count > 0 and t.nodes[node, N_CHUNK] == high:
            if t.blocks[t.chunks[high, OWNER], SEGMENT] != segment:
                break
            high += 1
            count -= 1
            node = t.nodes[node, N_FOLLOWING]
        take_range(t, low, high, row)


@njit()
def mark_parts(t, stitched, state):
    """Set the state of the primitive blocks that a held stitched block is made of."""
    node = t.blocks[stitched, NODES]
    for _ in range(t.blocks[stitched, USED_CHUNKS]):
        t.blocks[t.chunks[t.nodes[node, N_CHUNK], OWNER], STATE] = state
        node = t.nodes[node, N_FOLLOWING]


@njit()
def free_stitched(t, stitched):
    """Free the primitive blocks of a stitched block that nobody holds any more; it stays known."""
    t.blocks[stitched, STATE] = FREE
    node = t.blocks[stitched, NODES]
    for _ in range(t.blocks[stitched, USED_CHUNKS]):
        chunk = t.nodes[node, N_CHUNK]
        if t.chunks[chunk, BUSY] != 0:
            free_block(t, t.chunks[chunk, OWNER])
        node = t.nodes[node, N_FOLLOWING]
    t.blocks[stitched, USED_CHUNKS] = 0


@njit()
def drop_stitched(t, stitched):
    """Forget a stitched block that nobody holds; the memory stays where it is."""
    if t.blocks[stitched, FREE_CHUNKS] == num_chunks(t, stitched):
        remove(t, stitched)
    node = t.blocks[stitched, NODES]
    while node != 0:
        before, after = t.nodes[node, N_BEFORE], t.nodes[node, N_AFTER]
        if before == 0:
            t.chunks[t.nodes[node, N_CHUNK], FIRST_NODE] = after
        else:
            t.nodes[before, N_AFTER] = after
        if after != 0:
            t.nodes[after, N_BEFORE] = before
        following = t.nodes[node, N_FOLLOWING]
        t.nodes[node, N_FOLLOWING] = t.words[NODES_SPARE]
        t.words[NODES_SPARE] = node
        node = following
    previous, following = t.blocks[stitched, PREVIOUS], t.blocks[stitched, NEXT]
    if previous == 0:
        t.words[STITCHED_FIRST] = following
    else:
        t.blocks[previous, NEXT] = following
    if following != 0:
        t.blocks[following, PREVIOUS] = previous
    t.words[STITCHED_BYTES] -= t.blocks[stitched, SIZE]
    drop_block(t, stitched)


@njit()
def forget_chunks(t, block):
    """Forget every stitched block that shows a chunk of a free primitive block."""
    first = first_chunk(t, block)
    for chunk in range(first, first + num_chunks(t, block)):
        while t.chunks[chunk, FIRST_NODE] != 0:
            drop_stitched(t, t.nodes[t.chunks[chunk, FIRST_NODE], N_BLOCK])
