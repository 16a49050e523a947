"""What is decided, from figures: pure functions that know no controller, with the numbers of thresholds.py.

`requests`, `steps` and `passes` are counts; bytes are named so. A function says yes or no, or how much.
"""

from collections.abc import Sequence

from stalloc.runtime import thresholds as t

# --- looking for what repeats


def first_scan_at(*, begins: bool) -> int:
    """Requests in a record at the first search, where no marks come; `begins`: nothing was requested before it."""
    return t.FIRST_SCAN_REQUESTS if begins else t.SHORT_RECORD_REQUESTS


def is_short(requests: int) -> bool:
    """Whether a record is short."""
    return requests < t.SHORT_RECORD_REQUESTS


def next_scan_at(requests: int) -> int:
    """Requests in an unmarked record at its next search."""
    if is_short(requests):
        return min(requests + t.SCAN_AGAIN_REQUESTS, t.SHORT_RECORD_REQUESTS)
    return requests * 5 // 4 + t.SHORT_RECORD_REQUESTS


def scans_at_each_mark(steps: int) -> bool:
    """Whether the record is searched at each mark; else when it has grown by a quarter."""
    return steps <= t.EAGER_STEPS


def needed_coverage(requests: int, *, is_part: bool) -> float:
    """Share of an unmarked record that a ring has to fill; `is_part`: one was taken for a step that was a part."""
    coverage = t.WHOLE_COVERAGE if is_part else t.COVERAGE
    return max(coverage, t.SHORT_COVERAGE) if is_short(requests) else coverage


def shows_longer_ring(length: int, covered: int, ring_length: int, requests: int) -> bool:
    """Whether a ring of a record is longer than the one in force, and most of the record."""
    return length > ring_length and covered >= t.WHOLE_COVERAGE * requests


def shows_kinds(requests: int, least_requests: int) -> bool:
    """Whether an unmarked record is long enough for several kinds of steps."""
    return requests >= t.KINDS_RECORD_TIMES * least_requests


def are_little(part_requests: int, requests: int, part_bytes: int, num_bytes: int) -> bool:
    """Whether requests whose lifespans are not known are so few, and so small, that nobody waits for them."""
    return t.LITTLE_SHARE * part_requests <= requests and t.LITTLE_SHARE * part_bytes <= num_bytes


def are_periods_few(covered_requests: int, period_requests: int) -> bool:
    """Whether more periods of an unmarked ring may show lifespans that are not known yet."""
    return covered_requests < t.WHOLE_PERIODS * period_requests


def overdue_requests(longest_step: int) -> int:
    """Requests after which a mark should have come; the longest step so far, 0: none was marked."""
    return t.OVERDUE_STEPS * longest_step or t.OVERDUE_REQUESTS


def least_repeats(observe_steps: int) -> int:
    """How often an unmarked ring has to come, of which so many steps are to be seen at least."""
    return max(t.LEAST_REPEATS, observe_steps)


def least_period(misled_by: int) -> int:
    """Requests of an unmarked ring, at least, after one of so many was none; 0: there was none."""
    return max(t.LEAST_PERIOD_REQUESTS, misled_by + 1 if misled_by else 0)


def least_record(ring_requests: int) -> int:
    """Requests of a record in which a step is looked for, after a ring that was a part of one."""
    return t.PART_RINGS * ring_requests


def may_wait_for_lifespans(scans: int) -> bool:
    """Whether a plan waits for lifespans that are not known, after so many scans that it waited."""
    return scans < t.LIFESPAN_SCANS


# --- marked steps


def may_recur_in_any_order(steps: int) -> bool:
    """Whether so many whole steps without a cycle are enough to look for kinds of them."""
    return steps + 1 >= t.LEAST_STEPS


def is_doubted(steps: int) -> bool:
    """Whether to ask what keeps so many marked steps from recurring."""
    return steps in t.DOUBT_STEPS


def may_thread_be_to_blame(steps: int) -> bool:
    """Whether threads are asked about, too."""
    return steps >= t.THREADS_DOUBTED_STEPS


def is_settled(steps: int) -> bool:
    """Whether no plan is expected soon, after so many marked steps without one."""
    return steps >= t.SETTLE_STEPS


def is_unknown(share: float) -> bool:
    """Whether a step is another one, of which such a share was not served from the plan."""
    return share * t.UNKNOWN_SHARE > 1


def lacks_places(without: int, requests: int) -> bool:
    """Whether plans of kinds have no places for much that their steps ask for."""
    return t.LACKING_SHARE * without > requests


def makes_a_cycle(steps: int) -> bool:
    """Whether the order of so many steps is no chance."""
    return steps > t.CYCLE_STEPS


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
    """Whether a cycle can be planned in the processor time that is left."""
    return requests * t.CYCLE_SECONDS <= seconds


def is_near_mark(requests: int) -> bool:
    """Whether the cursor may be so far from where a mark is; else it is set there."""
    return requests <= t.NEAR_REQUESTS


def first_needed(step: int) -> int:
    """The first step that shows what one needs that is carried over to it."""
    return max(0, step - t.STEPS_BEFORE)


def num_planned_kinds(kinds: int) -> int:
    """How many of so many kinds are planned together."""
    return min(kinds, t.MOST_KINDS)


def may_cycle_wait(steps: int) -> bool:
    """Whether the plan of a cycle waits for lifespans, after so many steps that it waited."""
    return steps < t.CYCLE_WAITS


def watch_left(steps: int) -> int:
    """Steps for which the watch beside a plan goes on after so many; the first pause is as long as a watch."""
    return t.WATCH_STEPS - steps


def counts_in_pause(*, is_unknown: bool) -> int:
    """Steps of a pause that a step counts for."""
    return t.UNKNOWN_STEP_COUNTS if is_unknown else 1


def is_record_long(events: int) -> bool:
    """Whether a record beside a plan begins anew."""
    return events > t.MOST_EVENTS


def next_passed_steps(came: int, expected: int) -> int:
    """How many steady steps are expected next, after so many of those expected came."""
    return min(t.MOST_PASSED_STEPS, 2 * came) if came == expected else came


def next_heard_marks(heard: int) -> int:
    """How many marks are heard before steps are expected again, after none of them came."""
    return min(t.MOST_HEARD_STEPS, 2 * heard + 1)


# --- giving a plan up


def most_misses(requests: int) -> int:
    """By how much misses may outnumber hits under the plan of a ring."""
    return t.DROP_PASSES * requests + t.DROP_REQUESTS


def most_misses_of_kinds(longest: int) -> int:
    """The same under plans of several kinds, of which the longest has so many requests."""
    return t.DROP_STEPS * longest + t.DROP_REQUESTS


def is_bad(missed: int, requests: int) -> bool:
    """Whether a step is bad, of which so many requests were not served."""
    return t.BAD_SHARE * missed > requests


def are_bad_steps_few(bad_steps: int) -> bool:
    """Whether a plan keeps its patience after so many bad steps in a row."""
    return bad_steps < t.MOST_BAD_STEPS


def seems_a_part(lost: int, hits: int) -> bool:
    """Whether an unmarked ring seems to be of a part of a step."""
    return t.PART_SHARE * lost > hits


def misses_much(misses: int, hits: int) -> bool:
    """Whether so much is missed that a ring is left for what may be steps of several kinds."""
    return t.MISSED_SHARE * misses > hits


def ignores_marks(misses: int, hits: int) -> bool:
    """Whether an unmarked plan does not follow the marks that come now."""
    return t.FIRST_MARK_SHARE * misses > hits


def was_no_step(misses: int, hits: int) -> bool:
    """Whether an unmarked ring that was given up was no step."""
    return t.MISLED_SHARE * misses > hits


def judged_after(requests: int) -> int:
    """Requests after which unmarked plans of several kinds are judged."""
    return max(t.JUDGED_PASSES * requests, t.JUDGED_REQUESTS)


def has_fitted(passes: int) -> bool:
    """Whether a plan that is given up after so many passes was of steps."""
    return passes >= t.FITTED_PASSES


def most_misses_of_file() -> int:
    """By how much misses may outnumber hits under a plan from a file."""
    return t.DROP_OF_FILE_REQUESTS


def passes_to_judgement(ring_requests: int) -> int:
    """Requests after which the plan of an unmarked ring is judged."""
    return t.JUDGED_PASSES * ring_requests


# --- what is held


def allowed_bytes(peak_bytes: int, parts: int) -> int:
    """What may be held where no plan serves."""
    return peak_bytes + max(t.SPARE_BYTES, parts * (peak_bytes // t.PEAK_SHARE))


def allowed_planned_bytes(peak_bytes: int, parts: int, held_bytes: int, rest_bytes: int) -> int:
    """The same where one does, which had to hold so much once, and with which all of its places have pages."""
    most = peak_bytes + t.PLANNED_BYTES
    once = min(held_bytes, most + peak_bytes // t.HELD_SHARE)
    return max(min(allowed_bytes(peak_bytes, parts), most + peak_bytes // t.PEAK_SHARE), once, rest_bytes)


def rests(requests: int, moved_pages: int, *, is_planned: bool) -> bool:
    """Whether pages rested in a step of so many requests in which so many moved."""
    return moved_pages == 0 if is_planned else requests >= t.SELDOM_REQUESTS * moved_pages


def is_restless(steps: int, *, is_planned: bool) -> bool:
    """Whether pages moved in so many steps more than they rested in that more may be held."""
    return steps > (t.RESTLESS_PLANNED_STEPS if is_planned else t.RESTLESS_STEPS)


def next_parts(parts: int, peak_bytes: int, *, is_planned: bool) -> int:
    """Parts of the peak that may be held once pages are restless."""
    most = 1 + t.PLANNED_BYTES // max(1, peak_bytes // t.PEAK_SHARE) if is_planned else t.MOST_PARTS
    return max(parts, min(parts + 1, most, t.MOST_PARTS))


def may_have_all_pages(steps: int) -> bool:
    """Whether pages moved in so many steps more than they rested in that all places of a plan may have some."""
    return steps > t.NO_REST_STEPS


def is_plan_to_blame(steps: int) -> bool:
    """The same, that a plan which needs less is looked for."""
    return steps > t.PLAN_TO_BLAME_STEPS


def rest_bytes(needed_bytes: int, lacking_bytes: int, peak_bytes: int, free_bytes: int, *, has_streams: bool) -> int:
    """What is held once all places of a plan have pages, of which some are lacking; 0: that is too much."""
    parts = t.MOST_PARTS_OF_STREAMS if has_streams else t.MOST_PARTS
    is_little = needed_bytes <= peak_bytes + parts * (peak_bytes // t.PEAK_SHARE)
    return needed_bytes if is_little and 2 * lacking_bytes <= free_bytes else 0


def is_wasteful(step_peak_bytes: int, reserved_bytes: int) -> bool:
    """Whether segments go back after a step that is not known."""
    return t.WASTE_RATIO * step_peak_bytes < reserved_bytes


def is_dearer(needed_bytes: int, held_bytes: int) -> bool:
    """Whether a switch would hold far more than what came before it."""
    return needed_bytes > t.DEARER_RATIO * held_bytes + t.DEARER_BYTES


def may_move_arena(displaced: int, ring_requests: int, *, has_kinds: bool) -> bool:
    """Whether so many requests of a pass were displaced that the arena moves away from what lives there."""
    return displaced > (ring_requests // t.DISPLACED_SHARE if has_kinds else 0)


def next_move_wait(passes_since_due: int, wait: int) -> int:
    """Passes from a move of the arena to the next; it was due so many passes ago, and waited so long before."""
    soon = passes_since_due < max(wait, t.UNLIKE_PASSES)
    return min(2 * wait, t.QUIET_PASSES) if soon else 1


def next_quiet_passes(quiet: int, most: int, passes_since_release: int) -> tuple[int, int]:
    """Passes without a growth before what one needed goes, and how many they may become."""
    if passes_since_release <= t.AT_ONCE_PASSES:
        most = max(most, min(2 * quiet, t.VAIN_PASSES))
    return min(2 * quiet, most), most


def moves_in_each_pass(passes: int) -> bool:
    """Whether pages moved in so many passes in a row that they will go on to."""
    return passes >= t.MOVING_PASSES


def least_parts(*, repeats: bool) -> int:
    """Parts of the peak that may be held from the start."""
    return 1 if repeats else t.LOOSE_PARTS


def is_settling(passes: int) -> bool:
    """Whether whatever is free goes back after so many passes over a plan."""
    return passes < t.SETTLING_PASSES


def idle_passes(passes: int) -> int:
    """Passes for which a block of CuPy's pool served nothing that goes back, after so many over a plan."""
    return 0 if is_settling(passes) else t.IDLE_PASSES


def most_quiet_passes() -> int:
    """Passes without a growth before what one needed goes, at most, unless it is needed again at once."""
    return t.QUIET_PASSES


# --- a program that fills the device


def leaves_less_than(peak_bytes: int, device_bytes: int, shift: int) -> bool:
    """Whether a peak leaves less than 1 / 2 ** shift of the device."""
    return peak_bytes > device_bytes - (device_bytes >> shift)


def is_more_than(peak_bytes: int, device_bytes: int, shift: int) -> bool:
    """Whether a peak is more than 1 / 2 ** shift of the device."""
    return peak_bytes > device_bytes >> shift


def fills_device(peak_bytes: int, device_bytes: int) -> bool:
    """Whether a peak is most of the device."""
    return leaves_less_than(peak_bytes, device_bytes, t.FULL_SHIFT)


def is_at_brim(peak_bytes: int, device_bytes: int) -> bool:
    """Whether a peak leaves so little of the device that pages stay where they are."""
    return leaves_less_than(peak_bytes, device_bytes, t.BRIM_SHIFT)


def may_fill(peak_bytes: int, device_bytes: int) -> bool:
    """Whether a peak is more than half of the device."""
    return is_more_than(peak_bytes, device_bytes, 1)


def is_large_part(peak_bytes: int, device_bytes: int) -> bool:
    """Whether a peak is such a part of the device that a step which needs more than any before may fill it."""
    return is_more_than(peak_bytes, device_bytes, t.PART_SHIFT)


def excess_beside_no_plan(excess_bytes: int) -> int:
    """Of what is held beyond what is allowed, where no plan serves and half of the device is needed."""
    return excess_bytes - t.HALF_BYTES


def spared_bytes(peak_bytes: int) -> int:
    """What is held more before planned places take pages from one another."""
    return peak_bytes >> t.PLANNED_SHIFT


def range_bytes(size_bytes: int, device_bytes: int) -> int:
    """How long a range of addresses for a request is."""
    return max(size_bytes, t.RANGE_TIMES * device_bytes)


def needs_more(peak_bytes: int, highest_bytes: int) -> bool:
    """Whether a step needs clearly more than those before."""
    return peak_bytes > highest_bytes + (highest_bytes >> t.MORE_SHIFT)


def fits_beside(held_bytes: int, device_bytes: int) -> bool:
    """Whether an arena with what lives is no more than the device has."""
    return held_bytes + t.SPARE_BYTES <= device_bytes


def covers(held_bytes: int, peaks: Sequence[int], settled_steps: int) -> bool:
    """Whether a plan, with what lives, is of the steps that need most; without any marked nobody knows."""
    is_known = not peaks or settled_steps >= t.SETTLED_STEPS
    return is_known and held_bytes >= t.COVERED * max(peaks, default=0)


def is_left(lost: int) -> bool:
    """Whether a program that fills the device has left its plan, by misses beyond hits, or displaced requests."""
    return lost >= t.LEFT_REQUESTS


def num_recent_steps() -> int:
    """Steps whose peaks are remembered: as many as a plan waits for."""
    return t.SETTLED_STEPS


def most_misses_where(elsewhere: int, *, may_fill: bool) -> int:
    """By how much misses may outnumber hits where a program may fill the device, and elsewhere."""
    return min(elsewhere, t.LEFT_REQUESTS) if may_fill else elsewhere


def is_memory_short(free_bytes: int, allocated_bytes: int) -> bool:
    """Whether an optimizer's state may not fit."""
    return free_bytes < t.STATE_TIMES * allocated_bytes


# --- a step that is not the planned one


def leaves_out_much(left_out: int, ring_requests: int) -> bool:
    """Whether a step leaves out so much of its ring, or finds so many places taken, that it may be another one."""
    return left_out >= max(t.ASIDE_REQUESTS, ring_requests // t.ASIDE_SHARE)


def is_half_lost(lost: int, hits: int) -> bool:
    """Whether many requests are not as planned, and for each of them no more than one is."""
    return lost >= t.ASIDE_REQUESTS and lost > hits


def is_third_lost(lost: int, hits: int) -> bool:
    """Whether many requests are not as planned, a third of all."""
    return lost >= t.ASIDE_REQUESTS and 2 * lost > hits


def is_third_there(own_bytes: int, ahead_bytes: int) -> bool:
    """Whether a third of what a step needs for itself is there."""
    return 2 * own_bytes > ahead_bytes


def has_begun(place: int) -> bool:
    """Whether a pass is so far that it shows which step it is."""
    return place >= t.ASIDE_REQUESTS


def may_stand_aside(steps: int) -> bool:
    """Whether a plan may leave one more step to the heap, after so many in a row."""
    return steps < t.ASIDE_STEPS


def is_little_left(allocated_bytes: int, reserved_bytes: int) -> bool:
    """Whether little is free of what is held."""
    return t.LITTLE_LEFT_SHARE * allocated_bytes > (t.LITTLE_LEFT_SHARE - 1) * reserved_bytes


def has_much_to_come(ahead_bytes: int, needed_bytes: int, held_bytes: int) -> bool:
    """Whether a step will need much more than now, and nearly as much as any before."""
    return t.TO_COME_SHARE * ahead_bytes > needed_bytes > held_bytes - held_bytes // t.TO_COME_SHARE


def is_unexpected(needed_bytes: int, expected_bytes: int) -> bool:
    """Whether that is more than was expected when the step began."""
    return needed_bytes > expected_bytes + max(t.ASIDE_BYTES, expected_bytes >> t.ASIDE_SHIFT)


# --- processor time


def seconds_left(share: float, step_seconds: float, since_seconds: float, spent: float, *, has_plan: bool) -> float:
    """What may be spent on plans now, of a share of the program's time since the first one, or since it began."""
    later = max(t.LATER_PLAN_SECONDS, share * t.BUDGET_STEPS * step_seconds)
    return (later if has_plan else t.FIRST_PLAN_SECONDS) + share * since_seconds - spent
