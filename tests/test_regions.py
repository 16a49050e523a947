"""Where the requests of a plan lie in an arena whose memory comes by pages."""

import numpy as np
import pytest

from stalloc.core.arena_schedule import ArenaSchedule, on_pages
from stalloc.core.constants import GRANULE

KIB = 1024


def schedule_of(rng: np.random.Generator, num_small: int, num_large: int) -> ArenaSchedule:
    """Requests at random places, whether they share bytes or not; small ones are up to 16 KiB, others over 256."""
    size = np.concatenate([rng.integers(1, 16 * KIB, num_small), rng.integers(256 * KIB, 8 << 20, num_large)])
    size = rng.permutation(size)
    offset = rng.integers(0, 512 << 20, len(size)) & -512
    stream = rng.integers(0, 2, len(size)) if num_small % 2 else np.zeros(len(size), np.int64)
    offset += stream << 30
    return ArenaSchedule(arena_bytes=2 << 30, size=size, stream=stream, offset=offset)


def shared(schedule: ArenaSchedule) -> np.ndarray:
    """(n, n) whether two requests share bytes."""
    end = schedule.offset + ((schedule.size + 511) & -512)
    return (schedule.offset[:, None] < end[None]) & (schedule.offset[None] < end[:, None])


def pages(schedule: ArenaSchedule, rows: np.ndarray) -> set[int]:
    found = zip(schedule.offset[rows].tolist(), schedule.size[rows].tolist(), strict=True)
    return {page for begin, size in found for page in range(begin // GRANULE, (begin + size - 1) // GRANULE + 1)}


@pytest.mark.parametrize("seed", range(8))
def test_small_requests_lie_behind_the_others_and_nothing_else_changes(seed: int) -> None:
    schedule = schedule_of(np.random.default_rng(seed), 40 + seed, 200)
    placed, small = on_pages(schedule), schedule.size < 64 * KIB
    for stream in np.unique(schedule.stream):
        own = schedule.stream == stream
        assert placed.offset[own & small].min() >= (placed.offset + placed.size)[own & ~small].max()
        assert pages(placed, own).isdisjoint(pages(placed, ~own))
    assert (shared(placed) == shared(schedule) & (small[:, None] == small[None])).all()
    assert (placed.offset + placed.size).max() <= placed.arena_bytes <= 1040 << 20


def test_where_no_byte_is_to_spare_all_lies_as_planned() -> None:
    schedule = schedule_of(np.random.default_rng(2), 40, 200)
    assert (shared(on_pages(schedule, apart=False)) == shared(schedule)).all()


def test_where_nearly_all_is_small_it_lies_among_the_rest() -> None:
    rng = np.random.default_rng(1)
    schedule = schedule_of(rng, 600, 1)
    placed = on_pages(schedule)
    assert placed.arena_bytes <= int(((schedule.size + 511) & -512).sum()) + GRANULE
    assert (np.argsort(placed.offset, kind="stable") == np.argsort(schedule.offset, kind="stable")).all()


def test_what_is_not_planned_has_no_place() -> None:
    size = np.array([4 << 20, 1024, 4 << 20])
    schedule = ArenaSchedule(arena_bytes=8 << 20, size=size, stream=size * 0, offset=np.array([0, -1, 4 << 20]))
    assert on_pages(schedule).offset.tolist() == [0, -1, 4 << 20]
