"""Offsets for lifespans: small problems whose optimum is known, and properties that hold for every problem."""

import itertools

import numpy as np
import pytest
from hypothesis import strategies as st
from properties import holds_for

from stalloc.errors import BadInputError
from stalloc.planner import plan_arrays

ALIGNMENTS = st.sampled_from([1, 2, 64, 512, 4096])


def assert_apart(uses: list[tuple[int, int, int, int]]) -> None:
    """Every pair of (start, end, low, high) differs in time or in space."""
    for one, two in itertools.combinations(uses, 2):
        together = max(one[0], two[0]) < min(one[1], two[1])
        assert not (together and max(one[2], two[2]) < min(one[3], two[3])), (one, two)


def maximum_load(uses: list[tuple[int, int, int, int]], alignment: int) -> int:
    """The most bytes live at any start, sizes rounded up."""
    loads = [
        sum(-(-(high - low) // alignment) * alignment for start, end, low, high in uses if start <= now < end)
        for now, _, _, _ in uses
    ]
    return max(loads, default=0)


def peak_of(requests: list[tuple[int, int, int]], alignment: int = 1) -> int:
    start, end, size = zip(*requests, strict=True)
    return plan_arrays(start, end, size, alignment=alignment).peak_bytes


def test_no_requests_need_no_memory():
    layout = plan_arrays([], [], [])
    assert (len(layout.offset), layout.peak_bytes, layout.lower_bound_bytes) == (0, 0, 0)


def test_what_is_never_live_together_shares_bytes():
    assert peak_of([(0, 1, 10), (1, 2, 10), (2, 3, 10)]) == 10


def test_what_is_live_together_does_not():
    assert peak_of([(0, 2, 10), (1, 3, 10)]) == 20


def test_sizes_are_rounded_up_to_the_alignment():
    assert peak_of([(0, 2, 1), (0, 2, 513)], alignment=512) == 512 + 1024


def test_a_lifespan_of_no_time_constrains_nothing():
    layout = plan_arrays([0, 3], [5, 3], [100, 10**12], alignment=1)
    assert (layout.peak_bytes, layout.offset[1]) == (100, 0)


def test_a_request_of_no_bytes_constrains_nothing():
    assert peak_of([(0, 5, 0), (0, 5, 7)]) == 7


def test_long_lives_must_not_lie_in_the_middle():
    # In order of birth the long one lands on top of two that die, and the last no longer fits below it.
    assert peak_of([(0, 2, 4), (1, 6, 2), (0, 2, 4), (3, 5, 8)]) == 10


def test_a_hole_is_filled_by_what_fits_it_exactly():
    assert peak_of([(0, 10, 3), (0, 4, 5), (0, 10, 2), (4, 10, 2), (4, 10, 3)]) == 10


def test_the_optimum_can_need_an_order_that_is_sorted_by_nothing():
    # Three steps of a staircase up and down around one that spans all: only interleaving keeps the load.
    requests = [(0, 3, 2), (1, 4, 1), (2, 6, 3), (3, 7, 1), (4, 8, 2), (6, 9, 3), (0, 9, 1)]
    start, end, size = zip(*requests, strict=True)
    layout = plan_arrays(start, end, size, alignment=1)
    assert layout.peak_bytes == layout.lower_bound_bytes


def test_equal_iterations_are_placed_equally():
    iteration = [(0, 9, 5), (1, 4, 3), (2, 6, 7), (4, 8, 2), (5, 9, 4), (6, 9, 1)]
    requests = [(start + 10 * i, end + 10 * i, size) for i in range(3) for start, end, size in iteration]
    start, end, size = zip(*requests, strict=True)
    offset = plan_arrays(start, end, size, alignment=1).offset.reshape(3, len(iteration))
    assert (offset == offset[0]).all()


@pytest.mark.parametrize(
    ("start", "end", "size", "alignment", "named"),
    [
        ([0, 5], [3, 9], [1, -1], 512, "row 1"),
        ([0, 5], [3, 4], [1, 1], 512, "row 1"),
        ([0], [3], [1], 500, "alignment 500"),
        ([0], [3], [1], 0, "alignment 0"),
        ([0, 0], [3, 3], [1, 2**62], 512, "row 1"),
        ([0, 0, 0], [3, 3, 3], [2**60, 2**60, 1], 1, "row 1"),
        ([0], [3], np.array([2**63], np.uint64), 512, "row 0"),
        ([0.5], [3], [1], 512, "start"),
        ([0], [3, 4], [1], 512, "1, 2 and 1 rows"),
    ],
)
def test_bad_input_is_one_sentence_that_names_the_row(start, end, size, alignment, named):
    with pytest.raises(BadInputError, match=named) as caught:
        plan_arrays(start, end, size, alignment=alignment)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("start", "end", "cycle"),
    [([0], [3], (5, 5)), ([7], [8], (0, 5)), ([1], [7], (0, 5)), ([0], [8], (2, 6))],
    ids=["empty cycle", "starts after it", "longer than the period", "neither dies in the first pass nor stays"],
)
def test_what_is_no_cycle_is_refused(start, end, cycle):
    with pytest.raises(BadInputError):
        plan_arrays(start, end, [1], cycle=cycle)


REQUEST = st.tuples(
    st.integers(0, 30), st.integers(0, 15), st.one_of(st.integers(0, 9), st.sampled_from([511, 512, 513, 10**9]))
)


@holds_for(st.lists(REQUEST, max_size=25), ALIGNMENTS, st.integers(-(2**40), 2**40), few=26, many=400)
def test_every_packing_is_valid_and_its_bound_is_the_load(requests, alignment, shift):
    start = np.array([request[0] for request in requests], np.int64) + shift
    end = start + np.array([request[1] for request in requests], np.int64)
    size = np.array([request[2] for request in requests], np.int64)
    layout = plan_arrays(start, end, size, alignment=alignment)
    columns = (start, end, layout.offset, layout.offset + size)
    uses = [use for use in zip(*(column.tolist() for column in columns), strict=True) if use[0] < use[1]]
    assert_apart(uses)
    assert not (layout.offset % alignment).any()
    assert (layout.offset >= 0).all()
    assert layout.lower_bound_bytes == maximum_load(uses, alignment)
    assert layout.peak_bytes == max((-(-use[3] // alignment) * alignment for use in uses if use[2] < use[3]), default=0)


@st.composite
def cycles(draw):
    cycle_start, period = draw(st.integers(0, 12)), draw(st.integers(1, 20))
    cycle_end = cycle_start + period
    rows = []
    for _ in range(draw(st.integers(1, 18))):
        size = draw(st.one_of(st.integers(0, 5), st.sampled_from([512, 700, 4096])))
        if cycle_start and draw(st.booleans()):
            start = draw(st.integers(0, cycle_start - 1))
            end = cycle_end + period if draw(st.booleans()) else draw(st.integers(start, cycle_end))
        else:
            start = draw(st.integers(cycle_start, cycle_end - 1))
            end = start + draw(st.integers(0, period))
        rows.append((start, end, size))
    return rows, cycle_start, cycle_end


@holds_for(cycles(), ALIGNMENTS, few=26, many=400)
def test_a_cycle_is_valid_in_every_pass(cycle, alignment):
    rows, cycle_start, cycle_end = cycle
    start, end, size = zip(*rows, strict=True)
    layout = plan_arrays(start, end, size, alignment=alignment, cycle=(cycle_start, cycle_end))
    period, passes = cycle_end - cycle_start, 4
    uses = []
    for (born, dies, num_bytes), low in zip(rows, layout.offset.tolist(), strict=True):
        if born >= cycle_start:
            uses += [(born + i * period, dies + i * period, low, low + num_bytes) for i in range(passes)]
        else:
            uses.append((born, dies if dies <= cycle_end else cycle_end + passes * period, low, low + num_bytes))
    uses = [use for use in uses if use[0] < use[1]]
    assert_apart(uses)
    assert layout.lower_bound_bytes == maximum_load(uses, alignment)
    assert max((use[3] for use in uses), default=0) <= layout.peak_bytes
    assert not (layout.offset % alignment).any()


def test_a_request_that_wraps_keeps_its_bytes_over_the_cut():
    # live [8, 10) and [10, 12) of every pass of 10: the other, live [1, 3), must not take them
    layout = plan_arrays([8, 1], [12, 3], [4, 4], alignment=1, cycle=(0, 10))
    assert layout.peak_bytes == 8


def test_a_request_that_wraps_leaves_its_bytes_to_others_in_between():
    layout = plan_arrays([8, 3], [12, 8], [4, 4], alignment=1, cycle=(0, 10))
    assert layout.peak_bytes == 4


def test_what_the_prologue_leaves_is_followed_by_what_wraps():
    # gradients: the prologue's die at 14, the cycle's are born at 17 and die at 24, which is 14 of the next pass
    layout = plan_arrays([5, 17], [14, 24], [4, 4], alignment=1, cycle=(10, 20))
    assert layout.peak_bytes == 4


def test_gradients_that_live_over_the_cut_are_planned_at_the_bound():
    """A made-up training step: gradients die one by one at the start of the next pass, activations in the backward."""
    rng = np.random.default_rng(7)
    layers, clock = 60, itertools.count()
    weights, activations = rng.integers(1, 64, layers) * 4096, rng.integers(1, 64, layers) * 8192
    freed = [next(clock) for _ in range(layers)]
    born = [next(clock) for _ in range(layers)]
    backward = [(layer, next(clock), next(clock)) for layer in reversed(range(layers))]
    period = next(clock)
    rows = [(born[layer], dies, int(activations[layer])) for layer, _, dies in backward]
    rows += [(birth, freed[layer] + period, int(weights[layer])) for layer, birth, _ in backward]
    start, end, size = zip(*rows, strict=True)
    layout = plan_arrays(start, end, size, cycle=(0, period))
    assert layout.peak_bytes == layout.lower_bound_bytes


def test_a_hundred_thousand_requests_come_within_a_thousandth():
    """A made-up pipeline: eight microbatches in flight, each saves large and small tensors in every layer."""
    sizes = np.array([117_440_512, 234_881_024, 33_554_432, 524_288, 512])
    in_flight, microbatches, layers = 8, 420, 24
    each = layers * len(sizes)
    saved = np.tile(sizes, layers)
    at = np.arange(each) * 2
    first = np.arange(microbatches)[:, None] * 4 * each
    start = (first + at).ravel()
    end = (first + 4 * each * (in_flight - 1) + 4 * each - at - 1).ravel()
    brief = first + 2 * each + at
    start, end = np.concatenate([start, brief.ravel()]), np.concatenate([end, brief.ravel() + 3])
    layout = plan_arrays(start, end, np.concatenate([np.tile(saved, microbatches)] * 2))
    assert len(layout.offset) > 100_000
    assert layout.peak_bytes <= 1.001 * layout.lower_bound_bytes
