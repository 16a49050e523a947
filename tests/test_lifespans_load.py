"""The load agrees with counting at every event, for plain lifespans and for a cycle that is run for real."""

import random

import numpy as np
import pytest

from stalloc.lifespans import load_curve, peak_load


def naive_peak(lifespans):
    return max((sum(size for start, end, size in lifespans if start <= at < end) for at, _, _ in lifespans), default=0)


@pytest.mark.parametrize("seed", range(20))
def test_peak_agrees_with_counting(seed):
    print("seed", seed)
    chance = random.Random(seed)
    lifespans = []
    for _ in range(chance.randrange(30)):
        start = chance.randrange(-1, 20)
        lifespans.append((start, start + chance.randrange(1, 9), chance.randrange(100)))
    start, end, size = np.array(lifespans, np.int64).reshape(-1, 3).T
    assert peak_load(start, end, size) == naive_peak(lifespans)
    events, live = load_curve(start, end, size)
    assert np.all(np.diff(events) > 0)
    for at, level in zip(events, live, strict=True):
        assert level == sum(size for start, end, size in lifespans if start <= at < end)


@pytest.mark.parametrize("seed", range(20))
def test_peak_of_a_cycle_is_that_of_many_passes(seed):
    print("seed", seed)
    chance = random.Random(seed)
    cycle_start, length = 10, 8
    cycle_end = cycle_start + length
    rows, unrolled = [], []
    for _ in range(6):
        start, size = chance.randrange(cycle_start), chance.randrange(1, 100)
        end = chance.choice([chance.randrange(start + 1, cycle_end + 1), cycle_end + length])
        rows.append((start, end, size))
        unrolled.append((start, end if end <= cycle_end else 1 << 30, size))
    for _ in range(6):
        start, size = chance.randrange(cycle_start, cycle_end), chance.randrange(1, 100)
        end = start + chance.randrange(1, length + 1)
        rows.append((start, end, size))
        unrolled += [(start + i * length, end + i * length, size) for i in range(5)]
    start, end, size = np.array(rows).T
    assert peak_load(start, end, size, (cycle_start, cycle_end)) == naive_peak(unrolled)


def test_a_place_handed_over_at_one_event_counts_once():
    assert peak_load(np.array([0, 5]), np.array([5, 9]), np.array([7, 7])) == 7
