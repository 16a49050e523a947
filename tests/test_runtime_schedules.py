"""Several kinds of steps in one arena: their plans hold in any order, and each is known from its first requests."""

import itertools

import numpy as np
import pytest
from programs.core_machine import MIB, Cycle, Machine

from stalloc.core.arena_schedule import ArenaSchedule
from stalloc.lifespans.recurring_steps import StepKind
from stalloc.planner import validate_kinds
from stalloc.planner.kind_plans import KindPlans, plan_steps
from stalloc.sizes import whole_pages


def made_up_kind(rng: np.random.Generator, streams: int = 1, most: int = MIB) -> StepKind:
    """A step of random requests, of which some are handed on to the next step and some have no known end.

    It uses some of the streams.
    """
    length = int(rng.integers(8, 60))
    size = rng.choice(rng.integers(513, most, 6), length).astype(np.int64)
    place = np.arange(length)
    end = np.minimum(place + rng.geometric(0.1, length), length)
    handed = rng.random(length) < 0.15
    end[handed] = length + 1
    end[rng.random(length) < 0.05] = 0
    until = {}
    for stream in range(streams):
        # what comes from the step before is gone early, or, now and then, goes through the whole step; or was never
        # seen
        until[stream] = rng.integers(1, max(2, length // 3), 20)
        until[stream][rng.random(20) < 0.1] = length
        until[stream][rng.random(20) < 0.1] = -1
    used = rng.permutation(streams)[: int(rng.integers(1, streams + 1))]
    return StepKind(size=size, stream=rng.choice(used, length), end=end, until=until, times_seen=2)


def check_any_order(schedules: KindPlans, rng: np.random.Generator, num_steps: int) -> int:
    """Run the kinds in a random order, as they were observed; no two live requests may share a byte."""
    # position of death in this step, stream and rank if handed on, low, high
    live: list[tuple[int, tuple[int, int], int, int]] = []
    checked = turn = 0
    for _ in range(num_steps):
        index = int(rng.integers(len(schedules.kinds)))
        kind, first = schedules.kinds[index], schedules.begins[turn * len(schedules.kinds) + index]
        turn ^= schedules.switches_buffers[index]
        length = len(kind.size)
        streams = np.unique(kind.stream).tolist()
        rank_of = {int(row): (s, rank) for s in streams for rank, row in enumerate(kind.handed_on(s))}
        # nothing is known of what was never seen to be handed on to this kind: it is gone at once
        arrives = [int(kind.until[s][rank]) if rank < len(kind.until[s]) else 0 for _, (s, rank), _, _ in live]
        live = [(until, *block[1:]) for until, block in zip(arrives, live, strict=True)]
        left = [block for block in live if block[0] >= length]
        for i in range(length):
            live = [block for block in live if block[0] > i]
            offset = int(schedules.offset[first + i])
            assert offset >= 0 or kind.end[i] == 0 or kind.end[i] > length
            if offset < 0:
                continue
            high = offset + -(-int(kind.size[i]) // 512) * 512
            assert high <= schedules.peak_bytes
            for _, _, other_low, other_high in live:
                assert high <= other_low or other_high <= offset
            block = (int(kind.end[i]), rank_of.get(i, (0, 0)), offset, high)
            live.append(block)
            if block[0] > length:
                left.append(block)
            checked += 1
        live = left
    return checked


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_no_two_requests_meet_whichever_kind_follows_whichever(seed: int, streams: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    kinds = [made_up_kind(rng, streams) for _ in range(int(rng.integers(1, 6)))]
    made: dict = {}
    schedules = plan_steps(kinds, made)
    assert check_any_order(schedules, rng, 40)
    assert (schedules.offset >= 0).mean() > 0.5
    again = plan_steps([*kinds, made_up_kind(rng, streams)], made)
    assert check_any_order(again, rng, 40)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("seed", range(40))
def test_what_replaces_a_request_of_the_step_before_has_a_place_whichever_kind_follows(seed: int, streams: int) -> None:
    """A batch, what a model returned: steps lay it in one place and in another in turn."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    kinds = [made_up_kind(rng, streams, 8 * MIB) for _ in range(int(rng.integers(2, 6)))]
    for kind in kinds:
        for stream, until in kind.until.items():
            until[:] = np.minimum(until, len(kind.size) - 1)
            handed = kind.handed_on(stream)[:20]
            # what is replaced by a request lives until just after it
            until[: len(handed)] = np.where(rng.random(len(handed)) < 0.7, handed + 1, until[: len(handed)])
    one_each, schedules = plan_steps(kinds, {}), plan_steps(kinds, {}, double_buffered=True)
    assert check_any_order(schedules, rng, 60)
    assert validate_kinds(schedules.plans, schedules.num_buffers).ok
    assert schedules.num_buffers == 2
    assert (schedules.offset < 0).mean() < (one_each.offset < 0).mean()


@pytest.mark.parametrize("seed", range(12))
def test_every_stream_has_a_region_of_its_own_for_all_kinds(seed: int) -> None:
    """Nothing would make one stream wait for another's use of the bytes."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    kinds = [made_up_kind(rng, 4) for _ in range(4)]
    schedules = plan_steps(kinds, {})
    planned = schedules.offset >= 0
    high = schedules.offset + -(-schedules.size // 512) * 512
    regions = []
    for stream in np.unique(schedules.stream[planned]):
        rows = planned & (schedules.stream == stream)
        regions.append((int(schedules.offset[rows].min()), int(high[rows].max())))
        alone = [
            StepKind(
                size=kind.size,
                stream=kind.stream,
                end=np.where(kind.stream == stream, kind.end, 0),
                until=kind.until,
                times_seen=2,
            )
            for kind in kinds
        ]
        assert regions[-1][1] - regions[-1][0] <= plan_steps(alone, {}).peak_bytes
    regions.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(regions))
    assert schedules.lower_bound_bytes <= schedules.peak_bytes


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_kinds_that_begin_alike_hold_in_any_order(seed: int, streams: int) -> None:
    """They have one place for what they begin with, of which some lives on for longer in one kind than in another."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    kinds = [made_up_kind(rng, streams) for _ in range(2)]
    for _ in range(4):
        like, other = kinds[int(rng.integers(len(kinds)))], made_up_kind(rng, streams)
        common = int(rng.integers(10, max(11, len(like.size))))
        length = len(like.size[:common]) + len(other.size)
        end = np.concatenate([like.end[:common], np.where(other.end > 0, other.end + common, 0)])
        end[end > length] = length + 1
        end[:common] = np.where(like.end[:common] > len(like.size), length + 1, end[:common])
        lives_on = np.flatnonzero((rng.random(common) < 0.05) & (end[:common] > 0))
        end[lives_on] = np.maximum(end[lives_on], rng.integers(common, length, len(lives_on)))
        kinds.append(
            StepKind(
                size=np.concatenate([like.size[:common], other.size]),
                stream=np.concatenate([like.stream[:common], other.stream]),
                end=end,
                until=other.until,
                times_seen=2,
            )
        )
    schedules = plan_steps(kinds, {})
    assert check_any_order(schedules, rng, 60)


def serve(seed: int, count: int) -> tuple[Machine, list[Cycle], np.random.Generator]:
    """A machine that serves several cycles, none of which hands anything on."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    machine, cycles = Machine(), []
    for _ in range(count):
        cycle = Cycle(rng, int(rng.integers(30, 80)))
        cycle.lifespan = np.minimum(cycle.lifespan, cycle.length - np.arange(cycle.length))
        cycles.append(cycle)
    begins = [0, *np.cumsum([cycle.length for cycle in cycles])[:-1].tolist()]
    size, offset = (np.concatenate([getattr(cycle, name) for cycle in cycles]) for name in ("size", "offset"))
    arena_bytes, stream = whole_pages(max(cycle.peak for cycle in cycles)), np.zeros(len(size), np.int64)
    machine.state.arena.install(
        ArenaSchedule(arena_bytes=arena_bytes, size=size, stream=stream, offset=offset, begins=tuple(begins))
    )
    machine.state.arena.count(arena_bytes)
    machine.state.arena.serve(machine.take(arena_bytes), arena_bytes)
    return machine, cycles, rng


def one_pass(machine: Machine, cycle: Cycle, size_of: np.ndarray, skip: frozenset[int] = frozenset()) -> None:
    """One step, in which all is freed that was allocated."""
    due: dict[int, list[int]] = {}
    for i in range(cycle.length):
        for address in due.pop(i, ()):
            machine.free(address)
        if i not in skip:
            due.setdefault(i + int(cycle.lifespan[i]), []).append(machine.allocate(int(size_of[i])))
    for addresses in due.values():
        for address in addresses:
            machine.free(address)


@pytest.mark.parametrize("seed", range(5))
def test_each_kind_is_known_from_its_first_request(seed: int) -> None:
    machine, cycles, rng = serve(seed, 4)
    total = 0
    for _ in range(30):
        cycle = cycles[int(rng.integers(4))]
        one_pass(machine, cycle, cycle.size)
        total += cycle.length
    assert machine.state.record.follow.hits == total
    assert machine.state.record.iterations.misses == 0


@pytest.mark.parametrize("seed", range(5))
def test_unknown_and_shortened_steps_between_them_are_safe_and_soon_over(seed: int) -> None:
    machine, cycles, rng = serve(10 + seed, 3)
    for _ in range(15):
        one_pass(machine, cycles[0], rng.integers(513, 2 * MIB, cycles[0].length))
        cycle = cycles[int(rng.integers(3))]
        one_pass(machine, cycle, cycle.size, frozenset(rng.integers(0, cycle.length, 3).tolist()))
        for _ in range(2):
            one_pass(machine, cycles[1], cycles[1].size)
        hits = machine.state.record.follow.hits
        one_pass(machine, cycles[1], cycles[1].size)
        assert machine.state.record.follow.hits - hits == cycles[1].length
    machine.check_counts()
    assert machine.state.record.total.num_live == machine.state.record.total.allocated_bytes == 0
    machine.state.arena.drop_schedule()
    assert machine.state.arena.forget()


def test_steps_that_begin_alike_are_told_apart_where_they_part() -> None:
    rng = np.random.default_rng(60)
    machine = Machine()
    first, second = Cycle(rng, 40, num_sizes=30), Cycle(rng, 40, num_sizes=30)
    second.size[:12], second.lifespan[:12] = first.size[:12], first.lifespan[:12]
    for cycle in (first, second):
        cycle.lifespan = np.minimum(cycle.lifespan, 40 - np.arange(40))
        cycle.offset = np.cumsum(-(-cycle.size // 512) * 512) - -(-cycle.size // 512) * 512  # nothing shares a place
    peak = max(int(cycle.offset[-1] + cycle.size[-1]) for cycle in (first, second))
    size, offset = np.concatenate([first.size, second.size]), np.concatenate([first.offset, second.offset])
    stream = np.zeros(80, np.int64)
    machine.state.arena.install(
        ArenaSchedule(arena_bytes=whole_pages(peak), size=size, stream=stream, offset=offset, begins=(0, 40))
    )
    machine.state.arena.serve(machine.take(whole_pages(peak)), whole_pages(peak))
    for cycle in (first, second, second, first, second):
        one_pass(machine, cycle, cycle.size)
    assert machine.state.record.follow.hits == 5 * 40
