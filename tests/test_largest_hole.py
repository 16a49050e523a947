"""Layouts of live blocks: what moves, that it is the least, and that what cannot be done is refused."""

import itertools

import numpy as np
import pytest

from stalloc.errors import BadInputError
from stalloc.replay.largest_hole import largest_hole


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


def test_whole_blocks_of_512_bytes_stay_aligned() -> None:
    hole = largest_hole([512, 4096, 8192], [100, 1000, 512], capacity_bytes=16384, needed_bytes=8192)
    assert (hole.target % 512 == 0).all()
    assert hole.moved_bytes == 512


def test_exact_fits_no_blocks_and_more_than_is_free() -> None:
    assert largest_hole([], [], capacity_bytes=100, needed_bytes=100, alignment=1).moved_bytes == 0
    full = largest_hole([0, 5], [5, 5], capacity_bytes=10, needed_bytes=0, alignment=1)
    assert full.moved_bytes == 0
    exact = largest_hole([0, 6], [5, 4], capacity_bytes=12, needed_bytes=3, alignment=1)
    assert (exact.moved_bytes, exact.hole[1] - exact.hole[0]) == (4, 3)
    with pytest.raises(BadInputError, match="4 bytes cannot be free in one piece: 3 of 12 are in all"):
        largest_hole([0, 6], [5, 4], capacity_bytes=12, needed_bytes=4, alignment=1)
    with pytest.raises(BadInputError, match="share bytes or leave"):
        largest_hole([0, 3], [4, 4], capacity_bytes=12, needed_bytes=1)
