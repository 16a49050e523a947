"""Blocks and segments: what the compiled models share, and the bookkeeping around every event.

Contract: the blocks of a segment are a doubly linked list in the order of their addresses, without gaps:
`address + size` of a block is the `address` of its `next`. Row 0 of either table means none. Segments get addresses
that were never used before, two granules apart at least, so that blocks of different segments never touch. A driver
stops before an event for which the tables might be too small; Python makes them larger and goes on. Requests without
bytes hold no block.
"""

import numpy as np

from stalloc.compiled import inner, njit
from stalloc.core.record_types import Record, record_at, row_of, table
from stalloc.core.records import Word
from stalloc.replay.protocol import Kind
from stalloc.sizes import PAGE_BYTES

GRANULE = PAGE_BYTES  # segments begin at multiples of it, and what the device maps is a multiple
SMALL_BYTES = 1 << 20  # torch serves requests up to this from segments of one granule
LARGE_SEGMENT = 20 << 20  # bytes that torch takes for requests from there to 10 MiB
FIRST_ADDRESS = 1 << 44
ROWS_AHEAD = 8  # rows that one event may need at most, of blocks and of segments

FREE, LIVE, WAITING, UNMAPPED, HEADER, UNUSED = range(6)
"""States of a block. WAITING: given up, but a stream may still use it. UNMAPPED: addresses without memory. HEADER: the
row stands for a tree."""


class Block(Record):
    """A row of the block table. Live and free blocks of a segment: address + size = address of `next`."""

    address: int
    size: int  # bytes
    key: int  # what orders it in its tree before the address does: its size, or 0
    priority: int  # in its tree; of a header, the state of the tree's random numbers
    left: int  # in its tree; of a header, the root
    right: int
    previous: int  # block in front of it in its segment
    next: int  # block behind it; of a row without a block, the next such row
    tree: int  # that it is in, or was in last
    state: int
    request: int  # row of the request that holds it, -1 for none
    requested: int  # bytes
    stream: int
    segment: int
    extra: int  # the model's own, as is `other`
    other: int


class Segment(Record):
    """Memory that came from the device in one piece."""

    address: int
    size: int  # 0: the row stands for nothing
    first: int  # block; of a row without a segment, the next such row
    tag: int  # the model's own


class Store(Record):
    """The state that every model has. reserved = sum of the sizes of segments; no peak is below its current value."""

    reserved: int  # bytes that came from the device and did not go back
    peak_reserved: int
    allocated: int  # requested bytes of blocks that are not given up
    peak_allocated: int
    device_allocs: int
    device_frees: int
    retries: int
    capacity: int  # bytes of the device, 0 for no limit
    next_address: int
    blocks_used: int  # rows, those given back included
    blocks_spare: int  # first of the rows given back
    num_spare: int
    segments_used: int
    segments_spare: int
    refused: int  # whether the last request was
    blocks: int  # (num_blocks,) of Block
    num_blocks: int
    segments: int  # (num_segments,) of Segment
    num_segments: int
    headers: int  # (num_headers,) row that stands for each tree
    num_headers: int
    places: int  # (n,) block that each request holds, 0 for none
    addresses: int  # (n,) where each request was placed last, 0 for nowhere


ROW = 16  # words of a Block: two lines of the cache
store_at = record_at(Store)
at = row_of("blocks", Block)
cell_at = row_of("blocks", Word)
segment_at = row_of("segments", Segment)
header_at = row_of("headers", Word)
place_at = row_of("places", Word)
address_at = row_of("addresses", Word)


class Owner:
    """A record and the tables that it owns, on Python's side: one argument of compiled code however many tables it has.

    A table `x` has its address in the field `x`, and its number of rows in `num_x` if there is such a field.
    """

    def __init__(self, record: type[Record], **tables: np.ndarray) -> None:
        self.record = table(record, 1)
        self.tables: dict[str, np.ndarray] = {}
        for name, rows in tables.items():
            self._own(name, rows)

    def _own(self, name: str, rows: np.ndarray) -> None:
        self.tables[name] = rows
        self.record[name] = rows.ctypes.data
        if f"num_{name}" in (self.record.dtype.names or ()):
            self.record[f"num_{name}"] = len(rows)

    @property
    def pointer(self) -> int:
        """The address of the record."""
        return int(self.record.ctypes.data)

    def __getitem__(self, name: str) -> int:
        return int(self.record[name][0])

    def write(self, **values: int) -> None:
        """Set fields of the record."""
        for name, value in values.items():
            self.record[name] = value

    def lengthen(self, **lengths: int) -> None:
        """Give tables at least so many rows; new ones are zeros."""
        for name, length in lengths.items():
            rows = self.tables[name]
            if length > len(rows):
                longer = np.zeros((length, *rows.shape[1:]), rows.dtype)
                longer[: len(rows)] = rows
                self._own(name, longer)


def make_store(capacity_bytes: int) -> Owner:
    """An empty store."""
    numbers = {name: np.zeros(1, np.int64) for name in ("headers", "places", "addresses")}
    store = Owner(Store, blocks=table(Block, 256), segments=table(Segment, 64), **numbers)
    store.write(capacity=capacity_bytes, next_address=FIRST_ADDRESS, blocks_used=1, segments_used=1, num_headers=0)
    return store


@njit()
def round_up(size, unit):
    """The least multiple of `unit` that is not less."""
    return (size + unit - 1) // unit * unit


@inner()
def torch_segment_size(size, large):
    """What torch takes from the device for a block of `size` bytes; `large`: for those from 1 MiB to below 10 MiB."""
    if size <= SMALL_BYTES:
        return GRANULE
    return large if size < 10 * SMALL_BYTES else round_up(size, GRANULE)


@inner()
def log2(value):
    """The position of the highest bit of a positive number."""
    position = 0
    for step in (32, 16, 8, 4, 2, 1):
        if value >> step:
            value >>= step
            position += step
    return position


@inner()
def has_room(t):
    """Whether the tables have room for any one event."""
    return t.num_blocks - t.blocks_used >= ROWS_AHEAD and t.num_segments - t.segments_used >= ROWS_AHEAD


@inner()
def new_block(t):
    """A new row of the block table: free and without a request; its other fields are the last owner's."""
    row = t.blocks_spare
    if row != 0:
        t.blocks_spare = at(t, row).next
        t.num_spare -= 1
    else:
        row = t.blocks_used
        if row >= t.num_blocks:  # rather than write beyond the table
            raise IndexError("a model needs more rows of blocks for one event than its rule has_room asks for")
        t.blocks_used += 1
    block = at(t, row)
    block.state, block.request, block.extra, block.other = FREE, -1, 0, 0
    return row


@inner()
def drop_block(t, row):
    """Give a row back."""
    block = at(t, row)
    block.size, block.state, block.next = 0, UNUSED, t.blocks_spare
    t.blocks_spare = row
    t.num_spare += 1


@inner()
def count_reserved(t, change):
    """Count bytes that came from the device, or went back where `change` is negative."""
    t.reserved += change
    t.peak_reserved = max(t.peak_reserved, t.reserved)


@inner()
def count_call(t, change):
    """Count a call of the device that took bytes, or gave them back where `change` is negative."""
    count_reserved(t, change)
    if change > 0:
        t.device_allocs += 1
    else:
        t.device_frees += 1


@inner()
def fits(t, size):
    """Whether the device has so many bytes left."""
    return t.capacity == 0 or t.reserved + size <= t.capacity


@inner()
def whole_block(t, address, size):
    """A free block, in no tree, that has no neighbours."""
    row = new_block(t)
    block = at(t, row)
    block.address, block.size, block.previous, block.next = address, size, 0, 0
    return row


@inner()
def new_segment(t, size, stream, tag):
    """A segment of `size` bytes that is one free block in no tree: the block, or -1 if the device has no room."""
    if not fits(t, size):
        return -1
    number = t.segments_spare
    if number != 0:
        t.segments_spare = segment_at(t, number).first
    else:
        number = t.segments_used
        if number >= t.num_segments:
            raise IndexError("a model needs more rows of segments for one event than its rule has_room asks for")
        t.segments_used += 1
    address = t.next_address
    t.next_address = address + round_up(size + 2 * GRANULE, GRANULE)
    block, segment = whole_block(t, address, size), segment_at(t, number)
    at(t, block).segment, at(t, block).stream = number, stream
    segment.address, segment.size, segment.first, segment.tag = address, size, block, tag
    count_call(t, size)
    return block


@inner()
def drop_segment(t, block):
    """Give back to the device a segment that is one free block in no tree."""
    number = at(t, block).segment
    segment = segment_at(t, number)
    count_call(t, -segment.size)
    segment.size, segment.first = 0, t.segments_spare
    t.segments_spare = number
    drop_block(t, block)


@inner()
def is_whole(t, block):
    """Whether a block is all of its segment."""
    return at(t, block).previous == 0 and at(t, block).next == 0


@inner()
def split(t, block, size):
    """Cut a block after `size` bytes; the new block behind it, free and in no tree."""
    row = new_block(t)
    whole, rest = at(t, block), at(t, row)
    rest.address, rest.size = whole.address + size, whole.size - size
    rest.previous, rest.next = block, whole.next
    rest.segment, rest.stream, rest.tree = whole.segment, whole.stream, whole.tree
    if whole.next != 0:
        at(t, whole.next).previous = row
    whole.size, whole.next = size, row
    return row


@inner()
def absorb(t, block, following):
    """Let a block take in the one behind it; neither is in a tree."""
    after = at(t, following).next
    at(t, block).size += at(t, following).size
    at(t, block).next = after
    if after != 0:
        at(t, after).previous = block
    drop_block(t, following)


@inner()
def hold(t, row, block, requested):
    """Note that a request holds a block, 0 for a request of no bytes; False if it is below 0, for a refused request."""
    if block <= 0:
        place_at(t, row).value = address_at(t, row).value = 0
        t.refused = int(block < 0)
        return block == 0
    taken = at(t, block)
    place_at(t, row).value, address_at(t, row).value = block, taken.address
    taken.state, taken.request, taken.requested = LIVE, row, requested
    t.allocated += requested
    t.peak_allocated = max(t.peak_allocated, t.allocated)
    return True


@inner()
def give_up(t, row, kind):
    """Handle a free of either kind; the block that is to become free now, 0 for none."""
    block = place_at(t, row).value
    if block == 0:
        return 0
    held = at(t, block)
    if held.state == LIVE:
        t.allocated -= held.requested
        held.state = WAITING
    if kind != Kind.FREE_COMPLETED:
        return 0
    place_at(t, row).value = 0
    held.state, held.request = FREE, -1
    return block
