"""Memory that passes between streams: every new owner runs after the last one, whatever the program does."""

import dataclasses

import numpy as np
import pytest
from programs.core_machine import Cycle
from programs.cycle_program import DROP, INSERT, LINGER, RESIZE, SWAP, Program
from programs.ordered_machine import Checked

from stalloc.core import frees
from stalloc.lifespans.repeating_schedule import Schedule
from stalloc.planner import Plan, plan_schedule, validate


def shared_plan(cycle: Cycle) -> Plan:
    """The plan of a cycle whose streams share the arena."""
    start = np.arange(cycle.length)
    schedule = Schedule(
        size=cycle.size,
        stream=cycle.stream,
        start=start,
        end=start + cycle.lifespan,
        planned=np.ones(cycle.length, bool),
        row=start,
        num_prologue=0,
        cycle_start=0,
        cycle_end=cycle.length,
        period_requests=cycle.length,
        covered_requests=2 * cycle.length,
        minimum_size=513,
    )
    plan = plan_schedule(schedule, streams="share")
    assert validate(plan, handovers=True).ok
    return plan


def start(seed: int, length: int = 60, streams: int = 3) -> tuple[Checked, Program, Plan]:
    """A machine that serves a random cycle of several streams from one region, the program, the plan."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    cycle = Cycle(rng, length, streams=streams)
    cycle.size = -(-cycle.size // 512) * 512  # the plan lists handovers of bytes, the runtime hands out units of 512
    machine, plan = Checked(streams), shared_plan(cycle)
    assert len(plan.handover_later) > 5
    machine.follow(cycle, plan)
    assert [machine.allocate(1, stream) > 0 for stream in range(streams)]
    return machine, Program(machine, cycle, rng), plan


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_waits_exactly_where_the_plan_hands_over(seed: int) -> None:
    machine, program, plan = start(seed)
    for _ in range(3):
        program.one_pass()
    assert machine.state.record.iterations.misses + machine.state.record.iterations.conflicts == 0
    machine.driver.calls.clear()
    before = machine.state.record.driver.num_waits
    program.one_pass()
    calls = machine.driver.calls
    waits = [stream for what, stream, _ in calls if what == "wait"]
    records = [stream for what, stream, _ in calls if what == "record"]
    assert len(waits) == len(plan.handover_later) == machine.state.record.driver.num_waits - before
    assert sorted(waits) == sorted(plan.schedule_stream[plan.handover_later].tolist())
    assert len(records) == len(np.unique(plan.handover_earlier)), "one for each block that is handed on, at its free"


@pytest.mark.parametrize("seed", range(6))
def test_no_stream_overtakes_another_when_the_program_deviates(seed: int) -> None:
    machine, program, _ = start(10 + seed, streams=2 + seed % 3)
    rng = np.random.default_rng(seed)
    for _ in range(25):
        where = rng.integers(0, program.cycle.length, 6)
        what = rng.choice([INSERT, DROP, RESIZE, SWAP, LINGER], 6)
        program.one_pass(dict(zip(where.tolist(), what.tolist(), strict=True)))
    assert machine.state.record.follow.hits > 15 * program.cycle.length
    machine.check_counts()
    program.end()


@pytest.mark.parametrize("failing", ["record", "wait", "capture"])
def test_what_cannot_be_secured_is_served_from_the_heap(failing: str) -> None:
    machine, program, plan = start(20)
    for _ in range(3):
        program.one_pass()
    machine.driver.fails.add(failing)
    for _ in range(2):
        program.one_pass()
    assert machine.state.record.iterations.conflicts > 0
    machine.driver.fails.clear()
    for _ in range(3):
        program.one_pass()
    conflicts = machine.state.record.iterations.conflicts
    program.one_pass()
    assert machine.state.record.iterations.conflicts == conflicts, "all is as before"
    assert len(plan.handover_later)
    machine.check_counts()
    program.end()


def test_a_block_that_was_used_by_other_streams_still_is_handed_over_with_a_wait() -> None:
    machine, program, plan = start(30)
    program.one_pass()
    live = [address for address, size in machine.live.items() if size > 512]
    for address in live:
        machine.share(address, (machine.stream_of(address) + 1) % 3)
    program.one_pass()
    assert machine.state.record.hot.num_deferred == len(live)
    machine.driver.synchronize()
    assert frees.poll(machine.state.address, 0) == frees.KNOWN
    assert machine.state.record.hot.num_deferred == 0
    for _ in range(3):
        program.one_pass()
    machine.check_counts()
    assert machine.state.record.driver.num_waits > len(plan.handover_later)


@pytest.mark.parametrize("seed", range(4))
def test_an_arena_that_streams_share_is_parted_when_its_plan_goes(seed: int) -> None:
    machine, program, _ = start(40 + seed)
    for _ in range(3):
        program.one_pass({5: INSERT, 20: LINGER})
    base = machine.state.record.plan.arena
    machine.state.arena.drop_schedule()
    machine.state.arena.end_sharing()
    machine.driver.synchronize()
    bases = machine.state.arena.dissolve()
    assert bases
    end = base + machine.segments.remove(base)
    for part, following in zip(bases, [*bases[1:], end], strict=True):
        machine.segments.add(part, following - part)
    for _ in range(5):
        program.one_pass()
    machine.check_counts()
    program.end()
    for address in machine.live.addresses():
        machine.free(address)
    machine.give_back_segments()
    assert machine.state.record.statistics.reserved_bytes == 0


def test_an_arena_that_streams_share_is_parted_although_it_lacks_memory() -> None:
    rng = np.random.default_rng(50)
    cycle, machine = Cycle(rng, 60, streams=3), Checked(3)
    cycle.size = -(-cycle.size // 512) * 512
    machine.follow(cycle, shared_plan(cycle), has_memory=False)
    machine.state.arena.drop_schedule()
    machine.state.arena.end_sharing()
    assert machine.state.arena.dissolve()
    assert machine.state.record.statistics.reserved_bytes == 0, "nothing of it ever had memory"


def test_a_plan_whose_hand_over_is_missing_is_refused() -> None:
    plan = shared_plan(Cycle(np.random.default_rng(50), 60, streams=3))
    missing = dataclasses.replace(
        plan, handover_earlier=plan.handover_earlier[1:], handover_later=plan.handover_later[1:]
    )
    verdict = validate(missing, handovers=True)
    assert (verdict.ok, verdict.reason) == (False, "shared-by-streams")
