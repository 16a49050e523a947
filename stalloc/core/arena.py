"""The arena: the memory that the plan is served from. Contract: the lock is held."""

from stalloc.compiled import inner, njit
from stalloc.core.arena_intervals import has_page
from stalloc.core.constants import (
    ACTION_SEGMENT_ALLOC,
    ACTION_SEGMENT_FREE,
    ACTION_SEGMENT_UNMAP,
    GENERAL_KIND,
    GRANULE,
    MODE_PLANNED,
)
from stalloc.core.counters import count_segment
from stalloc.core.event_log import record
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.iteration_log import begin_counting
from stalloc.core.leases import revoke_all
from stalloc.core.records import interval_at


@njit()
def serve_arena(device, arena, arena_bytes):
    """Serve the schedule from an arena of `arena_bytes`; the counting of planned steps and their peaks begins."""
    state = locked(device)
    begin_serving(state, arena, arena_bytes, True)
    state.plan.arena_mapped_bytes = arena_bytes
    if state.hot.recording == 1:
        record(state, ACTION_SEGMENT_ALLOC, 0, arena, arena_bytes)
    unlock(state)


@inner()
def begin_serving(state, arena, arena_bytes, anew):
    """Serve the schedule from an arena, all of which has memory as far as this knows; `anew`: count from here on."""
    end_at(state, arena_bytes)
    _serve(state, arena, arena_bytes)
    if anew:
        _count_anew(state)


@inner()
def end_at(state, arena_bytes):
    """Make one more interval of the arena's bytes beyond the plan, so that they can be leased."""
    count = state.plan.num_intervals
    if interval_at(state, count).offset < arena_bytes:
        interval_at(state, count + 1).offset = arena_bytes
        state.plan.num_intervals = count + 1


@inner()
def _serve(state, arena, arena_bytes):
    state.plan.arena = arena
    state.plan.arena_bytes = arena_bytes
    state.plan.arena_pages = 0
    state.hot.mode = MODE_PLANNED
    state.iterations.iteration_start = 0
    state.follow.bypassed = 0
    state.iterations.bad_iterations = 0
    state.follow.misses_over_matches = 0


@inner()
def _count_anew(state):
    state.follow.hits = 0
    state.iterations.misses = 0
    state.iterations.conflicts = 0
    state.dynamic.num_dynamic = 0
    state.dynamic.num_lent = 0
    state.dynamic.num_revoked = 0
    state.iterations.iteration_count = 0
    state.iterations.span_allocated_peak = 0
    state.iterations.span_reserved_peak = 0
    begin_counting(state)


@inner()
def clear(state):
    """No arena is in place any more."""
    state.plan.arena = 0
    state.plan.arena_bytes = 0
    state.plan.arena_mapped_bytes = 0
    state.plan.arena_pages = 0
    state.plan.arena_live = 0
    state.plan.num_intervals = 0
    state.dynamic.num_leases = 0
    state.dynamic.leased_bytes = 0
    state.hot.has_handovers = 0


@njit()
def arena_is_idle(device):
    """Whether nothing lives in the arena. For Python."""
    state = locked(device)
    idle = revoke_all(state) and state.plan.arena_live == 0
    unlock(state)
    return idle


@inner()
def _record_return(state):
    """Record that the arena's memory goes back to the device."""
    if state.plan.arena_pages == 0:
        record(state, ACTION_SEGMENT_FREE, 0, state.plan.arena, state.plan.arena_bytes)
        return
    for page in range(state.plan.arena_bytes // GRANULE):
        if has_page(state, page):
            record(state, ACTION_SEGMENT_UNMAP, 0, state.plan.arena + page * GRANULE, GRANULE)


@njit()
def forget_arena(device):
    """Let go of an arena that is not served and in which nothing lives: its bytes, 0 if it must stay. For Python."""
    state = locked(device)
    arena_bytes = state.plan.arena_bytes
    if state.plan.arena_live != 0 or state.hot.mode == MODE_PLANNED or not revoke_all(state):
        arena_bytes = 0
    else:
        count_segment(state, GENERAL_KIND, -state.plan.arena_mapped_bytes)
        if state.hot.recording == 1:
            _record_return(state)
        clear(state)
    unlock(state)
    return arena_bytes
