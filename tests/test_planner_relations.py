"""Plans that depend on others: several in one arena, one changed after an edit, streams that hand over, moves."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import strategies as st
from properties import holds_for
from test_planner_schedule import training

from stalloc.errors import BadInputError
from stalloc.lifespans.repeating_schedule import fold
from stalloc.planner import plan, plan_joint, plan_moving_least, plan_schedule, replan, validate


def layers(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Forward and backward of `count` layers: what is saved dies in reverse, workspaces die at once."""
    rng = np.random.default_rng(seed)
    size = rng.integers(1, 200, count) * 512
    forward, backward = np.arange(count) * 4, 4 * count + np.arange(count)[::-1] * 4
    start = np.concatenate([forward, forward + 1, backward])
    end = np.concatenate([backward + 3, forward + 3, backward + 2])
    order = np.argsort(start, kind="stable")
    return start[order], end[order], np.concatenate([size, size // 2, size])[order]


def test_alternatives_share_one_arena():
    traces = [([0, 1], [3, 4], [1000, 5000]), ([0], [1], [100_000]), ([], [], [])]
    plans = plan_joint(traces)
    assert {made.peak_bytes for made in plans} == {100_352}
    assert all(validate(made).ok and made.optimal for made in plans)
    assert [made.num_requests for made in plans] == [2, 1, 0]


def test_schedules_and_traces_share_one_arena():
    plans = plan_joint([fold(training()), training(3), layers(5)])
    assert len({made.peak_bytes for made in plans}) == 1
    assert all(validate(made).ok for made in plans)
    assert [made.kind for made in plans] == ["program", "program", "trace"]


@holds_for(st.integers(2, 40), st.integers(0, 9), st.data(), few=8, many=80)
def test_a_changed_trace_gets_a_valid_plan(count, seed, data):
    start, end, size = layers(count, seed)
    before = plan((start, end, size))
    kept = np.ones(len(size), bool)
    for row in data.draw(st.sets(st.integers(0, len(size) - 1), max_size=4)):
        change = data.draw(st.sampled_from(["gone", "larger", "longer", "never"]))
        kept[row] &= change != "gone"
        size[row] *= 3 if change == "larger" else 1
        end[row] += 7 if change == "longer" else 0
        end[row] = start[row] if change == "never" else end[row]
    after = start[kept], end[kept], size[kept]
    made = replan(before, after)
    assert validate(made).detail == ""
    assert made.size.tolist() == after[2].tolist()
    assert made.peak_bytes - made.lower_bound_bytes <= max(
        before.gap_bytes + 0.001 * made.lower_bound_bytes, plan(after).gap_bytes
    )


def test_what_did_not_change_stays_where_it_is():
    start, end, size = layers(200)
    before = plan((start, end, size))
    more = np.append(start, 401), np.append(end, 402), np.append(size, 512)
    order = np.argsort(more[0], kind="stable")
    made = replan(before, tuple(column[order] for column in more))
    assert validate(made).ok
    assert made.peak_bytes == before.peak_bytes
    assert (np.delete(made.offset, np.flatnonzero(order == 600)) == before.offset).mean() > 0.99


def test_a_plan_with_constraints_is_not_changed_for_another_trace():
    made = plan(([0, 1], [3, 4], [100, 100]), fixed={0: 512})
    with pytest.raises(BadInputError, match="constraints"):
        replan(made, ([0, 1], [3, 4], [100, 100]))


def test_streams_that_share_list_who_takes_over_from_whom():
    schedule = fold(training(second_stream=True))
    apart, shared = plan_schedule(schedule), plan_schedule(schedule, streams="share")
    assert shared.peak_bytes < apart.peak_bytes
    assert len(apart.handover_earlier) == 0
    assert len(shared.handover_earlier) > 0
    assert validate(shared, handovers=True).detail == ""
    assert validate(apart, handovers=True).ok


def test_a_shared_plan_passes_only_for_those_who_secure_the_handovers():
    shared = plan_schedule(fold(training(second_stream=True)), streams="share")
    assert validate(shared).reason == "shared-by-streams"


def test_a_handover_that_is_missing_or_too_many_is_named():
    shared = plan_schedule(fold(training(second_stream=True)), streams="share")
    fewer = dataclasses.replace(
        shared, handover_earlier=shared.handover_earlier[1:], handover_later=shared.handover_later[1:]
    )
    assert validate(fewer, handovers=True).reason == "shared-by-streams"
    more = dataclasses.replace(
        shared,
        handover_earlier=np.append(shared.handover_earlier, 0),
        handover_later=np.append(shared.handover_later, 0),
    )
    assert validate(more, handovers=True).reason == "bad-handover"


def fits(blocks: list[tuple[int, int]], height: int) -> bool:
    """Whether blocks (offset, size) lie apart below the height."""
    ordered = sorted((low, low + size) for low, size in blocks if size)
    return all(one[1] <= two[0] for one, two in itertools.pairwise(ordered)) and all(b <= height for _, b in ordered)


def fewest_moved(blocks: list[tuple[int, int]], height: int, hole: int) -> int:
    """By looking at every way to place blocks and hole on whole bytes."""
    best = sum(size for _, size in blocks)
    places = [range(height - size + 1) for _, size in blocks] + [range(height - hole + 1) if hole else range(1)]
    for choice in itertools.product(*places):
        moved = sum(size for (low, size), place in zip(blocks, choice, strict=False) if low != place)
        now = [(place, size) for (_, size), place in zip(blocks, choice, strict=False)]
        if moved < best and fits([*now, (choice[-1], hole)], height):
            best = moved
    return best


@holds_for(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=4),
    st.integers(0, 4),
    st.data(),
    few=8,
    many=100,
)
def test_no_other_choice_moves_fewer_bytes(pieces, hole, data):
    offset, at = [], 0
    for size, gap in pieces:
        offset.append(at + gap)
        at += gap + size
    sizes = [size for size, _ in pieces]
    height = data.draw(st.integers(sum(sizes) + hole, max(at, sum(sizes) + hole)))
    moves = plan_moving_least(offset, sizes, target_height=height, needed_hole=hole, alignment=1)
    blocks = list(zip(offset, sizes, strict=True))
    assert fits([*zip(moves.offset.tolist(), sizes, strict=True), (moves.hole[0], hole)], height)
    assert moves.least
    assert moves.moved_bytes == fewest_moved(blocks, height, hole)


@pytest.mark.parametrize("seed", range(4))
def test_many_blocks_are_moved_apart(seed):
    rng = np.random.default_rng(seed)
    size = rng.integers(1, 20, 300) * 512
    gap = rng.integers(0, 10, 300) * 512
    offset = np.cumsum(size + gap) - size
    hole = int(gap.sum()) // 3
    moves = plan_moving_least(offset, size, target_height=int((offset + size).max()), needed_hole=hole)
    assert fits(
        [*zip(moves.offset.tolist(), size.tolist(), strict=True), (moves.hole[0], hole)], int(offset[-1] + size[-1])
    )
    assert moves.moved_bytes == size[moves.row].sum() < size.sum()
    assert (moves.offset[np.setdiff1d(np.arange(300), moves.row)] == np.delete(offset, moves.row)).all()


def test_what_cannot_fit_is_one_sentence():
    with pytest.raises(BadInputError, match="do not fit"):
        plan_moving_least([0, 512], [512, 512], target_height=1024, needed_hole=1)
    with pytest.raises(BadInputError, match="row 0 and row 1"):
        plan_moving_least([0, 512], [1024, 512], target_height=4096)
