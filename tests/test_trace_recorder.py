"""Requests from recorded events: an independent, naive pairing agrees, contradictions are refused."""

import random

import numpy as np
import pytest

from stalloc.errors import BadInputError
from stalloc.trace import Action
from stalloc.trace.recorder import from_recorded


def record(events, **changes):
    """A trace of (action, address, size) events on one stream."""
    action, address, size = zip(*events, strict=True)
    zeros = np.zeros(len(events), np.int64)
    return from_recorded(0, np.array(action), np.array(address), np.array(size), zeros, zeros, [], [0], **changes)


def naive_lifespans(events):
    live, requests = {}, []
    for at, (action, address, size) in enumerate(events):
        if action == Action.ALLOC:
            live[address] = len(requests)
            requests.append([at, len(events), size])
        elif action == Action.FREE_COMPLETED:
            if address in live:
                requests[live.pop(address)][1] = at
            else:
                requests.append([-1, at, size])
    return sorted(map(tuple, requests))


@pytest.mark.parametrize("seed", range(20))
def test_pairing_agrees_with_a_naive_one(seed):
    print("seed", seed)
    chance = random.Random(seed)
    live = dict.fromkeys(range(3), 7)  # live before recording
    events = []
    for _ in range(200):
        address = chance.randrange(12)
        if address in live:
            size = live.pop(address)
            events += [(Action.FREE_REQUESTED, address, size), (Action.FREE_COMPLETED, address, size)]
        elif chance.random() < 0.2:
            events.append((Action.SEGMENT_ALLOC, address, 1 << 20))
        else:
            live[address] = chance.randrange(1, 1000)
            events.append((Action.ALLOC, address, live[address]))
    trace = record(events)
    assert sorted(zip(trace.start, trace.end, trace.size, strict=True)) == naive_lifespans(events)
    for row in range(trace.num_requests):
        mine = np.flatnonzero(trace.event_request == row)
        assert len({int(trace.address[event]) for event in mine}) == 1
        if trace.end[row] < trace.num_events:
            assert mine[-1] == trace.end[row]
            assert trace.free_requested[row] == trace.end[row] - 1
        if trace.start[row] >= 0:
            assert mine[0] == trace.start[row]


def test_a_deferred_free_ends_when_it_is_completed():
    trace = record([(0, 64, 8), (1, 64, 8), (0, 128, 8), (2, 64, 8)])
    assert (trace.end[0], trace.free_requested[0]) == (3, 1)
    assert (trace.end[1], trace.free_requested[1]) == (4, 4)


def test_a_record_is_complete_only_if_nothing_came_before():
    assert record([(0, 64, 8)]).info["complete"]
    assert not record([(0, 64, 8), (2, 128, 8)]).info["complete"]
    assert not record([(0, 64, 8)], reserved_start_bytes=512).info["complete"]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([(0, 64, 8), (0, 64, 8)], "event 1 says that address 0x40 is allocated twice"),
        ([(0, 64, 8), (2, 64, 8), (2, 64, 8)], "event 2 says that address 0x40 is freed twice"),
    ],
)
def test_contradictions_are_refused(events, said):
    with pytest.raises(BadInputError, match=said):
        record(events)


def test_reserved_follows_segments():
    trace = record([(3, 0, 100), (5, 100, 50), (0, 0, 8), (6, 100, 50), (4, 0, 100)], reserved_start_bytes=7)
    assert trace.reserved_bytes().tolist() == [107, 157, 157, 107, 7]


def test_nothing_recorded_is_an_empty_trace():
    none = np.empty(0, np.int64)
    trace = from_recorded(0, none, none, none, none, none, [], [])
    assert (trace.num_requests, trace.num_events) == (0, 0)
