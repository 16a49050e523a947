"""The arena: dissolved into segments between plans, lent while a plan is in force."""

import numpy as np
import pytest
from programs.core_machine import KIB, MIB, Cycle, Machine, Owners
from programs.cycle_program import DROP, INSERT, Program

from stalloc.core import constants
from stalloc.core.arena_schedule import ArenaSchedule


def cycles(seed: int, streams: int = 1) -> tuple[Machine, Program, Cycle, np.random.Generator]:
    """A machine that serves a random cycle, its program, and another cycle of the same kind."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    cycle, other = Cycle(rng, 60, streams=streams), Cycle(rng, 60, streams=streams)
    machine = Machine(owners=Owners())
    machine.install(cycle)
    assert [machine.allocate(1, stream) > 0 for stream in range(streams)]
    return machine, Program(machine, cycle, rng), other, rng


@pytest.mark.parametrize("streams", [1, 3])
def test_an_arena_that_is_given_up_serves_on_as_a_segment(streams: int) -> None:
    machine, program, _, _ = cycles(1, streams)
    for _ in range(3):
        program.one_pass({7: INSERT, 30: DROP})
    live, taken = machine.state.record.total.num_live, machine.taken
    assert len(machine.dissolve()) == streams
    assert machine.state.record.plan.arena_bytes == machine.state.record.plan.arena_live == 0
    assert machine.state.record.total.num_live == live
    machine.check_counts()
    for _ in range(5):
        program.one_pass()
    assert machine.taken <= taken + 20 * MIB * streams, "what is free in it is used"
    program.end()
    for address in machine.live.addresses():
        machine.free(address)
    machine.give_back_segments()
    assert machine.state.record.statistics.reserved_bytes == 0
    assert len(machine.segments) == 0


def test_what_lives_in_a_dissolved_arena_keeps_all_of_it_from_the_device() -> None:
    machine, program, _, _ = cycles(2, 2)
    program.one_pass()
    machine.dissolve()
    kept = min(address for address, size in machine.live.items() if size > 512)
    for address in machine.live.addresses():
        if address != kept:
            machine.free(address)
    machine.give_back_segments()
    assert len(machine.segments) == 2, "both parts: they came as one"
    machine.free(kept)
    machine.give_back_segments()
    assert machine.state.record.statistics.reserved_bytes == 0


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_plans_that_come_and_go_keep_every_block_apart(seed: int, streams: int) -> None:
    machine, program, other, rng = cycles(100 + seed, streams)
    programs, served = [program, Program(machine, other, rng)], 0
    for _ in range(40):
        chosen = programs[int(rng.integers(2))]
        deviations = {int(at): int(rng.integers(5)) for at in np.flatnonzero(rng.random(60) < 0.05)}
        chosen.one_pass(deviations)
        what = rng.integers(6)
        if what == 0 and machine.state.record.plan.arena_bytes:
            assert len(machine.dissolve()) == streams
        elif what == 1 and not machine.state.record.plan.arena_bytes:
            machine.give_back_segments()
            machine.install(chosen.cycle)
            served += 1
    print(f"{served} plans came")
    assert served
    for chosen in programs:
        chosen.end()
    machine.check_counts()
    if machine.state.record.plan.arena_bytes:
        machine.dissolve()
    for address in machine.live.addresses():
        machine.free(address)
    machine.give_back_segments()
    assert machine.state.record.statistics.reserved_bytes == 0


def test_an_extra_request_borrows_from_the_arena_and_the_plan_goes_on() -> None:
    machine, program, _, _ = cycles(40)
    program.one_pass()
    taken, misses = machine.taken, machine.state.record.iterations.misses
    program.one_pass({20: INSERT})
    assert machine.state.record.dynamic.num_lent == 1
    assert machine.state.record.iterations.misses == misses + 1
    assert machine.taken == taken
    for _ in range(3):
        program.one_pass()
    assert machine.state.record.iterations.misses == misses + 1
    hits = machine.state.record.follow.hits
    program.one_pass()
    assert machine.state.record.follow.hits == hits + 60


def test_a_lease_is_of_the_stream_that_asked_for_it() -> None:
    """What other streams have used may still be in use by their kernels."""
    rng = np.random.default_rng(50)
    cycle = Cycle(rng, 60, streams=2)
    machine = Machine()
    base = machine.install(cycle)
    assert [machine.allocate(1, stream) > 0 for stream in range(2)]
    program = Program(machine, cycle, rng)
    for _ in range(2):
        program.one_pass()
    border = int(cycle.offset[cycle.stream == 1].min())
    lent = 0
    for _ in range(200):
        stream = int(rng.integers(2))
        address = machine.allocate(int(rng.integers(513, 2 * MIB)), stream)
        if base <= address < base + machine.state.record.plan.arena_bytes:
            lent += 1
            assert (address - base >= border) == (stream == 1)
    assert lent
    assert machine.state.record.statistics.num_unknown_frees == 0
    assert machine.state.record.hot.mode == constants.MODE_PLANNED


def test_a_planned_request_whose_place_is_taken_does_not_take_the_place_of_another() -> None:
    """Its stand-in has to last as long as the plan says, or one late free would displace others pass after pass."""
    cycle = Cycle(np.random.default_rng(60), 16)
    long, other = 0, 8  # the one whose place is taken; the one whose place is idle just long enough to look tempting
    cycle.size[:] = MIB
    cycle.size[[long, other]] = 4 * MIB, 6 * MIB
    cycle.lifespan[:] = 1
    cycle.lifespan[[long, other]] = 12, 4
    cycle.offset[cycle.size == MIB] = np.arange(10, 24) * MIB
    cycle.offset[[long, other]] = 6 * MIB, 0
    cycle.peak = 24 * MIB
    machine = Machine()
    machine.install(cycle)
    program = Program(machine, cycle, np.random.default_rng(60))
    cycle.lifespan[long] = 20
    program.one_pass()
    cycle.lifespan[long] = 12
    conflicts = machine.state.record.iterations.conflicts
    program.one_pass()
    assert machine.state.record.iterations.conflicts == conflicts + 1
    program.one_pass()
    assert machine.state.record.iterations.conflicts == conflicts + 1


def test_what_the_plan_does_not_know_lies_side_by_side_in_what_it_borrows() -> None:
    """Blocks that are smaller than the places that are idle would leave the end of each to nobody."""
    cycle = Cycle(np.random.default_rng(70), 16)
    cycle.size[:], cycle.lifespan[:] = 6 * MIB, 16
    cycle.offset[:] = 6 * MIB * np.arange(16)
    cycle.peak = 96 * MIB
    machine = Machine()
    machine.install(cycle)
    program = Program(machine, cycle, np.random.default_rng(70))
    for _ in range(2):
        program.one_pass()
    program.end()
    assert machine.allocate(1) > 0
    for size in range(40):
        machine.free(machine.allocate(2 * MIB + 512 * size))  # from here on it does something else
    taken = machine.taken
    for size in range(25):
        assert machine.allocate(15 * MIB // 4 - 512 * size) > 0
    assert machine.taken == taken
    machine.check_counts()
    for address in machine.live.addresses():
        machine.free(address)
    for _ in range(2):
        hits = machine.state.record.follow.hits
        program.one_pass()
    assert machine.state.record.follow.hits == hits + 16
    machine.check_counts()


def test_places_of_little_requests_are_lent_where_nothing_else_is_left() -> None:
    """The device has room for the plan alone; elsewhere a large request would not displace so many."""
    size = np.full(128, 32 * KIB)
    machine = Machine(capacity=4 * MIB)
    machine.install(ArenaSchedule(arena_bytes=4 * MIB, size=size, stream=size * 0, offset=np.cumsum(size) - size))
    held = [machine.allocate(32 * KIB) for _ in range(128)]
    assert machine.state.record.follow.hits == 128
    for address in held:
        machine.free(address)
    for _ in range(20):
        stray = machine.allocate(2 * MIB)
        assert stray, "all of it is idle"
        machine.free(stray)
    assert all(machine.allocate(32 * KIB) for _ in range(128))
    assert machine.state.record.follow.hits == 256
    machine.check_counts()
