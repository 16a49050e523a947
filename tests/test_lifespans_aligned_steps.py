"""Steps that are alike in part: what they have in common is found, whatever comes between."""

import numpy as np
import pytest
from made_up_programs import Program

from stalloc.lifespans.aligned_steps import AlignedSteps, align
from stalloc.trace import Trace

NONE = np.zeros(0, np.int64)
KIB = 1 << 10
STATIC = 100 * KIB


def longest_common(one: list[int], other: list[int]) -> int:
    """By the textbook: a table of all prefixes."""
    best = np.zeros((len(one) + 1, len(other) + 1), int)
    for i, first in enumerate(one):
        for j, second in enumerate(other):
            best[i + 1, j + 1] = best[i, j] + 1 if first == second else max(best[i, j + 1], best[i + 1, j])
    return int(best[-1, -1])


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130, 200])
def test_two_steps_have_as_much_in_common_as_any_order_allows(length: int) -> None:
    rng = np.random.default_rng(length)
    print(f"seed {length}")
    one = rng.integers(0, 4, length)
    other = rng.permutation(one)  # so that every key is as frequent in both
    found = align([one, other], NONE)
    assert len(found.key) == longest_common(one.tolist(), other.tolist())
    for step, sites in zip((one, other), found.sites, strict=True):
        chosen = sites[sites >= 0]
        assert (np.diff(chosen) > 0).all(), "in order"
        assert (step[sites >= 0] == found.key[chosen]).all()


def test_what_most_steps_have_is_static_and_what_few_have_is_not() -> None:
    steps = [np.array(step) for step in ([1, 2, 9, 3], [1, 2, 3, 8], [1, 2, 3], [1, 3, 2, 7])]
    found = align(steps, NONE)
    assert found.key.tolist() == [1, 2, 3]
    assert found.sites[0].tolist() == [0, 1, -1, 2]
    assert found.seen.tolist() == [4, 3, 4], "one step has the last two the other way round"


def test_a_size_that_comes_now_often_and_now_seldom_is_no_part_of_what_steps_have_in_common() -> None:
    """Experts at their capacity are of one size, and of any number."""
    often, seldom = [1] + [5] * 8 + [2], [1] + [5] * 6 + [2]
    found = align([np.array(often), np.array(seldom)] * 2, NONE)
    assert found.key.tolist() == [1, 2]
    steadily = align([np.array([1] + [5] * 8 + [2]), np.array([1] + [5] * 7 + [2])] * 2, NONE)
    assert steadily.key.tolist() == [1, *[5] * 7, 2], "one in eight may be missing"
    little = align([np.array([1] + [5] * 8 + [2]), np.array([1] + [5] * 7 + [2])] * 2, np.array([5]))
    assert little.key.tolist() == [1, 2], "but of little requests none"


def steps_of(tokens: list[list[int]]) -> Trace:
    """Steps of a static request, experts of so many tokens each with a static result, and what frees them in turn."""
    program = Program()
    for experts in tokens:
        program.mark()
        program.alloc("input", STATIC)
        for number, count in enumerate(experts):
            program.alloc(f"hidden{number}", count * 64 * KIB)
            program.alloc(f"result{number}", 3 * STATIC)
        for number in reversed(range(len(experts))):
            program.free(f"result{number}")
            program.free(f"hidden{number}")
        program.free("input")
    program.mark()
    return program.trace()


def test_dynamic_requests_are_known_by_the_static_one_that_comes_next() -> None:
    trace = steps_of([[3, 4], [5, 6], [7, 3], [9, 5]])
    aligned = AlignedSteps(trace)
    assert aligned.num_steps == 4
    schedule, (num_dynamic, least_dynamic, lasts, ratios, next_sure, without) = aligned.schedule(), aligned.between()
    assert schedule.size.tolist() == [STATIC, 3 * STATIC, 3 * STATIC]
    assert (schedule.end - schedule.start).tolist() == [3, 2, 1]
    assert num_dynamic.tolist() == least_dynamic.tolist() == [0, 1, 1]
    assert ratios.tolist() == [[0, 0], [0, 0]], "of the first between two static ones, where steps do not agree"
    assert lasts.tolist() == [3, 2], "the first of them lives beside both static ones that follow"
    assert next_sure.tolist() == without.tolist() == [0, 1, 2]


def test_an_expert_without_tokens_may_be_left_out() -> None:
    some = [list(range(number, number + 8)) for number in range(3, 8)]
    trace = steps_of([*some, list(range(20, 27))])
    schedule, (num_dynamic, _, lasts, _, next_sure, _) = AlignedSteps(trace).schedule(), AlignedSteps(trace).between()
    assert schedule.size.tolist() == [STATIC, *[3 * STATIC] * 8]
    assert next_sure.tolist() == [*range(8), 9], "the last result is not sure"
    assert num_dynamic.tolist() == [0, *[1] * 8]
    assert len(lasts) == 8


@pytest.mark.parametrize(
    ("counts", "num_steps"), [([10, 14, 10, 11, 10, 14], 4), ([10, 11, 13, 10, 10, 10], 5), ([10, 10, 10, 13, 13], 2)]
)
def test_some_of_the_steps_are_those_like_the_last_two_or_like_most(counts: list[int], num_steps: int) -> None:
    """An eighth more is alike: of 1,040 KiB 128, not 192."""
    trace = steps_of([[count] for count in counts])
    assert AlignedSteps(trace, some=True).num_steps == num_steps
    assert AlignedSteps(trace).num_steps == len(counts)


def test_the_share_that_is_static_is_that_of_the_step_with_least() -> None:
    few, many = AlignedSteps(steps_of([[1, 2], [2, 1], [2, 3]])), AlignedSteps(steps_of([[1, 2], [2, 1], [90, 80]]))
    assert few.static_share > 0.5
    assert many.static_share < 0.1
    with pytest.raises(ValueError, match="two at least"):
        AlignedSteps(steps_of([[1, 2]]))


def test_the_cycle_with_dynamic_requests_has_those_of_the_last_step_where_they_came() -> None:
    aligned = AlignedSteps(steps_of([[50, 70], [300, 20], [90, 110], [60, 0]]))
    cycle = aligned.schedule()
    wider = aligned.with_dynamic(cycle)
    own = wider.row >= 0
    assert wider.row[own].tolist() == list(range(cycle.num_requests))
    unit = wider.cycle_end // cycle.cycle_end
    assert (wider.start[own] == cycle.start * unit).all()
    assert (wider.end[own] == cycle.end * unit).all()
    assert (np.diff(wider.start) > 0).all()
    assert (wider.end > wider.start).all()
    assert wider.size[~own].tolist() == [60 * 64 * KIB], "little ones are the heap's"
