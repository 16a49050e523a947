"""How long requests that no plan serves lived so far, by their size and where in the iteration they were made.

Contract: the lock is held. Time is that of the schedule, which stands still while the program does something else.
"""

from stalloc.compiled import inner
from stalloc.core.arena_intervals import schedule_time
from stalloc.core.constants import LIFESPAN_BITS, LIFESPAN_PLACES, LIFESPAN_PLACES_BITS, LIFESPAN_ROWS, LIFESPAN_SIZES
from stalloc.core.intrinsics import last_bit
from stalloc.core.records import block_at, lifespan_at

_STAYS = 4  # iterations: what lives for less than one is known again when a few like it have


@inner()
def lifespan_row(state, size):
    """The row of a request of this size, at this place in the iteration, in the table of lifespans."""
    start = state.follow.cycle_start
    length = state.follow.cycle_end - start
    shift = max(last_bit(length | 1) - LIFESPAN_PLACES_BITS + 1, 0)  # a division takes long
    place = min(max(state.follow.cursor - start, 0) >> shift, LIFESPAN_PLACES - 1)
    units = size >> 9
    octave = max(last_bit(units) - 1, 0)
    return place * LIFESPAN_SIZES + min(2 * octave + ((units >> octave) & 1), LIFESPAN_SIZES - 1)  # two an octave


@inner()
def outlives_iteration(state, row):
    """Whether requests like those of a row are known to live for longer than an iteration."""
    return lifespan_at(state, row).value > state.follow.cycle_end - state.follow.cycle_start


@inner()
def note_birth(state, block, row):
    """An unplanned request begins to live, in whatever segment; `row` is its row in the table of lifespans."""
    block_at(state, block).born = schedule_time(state) << LIFESPAN_BITS | row


@inner()
def note_death(state, block):
    """Learn from an unplanned request how long the next one like it will live: the longest counts.

    It fades, but for a dynamic request: where experts are left out, a short life follows a long one by chance.
    """
    _learn(state, block, 0)


@inner()
def note_staying(state, block):
    """Learn from a request that the arena moves away from: as far as anyone knows, it lives for several iterations."""
    _learn(state, block, _STAYS * (state.follow.cycle_end - state.follow.cycle_start))


@inner()
def _learn(state, block, least):
    born = block_at(state, block).born
    lived = max(schedule_time(state) - (born >> LIFESPAN_BITS) + 1, least)
    row = born & ((1 << LIFESPAN_BITS) - 1)
    known = lifespan_at(state, row)
    if lived > 0:
        fades = known.value >> 3 if row < LIFESPAN_ROWS else 0
        known.value = max(lived, known.value - fades)
