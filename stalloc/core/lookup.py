"""How things are found: live blocks by address, slots by offset, keys of a schedule by themselves, streams by handle.

Contract: the lock is held, except where Python calls. Hash tables probe linearly, and at most half of their rows are
used, so a search ends soon. Only live blocks leave their table again; theirs grows, for a small one stays in the
caches. Every offset of a schedule has a slot for as long as the schedule is in place. A stream's row is its index, 0
for the default stream; it is given to another handle only when no segment and no schedule knows the old one.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.constants import MAX_STREAMS, NO_HANDLE
from stalloc.core.intrinsics import under_lock
from stalloc.core.records import (
    LiveBlock,
    Slot,
    dtype_of,
    live_at,
    live_row,
    pool_at,
    segment_at,
    slot_at,
    slot_row,
    stream_at,
    word_at,
)

_HASH = 0x1E3779B97F4A7C15
_LIVE_WORDS = dtype_of(LiveBlock).itemsize // 8
_WORDS = dtype_of(Slot).itemsize // 8


@inner(forceinline=True)
def hash_slot(number, mask):
    """Where the search for a number begins; of addresses and offsets the number is that of ALIGNMENT units."""
    return (number * _HASH >> 24) & mask


@inner(forceinline=True)
def find_row(table, words, mask, number, first_word, empty):
    """The row that begins with `first_word`, or the empty row where it would be added.

    `words` is the length of a row, `number` what is hashed, `empty` the first word of rows that nobody uses.
    """
    row = hash_slot(number, mask)
    found = word_at(table, row * words).value
    while found != first_word and found != empty:
        row = (row + 1) & mask
        found = word_at(table, row * words).value
    return row


@inner()
def find_live(state, address):
    """The block at an address that is not free, 0 if there is none."""
    row = find_row(state.lookup.live, _LIVE_WORDS, state.lookup.live_mask, address >> 9, address, 0)
    return live_at(state, row).block


@inner()
def _grow_live(state):
    """Go over to a table of twice as many rows, which lies behind the one in use."""
    old, rows = state.lookup.live, state.lookup.live_mask + 1
    new, mask = old + rows * _LIVE_WORDS * 8, 2 * rows - 1
    for i in range(rows):
        row = live_row(old, i)
        if row.address != 0:
            copy = live_row(new, find_row(new, _LIVE_WORDS, mask, row.address >> 9, 0, 0))
            copy.address = row.address
            copy.block = row.block
    state.lookup.live = new
    state.lookup.live_mask = mask


@inner()
def add_live(state, address, block):
    """Let a block be found by its address."""
    mask = state.lookup.live_mask
    row = live_at(state, find_row(state.lookup.live, _LIVE_WORDS, mask, address >> 9, 0, 0))
    row.address = address
    row.block = block
    state.lookup.live_count += 1
    if 2 * state.lookup.live_count > mask and mask < state.lookup.max_live_mask:
        _grow_live(state)


@inner()
def drop_live(state, address):
    """Let the block at an address be found no more; what probed past its row moves back."""
    mask = state.lookup.live_mask
    hole = find_row(state.lookup.live, _LIVE_WORDS, mask, address >> 9, address, 0)
    i = (hole + 1) & mask
    while live_at(state, i).address != 0:
        row = live_at(state, i)
        if ((i - hash_slot(row.address >> 9, mask)) & mask) >= ((i - hole) & mask):
            live_at(state, hole).address = row.address
            live_at(state, hole).block = row.block
            hole = i
        i = (i + 1) & mask
    live_at(state, hole).address = 0
    live_at(state, hole).block = 0
    state.lookup.live_count -= 1


@inner(forceinline=True)
def live_is_full(state):
    """Whether the largest table of live blocks is half full: beyond that looking things up takes long."""
    return 2 * state.lookup.live_count > state.lookup.live_mask


@njit(**BORROWING)
def fill_slots(table, mask, offsets, rows):
    """Fill an empty table of slots with distinct offsets (bytes); `rows[i]` becomes the row of `offsets[i]`."""
    for i in range(len(offsets)):
        rows[i] = find_row(table, _WORDS, mask, offsets[i] >> 9, -1, -1)
        slot_row(table, rows[i]).offset = offsets[i]


@inner(forceinline=True)
def in_arena(state, address):
    """Whether an address is one of the arena's."""
    return state.plan.arena <= address < state.plan.arena + state.plan.arena_bytes


@inner(forceinline=True)
def find_slot(state, address):
    """The row of the slot of what lives at an address in the arena; -1 if no planned request does."""
    offset = address - state.plan.arena
    row = find_row(state.plan.slots, _WORDS, state.plan.slots_mask, offset >> 9, offset, -1)
    return row if slot_at(state, row).entry >= 0 else -1


@inner()
def _find_stream(state, handle):
    """The index of a stream other than the last; a new row if it has none, -1 if the table is full."""
    count = state.lookup.num_streams
    index, spare = -1, count
    for i in range(count):
        found = stream_at(state, i).value
        if found == handle:
            index = i
            break
        if found == NO_HANDLE and spare == count:
            spare = i
    if index < 0:
        if spare == MAX_STREAMS:
            return -1
        index = spare
        stream_at(state, index).value = handle
        state.lookup.num_streams = max(count, index + 1)
    state.hot.last_stream = handle
    state.hot.last_stream_index = index
    return index


@inner(forceinline=True)
def stream_index(state, handle):
    """The index of a stream; -1 if the table is full."""
    if state.hot.last_stream == handle:
        return state.hot.last_stream_index
    return _find_stream(state, handle)


@under_lock()
def forget_streams(state, kept):
    for row in range(1, state.heap.segments_used):
        segment = segment_at(state, row)
        if segment.address != 0:
            kept[pool_at(state, segment.pool).stream] = 1
    count = 0
    for index in range(1, state.lookup.num_streams):
        stream = stream_at(state, index)
        if kept[index] == 0 and stream.value != NO_HANDLE:
            stream.value = NO_HANDLE
            count += 1
    state.hot.last_stream = 0
    state.hot.last_stream_index = 0
    return count
