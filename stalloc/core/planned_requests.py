"""Requests that the plan has: they are served from their places, whose memory is there and which nobody has.

Contract: as in requests.py, with the lock held. An outcome with neither address nor reason leaves the request to the
heap; its subject is the row of a dynamic request in the table of lifespans, 0 for others.
"""

from stalloc.compiled import inner
from stalloc.core.arena_intervals import flip_intervals, intervals_empty
from stalloc.core.arena_pages import lacks_only_pages
from stalloc.core.constants import (
    BLOCK_LIVE,
    MODE_PLANNED,
    NEED_PAGES,
    POLL_FOR_PLACE,
    POLLED,
    SMALL_LIMIT,
    STREAM_BITS,
)
from stalloc.core.heap import Outcome
from stalloc.core.iteration_log import bypassed, end_iteration, is_off_plan
from stalloc.core.leases import revoke
from stalloc.core.records import entry_at, slot_at
from stalloc.core.schedule_cursor import dynamic_row, follow


@inner(forceinline=True)
def serve_planned(state, key, requested, waiting):
    """Serve a request from its place on the plan, or say what that needs; nothing at all: it has none that is free.

    `waiting`: some that were freed wait for other streams, which may be done with them.
    """
    position, begins = follow(state, key)
    if position < 0 or state.hot.mode != MODE_PLANNED:
        return Outcome(0, 0, dynamic_row(position))
    if begins:
        end_iteration(state)
    entry, bits = entry_at(state, position), state.plan.interval_bits
    low, high = entry.interval_low, entry.interval_high
    # what comes once has a place that lasts
    lasts = state.policy.allocating_persistent == 1 and position >= state.follow.cycle_start
    if state.policy.small_apart != 0 and key >> STREAM_BITS <= SMALL_LIMIT and is_off_plan(state):
        lasts = True  # its place would keep a page for it alone: with others like it it has a part of one
    lasts = lasts or bypassed(state, position)
    if entry.offset < 0 or lasts or not (intervals_empty(bits, low, high) or revoke(state, low, high)):
        has_place = entry.offset >= 0 and not lasts
        if has_place and state.plan.arena_pages != 0 and lacks_only_pages(state, low, high):
            return Outcome(0, NEED_PAGES, position)
        if has_place and waiting:
            return Outcome(0, POLL_FOR_PLACE, position)
        _count_conflict(state, not has_place)
        return Outcome(0, 0, 0)
    return _take_intervals(state, position, requested)


@inner()
def _count_conflict(state, unplanned):
    state.iterations.conflicts += 1
    state.iterations.iteration_misses += 1
    state.iterations.iteration_unplanned += unplanned


@inner()
def take_place(state, position, key, requested, stage):
    """Serve a request from the place of an entry, after Python was asked for pages or what waited was freed (`stage`).

    The outcome may ask for pages after the latter; nothing: it is not to be had.
    """
    if state.hot.mode != MODE_PLANNED or position >= state.tables.num_entries:
        return Outcome(0, 0, 0)
    entry, bits = entry_at(state, position), state.plan.interval_bits
    low, high = entry.interval_low, entry.interval_high
    if entry.key == key and entry.offset >= 0 and (intervals_empty(bits, low, high) or revoke(state, low, high)):
        return _take_intervals(state, position, requested)
    if stage == POLLED and entry.key == key and state.plan.arena_pages != 0 and lacks_only_pages(state, low, high):
        return Outcome(0, NEED_PAGES, position)
    _count_conflict(state, entry.offset < 0)
    return Outcome(0, 0, 0)


@inner(forceinline=True)
def _take_intervals(state, position, requested):
    """Serve a request from the empty intervals of an entry."""
    entry = entry_at(state, position)
    flip_intervals(state.plan.interval_bits, entry.interval_low, entry.interval_high)
    slot = slot_at(state, entry.slot)
    slot.entry = position
    slot.requested_bytes = requested
    slot.state = BLOCK_LIVE
    state.plan.arena_live += 1
    state.follow.hits += 1
    return Outcome(state.plan.arena + entry.offset, 0, 0)
