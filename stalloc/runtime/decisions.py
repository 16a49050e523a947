"""What is decided, from figures: pure functions that know no controller, with the numbers of thresholds.py.

`requests`, `steps` and `iterations` are counts; bytes are named so. A function says yes or no, or how much.
"""

from collections.abc import Callable, Sequence

from stalloc.runtime import thresholds as t

_SHOWN_REQUESTS = 2 * t.SOME_REQUESTS  # of an iteration, which show whether it is another step


def _from(least: int) -> Callable[[int], bool]:
    return lambda count: count >= least


def _up_to(most: int) -> Callable[[int], bool]:
    return lambda count: count <= most


def _above(limit: int) -> Callable[[int], bool]:
    return lambda count: count > limit


def _below(limit: int) -> Callable[[int], bool]:
    return lambda count: count < limit


def _always(number: int) -> Callable[[], int]:
    return lambda: number


def _exceeds(one_in: int) -> Callable[[int, int], bool]:
    """Whether a part is more than one in so many of a whole."""
    return lambda part, whole: one_in * part > whole


first_scan_at = _always(t.FIRST_SCAN_REQUESTS)  #: requests in a record at the first search, where no marks come
num_recent_steps = _always(t.MANY_STEPS)  #: whose peaks are remembered: as many as a plan waits for
quiet_iterations = _always(t.MANY_STEPS)  #: without a growth, before what the first one under a plan needed goes

# --- counts of requests, steps or iterations that decide by one number

scans_at_each_mark = _up_to(t.LONG_STEPS)  #: the record of so many steps; else it is when it has grown by a quarter
may_wait_for_lifespans = _below(t.MOST_WAITS)  #: that are not known; scans, or steps of a cycle, that a plan waited for
may_recur_in_any_order = _from(t.LEAST_STEPS)  #: so many whole steps without a cycle: kinds of them are looked for
may_align_some = _from(t.MANY_STEPS)  #: of so many steps; before, kinds may not have come twice each yet
is_settled = _from(t.MANY_STEPS)  #: no plan is expected soon, after so many marked steps without one
makes_a_cycle = _above(t.CYCLE_STEPS)  #: the order of so many steps is no chance
is_near_mark = _up_to(t.SOME_REQUESTS)  #: the cursor, so far from where a mark is; else it is set there
are_ranges_many = _above(t.MANY_RANGES)  #: of addresses: those without memory are closed when an arena gets others
is_record_long = _above(t.MOST_EVENTS)  #: of so many events, beside a plan: it begins anew
are_bad_steps_few = _below(t.MANY_STEPS)  #: in a row: the plan stays
has_fitted = _from(t.MANY_STEPS)  #: a plan that is given up after so many iterations was of steps
is_restless = _above(t.MANY_STEPS)  #: pages moved in so many steps more than they rested in: more may be held
is_plan_to_blame = _above(2 * t.MANY_STEPS)  #: pages were restless in so many steps: a smaller plan is looked for
moves_in_each_iteration = _from(t.MANY_STEPS)  #: pages moved in so many in a row that they will go on to
is_settling = _below(t.SETTLING_ITERATIONS)  #: whatever is free goes back after so many iterations over a plan
is_left = _from(t.SOME_REQUESTS)  #: a plan that fills the device, by misses beyond hits, or displaced requests
has_begun = _from(_SHOWN_REQUESTS)  #: an iteration is so far that it shows which step it is
may_bypass = _below(t.MANY_STEPS)  #: a plan leaves one more step to the heap, after so many in a row

# --- parts of a whole, in that order, that decide by one number

lacks_places = _exceeds(t.NEGLIGIBLE_ONE_IN)  #: requests without a place in plans of kinds, and all
is_bad = _exceeds(t.MAJOR_ONE_IN)  #: a step, by requests that were not served, and all
seems_a_part = _exceeds(t.NEGLIGIBLE_ONE_IN)  #: of a step, an unmarked cycle: requests that were lost, and hits
misses_much = _exceeds(t.MINOR_ONE_IN)  #: misses and hits: a plan is left for steps of several kinds, or for marks
was_no_step = _exceeds(t.MAJOR_ONE_IN)  #: an unmarked cycle that was given up: misses and hits
may_fill = _exceeds(2)  #: a peak and the device
is_large_part = _exceeds(t.MAJOR_ONE_IN)  #: a peak and the device: a step that needs more than any before may fill it
is_third_there = _exceeds(2)  #: of what a step needs for itself: what it has, and what is to come

# --- looking for what repeats


def next_scan_at(requests: int) -> int:
    if requests < t.SHORT_RECORD_REQUESTS:
        return min(requests + t.SCAN_AGAIN_REQUESTS, t.SHORT_RECORD_REQUESTS)
    return requests * 5 // 4 + t.SHORT_RECORD_REQUESTS


def needed_coverage(*, is_part: bool) -> float:
    """Share of an unmarked record that a cycle has to fill; `is_part`: one was taken for a step that was a part."""
    return t.WHOLE_COVERAGE if is_part else t.COVERAGE


def shows_longer_cycle(length: int, covered: int, cycle_length: int, requests: int) -> bool:
    return length > cycle_length and covered >= t.WHOLE_COVERAGE * requests


def shows_kinds(requests: int, least_requests: int) -> bool:
    return requests >= t.LEAST_REPEATS * least_requests


def are_little(part_requests: int, requests: int, part_bytes: int, num_bytes: int) -> bool:
    """Whether requests whose lifespans are not known are so few, and so small, that nobody waits for them."""
    return t.NEGLIGIBLE_ONE_IN * part_requests <= requests and t.NEGLIGIBLE_ONE_IN * part_bytes <= num_bytes


def are_periods_few(covered_requests: int, period_requests: int) -> bool:
    """Whether more periods of an unmarked cycle may show lifespans that are not known yet."""
    return covered_requests < (t.LEAST_REPEATS + 1) * period_requests


def overdue_requests(longest_step: int) -> int:
    """Requests after which a mark should have come; the longest step so far, 0: none was marked."""
    return t.MANY_STEPS * longest_step or t.OVERDUE_REQUESTS


def least_repeats(observe_steps: int) -> int:
    return max(t.LEAST_REPEATS, observe_steps)


def least_period(misled_by: int) -> int:
    """Requests of an unmarked cycle, at least, after one of so many was none; 0: there was none."""
    return max(t.LEAST_PERIOD_REQUESTS, misled_by + 1 if misled_by else 0)


def least_record(cycle_requests: int) -> int:
    return t.MANY_STEPS * cycle_requests


# --- marked steps


def may_be_aligned(steps: int) -> bool:
    """Whether to see what so many marked steps have in common, none of which recurs: at each doubling of the least."""
    return _is_doubled(steps, t.LEAST_STEPS)


def is_doubted(steps: int) -> bool:
    """Whether to ask what keeps so many marked steps from recurring: at each doubling of those in which any may."""
    return _is_doubled(steps, 2 * t.LEAST_REPEATS)


def _is_doubled(count: int, least: int) -> bool:
    times, rest = divmod(count, least)
    return times > 0 and rest == 0 and times & (times - 1) == 0


def may_be_aligned_again(steps: int, missed: int, *, is_unknown: bool) -> bool:
    """Whether to see it again after so many steps, the last of which missed so many; early ones if it is much.

    The record of a pause has none, and that of a watch that has just begun has one.
    """
    if steps < 2:
        return False
    is_due = may_be_aligned(steps) or steps % t.ALIGNED_STEPS == 0 or (is_unknown and steps < t.ALIGNED_STEPS)
    return is_due and missed >= t.SOME_REQUESTS


def first_aligned(steps: int) -> int:
    """The first step of a record of so many that is aligned with those after it."""
    return max(0, steps - t.ALIGNED_STEPS)


def is_static_enough(share: float) -> bool:
    return t.MAJOR_ONE_IN * share > 1


def is_unknown(share: float) -> bool:
    """Whether a step is another one, of which such a share was not served from the plan."""
    return share * t.MINOR_ONE_IN > 1


def num_affordable(lengths: Sequence[int], seconds: float) -> int:
    """How many kinds of these lengths, one at least, can be planned in the processor time that is left."""
    count = 0
    for length in lengths:
        seconds -= length * t.PLANNING_SECONDS
        if seconds < 0:
            break
        count += 1
    return max(1, count)


def is_cycle_affordable(requests: int, seconds: float) -> bool:
    return requests * t.PLANNING_SECONDS <= seconds


def first_needed(step: int) -> int:
    """The first step that shows what one needs that is carried over to it."""
    return max(0, step - t.LEAST_STEPS)


def num_planned_kinds(kinds: int) -> int:
    return min(kinds, t.MOST_KINDS)


def watch_left(steps: int) -> int:
    """Steps for which the watch beside a plan goes on after so many; the first pause is as long as a watch."""
    return t.LONG_STEPS - steps


def counts_in_pause(*, is_unknown: bool) -> int:
    return t.MANY_STEPS if is_unknown else 1


def next_passed_steps(came: int, expected: int) -> int:
    return min(t.MOST_PASSED_STEPS, 2 * came) if came == expected else came


def next_heard_marks(heard: int) -> int:
    """How many marks are heard before steps are expected again, after none of them came."""
    return min(t.MOST_PASSED_STEPS, 2 * heard + 1)


# --- giving a plan up


def most_misses(requests: int) -> int:
    """By how much misses may outnumber hits under a plan whose cycle, or longest kind of step, has so many requests."""
    return t.MANY_STEPS * requests + t.MANY_REQUESTS


def judged_after(requests: int, *, has_kinds: bool) -> int:
    """Requests after which an unmarked plan is judged, whose cycle, or longest kind of step, has so many."""
    return max(t.MANY_STEPS * requests, t.MANY_REQUESTS if has_kinds else 0)


# --- what is held


def allowed_bytes(peak_bytes: int, parts: int) -> int:
    return peak_bytes + max(t.SPARE_BYTES, parts * (peak_bytes // t.PEAK_SHARE))


def most_before_eviction(before_bytes: int, allocated_bytes: int, held_bytes: int) -> int:
    """What may be allocated before something is evicted, once the device ran out with so much allocated and held.

    `before_bytes`: what it was; 0: as much as the device has. A little less each time, since the moment may be an odd
    one, and in all no less than a common share of what is held.
    """
    before_bytes = before_bytes or held_bytes
    part_bytes = held_bytes // t.PEAK_SHARE
    least_bytes = held_bytes - max(t.SPARE_BYTES, t.LOOSE_PARTS * part_bytes)
    return min(before_bytes, max(allocated_bytes, least_bytes, before_bytes - max(t.SPARE_BYTES, part_bytes)))


def rests(requests: int, moved_pages: int, *, planned: bool) -> bool:
    """Whether pages rested in a step of so many requests in which so many moved; `planned`: it was served by a plan."""
    return moved_pages == 0 if planned else requests >= t.NEGLIGIBLE_ONE_IN * moved_pages


def most_parts(*, alike_in_part: bool) -> int:
    return t.DYNAMIC_PARTS if alike_in_part else t.LOOSE_PARTS


def least_parts(*, repeats: bool) -> int:
    """Parts of the peak that may be held from the start; none of those of a program that repeats."""
    return 0 if repeats else t.LOOSE_PARTS


def rest_bytes(
    needed_bytes: int, lacking_bytes: int, peak_bytes: int, free_bytes: int, *, most_parts: int, has_streams: bool
) -> int:
    """What is held once all places of a plan have pages, of which some are lacking; 0: that is too much."""
    parts = 2 * most_parts if has_streams else most_parts
    is_little = needed_bytes <= peak_bytes + parts * (peak_bytes // t.PEAK_SHARE)
    return needed_bytes if is_little and 2 * lacking_bytes <= free_bytes else 0


def is_wasteful(step_peak_bytes: int, reserved_bytes: int) -> bool:
    return t.WASTE_RATIO * step_peak_bytes < reserved_bytes


def is_dearer(needed_bytes: int, held_bytes: int) -> bool:
    return needed_bytes > t.DEARER_RATIO * held_bytes + t.SPARE_BYTES


def may_move_arena(displaced: int, cycle_requests: int, *, has_kinds: bool) -> bool:
    """Whether so many requests of an iteration were displaced that the arena moves away from what lives there."""
    return displaced > (cycle_requests // t.NEGLIGIBLE_ONE_IN if has_kinds else 0)


def next_move_wait(iterations_since_due: int, wait: int) -> int:
    """Iterations from a move of the arena to the next; it was due so many iterations ago, and waited so long before."""
    soon = iterations_since_due < max(wait, t.LEAST_STEPS)
    return min(2 * wait, t.LONG_STEPS) if soon else 1


def next_patience(iterations: int) -> int:
    """Iterations without a growth before what the next deviation needed goes, after so many for the last one."""
    return min(2 * iterations, t.MOST_QUIET_STEPS)


def idle_iterations(iterations: int) -> int:
    """Passes for which a block of CuPy's pool served nothing that goes back, after so many over a plan."""
    return 0 if is_settling(iterations) else t.SETTLING_ITERATIONS


# --- a program that fills the device


def fills_device(peak_bytes: int, device_bytes: int) -> bool:
    return peak_bytes > device_bytes - device_bytes // t.MAJOR_ONE_IN


def is_at_brim(peak_bytes: int, device_bytes: int) -> bool:
    """Whether a peak leaves so little of the device that pages stay where they are until it is full."""
    return peak_bytes > device_bytes - device_bytes // t.MINOR_ONE_IN


def is_planned_for_capture(requests: int) -> bool:
    """Whether a warm-up of so many requests is planned, for which the capture after it waits."""
    return 0 < requests <= t.MOST_CAPTURE_REQUESTS


def range_bytes(size_bytes: int, device_bytes: int) -> int:
    return max(size_bytes, t.ADDRESS_TIMES * device_bytes)


def needs_more(peak_bytes: int, highest_bytes: int) -> bool:
    return peak_bytes > highest_bytes + highest_bytes // t.NEGLIGIBLE_ONE_IN


def fits_beside(held_bytes: int, device_bytes: int) -> bool:
    return held_bytes + t.SPARE_BYTES <= device_bytes


def covers(held_bytes: int, peaks: Sequence[int], settled_steps: int) -> bool:
    """Whether a plan, with what lives, is of the steps that need most; without any marked nobody knows."""
    is_known = not peaks or settled_steps >= t.MANY_STEPS
    return is_known and held_bytes >= t.WHOLE_COVERAGE * max(peaks, default=0)


def most_misses_where(elsewhere: int, *, may_fill: bool) -> int:
    """By how much misses may outnumber hits where a program may fill the device, and elsewhere."""
    return min(elsewhere, t.SOME_REQUESTS) if may_fill else elsewhere


def is_memory_short(free_bytes: int, allocated_bytes: int) -> bool:
    return free_bytes < t.STATE_TIMES * allocated_bytes


# --- a step that is not the planned one


def leaves_out_much(left_out: int, cycle_requests: int) -> bool:
    """Whether a step leaves out so much of its cycle, or finds so many places taken, that it may be another one."""
    return left_out >= max(_SHOWN_REQUESTS, cycle_requests // t.NEGLIGIBLE_ONE_IN)


def is_half_lost(lost: int, hits: int) -> bool:
    return lost >= _SHOWN_REQUESTS and lost > hits


def is_third_lost(lost: int, hits: int) -> bool:
    return lost >= _SHOWN_REQUESTS and 2 * lost > hits


def is_little_left(allocated_bytes: int, reserved_bytes: int) -> bool:
    return t.MAJOR_ONE_IN * allocated_bytes > (t.MAJOR_ONE_IN - 1) * reserved_bytes


def has_much_to_come(ahead_bytes: int, needed_bytes: int, held_bytes: int) -> bool:
    return t.MINOR_ONE_IN * ahead_bytes > needed_bytes > held_bytes - held_bytes // t.MINOR_ONE_IN


def is_unexpected(needed_bytes: int, expected_bytes: int) -> bool:
    return needed_bytes > expected_bytes + max(t.SPARE_BYTES, expected_bytes // t.NEGLIGIBLE_ONE_IN)


# --- processor time


def seconds_left(share: float, step_seconds: float, since_seconds: float, spent: float, *, has_plan: bool) -> float:
    """What may be spent on plans now, of a share of the program's time since the first one, or since it began."""
    later = max(t.LATER_PLAN_SECONDS, share * t.BUDGET_STEPS * step_seconds)
    return (later if has_plan else t.FIRST_PLAN_SECONDS) + share * since_seconds - spent
