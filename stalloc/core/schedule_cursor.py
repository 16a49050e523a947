"""Where a program stands on its schedule: the expected request first, then a search for where it went on.

Contract: the lock is held, except where Python calls; the cursor moves only to an entry that the program has just asked
for, or to where a mark says. One extra request never moves it on its own. A search costs steps for each place on the
schedule where such a request stands, not for each entry, so a request that is on no schedule costs next to nothing.

Marks of steps that come as expected are noted here, and Python is told later: such a step ends where it should, with
hardly a request that was not served as planned and nothing that Python has to do.
"""

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.constants import ALIGNMENT, AT_ANY_REQUEST, LIFESPAN_ROWS, MODE_HEAP, MODE_PLANNED, STREAM_BITS
from stalloc.core.intrinsics import first_at_least, under_lock
from stalloc.core.lending import schedule_time
from stalloc.core.lookup import find_row
from stalloc.core.records import (
    Key,
    cycle_at,
    dtype_of,
    entry_at,
    expected_step_at,
    gap_at,
    history_at,
    interval_at,
    key_at,
    key_row,
    place_at,
    ratio_at,
)

WINDOW = 64  # entries looked ahead for the last two requests in a row
CONTEXT = 4  # requests that are remembered
_NEAR = 2  # entries: a request this close to the expected one replaces or skips what lies between
_MORE_DYNAMIC = 64  # requests, beyond those that steps had at a place so far, as of a few experts; more: another step
SURE = 16  # matches in a row after which the place on the schedule is beyond doubt
_KEY_WORDS = dtype_of(Key).itemsize // 8
_FEW_SHIFT = 5  # 1 / 2 ** shift of a step may be served elsewhere than in its place


@njit(**BORROWING)
def fill_keys(table, mask, keys, order):
    """Fill an empty table of keys: `keys` (k,) are those of the schedule's entries, `order` (k,) the entries by key."""
    first = 0
    while first < len(order):
        key, end = keys[order[first]], first + 1
        while end < len(order) and keys[order[end]] == key:
            end += 1
        row = key_row(table, find_row(table, _KEY_WORDS, mask, key, 0, 0))
        row.key = key
        row.first = first
        row.end = end
        first = end


@njit(inline="always")
def _find_key(state, key):
    """The row of a request in the table of keys; one without places if it is on no schedule."""
    return key_at(state, find_row(state.tables.keys, _KEY_WORDS, state.tables.keys_mask, key, key, 0))


@inner(forceinline=True)
def asked(state, back):
    """The key of the request that was asked for `back` requests before this one."""
    return history_at(state, (state.follow.history_count - 1 - back) & 3).value


@inner()
def _realign(state, key):
    """Where on the schedule an unexpected request stands; -1: nowhere near, it was inserted.

    The request itself must be one of the next few entries, or it and the one before it must be a pair within the
    window or begin a schedule; where steps differ from one another, or no request was missed before, it takes three in
    a row. One extra request never moves the cursor on its own.
    """
    if state.follow.miss_run == 0:
        return _begins_anew(state, key, 2)
    position = state.follow.cursor
    for _ in range(_NEAR):
        position = position + 1 if position + 1 < state.follow.cycle_end else state.follow.cycle_start
        if entry_at(state, position).key == key:
            return position
    places = _find_key(state, key)
    first, end = places.first, places.end
    if first == end:
        return -1
    position = _third_ahead(state, first, end) if state.tables.gaps != 0 else _pair_ahead(state, first, end)
    if position < 0 and state.tables.gaps != 0:
        position = _third_behind(state, first, end)
    if position < 0:
        position = _begins_anew(state, key, 2 if state.tables.gaps != 0 else 1)
    return position


@inner()
def _pair_in(state, first, end, low, high, last):
    """The first place of this request in [low, high) before which the schedule has the request before it; -1: none.

    Before the begin of the cycle stands the entry `last`.
    """
    i, before = first_at_least(state.tables.places, first, end, low), asked(state, 1)
    while i < end and place_at(state, i).value < high:
        position = place_at(state, i).value
        if entry_at(state, last if position == state.follow.cycle_start else position - 1).key == before:
            return position
        i += 1
    return -1


@inner()
def _pair_ahead(state, first, end):
    """The next place of this request in the window, before which the schedule has the request before it; -1: none."""
    cursor, start, length = state.follow.cursor, state.follow.cycle_start, state.follow.cycle_end
    position = _pair_in(state, first, end, cursor + 1, min(cursor + WINDOW + 1, length), start - 1)
    around = cursor + WINDOW - length + 1  # entries of the window that lie beyond the end of the cycle
    if position < 0 and around > 0:
        position = _pair_in(state, first, end, start, min(start + around, max(cursor, start) + 1), length - 1)
    return position


@inner()
def _third_ahead(state, first, end):
    """As `_pair_ahead`, if the request before the two is the one that the schedule has there, too."""
    position = _pair_ahead(state, first, end)
    is_third = position >= state.follow.cycle_start + 2 and entry_at(state, position - 2).key == asked(state, 2)
    return position if is_third else -1


@inner()
def _third_behind(state, first, end):
    """The last place of this request in the window behind, after the two that came before it; -1: none.

    Where layers are alike, the cursor may have run a layer ahead.
    """
    cursor = state.follow.cursor
    found, i = -1, first_at_least(state.tables.places, first, end, max(cursor - WINDOW, state.follow.cycle_start + 2))
    while i < end and place_at(state, i).value < cursor:
        position = place_at(state, i).value
        before, second = entry_at(state, position - 1).key, entry_at(state, position - 2).key
        if before == asked(state, 1) and second == asked(state, 2):
            found = position
        i += 1
    return found


@inner()
def _begins_anew(state, key, least):
    """Where this request is on a schedule that begins with it and `least` or more before it, and is followed; or -1."""
    others = state.follow.num_schedules if state.follow.num_schedules > 1 else 0
    for schedule in range(-1, others):  # -1: the one that is followed
        begin = state.follow.cycle_start if schedule < 0 else cycle_at(state, schedule).begin
        end = state.follow.cycle_end if schedule < 0 else cycle_at(state, schedule).end
        if schedule >= 0 and begin == state.follow.cycle_start:
            continue  # it was the first
        for back in range(least, min(CONTEXT, end - begin, state.follow.history_count)):
            if entry_at(state, begin + back).key != key:
                continue
            i = 1
            while i <= back and entry_at(state, begin + back - i).key == asked(state, i):
                i += 1
            if i > back:
                go_to(state, begin, end, begin + back)
                state.follow.left_out = 0  # all of the step is to come, whatever was asked for before it
                return begin + back
    return -1


@inner(forceinline=True)
def _matches_in_a_row(state):
    """How many requests have matched since the last one that did not."""
    return state.follow.history_count - state.iterations.last_miss


@inner()
def _branch(state, key):
    """The place on another schedule that begins as this iteration and goes on with `key`, and is followed; -1: none."""
    start = state.follow.cycle_start
    done = state.follow.cursor - start
    if _matches_in_a_row(state) <= done:  # this request, which is counted already, is none
        return -1
    for schedule in range(state.follow.num_schedules):
        begin, end = cycle_at(state, schedule).begin, cycle_at(state, schedule).end
        if begin == start or begin + done >= end or entry_at(state, begin + done).key != key:
            continue
        i = 0
        while i < done and entry_at(state, begin + i).key == entry_at(state, start + i).key:
            i += 1
        if i == done:
            go_to(state, begin, end, begin + done)
            return begin + done
    return -1


@inner()
def go_to(state, begin, end, position):
    """Follow the schedule [begin, end) from a position; the clock goes on, and uses of intervals are looked up anew."""
    state.iterations.iteration_start = schedule_time(state) - position
    state.follow.cycle_start = begin
    state.follow.cycle_end = end
    state.follow.cursor = position
    for index in range(state.plan.num_intervals):
        interval_at(state, index).needed_at = -1
    state.dynamic.intervals_released += 1


@inner()
def is_asked_for(state, key):
    """Whether Python wants to be entered before this request is served, since it is any, or begins the cycle anew.

    The latter after enough matches in a row to be sure of the place.
    """
    start = state.follow.cycle_start
    if state.triggers.ask_at_boundary == AT_ANY_REQUEST:
        return True
    if state.follow.cursor != start or entry_at(state, start).key != key:
        return False
    return _matches_in_a_row(state) >= min(state.follow.cycle_end - start, SURE)


@inner()
def _passes_start(state, position):
    """Whether the way forward from the cursor to a position passes the start of the cycle."""
    cursor, start = state.follow.cursor, state.follow.cycle_start
    if position < start:
        return False
    if cursor < start:
        return True
    length = state.follow.cycle_end - start
    ahead = (position - cursor) % length
    return (start - cursor) % length <= ahead <= length // 2  # beyond half a cycle it is a way back


@inner()
def _count_miss(state, key):
    places = _find_key(state, key)
    if state.tables.gaps != 0 and places.first == places.end:
        state.follow.history_count -= 1
    state.iterations.misses += 1
    state.iterations.iteration_misses += 1
    state.follow.misses_over_matches += 1
    state.follow.miss_run += 1
    state.iterations.last_miss = state.follow.history_count


@inner()
def _search(state, key):
    """Where an unexpected request stands, -1: nowhere; and whether the cycle begins anew there."""
    position = _branch(state, key) if state.follow.num_schedules > 1 else -1
    if position >= 0:
        return position, position == state.follow.cycle_start
    cursor = state.follow.cursor
    position = _realign(state, key)
    if cursor < position <= cursor + WINDOW:
        state.follow.left_out += position - cursor
    begins = position >= 0 and _passes_start(state, position)
    if 0 <= position < state.follow.cursor:  # a way back, or around: the clock goes on
        go_to(state, state.follow.cycle_start, state.follow.cycle_end, position)
    return position, begins


@inner(forceinline=True)
def _is_in_proportion(state, row, number, before_bytes, key):
    """Whether a request is to the dynamic one before it as one that a gap may have, after so many in it."""
    gap = gap_at(state, row)
    if number >= gap.num_dynamic:
        return False
    ratio = ratio_at(state, gap.first_dynamic - LIFESPAN_ROWS + number)
    more = (key >> STREAM_BITS) * ratio.over - before_bytes * ratio.times
    return -ALIGNMENT * ratio.times < more < ALIGNMENT * ratio.over  # both sizes were rounded up


@inner(forceinline=True)
def _num_in_gap(state):
    """How many dynamic requests came since the last one that the schedule has."""
    return state.dynamic.dynamic_in_gap if state.dynamic.gap_time == schedule_time(state) else 0


@inner(forceinline=True)
def _goes_on(state, row, key):
    """Whether a request is the next dynamic one that a gap may have."""
    return _is_in_proportion(state, row, _num_in_gap(state), state.dynamic.last_dynamic_bytes, key)


@inner()
def _take_back(state, key, position):
    """The expected entry, if the last match was one of the dynamic requests before it: the one that it was taken for.

    What an expert asks for may have a size that the schedule has. It came before all that come there in every step, and
    is found out if what follows is in proportion to it; or, after some of them, if that may not come at the cursor now.
    """
    if position != state.follow.cursor or position == state.follow.cycle_start:
        return position
    row, before = entry_at(state, position).gap, entry_at(state, position - 1)
    number, size = state.dynamic.early_number, before.key >> STREAM_BITS
    may_come = row != 0 or number == 0
    if may_come and not _is_in_proportion(state, before.gap, number + 1, size, key):
        return position
    state.follow.cursor = position - 1
    state.dynamic.gap_time = schedule_time(state)
    state.dynamic.dynamic_in_gap = number + 1
    state.dynamic.known_in_gap = 1
    state.dynamic.last_dynamic_bytes = size
    return position - 1


@inner()
def _skip_gap(state, key, row):
    """What an unexpected request is in a gap: an entry, beyond those that some steps leave out; or dynamic.

    Then its row in the table of lifespans, below -1 (`dynamic_row` has it). A size that the schedule has may be one of
    the data's, too: only three such requests in a row that are so on the schedule move the cursor, and one that is
    expected is dynamic if it is in proportion to the dynamic one before it. -1: neither.
    """
    gap, now = gap_at(state, row), schedule_time(state)
    sure, in_proportion = gap.next_sure, _goes_on(state, row, key)
    if not in_proportion and sure < state.follow.cycle_end and entry_at(state, sure).key == key:
        return sure
    if gap.num_dynamic == 0:
        return -1
    number = _num_in_gap(state)
    known = state.dynamic.known_in_gap if number > 0 else 0  # of these, the last in a row that the schedule has
    places = _find_key(state, key)
    is_known = places.first != places.end and not in_proportion
    position = _third_ahead(state, places.first, places.end) if is_known and known >= 2 else -1
    if position >= 0:
        return position
    state.dynamic.gap_time = now
    state.dynamic.dynamic_in_gap = number + 1
    state.dynamic.known_in_gap = known + 1 if is_known else 0
    state.dynamic.last_dynamic_bytes = key >> STREAM_BITS
    if number >= gap.num_dynamic + _MORE_DYNAMIC:
        return -1
    state.dynamic.num_dynamic += 1
    if is_known:
        state.iterations.last_miss = state.follow.history_count
    else:
        state.follow.history_count -= 1  # so that requests in a row are those that a schedule may have, as in `follow`
    number = min(number, gap.num_dynamic - 1)
    is_another = not in_proportion and ratio_at(state, gap.first_dynamic - LIFESPAN_ROWS + number).times != 0
    return -2 - (gap.longest_dynamic if is_another else gap.first_dynamic + number)


@inner(forceinline=True)
def dynamic_row(position):
    """The row in the table of lifespans of a request that was found to be dynamic; 0: it is none."""
    return -2 - position if position < -1 else 0


@inner(forceinline=True)
def follow(state, key):
    """Follow the schedule with one request: its entry, and whether the cycle begins anew with it.

    The entry is -1 if it is on no schedule, and less if it is dynamic (`dynamic_row`).
    """
    count = state.follow.history_count
    history_at(state, count & 3).value = key
    state.follow.history_count = count + 1
    position = state.follow.cursor
    begins = position == state.follow.cycle_start
    entry = entry_at(state, position)
    if entry.gap != 0 and entry.key == key:
        # one like the expected entry is a later one, if none came of what always comes before it
        position = gap_at(state, entry.gap).without if _num_in_gap(state) == 0 else position
        entry = entry_at(state, position)
    if entry.key != key or (entry.gap != 0 and _goes_on(state, entry.gap, key)):
        if state.dynamic.early_time == schedule_time(state):
            position = _take_back(state, key, position)
            entry = entry_at(state, position)
        position = _skip_gap(state, key, entry.gap) if entry.gap != 0 else -1
        if position < -1:
            return position, False
        begins = False
        if position < 0:
            position, begins = _search(state, key)
            if position < 0:
                _count_miss(state, key)
                return -1, False
    elif entry.gap != 0 and state.follow.cursor + 1 < state.follow.cycle_end:
        number = _num_in_gap(state)
        if number < gap_at(state, entry.gap).least_dynamic:  # it came before all dynamic ones that always do
            state.dynamic.early_time = schedule_time(state) + 1
            state.dynamic.early_number = number
    state.follow.miss_run = 0
    if state.follow.misses_over_matches > 0:
        state.follow.misses_over_matches -= 1
    following = position + 1
    if following == state.follow.cycle_end:
        following = state.follow.cycle_start
        state.iterations.iteration_start += position + 1 - following
    state.follow.cursor = following
    return position, begins


@inner()
def _begin_at(state, begin, end, position):
    """Follow the schedule [begin, end) from a position on: the place is beyond doubt."""
    if state.follow.cursor != position or state.follow.cycle_start != begin:
        go_to(state, begin, end, position)
    state.follow.miss_run = 0
    state.iterations.last_miss = min(state.iterations.last_miss, state.follow.history_count - SURE)


@under_lock()
def begin_step(state, begin, end, position, schedules):
    if state.hot.mode != MODE_HEAP:
        state.tables.schedules = schedules
        _begin_at(state, begin, end, position)


@inner()
def _note_mark(state):
    known = state.known_steps
    known.hits = state.follow.hits
    known.conflicts = state.iterations.conflicts
    known.followed = state.follow.history_count
    known.num_allocs = state.total.num_allocs
    known.allocated_bytes = state.total.allocated_bytes
    known.requested_ever = state.small.requested_ever + state.large.requested_ever
    known.place = state.follow.cursor - state.follow.cycle_start


@under_lock()
def expect_steps(state, expected, num_expected, overdue):
    known = state.known_steps
    known.num_expected, known.count, known.expected = num_expected, 0, expected
    known.misses, known.overdue = state.iterations.misses, overdue
    _note_mark(state)


@under_lock()
def end_known_step(state):
    known = state.known_steps
    if known.count == known.num_expected:
        known.num_expected = 0
        return False
    step = expected_step_at(known, known.count)
    is_asked_for = state.hot.private_kind | state.triggers.ask_at_boundary | state.follow.bypassed
    comes = (
        state.hot.mode == MODE_PLANNED
        and is_asked_for | state.policy.allocating_persistent == 0
        and state.follow.cursor == step.end
        and state.follow.history_count - known.followed == step.num_entries
        and state.iterations.misses == known.misses
        and state.iterations.conflicts - known.conflicts <= step.num_entries >> _FEW_SHIFT
    )
    if comes:
        state.tables.schedules = step.schedules
        _begin_at(state, step.cycle_start, step.cycle_end, step.cursor)
        state.triggers.doubt_at = state.total.num_allocs + known.overdue
        step.num_events = state.log.num_events
        known.count += 1
        _note_mark(state)
    else:
        known.num_expected = 0
    return comes


@under_lock()
def end_known_steps(state):
    count = state.known_steps.count
    state.known_steps.num_expected = state.known_steps.count = 0
    return count
