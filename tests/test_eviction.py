"""Online eviction: scores of policies, and replays of recordings under a budget."""

import itertools
import math

import pytest

from stalloc.eviction.scores import POLICIES, Candidate, cheapest_window

OLD = Candidate(cost=2.0, around=0.0, size=100.0, age=50.0)


@pytest.mark.parametrize(
    ("policy", "rather"),
    [
        ("dtr", {"cost": 1.0}),
        ("dtr", {"size": 200.0}),
        ("dtr", {"age": 60.0}),
        ("dtr-local", {"cost": 1.0, "around": 9.0}),
        ("lru", {"age": 60.0, "cost": 9.0}),
        ("size", {"size": 200.0, "cost": 9.0}),
        ("msps", {"cost": 1.0, "age": 1.0}),
        ("dte", {"free_beside": 50.0}),
        ("coop", {"cost": 1.0, "size": 1.0}),
    ],
)
def test_a_policy_prefers_what_its_paper_says(policy, rather):
    score = POLICIES[policy].score
    assert score(OLD._replace(**rather)) < score(OLD)


@pytest.mark.parametrize("policy", ["dtr", "dtr-eq", "msps", "dte", "coop"])
def test_what_is_evicted_around_a_candidate_speaks_against_it(policy):
    score = POLICIES[policy].score
    assert score(OLD._replace(around=1.0)) > score(OLD)


def _all_windows(begins, ends, costs, needed):
    for first, last in itertools.combinations(range(len(begins) + 1), 2):
        touch = all(ends[i] == begins[i + 1] for i in range(first, last - 1))
        cost = sum(costs[first:last])
        if touch and ends[last - 1] - begins[first] >= needed and cost < math.inf:
            yield cost


def test_the_window_is_the_cheapest_of_all():
    import random

    draw = random.Random(3)
    found = 0
    for _ in range(300):
        begins, ends, costs, place = [], [], [], 0
        for _ in range(draw.randrange(1, 9)):
            place += draw.choice((0, 0, 0, 5))
            begins.append(place)
            place += draw.randrange(1, 20)
            ends.append(place)
            costs.append(draw.choice((0.0, 1.0, 2.0, 4.0, math.inf)))
        needed = draw.randrange(1, 60)
        first, last = cheapest_window(begins, ends, costs, needed)
        best = min(_all_windows(begins, ends, costs, needed), default=None)
        if best is None:
            assert (first, last) == (0, 0)
        else:
            found += 1
            assert ends[last - 1] - begins[first] >= needed
            assert sum(costs[first:last]) == best
    assert found > 100
