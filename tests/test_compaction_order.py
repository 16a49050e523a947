"""Orders of moves: executed wave by wave on bytes, each block arrives, and what is nobody's stays as it was."""

import numpy as np
import pytest

from stalloc.compaction import BOUNCE, Schedule, order_moves
from stalloc.errors import BadInputError

Column = np.ndarray


def _execute(schedule: Schedule, memory: Column) -> None:
    """Execute waves on one number a byte, checking that the order within a wave cannot matter."""
    bounce = np.full(schedule.bounce_bytes, -1, memory.dtype)
    for source, target, size in schedule.waves():
        written = [np.zeros(len(place), bool) for place in (memory, bounce)]

        def part(places: list[Column], at: int, count: int) -> Column:
            kind, low = (1, at - BOUNCE) if at >= BOUNCE else (0, at)
            assert 0 <= low <= low + count <= len(places[kind])
            return places[kind][low : low + count]

        for at, count in zip(target.tolist(), size.tolist(), strict=True):
            assert count > 0
            assert not part(written, at, count).any(), "two targets of a wave share a byte"
            part(written, at, count)[:] = True
        data = []
        for at, count in zip(source.tolist(), size.tolist(), strict=True):
            assert not part(written, at, count).any(), "a source of a wave is written in it"
            data.append(part([memory, bounce], at, count).copy())
        for at, values in zip(target.tolist(), data, strict=True):
            part([memory, bounce], at, len(values))[:] = values


def _moved(source: Column, target: Column, size: Column, schedule: Schedule, room: int) -> None:
    """Assert that a schedule does what it has to."""
    memory = np.arange(room) + 1000
    before = memory.copy()
    _execute(schedule, memory)
    touched = np.zeros(room, bool)
    for a, b, count in zip(source, target, size, strict=True):
        assert (memory[b : b + count] == before[a : a + count]).all()
        touched[a : a + count] = touched[b : b + count] = True
    assert (memory[~touched] == before[~touched]).all()


def _placed(rng: np.random.Generator, size: Column, slack: int) -> Column:
    """Blocks in a random order with random gaps."""
    gap = rng.multinomial(slack, np.full(len(size) + 1, 1 / (len(size) + 1)))
    low, at = np.zeros(len(size), np.int64), 0
    for nth, block in enumerate(rng.permutation(len(size))):
        at += gap[nth]
        low[block], at = at, at + size[block]
    return low


@pytest.mark.parametrize("seed", range(6))
def test_any_blocks_reach_any_targets_with_a_bounce_buffer_of_any_size(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    through_bounce = 0
    for _ in range(250):
        size = rng.integers(0, int(rng.choice([3, 12, 40])), int(rng.integers(0, 9)))
        slack = int(rng.choice([0, 0, 1, 3, 20]))
        source, target = _placed(rng, size, slack), _placed(rng, size, slack)
        limit = int(rng.choice([1, 2, 5, 30, 600, 4000]))
        schedule = order_moves(source, target, size, bounce_bytes=limit)
        assert schedule.bounce_bytes <= limit
        assert schedule.moved_bytes == size[source != target].sum()
        assert schedule.copied_bytes >= schedule.moved_bytes
        _moved(source, target, size, schedule, int(size.sum()) + slack)
        through_bounce += schedule.copied_bytes > schedule.moved_bytes
    assert through_bounce > 25


def test_blocks_whose_target_is_free_go_in_one_wave() -> None:
    schedule = order_moves([0, 10, 20], [100, 120, 110], [10, 10, 10])
    assert (schedule.num_waves, schedule.bounce_bytes, schedule.copied_bytes) == (1, 0, 30)


def test_blocks_follow_each_other_into_what_the_one_before_left() -> None:
    schedule = order_moves([30, 20, 10], [40, 30, 20], [10, 10, 10])
    assert [wave[0].tolist() for wave in schedule.waves()] == [[30], [20], [10]]


@pytest.mark.parametrize(("source", "target"), [(1, 0), (0, 1)])
def test_a_gap_of_one_byte_is_crossed_in_the_safe_direction(source: int, target: int) -> None:
    schedule = order_moves([source], [target], [5])
    assert (schedule.num_waves, schedule.bounce_bytes) == (5, 0)
    _moved(np.array([source]), np.array([target]), np.array([5]), schedule, 6)
    faster = order_moves([source], [target], [5], bounce_bytes=5)
    assert (faster.num_waves, faster.copied_bytes) == (2, 10)


def test_an_exact_fit_needs_no_bounce_buffer() -> None:
    schedule = order_moves([10, 0], [0, 20], [10, 10])
    assert (schedule.num_waves, schedule.bounce_bytes) == (2, 0)


def test_no_blocks_and_blocks_in_place_are_no_moves() -> None:
    assert order_moves([], [], []).num_waves == 0
    schedule = order_moves([5, 0], [5, 9], [3, 0], bounce_bytes=8)
    assert (schedule.num_waves, schedule.moved_bytes, schedule.bounce_bytes) == (0, 0, 0)


def test_a_cycle_takes_the_place_of_its_smallest_block() -> None:
    source, target, size = np.array([0, 10, 20]), np.array([10, 20, 0]), np.array([10, 4, 6])
    schedule = order_moves(source, target, size, bounce_bytes=100)
    assert schedule.bounce_bytes == 4
    assert schedule.copied_bytes == 24
    _moved(source, target, size, schedule, 30)
    swap = order_moves([0, 8], [8, 0], [8, 8], bounce_bytes=8)
    assert (swap.bounce_bytes, swap.num_waves) == (8, 3)


def test_a_cycle_goes_in_chunks_where_memory_is_nearly_full() -> None:
    source, target, size = np.array([0, 4096]), np.array([4096, 0]), np.array([4096, 4096])
    schedule = order_moves(source, target, size, bounce_bytes=1024)
    assert schedule.bounce_bytes == 1024
    assert schedule.copied_bytes == 8192 + 4096
    _moved(source, target, size, schedule, 8192)


def test_many_cycles_share_a_bounce_buffer_that_holds_several() -> None:
    count = 64
    source = np.arange(2 * count) * 512
    target = (np.arange(2 * count) ^ 1) * 512
    size = np.full(2 * count, 512)
    at_once = order_moves(source, target, size, bounce_bytes=count * 512)
    assert (at_once.num_waves, at_once.bounce_bytes) == (3, count * 512)
    in_turn = order_moves(source, target, size, bounce_bytes=512)
    assert (in_turn.num_waves, in_turn.bounce_bytes) == (3 * count, 512)
    _moved(source, target, size, in_turn, 2 * count * 512)


def test_what_cannot_be_done_is_one_clear_error() -> None:
    with pytest.raises(BadInputError, match=r"2 blocks change places in a cycle .* give a bounce buffer"):
        order_moves([0, 8], [8, 0], [8, 8])
    with pytest.raises(BadInputError, match="target at byte 4 lies on another block"):
        order_moves([10, 20], [0, 4], [8, 8])
    with pytest.raises(BadInputError, match="source at byte 4 lies on another block"):
        order_moves([0, 4], [20, 40], [8, 8])
    with pytest.raises(BadInputError, match="lies on another block"):
        order_moves([10], [0], [8], fixed=([7], [2]))
    with pytest.raises(BadInputError, match="lies on another block"):
        order_moves([10, 4], [0, 4], [8, 2])
    with pytest.raises(BadInputError, match="do not belong together"):
        order_moves([1, 2], [1], [1])
    with pytest.raises(BadInputError, match="copies: give a bounce buffer"):
        order_moves([1], [0], [1 << 40])
    swap = order_moves([0, 8], [8, 0], [8, 8], bounce_bytes=8)
    with pytest.raises(BadInputError, match="needs a bounce buffer of 8 bytes"):
        swap.resolve(base=1 << 40)


@pytest.mark.slow
def test_cycles_that_would_fall_into_endless_pieces_are_refused() -> None:
    rng = np.random.default_rng(0)
    size = rng.integers(1, 200, 20_000) * 512
    source, target = _placed(rng, size, 0), _placed(rng, size, 0)
    with pytest.raises(BadInputError, match=r"more than \d+ pieces: give a larger bounce buffer"):
        order_moves(source, target, size, bounce_bytes=1 << 20)


def test_a_hundred_thousand_blocks_are_ordered_in_few_waves() -> None:
    rng = np.random.default_rng(11)
    size = rng.integers(1, 200, 100_000) * 512
    low = np.cumsum(size) - size
    gap = rng.integers(0, 100, 100_000) * 512
    slide = order_moves(low + np.cumsum(gap), low, size)
    assert slide.num_waves < 1000
    assert slide.bounce_bytes == 0
    even = np.full(100_000, 4096)
    mixed = order_moves(np.arange(100_000) * 4096, rng.permutation(100_000) * 4096, even, bounce_bytes=1 << 20)
    assert 0 < mixed.bounce_bytes <= 1 << 20
    # one more copy a cycle, and a random permutation of n has about ln n of them
    assert mixed.copied_bytes - mixed.moved_bytes < 40 * 4096


def test_addresses_are_resolved_against_an_arena_and_a_buffer() -> None:
    schedule = order_moves([0, 8], [8, 0], [8, 8], bounce_bytes=8).resolve(base=1 << 30, bounce=1 << 20)
    assert schedule.source.tolist() == [1 << 30, (1 << 30) + 8, 1 << 20]
    assert schedule.target.tolist() == [1 << 20, 1 << 30, (1 << 30) + 8]
