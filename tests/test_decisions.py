"""What the runtime decides from figures, on both sides of each of its numbers."""

from functools import partial
from typing import Any

import pytest

from stalloc.core.constants import GENERAL_KIND, PERSISTENT_KIND
from stalloc.runtime import decisions as d
from stalloc.runtime.shortage import segment_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

#: a decision, the figures at which it is the last of one sort and the first of the other, and what it says of each
BOUNDARIES: list[tuple[Any, tuple[tuple[Any, ...], Any], tuple[tuple[Any, ...], Any]]] = [
    (d.next_scan_at, ((52,), 64), ((51,), 63)),
    (d.next_scan_at, ((63,), 64), ((64,), 144)),
    (d.scans_at_each_mark, ((64,), True), ((65,), False)),
    (d.shows_longer_cycle, ((11, 90, 10, 100), True), ((11, 89, 10, 100), False)),
    (d.shows_longer_cycle, ((11, 100, 10, 100), True), ((10, 100, 10, 100), False)),
    (d.shows_kinds, ((300, 100), True), ((299, 100), False)),
    (d.are_little, ((1, 64, 0, 1), True), ((1, 63, 0, 1), False)),
    (d.are_little, ((0, 1, 1, 64), True), ((0, 1, 1, 63), False)),
    (d.are_periods_few, ((39, 10), True), ((40, 10), False)),
    (d.least_repeats, ((4,), 4), ((0,), 3)),
    (d.least_period, ((4,), 5), ((0,), 4)),
    (d.least_record, ((100,), 800), ((0,), 0)),
    (d.may_wait_for_lifespans, ((2,), True), ((3,), False)),
    (d.first_needed, ((10,), 6), ((3,), 0)),
    (d.num_planned_kinds, ((31,), 31), ((33,), 32)),
    (d.watch_left, ((60,), 4), ((65,), -1)),
    (d.is_record_long, ((1_048_577,), True), ((1_048_576,), False)),
    (d.next_passed_steps, ((7, 7), 14), ((8, 8), 15)),
    (d.next_passed_steps, ((7, 8), 7), ((15, 15), 15)),
    (d.next_heard_marks, ((2,), 5), ((8,), 15)),
    (d.is_settling, ((2,), True), ((3,), False)),
    (d.idle_iterations, ((2,), 0), ((3,), 3)),
    (d.fills_device, ((76, 100), True), ((75, 100), False)),
    (d.is_at_brim, ((89, 100), True), ((88, 100), False)),
    (d.may_fill, ((51, 100), True), ((50, 100), False)),
    (d.is_large_part, ((26, 100), True), ((25, 100), False)),
    (d.range_bytes, ((GIB, GIB), 2 * GIB), ((3 * GIB, GIB), 3 * GIB)),
    (d.overdue_requests, ((100,), 800), ((0,), 65_536)),
    (d.may_recur_in_any_order, ((4,), True), ((3,), False)),
    (d.may_be_aligned, ((4,), True), ((2,), False)),
    (d.may_be_aligned, ((16,), True), ((12,), False)),
    (d.may_align_some, ((8,), True), ((7,), False)),
    (d.is_planned_for_capture, ((16_384,), True), ((16_385,), False)),
    (d.first_aligned, ((16,), 0), ((17,), 1)),
    (d.is_static_enough, ((0.251,), True), ((0.25,), False)),
    (d.is_doubted, ((6,), True), ((3,), False)),
    (d.is_doubted, ((12,), True), ((8,), False)),
    (d.is_doubted, ((48,), True), ((18,), False)),
    (d.is_settled, ((8,), True), ((7,), False)),
    (d.is_unknown, ((0.126,), True), ((0.125,), False)),
    (d.lacks_places, ((10, 639), True), ((10, 640), False)),
    (d.makes_a_cycle, ((17,), True), ((16,), False)),
    (d.num_affordable, (([1000, 1000], 0.0401), 2), (([1000, 1000], 0.0399), 1)),
    (d.num_affordable, (([1000, 1000, 1000], 1.0), 3), (([1000], 0.0), 1)),
    (d.is_cycle_affordable, ((1000, 0.0201), True), ((1000, 0.0199), False)),
    (d.is_near_mark, ((8,), True), ((9,), False)),
    (d.most_misses, ((0,), 1024), ((100,), 1824)),
    (d.is_bad, ((251, 1000), True), ((250, 1000), False)),
    (d.are_bad_steps_few, ((7,), True), ((8,), False)),
    (d.seems_a_part, ((1, 63), True), ((1, 64), False)),
    (d.misses_much, ((1, 7), True), ((1, 8), False)),
    (d.was_no_step, ((1, 3), True), ((1, 4), False)),
    (d.has_fitted, ((8,), True), ((7,), False)),
    (d.allowed_bytes, ((GIB, 1), GIB + 4 * MIB), ((GIB, 2), GIB + 8 * MIB)),
    (d.allowed_bytes, ((MIB, 1), 5 * MIB), ((2 * GIB, 1), 2 * GIB + 8 * MIB)),
    (
        d.most_before_eviction,
        ((256 * MIB, 253 * MIB, 256 * MIB), 253 * MIB),
        ((256 * MIB, 239 * MIB, 256 * MIB), 252 * MIB),
    ),
    (d.most_before_eviction, ((0, 239 * MIB, 256 * MIB), 252 * MIB), ((9 * MIB, 9 * MIB, 10 * MIB), 9 * MIB)),
    (d.most_before_eviction, ((242 * MIB, 9, 256 * MIB), 240 * MIB), ((2 * GIB, 9, 2 * GIB), 2 * GIB - 8 * MIB)),
    (d.is_plan_to_blame, ((17,), True), ((16,), False)),
    (d.is_wasteful, ((100, 111), True), ((100, 109), False)),
    (d.is_dearer, ((154 * MIB + 1, 100 * MIB), True), ((154 * MIB, 100 * MIB), False)),
    (d.is_dearer, ((4 * MIB + 1, 0), True), ((4 * MIB, 0), False)),
    (d.next_move_wait, ((3, 1), 2), ((4, 1), 1)),
    (d.next_move_wait, ((15, 16), 32), ((16, 16), 1)),
    (d.next_move_wait, ((0, 64), 64), ((0, 16), 32)),
    (d.are_ranges_many, ((33,), True), ((32,), False)),
    (d.next_patience, ((512,), 512), ((128,), 256)),
    (d.moves_in_each_iteration, ((8,), True), ((7,), False)),
    (d.needs_more, ((66, 64), True), ((65, 64), False)),
    (d.fits_beside, ((96 * MIB, 100 * MIB), True), ((96 * MIB + 1, 100 * MIB), False)),
    (d.covers, ((90, [100], 8), True), ((89, [100], 8), False)),
    (d.covers, ((100, [100], 8), True), ((100, [100], 7), False)),
    (d.covers, ((100, [], 0), True), ((100, [50], 0), False)),
    (d.is_left, ((8,), True), ((7,), False)),
    (d.is_memory_short, ((199, 100), True), ((200, 100), False)),
    (d.leaves_out_much, ((16, 100), True), ((15, 100), False)),
    (d.leaves_out_much, ((32, 2048), True), ((31, 2048), False)),
    (d.is_half_lost, ((16, 15), True), ((16, 16), False)),
    (d.is_half_lost, ((16, 0), True), ((15, 0), False)),
    (d.is_third_lost, ((16, 31), True), ((16, 32), False)),
    (d.is_third_lost, ((16, 0), True), ((15, 0), False)),
    (d.is_third_there, ((51, 100), True), ((50, 100), False)),
    (d.has_begun, ((16,), True), ((15,), False)),
    (d.may_bypass, ((7,), True), ((8,), False)),
    (d.is_little_left, ((76, 100), True), ((75, 100), False)),
    (d.has_much_to_come, ((126, 1000, 1000), True), ((125, 1000, 1000), False)),
    (d.has_much_to_come, ((500, 876, 1000), True), ((500, 875, 1000), False)),
    (d.is_unexpected, ((104 * MIB + 1, 100 * MIB), True), ((104 * MIB, 100 * MIB), False)),
    (d.is_unexpected, ((65 * GIB + 1, 64 * GIB), True), ((65 * GIB, 64 * GIB), False)),
]


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda boundary: f"{boundary[0].__name__}{boundary[1][0]}")
def test_a_decision_turns_where_its_number_says(boundary: Any) -> None:
    decide, *sides = boundary
    for figures, answer in sides:
        assert decide(*figures) == answer


def test_an_unmarked_cycle_has_to_fill_most_of_a_record_after_a_part_was_taken_for_a_step() -> None:
    assert d.first_scan_at() == 24
    assert [d.needed_coverage(is_part=part) for part in (False, True)] == [0.6, 0.9]


def test_steps_are_aligned_again_where_much_was_missed() -> None:
    again = partial(d.may_be_aligned_again, is_unknown=False)
    assert [(again(8, missed), again(48, missed)) for missed in (7, 8)] == [(False, False), (True, True)]
    assert not again(24, 8)
    unknown = [d.may_be_aligned_again(steps, 8, is_unknown=True) for steps in (0, 1, 2, 15, 17)]
    assert unknown == [False, False, True, True, False]


def test_a_step_that_no_plan_knows_shortens_a_pause() -> None:
    assert (d.counts_in_pause(is_unknown=True), d.counts_in_pause(is_unknown=False)) == (8, 1)


def test_an_unmarked_plan_is_judged_after_eight_passes_and_one_of_kinds_after_1024_requests() -> None:
    assert [d.judged_after(requests, has_kinds=False) for requests in (1, 200)] == [8, 1600]
    assert [d.judged_after(requests, has_kinds=True) for requests in (100, 200)] == [1024, 1600]


def test_figures_that_a_plan_begins_with() -> None:
    assert (d.least_parts(repeats=True), d.least_parts(repeats=False)) == (0, 16)
    assert [d.most_misses_where(2000, may_fill=full) for full in (True, False)] == [8, 2000]
    assert (d.num_recent_steps(), d.quiet_iterations()) == (8, 8)


def test_pages_rest_under_a_plan_if_none_moves_and_elsewhere_if_few_do() -> None:
    assert [d.rests(128, pages, planned=False) for pages in (2, 3)] == [True, False]
    assert [d.rests(64, pages, planned=True) for pages in (0, 1)] == [True, False]
    assert [d.is_restless(steps) for steps in (8, 9)] == [False, True]


def test_more_is_allowed_up_to_what_fragmentation_commonly_costs_or_a_part_where_steps_differ() -> None:
    assert (d.most_parts(alike_in_part=False), d.most_parts(alike_in_part=True)) == (16, 1)


def test_all_places_of_a_plan_get_pages_if_that_costs_no_more_than_fragmentation() -> None:
    def rest(needed: int, lacking: int = 0, free: int = 0, *, parts: int = 16, streams: bool = False) -> bool:
        return d.rest_bytes(needed, lacking, 256 * MIB, free, most_parts=parts, has_streams=streams) > 0

    assert [rest(needed * MIB) for needed in (272, 273)] == [True, False]
    assert [rest(needed * MIB, streams=True) for needed in (288, 289)] == [True, False]
    assert [rest(needed * MIB, parts=1) for needed in (257, 258)] == [True, False]
    assert [rest(260 * MIB, 8 * MIB, free * MIB) for free in (16, 15)] == [True, False]


def test_an_arena_moves_for_one_displaced_request_or_for_one_in_64_where_there_are_kinds() -> None:
    assert [d.may_move_arena(displaced, 640, has_kinds=False) for displaced in (0, 1)] == [False, True]
    assert [d.may_move_arena(displaced, 640, has_kinds=True) for displaced in (10, 11)] == [False, True]


def test_planning_may_take_a_second_before_the_first_plan_and_a_share_of_the_programs_time_after_it() -> None:
    assert d.seconds_left(0.01, 0.0, 0.0, 0.75, has_plan=False) == pytest.approx(0.25)
    assert d.seconds_left(0.01, 0.001, 10.0, 0.0, has_plan=True) == pytest.approx(0.4)
    assert d.seconds_left(0.01, 0.5, 0.0, 1.0, has_plan=True) == pytest.approx(4.0)


def test_segments_are_pytorchs_and_those_of_what_lasts_lose_hardly_anything_to_rounding() -> None:
    general = [segment_bytes(GENERAL_KIND, size) // MIB for size in (5 * MIB, 10 * MIB - 512, 10 * MIB)]
    assert general == [20, 20, 10]
    # several of one size, of which rounding loses the least, or less than a hundredth, in at most 32 MiB
    lasting = [segment_bytes(PERSISTENT_KIND, size) // MIB for size in (1_049_088, 1_100_800, 1_152_512, 1_411_072)]
    assert lasting == [32, 18, 22, 30]
