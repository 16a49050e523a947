"""Blocks and segments in arrays: what the compiled models share, and the bookkeeping around every event.

Contract: the blocks of a segment are a doubly linked list in the order of their addresses, without gaps. Row 0 of
either table means none. Segments get addresses that were never used before, two granules apart at least, so that
blocks of different segments never touch. A kernel stops before an event for which the tables might be too small;
Python makes them larger and goes on. Requests without bytes hold no block.
"""

from typing import NamedTuple

import numpy as np

from stalloc.compiled import njit
from stalloc.replay.protocol import Kind
from stalloc.trace.record import Column

FIRST_ADDRESS = 1 << 44
GRANULE = 2 << 20  # bytes; segments begin at multiples of it
ROWS_AHEAD = 8  # rows that one event may need at most, of blocks and of segments

# words of Tables.words; a model's own words begin at OWN
(
    RESERVED,
    PEAK_RESERVED,
    ALLOCATED,
    PEAK_ALLOCATED,
    DEVICE_ALLOCS,
    DEVICE_FREES,
    RETRIES,
    CAPACITY,
    NEXT_ADDRESS,
    RANDOM,
    BLOCKS_USED,
    BLOCKS_SPARE,
    SEGMENTS_USED,
    SEGMENTS_SPARE,
    REFUSED,
) = range(15)
OWN = 16

# columns of Tables.blocks; EXTRA and OTHER are the model's own
(
    ADDRESS,
    SIZE,
    PREVIOUS,
    NEXT,
    LEFT,
    RIGHT,
    PRIORITY,
    TREE,
    SEGMENT,
    STATE,
    REQUEST,
    REQUESTED,
    STREAM,
    EXTRA,
    OTHER,
) = range(15)
BLOCK_COLUMNS = 16  # two cache lines
FREE, LIVE, WAITING = range(3)

# columns of Tables.segments
S_ADDRESS, S_SIZE, S_FIRST, S_TAG = range(4)
SEGMENT_COLUMNS = 4

_ALLOC, _FREE_COMPLETED, _EMPTY_CACHE = int(Kind.ALLOC), int(Kind.FREE_COMPLETED), int(Kind.EMPTY_CACHE)


class Tables(NamedTuple):
    """The state of a model, as its kernel takes it; all int64."""

    words: Column  #: (w,) counters and what the model keeps
    blocks: Column  #: (b, BLOCK_COLUMNS)
    segments: Column  #: (s, SEGMENT_COLUMNS)
    roots: Column  #: (t,) root of each tree of free blocks, 0 for an empty one
    place: Column  #: (n,) block that each request holds, 0 for none
    address: Column  #: (n,) where each request was placed last, 0 for nowhere


def make_tables(num_words: int, capacity_bytes: int) -> Tables:
    """Empty tables; `num_words` of the model's own."""
    words = np.zeros(OWN + num_words, np.int64)
    words[CAPACITY], words[NEXT_ADDRESS], words[RANDOM] = capacity_bytes, FIRST_ADDRESS, 0x2545F4914F6CDD1D
    words[BLOCKS_USED] = words[SEGMENTS_USED] = 1
    blocks = np.zeros((256, BLOCK_COLUMNS), np.int64)
    segments = np.zeros((64, SEGMENT_COLUMNS), np.int64)
    return Tables(words, blocks, segments, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))


def lengthen(column: Column, length: int) -> Column:
    """The column with zeros after it, so that it has at least `length` rows."""
    if len(column) >= length:
        return column
    longer = np.zeros((length, *column.shape[1:]), np.int64)
    longer[: len(column)] = column
    return longer


@njit()
def has_room(t):
    """Whether the tables have room for any one event."""
    blocks_left = len(t.blocks) - t.words[BLOCKS_USED]
    segments_left = len(t.segments) - t.words[SEGMENTS_USED]
    return blocks_left >= ROWS_AHEAD and segments_left >= ROWS_AHEAD


@njit()
def new_block(t):
    """A row of the block table; what is in it is the last owner's, but it is free and holds no request."""
    row = t.words[BLOCKS_SPARE]
    if row != 0:
        t.words[BLOCKS_SPARE] = t.blocks[row, NEXT]
    else:
        row = t.words[BLOCKS_USED]
        t.words[BLOCKS_USED] = row + 1
    t.blocks[row, STATE] = FREE
    t.blocks[row, REQUEST] = -1
    t.blocks[row, EXTRA] = 0
    t.blocks[row, OTHER] = 0
    return row


@njit()
def drop_block(t, row):
    """Give a row back."""
    t.blocks[row, SIZE] = 0
    t.blocks[row, NEXT] = t.words[BLOCKS_SPARE]
    t.words[BLOCKS_SPARE] = row


@njit()
def count_reserved(t, size):
    """Count bytes that came from the device."""
    reserved = t.words[RESERVED] + size
    t.words[RESERVED] = reserved
    if reserved > t.words[PEAK_RESERVED]:
        t.words[PEAK_RESERVED] = reserved


@njit()
def fits(t, size):
    """Whether the device has so many bytes left."""
    return t.words[CAPACITY] == 0 or t.words[RESERVED] + size <= t.words[CAPACITY]


@njit()
def new_segment(t, size, stream, tag):
    """A segment of `size` bytes that is one free block in no tree: the block, or -1 if the device has no room."""
    if not fits(t, size):
        return -1
    row = t.words[SEGMENTS_SPARE]
    if row != 0:
        t.words[SEGMENTS_SPARE] = t.segments[row, S_FIRST]
    else:
        row = t.words[SEGMENTS_USED]
        t.words[SEGMENTS_USED] = row + 1
    address = t.words[NEXT_ADDRESS]
    t.words[NEXT_ADDRESS] = address + (size + 3 * GRANULE - 1) // GRANULE * GRANULE
    block = new_block(t)
    t.blocks[block, ADDRESS] = address
    t.blocks[block, SIZE] = size
    t.blocks[block, PREVIOUS] = 0
    t.blocks[block, NEXT] = 0
    t.blocks[block, SEGMENT] = row
    t.blocks[block, STREAM] = stream
    t.segments[row, S_ADDRESS] = address
    t.segments[row, S_SIZE] = size
    t.segments[row, S_FIRST] = block
    t.segments[row, S_TAG] = tag
    t.words[DEVICE_ALLOCS] += 1
    count_reserved(t, size)
    return block


@njit()
def drop_segment(t, block):
    """Give the segment back to the device of which a free block, in no tree, is all."""
    row = t.blocks[block, SEGMENT]
    t.words[RESERVED] -= t.segments[row, S_SIZE]
    t.words[DEVICE_FREES] += 1
    t.segments[row, S_SIZE] = 0
    t.segments[row, S_FIRST] = t.words[SEGMENTS_SPARE]
    t.words[SEGMENTS_SPARE] = row
    drop_block(t, block)


@njit()
def is_whole(t, block):
    """Whether a block is all of its segment."""
    return t.blocks[block, PREVIOUS] == 0 and t.blocks[block, NEXT] == 0


@njit()
def split(t, block, size):
    """Cut a block after `size` bytes; the new block behind it, free and in no tree."""
    rest = new_block(t)
    after = t.blocks[block, NEXT]
    t.blocks[rest, ADDRESS] = t.blocks[block, ADDRESS] + size
    t.blocks[rest, SIZE] = t.blocks[block, SIZE] - size
    t.blocks[rest, PREVIOUS] = block
    t.blocks[rest, NEXT] = after
    t.blocks[rest, SEGMENT] = t.blocks[block, SEGMENT]
    t.blocks[rest, STREAM] = t.blocks[block, STREAM]
    t.blocks[rest, TREE] = t.blocks[block, TREE]
    if after != 0:
        t.blocks[after, PREVIOUS] = rest
    t.blocks[block, NEXT] = rest
    t.blocks[block, SIZE] = size
    return rest


@njit()
def absorb(t, block, following):
    """Let a block take in the one behind it; neither is in a tree."""
    after = t.blocks[following, NEXT]
    t.blocks[block, SIZE] += t.blocks[following, SIZE]
    t.blocks[block, NEXT] = after
    if after != 0:
        t.blocks[after, PREVIOUS] = block
    drop_block(t, following)


@njit()
def draw_priority(t):
    """The next random word: the priority of a block in a treap."""
    x = t.words[RANDOM]
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    t.words[RANDOM] = x
    return x


@njit()
def hold(t, row, block, requested):
    """Note that a request holds a block; 0 for a request without bytes, below 0 for one refused: False then."""
    if block < 0:
        t.words[REFUSED] = 1
        return False
    t.place[row] = block
    if block == 0:
        t.address[row] = 0
        return True
    t.address[row] = t.blocks[block, ADDRESS]
    t.blocks[block, STATE] = LIVE
    t.blocks[block, REQUEST] = row
    t.blocks[block, REQUESTED] = requested
    allocated = t.words[ALLOCATED] + requested
    t.words[ALLOCATED] = allocated
    if allocated > t.words[PEAK_ALLOCATED]:
        t.words[PEAK_ALLOCATED] = allocated
    return True


@njit()
def give_up(t, row, kind):
    """A free of either kind: the block that is to become free now, 0 for none."""
    block = t.place[row]
    if block == 0:
        return 0
    if t.blocks[block, STATE] == LIVE:
        t.words[ALLOCATED] -= t.blocks[block, REQUESTED]
        t.blocks[block, STATE] = WAITING
    if kind != _FREE_COMPLETED:
        return 0
    t.place[row] = 0
    t.blocks[block, STATE] = FREE
    t.blocks[block, REQUEST] = -1
    return block


@njit()
def note(t, at, reserved, allocated):
    """Write the figures after an event."""
    reserved[at] = t.words[RESERVED]
    allocated[at] = t.words[ALLOCATED]


@njit()
def copy_blocks(t, segments, out):
    """Write the blocks of segments (k,), in that order, to rows of `out`; how many there are.

    Columns of `out`: address, size, request, waiting, stream, position of the segment.
    """
    count = 0
    for k in range(len(segments)):
        block = t.segments[segments[k], S_FIRST]
        while block != 0:
            out[count, 0] = t.blocks[block, ADDRESS]
            out[count, 1] = t.blocks[block, SIZE]
            out[count, 2] = t.blocks[block, REQUEST]
            out[count, 3] = t.blocks[block, STATE] == WAITING
            out[count, 4] = t.blocks[block, STREAM]
            out[count, 5] = k
            count += 1
            block = t.blocks[block, NEXT]
    return count
