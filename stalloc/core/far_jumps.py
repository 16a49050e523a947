"""Where a program goes on if its last requests stand far away on its tape, and whether it really does.

Contract: the lock is held; the cursor does not move here. What a program copies and keeps (its weights, say) it may ask
for in the order in which its optimizer asks for temporary memory of the same sizes. If the cursor goes there, copies
get places that the plan needs again. So a jump is remembered: if the program comes back to where it came from while
most of what was served in between lives on, it never was there, and from then on so many requests in a row have to
match before a jump is believed. That may cost hits, but no memory.
"""

from stalloc.compiled import inner
from stalloc.core.constants import BLOCK_LIVE
from stalloc.core.intrinsics import first_at_least
from stalloc.core.records import entry_at, history_at, place_at, ring_at, slot_at

WINDOW = 64  # entries looked ahead for the last two requests in a row
CONTEXT = 4  # requests in a row that find their place anywhere on the tape
_WIDE_EVERY = 8  # misses between two searches of the whole tape
_SLACK = 4  # requests that match nothing, on the way there or back
_MOST = 1024  # requests that have to match, at most


@inner(forceinline=True)
def asked(state, back):
    """The key of the request that was asked for `back` requests before this one."""
    return history_at(state, (state.history_count - 1 - back) & 3).value


@inner()
def _matches_history(state, position):
    """Whether the last requests, this one included, are the tape's entries up to `position`."""
    if state.history_count < CONTEXT:
        return False
    ring_start, ring_end = state.ring_start, state.ring_end
    for back in range(CONTEXT):
        if asked(state, back) != entry_at(state, position).key:
            return False
        if position == ring_start and ring_start > 0:
            # before the ring lies the prologue or the end of the ring: the first pass decides for the ring
            position = ring_end - 1
        else:
            position = position - 1 if position > 0 else ring_end - 1
    return True


@inner()
def _anywhere(state, first, end):
    """The place of the last four requests on the tape that is followed, the next one from the cursor on; -1: none."""
    cursor = state.cursor
    for low, high in ((cursor, state.ring_end), (state.ring_start, cursor)):
        i = first_at_least(state.places, first, end, low)
        while i < end:
            position = place_at(state, i).value
            if position >= high:
                break
            if _matches_history(state, position):
                return position
            i += 1
    return -1


@inner()
def _on_any_tape(state, first, end):
    """The place of the last four requests on any tape; -1: nowhere."""
    for tape in range(state.num_tapes if state.num_tapes > 1 else 0):
        ring = ring_at(state, tape)
        i = first_at_least(state.places, first, end, ring.begin + CONTEXT - 1)
        while i < end:
            position = place_at(state, i).value
            if position >= ring.end:
                break
            back = 1
            while back < CONTEXT and entry_at(state, position - back).key == asked(state, back):
                back += 1
            if back == CONTEXT:
                return position
            i += 1
    return -1


@inner()
def _after_shadow(state, key):
    """The entry at which a jump that is not believed yet would go on with this request; -1: none."""
    jump = state.far_jump
    position = jump.shadow + 1
    is_next = jump.needed > 0 and jump.seen_at == state.history_count - 1 and position < state.num_entries
    return position if is_next and entry_at(state, position).key == key else -1


@inner()
def _is_believed(state, position):
    """Whether the cursor may go to an entry that was found by the last requests."""
    jump = state.far_jump
    if jump.needed == 0:
        return True
    goes_on = jump.seen_at == state.history_count - 1 and jump.shadow == position - 1
    jump.matches = jump.matches + 1 if goes_on else CONTEXT
    jump.shadow = position
    jump.seen_at = state.history_count
    return jump.matches >= jump.needed


@inner()
def far_away(state, key, first, end):
    """The place of the last requests on the tape that is followed or on another, if it is believed; -1: none."""
    run = state.miss_run
    position = _after_shadow(state, key)
    rare = end - first <= WINDOW
    if position < 0 and (rare or run < 2 * CONTEXT or run % _WIDE_EVERY == 0):
        position = _anywhere(state, first, end)
        if position < 0:
            position = _on_any_tape(state, first, end)
    return position if position >= 0 and _is_believed(state, position) else -1


@inner()
def _lives_on(state, position):
    """Whether what was served from the place of an entry lives."""
    entry = entry_at(state, position)
    if entry.offset < 0:
        return False
    slot = slot_at(state, entry.slot)
    return slot.entry == position and slot.state == BLOCK_LIVE


@inner()
def _learn(state, cursor, position):
    """The cursor leaves an entry for another: see whether that is where the last jump came from."""
    jump = state.far_jump
    served = cursor - jump.end
    missed = state.history_count - jump.jumped_at - served
    came_back = jump.begin <= position <= jump.begin + _SLACK and 0 <= missed <= _SLACK
    if jump.jumped_at > 0 and served > 0 and came_back:
        num_live = 0
        for i in range(jump.end, cursor):
            num_live += _lives_on(state, i)
        if 2 * num_live > served:
            jump.needed = max(jump.needed, min(2 * (served + _SLACK), _MOST))


@inner()
def note_move(state, cursor, position):
    """The cursor goes from one entry to another, which an unexpected request was found at."""
    if (position < cursor or position > cursor + _SLACK) and state.num_strands == 0:
        _learn(state, cursor, position)
        jump = state.far_jump
        jump.begin = cursor
        jump.end = position
        jump.jumped_at = state.history_count


@inner()
def note_end_of_pass(state):
    """The cursor is about to be at the begin of the ring again."""
    _learn(state, state.ring_end, state.ring_start)
    state.far_jump.jumped_at = 0
