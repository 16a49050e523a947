"""Layouts of live blocks: what moves, that it is the least, and that what cannot be done is refused."""

import itertools

import numpy as np
import pytest

from stalloc.compaction import largest_hole, order_moves, slide, to_plan
from stalloc.errors import BadInputError


def _blocks(rng: np.random.Generator, count: int, slack: int) -> tuple[np.ndarray, np.ndarray, int]:
    size = rng.integers(1, 9, count)
    gap = rng.multinomial(slack, np.full(count + 1, 1 / (count + 1)))
    return np.cumsum(size + gap[:-1]) - size, size, int(size.sum()) + slack


def _check(target: np.ndarray, size: np.ndarray, capacity: int) -> None:
    order = np.argsort(target)
    ends = (target + size)[order]
    assert (target[order][1:] >= ends[:-1]).all()
    assert (target >= 0).all()
    assert (ends <= capacity).all()


def _least_in_order(low: np.ndarray, size: np.ndarray, capacity: int, needed: int, fixed: np.ndarray) -> int | None:
    """The fewest bytes that move, by trying every set of blocks that move and keeping the order."""
    best = None
    for moving in itertools.product([False, True], repeat=len(low)):
        if any(m and f for m, f in zip(moving, fixed, strict=True)):
            continue
        # between neighbours that stay the blocks that move can be pushed to one side
        edges = [(0, 0), *((int(a), int(a + n)) for a, n, m in zip(low, size, moving, strict=True) if not m)]
        edges.append((capacity, capacity))
        for (_, end), (start, _) in itertools.pairwise(edges):
            inside = sum(int(n) for a, n, m in zip(low, size, moving, strict=True) if m and end <= a < start)
            if start - end - inside >= needed:
                cost = int(size[np.array(moving, bool)].sum())
                best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize("seed", range(3))
def test_a_range_is_freed_with_the_fewest_bytes_that_keep_the_order(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    reordered = refused = 0
    for _ in range(80):
        low, size, capacity = _blocks(rng, int(rng.integers(1, 7)), int(rng.integers(0, 20)))
        movable = rng.random(len(low)) < rng.choice([0.6, 1.0])
        needed = int(rng.integers(0, capacity - size.sum() + 1))
        expected = _least_in_order(low, size, capacity, needed, ~movable)
        if expected is None:
            refused += 1
            with pytest.raises(BadInputError, match="between the blocks that may not move"):
                largest_hole(low, size, capacity_bytes=capacity, needed_bytes=needed, movable=movable, alignment=1)
            continue
        layout = largest_hole(low, size, capacity_bytes=capacity, needed_bytes=needed, movable=movable, alignment=1)
        _check(layout.target, size, capacity)
        assert (layout.target[~movable] == low[~movable]).all()
        assert layout.hole[1] - layout.hole[0] >= needed
        assert layout.moved_bytes == size[layout.target != low].sum()
        if movable.all():
            assert layout.moved_bytes <= expected
            reordered += layout.moved_bytes < expected
        else:
            assert layout.moved_bytes == expected
    assert refused
    assert reordered


@pytest.mark.parametrize("seed", range(3))
def test_sliding_leaves_no_gap_but_before_what_stays(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(50):
        low, size, capacity = _blocks(rng, 30, int(rng.integers(0, 60)))
        layout = slide(low, size, capacity_bytes=capacity, alignment=1)
        _check(layout.target, size, capacity)
        assert layout.hole[1] - layout.hole[0] == capacity - size.sum()
        assert (np.argsort(layout.target) == np.argsort(low)).all()
        both = [
            slide(low, size, capacity_bytes=capacity, alignment=1, towards=way).moved_bytes for way in ("low", "high")
        ]
        assert layout.moved_bytes == min(both)
        movable = rng.random(30) < 0.8
        partly = slide(low, size, capacity_bytes=capacity, movable=movable, alignment=1, towards="low")
        assert (partly.target[~movable] == low[~movable]).all()
        assert (partly.target <= low).all()
        _check(partly.target, size, capacity)
        # any slide can be done without a bounce buffer
        assert order_moves(low, partly.target, size).bounce_bytes == 0


def test_whole_blocks_of_512_bytes_stay_aligned() -> None:
    layout = slide([512, 4096, 8192], [100, 1000, 512], capacity_bytes=16384)
    assert layout.target.tolist() == [0, 512, 1536]
    assert layout.hole == (2048, 16384)
    hole = largest_hole([512, 4096, 8192], [100, 1000, 512], capacity_bytes=16384, needed_bytes=8192)
    assert (hole.target % 512 == 0).all()
    assert hole.moved_bytes == 512


def test_a_plan_is_followed_to_the_byte() -> None:
    layout = to_plan([0, 10], [10, 5], [5, 0], capacity_bytes=20)
    assert layout.target.tolist() == [5, 0]
    assert (layout.moved_bytes, layout.hole) == (15, (15, 20))
    with pytest.raises(BadInputError, match="share bytes or leave"):
        to_plan([0, 10], [10, 5], [5, 14], capacity_bytes=20)
    with pytest.raises(BadInputError, match="share bytes or leave"):
        to_plan([0, 10], [10, 5], [0, 16], capacity_bytes=20)
    with pytest.raises(BadInputError, match="do not belong together"):
        to_plan([0, 10], [10, 5], [0], capacity_bytes=20)


def test_exact_fits_no_blocks_and_more_than_is_free() -> None:
    assert slide([], [], capacity_bytes=100).hole == (0, 100)
    assert largest_hole([], [], capacity_bytes=100, needed_bytes=100, alignment=1).moved_bytes == 0
    full = largest_hole([0, 5], [5, 5], capacity_bytes=10, needed_bytes=0, alignment=1)
    assert full.moved_bytes == 0
    exact = largest_hole([0, 6], [5, 4], capacity_bytes=12, needed_bytes=3, alignment=1)
    assert (exact.moved_bytes, exact.hole[1] - exact.hole[0]) == (4, 3)
    with pytest.raises(BadInputError, match="4 bytes cannot be free in one piece: 3 of 12 are in all"):
        largest_hole([0, 6], [5, 4], capacity_bytes=12, needed_bytes=4, alignment=1)
    with pytest.raises(BadInputError, match="share bytes or leave"):
        slide([0, 3], [4, 4], capacity_bytes=12)


def test_a_capped_arena_full_of_holes_serves_a_large_block_after_compaction() -> None:
    """Fragmentation alone: half of the bytes are free, no two of them together; then one range of them all is."""
    rng = np.random.default_rng(5)
    low, size = np.arange(500) * 4096, np.full(500, 2048)
    memory = rng.integers(0, 256, 500 * 4096)
    before = memory.copy()
    layout = largest_hole(low, size, capacity_bytes=len(memory), needed_bytes=500 * 2048)
    for source, target, count in order_moves(low, layout.target, size).waves():
        data = [memory[a : a + n].copy() for a, n in zip(source, count, strict=True)]
        for b, piece in zip(target, data, strict=True):
            memory[b : b + len(piece)] = piece
    memory[slice(*layout.hole)] = -1
    for a, b in zip(low, layout.target, strict=True):
        assert (memory[b : b + 2048] == before[a : a + 2048]).all()
