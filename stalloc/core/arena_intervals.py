"""The intervals of the arena: the ranges between all boundaries of the plan, and who has them.

Contract: the lock is held. An interval is taken (its bit is 1) while a planned request lives there or while it belongs
to a lease; nobody else gets it then. What the arena has beyond the plan is one more interval.
"""

from stalloc.compiled import inner
from stalloc.core.constants import GRANULE
from stalloc.core.intrinsics import first_at_least
from stalloc.core.records import interval_at, use_at, use_start_at, word_at

NEVER = 1 << 60  # schedule time


@inner(forceinline=True)
def _mask(word, low, high):
    """The bits of a word of intervals that belong to the intervals [low, high)."""
    mask = -1
    if word == low >> 6:
        mask &= -1 << (low & 63)
    if word == high >> 6:
        mask &= (1 << (high & 63)) - 1
    return mask


@inner(forceinline=True)
def intervals_empty(bits, low, high):
    """Whether nobody has any of the intervals [low, high); `bits` is State.plan.interval_bits."""
    taken = 0
    for word in range(low >> 6, ((high - 1) >> 6) + 1):
        taken |= word_at(bits, word).value & _mask(word, low, high)
    return taken == 0


@inner(forceinline=True)
def flip_intervals(bits, low, high):
    """Take empty intervals, or empty taken ones."""
    for word in range(low >> 6, ((high - 1) >> 6) + 1):
        word_at(bits, word).value ^= _mask(word, low, high)


@inner()
def has_page(state, page):
    """Whether a page of the arena has memory."""
    return state.plan.arena_pages == 0 or (word_at(state.plan.arena_pages, page >> 6).value >> (page & 63)) & 1 == 1


@inner()
def has_memory(state, index):
    """Whether all of an interval has memory."""
    page, last = interval_at(state, index).offset // GRANULE, (interval_at(state, index + 1).offset - 1) // GRANULE
    while page <= last and has_page(state, page):
        page += 1
    return page > last


@inner()
def region_end(state, first):
    """The end of the intervals from `first` on that are of one stream."""
    end = first + 1
    while end < state.plan.num_intervals and interval_at(state, end).stream == interval_at(state, first).stream:
        end += 1
    return end


@inner(forceinline=True)
def schedule_time(state):
    """Requests that the schedule was followed by since it was put in force: the clock of leases."""
    return state.iterations.iteration_start + state.follow.cursor


@inner()
def needed_at(state, index, now):
    """The schedule time at which the plan needs an interval next."""
    interval = interval_at(state, index)
    if interval.needed_at >= now:
        return interval.needed_at
    uses = state.tables.uses
    if uses == 0:
        return now + 1
    first, end, time = use_start_at(state, index).value, use_start_at(state, index + 1).value, NEVER
    use = first_at_least(uses, first, end, now - state.iterations.iteration_start)
    if use < end and use_at(state, use).value < state.follow.cycle_end:
        time = state.iterations.iteration_start + use_at(state, use).value
    elif first < end and use_at(state, end - 1).value >= state.follow.cycle_start:
        # in the next iteration, if it is one of the same schedule: the first use that belongs to the cycle
        use = first_at_least(uses, first, end, state.follow.cycle_start)
        if use_at(state, use).value < state.follow.cycle_end:
            time = (
                state.iterations.iteration_start
                + use_at(state, use).value
                + state.follow.cycle_end
                - state.follow.cycle_start
            )
    interval.needed_at = time
    return time
