"""The cells of the arena: the ranges between all boundaries of the plan, and who has them.

Contract: the lock is held. A cell is taken (its bit is 1) while a planned request lives there or while it belongs to a
lease; nobody else gets it then. What the arena has beyond the plan is one more cell.
"""

from stalloc.compiled import inner
from stalloc.core.constants import GRANULE
from stalloc.core.intrinsics import first_at_least
from stalloc.core.records import cell_at, use_at, use_start_at, word_at

NEVER = 1 << 60  # tape time


@inner(forceinline=True)
def _mask(word, low, high):
    """The bits of a word of cells that belong to the cells [low, high)."""
    mask = -1
    if word == low >> 6:
        mask &= -1 << (low & 63)
    if word == high >> 6:
        mask &= (1 << (high & 63)) - 1
    return mask


@inner(forceinline=True)
def cells_empty(bits, low, high):
    """Whether nobody has any of the cells [low, high); `bits` is State.cell_bits."""
    taken = 0
    for word in range(low >> 6, ((high - 1) >> 6) + 1):
        taken |= word_at(bits, word).value & _mask(word, low, high)
    return taken == 0


@inner(forceinline=True)
def flip_cells(bits, low, high):
    """Take empty cells, or empty taken ones."""
    for word in range(low >> 6, ((high - 1) >> 6) + 1):
        word_at(bits, word).value ^= _mask(word, low, high)


@inner()
def has_page(state, page):
    """Whether a page of the arena has memory."""
    return state.arena_pages == 0 or (word_at(state.arena_pages, page >> 6).value >> (page & 63)) & 1 == 1


@inner()
def has_memory(state, index):
    """Whether all of a cell has memory."""
    page, last = cell_at(state, index).offset // GRANULE, (cell_at(state, index + 1).offset - 1) // GRANULE
    while page <= last and has_page(state, page):
        page += 1
    return page > last


@inner()
def region_end(state, first):
    """The end of the cells from `first` on that are of one stream."""
    end = first + 1
    while end < state.num_cells and cell_at(state, end).stream == cell_at(state, first).stream:
        end += 1
    return end


@inner(forceinline=True)
def tape_time(state):
    """Requests that the tape was followed by since it was put in force: the clock of leases."""
    return state.pass_start + state.cursor


@inner()
def needed_at(state, index, now):
    """The tape time at which the plan needs a cell next."""
    cell = cell_at(state, index)
    if cell.needed_at >= now:
        return cell.needed_at
    uses = state.uses
    if uses == 0:
        return now + 1
    first, end, time = use_start_at(state, index).value, use_start_at(state, index + 1).value, NEVER
    use = first_at_least(uses, first, end, now - state.pass_start)
    if use < end and use_at(state, use).value < state.ring_end:
        time = state.pass_start + use_at(state, use).value
    elif first < end and use_at(state, end - 1).value >= state.ring_start:
        # in the next pass, if it is one of the same tape: the first use that belongs to the ring
        use = first_at_least(uses, first, end, state.ring_start)
        if use_at(state, use).value < state.ring_end:
            time = state.pass_start + use_at(state, use).value + state.ring_end - state.ring_start
    cell.needed_at = time
    return time
