"""Hash tables with linear probing: rows whose first word is what they are found by.

Contract: at most half of the rows are used, so a search ends soon. Live blocks are found by address, slots by offset,
keys of the schedule by themselves. Only live blocks leave their table again; theirs grows, for a small one stays in the
caches.
"""

from stalloc.compiled import inner
from stalloc.core.records import LiveBlock, dtype_of, live_at, live_row, word_at

_HASH = 0x1E3779B97F4A7C15
_LIVE_WORDS = dtype_of(LiveBlock).itemsize // 8


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
    return live_at(
        state, find_row(state.lookup.live, _LIVE_WORDS, state.lookup.live_mask, address >> 9, address, 0)
    ).block


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
