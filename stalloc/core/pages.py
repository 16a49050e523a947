"""Segments whose memory comes and goes by pages: a range of addresses of which a part is mapped.

Contract: the lock is held, except where Python calls. What has no memory is an unmapped block of whole pages; no two of
them are neighbours, and all are on one list. Memory is mapped before a block becomes free here, and unmapped only
after it ceased to be: nobody is ever given addresses without memory. Nothing of a pool that belongs to a graph goes.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.constants import (
    ACTION_SEGMENT_MAP,
    ACTION_SEGMENT_UNMAP,
    BLOCK_FREE,
    BLOCK_UNMAPPED,
    GRANULE,
)
from stalloc.core.counters import count_joined, count_parted, count_resized
from stalloc.core.event_log import record
from stalloc.core.free_lists import insert_free, remove_free
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.records import block_at, pool_at, segment_at
from stalloc.core.segments import (
    absorb,
    allocate_block_row,
    allocate_segment_row,
    release_block_row,
    release_segment_row,
    set_up_block,
)


@inner()
def _insert_unmapped(state, row):
    block, following = block_at(state, row), state.heap.first_unmapped
    block.left = 0
    block.right = following
    if following != 0:
        block_at(state, following).left = row
    state.heap.first_unmapped = row


@inner()
def _remove_unmapped(state, row):
    block = block_at(state, row)
    if block.left != 0:
        block_at(state, block.left).right = block.right
    else:
        state.heap.first_unmapped = block.right
    if block.right != 0:
        block_at(state, block.right).left = block.left


@inner()
def put_on(state, row, status):
    """Make a block free or unmapped, whichever `status` says, and put it on the list of such."""
    block_at(state, row).state = status
    if status == BLOCK_FREE:
        insert_free(state, row)
    else:
        _insert_unmapped(state, row)


@inner()
def take_off(state, row):
    """Take a free or unmapped block off the list that it is on."""
    if block_at(state, row).state == BLOCK_FREE:
        remove_free(state, row)
    else:
        _remove_unmapped(state, row)


@inner()
def has_rows(state, count):
    """Whether the table of blocks has room for so many more."""
    room, spare = state.heap.blocks_capacity - state.heap.blocks_used, state.heap.free_block_row
    while room < count and spare != 0:
        room += 1
        spare = block_at(state, spare).next
    return room >= count


@inner()
def _cut(state, row, size):
    """Cut a block that is on no list after `size` bytes: the row of the rest, 0 if that is nothing."""
    block = block_at(state, row)
    if block.size_bytes == size:
        return 0
    other = allocate_block_row(state)
    rest = block_at(state, other)
    set_up_block(state, other, block.address + size, block.size_bytes - size, block.segment, block.state)
    rest.previous = row
    rest.next = block.next
    if block.next != 0:
        block_at(state, block.next).previous = other
    block.next = other
    block.size_bytes = size
    return other


@inner()
def join(state, row, status):
    """Join a block that is on no list with the neighbours of this state, and put it on their list; its row then."""
    block = block_at(state, row)
    following, previous = block.next, block.previous
    if following != 0 and block_at(state, following).state == status:
        take_off(state, following)
        absorb(state, row, following)
    if previous != 0 and block_at(state, previous).state == status:
        take_off(state, previous)
        absorb(state, previous, row)
        row = previous
    put_on(state, row, status)
    return row


@inner()
def cut_out(state, row, begin, size):
    """Take the part [begin, begin + size) of a free or unmapped block off its list; its row. Up to two are needed."""
    block = block_at(state, row)
    before = block.state
    take_off(state, row)
    if block.address < begin:
        rest = _cut(state, row, begin - block.address)
        put_on(state, row, before)
        row = rest
    rest = _cut(state, row, size)
    if rest != 0:
        put_on(state, rest, before)
    return row


@inner()
def _change_part(state, row, begin, size, status):
    """Make the part [begin, begin + size) of a free or unmapped block the other; its row. Up to two rows are needed."""
    return join(state, cut_out(state, row, begin, size), status)


@inner()
def count_pages(state, segment, size):
    """Count memory that a segment got, or that it lost where `size` is negative."""
    segment_at(state, segment).mapped_bytes += size
    count_resized(state, pool_at(state, segment_at(state, segment).pool).kind, size)


@njit()
def give_range(device, pool, address, size):
    """Give a pool a range of addresses without memory, whole pages; False if the tables are full. For Python."""
    state = locked(device)
    block, row = allocate_block_row(state), 0
    if block != 0:
        row = allocate_segment_row(state, pool, address, size, block)
        if row == 0:
            release_block_row(state, block)
    if row != 0:
        set_up_block(state, block, address, size, row, BLOCK_UNMAPPED)
        put_on(state, block, BLOCK_UNMAPPED)
        segment_at(state, row).mapped_bytes = 0
        segment_at(state, row).is_paged = 1
        count_parted(state, 2)
    unlock(state)
    return row != 0


@inner()
def _find_unmapped(state, address):
    row = state.heap.first_unmapped
    while row != 0:
        block = block_at(state, row)
        if block.address <= address < block.address + block.size_bytes:
            return row
        row = block.right
    return 0


@njit()
def use_pages(device, address, size):
    """Serve from pages of a segment that have memory now; False if they are none without, or a table is full.

    For Python.
    """
    state = locked(device)
    row = _find_unmapped(state, address)
    block = block_at(state, row)
    done = row != 0 and block.address + block.size_bytes >= address + size and has_rows(state, 2)
    if done:
        segment = block.segment
        _change_part(state, row, address, size, BLOCK_FREE)
        count_pages(state, segment, size)
        state.statistics.num_segment_allocs += 1
        if state.hot.recording == 1:
            record(state, ACTION_SEGMENT_MAP, pool_at(state, segment_at(state, segment).pool).stream, address, size)
    unlock(state)
    return done


@inner()
def free_pages(state, row):
    """The whole pages of a block, if it is free: where they begin and end; as much as nothing otherwise."""
    block = block_at(state, row)
    if block.state != BLOCK_FREE:
        return 0, 0
    return (block.address + (GRANULE - 1)) & -GRANULE, (block.address + block.size_bytes) & -GRANULE


@inner()
def unmap_part(state, row, begin, size):
    """Make the pages [begin, begin + size) of a free block an unmapped block; its row. Needs up to two spare rows."""
    return _change_part(state, row, begin, size, BLOCK_UNMAPPED)


@inner()
def unmap_free(state, row, begin, size):
    """Let the pages [begin, begin + size) of a free block have no memory any more."""
    segment = block_at(state, row).segment
    unmap_part(state, row, begin, size)
    count_pages(state, segment, -size)
    state.statistics.num_segment_frees += 1
    if state.hot.recording == 1:
        record(state, ACTION_SEGMENT_UNMAP, pool_at(state, segment_at(state, segment).pool).stream, begin, size)


@njit(**BORROWING)
def remove_empty_ranges(device, addresses):
    """Take segments of which nothing has memory out of the heap: writes where they begin, returns how many.

    For Python.
    """
    state = locked(device)
    count = 0
    for row in range(1, state.heap.segments_used):
        segment = segment_at(state, row)
        if count == len(addresses) or segment.address == 0 or segment.is_paged == 0 or segment.mapped_bytes != 0:
            continue
        if segment.tail != 0 or segment.head != 0:
            continue  # a stitched segment has memory of others
        addresses[count] = segment.address
        count += 1
        take_off(state, segment.first)
        release_block_row(state, segment.first)
        release_segment_row(state, row)
        count_joined(state, 2)
    unlock(state)
    return count


@njit()
def keep_ranges(device):
    """Leave every range as it is for good: this process is a fork, the pages are its parent's. For Python."""
    state = locked(device)
    for row in range(1, state.heap.segments_used):
        segment = segment_at(state, row)
        if segment.address != 0 and segment.is_paged == 1:
            segment.is_paged = 0
            segment.num_live += 1  # it is never given back
    row = state.heap.first_unmapped
    while row != 0:
        following = block_at(state, row).right
        block_at(state, row).left = 0
        block_at(state, row).right = 0
        row = following
    state.heap.first_unmapped = 0
    unlock(state)
