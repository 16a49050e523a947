"""Steps that come as expected: their marks are noted here, and Python is told later.

Contract: such a step ends where it should, with hardly a request that was not served as planned and nothing that Python
has to do; the step after it is followed from its begin. Each function takes the lock.
"""

from stalloc.compiled import inner, njit
from stalloc.core.constants import MODE_PLANNED
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.records import expected_step_at
from stalloc.core.step_begins import follow

_FEW_SHIFT = 5  # 1 / 2 ** shift of a step may be served elsewhere than in its place


@inner()
def _note_mark(state):
    known = state.known_steps
    known.hits, known.conflicts, known.followed = (
        state.follow.hits,
        state.iterations.conflicts,
        state.follow.history_count,
    )
    known.num_allocs, known.allocated_bytes = state.total.num_allocs, state.total.allocated_bytes
    known.requested_ever = state.small.requested_ever + state.large.requested_ever
    known.place = state.follow.cursor - state.follow.cycle_start


@inner()
def _comes(state, step):
    """Whether the step that is over is the one that was expected, and nobody in Python has to know."""
    known = state.known_steps
    goes_as_planned = (
        state.hot.mode == MODE_PLANNED
        and state.follow.cursor == step.end
        and state.follow.history_count - known.followed == step.num_entries
        and state.iterations.misses == known.misses
        and state.iterations.conflicts - known.conflicts <= step.num_entries >> _FEW_SHIFT
    )
    is_asked_for = (
        state.hot.private_kind
        or state.triggers.ask_at_boundary
        or state.follow.bypassed
        or state.policy.allocating_persistent
    )
    return goes_as_planned and not is_asked_for


@njit()
def expect_steps(device, expected, num_expected, overdue):
    """From the mark that was just set on, so many steps are expected, which a table says.

    `overdue`: requests after which another mark should have come.
    """
    state = locked(device)
    known = state.known_steps
    known.num_expected, known.count, known.expected = num_expected, 0, expected
    known.misses, known.overdue = state.iterations.misses, overdue
    _note_mark(state)
    unlock(state)


@njit()
def end_known_step(device):
    """The program marks a step: whether Python need not be told. If it has to be, it is of all from here on."""
    state = locked(device)
    known = state.known_steps
    comes = False
    if known.count < known.num_expected:
        step = expected_step_at(known, known.count)
        comes = _comes(state, step)
        if comes:
            state.tables.schedules = step.schedules
            follow(state, step.cycle_start, step.cycle_end, step.cursor)
            state.triggers.doubt_at = state.total.num_allocs + known.overdue
            step.num_events = state.log.num_events
            known.count += 1
            _note_mark(state)
    if not comes:
        known.num_expected = 0
    unlock(state)
    return comes


@njit()
def end_known_steps(device):
    """Python is told of all steps from here on: how many came of which it was not."""
    state = locked(device)
    count = state.known_steps.count
    state.known_steps.num_expected = state.known_steps.count = 0
    unlock(state)
    return count
