"""Programs that deviate from their plans in every way, while plans come and go: nothing overlaps, all comes back.

`PROGRAMS=100000 pytest tests/test_runtime_fuzz.py` runs more of them.
"""

import os

import numpy as np
import pytest
from programs.core_machine import Cycle, Machine, Owners
from programs.cycle_program import Program

PROGRAMS = int(os.environ.get("PROGRAMS", "60"))
GROUP = 20


def deviate(seed: int) -> tuple[int, int]:
    """One program of a few passes, each with deviations of a random rate, then three without; hits and misses."""
    rng = np.random.default_rng(seed)
    streams = int(rng.integers(1, 4))
    cycle = Cycle(rng, int(rng.integers(20, 60)), streams=streams, num_sizes=int(rng.integers(3, 40)))
    machine = Machine(owners=Owners())
    machine.install(cycle)
    assert all(machine.allocate(1, stream) for stream in range(streams))
    program = Program(machine, cycle, rng)
    for _ in range(int(rng.integers(2, 6))):
        places = np.flatnonzero(rng.random(cycle.length) < rng.choice([0.02, 0.1, 0.5]))
        program.one_pass({int(at): int(rng.integers(5)) for at in places})
        if rng.random() < 0.3:  # the streams of the whole pass change places
            cycle.stream = (cycle.stream + 1) % streams
        if rng.random() < 0.2:
            machine.give_back_segments()
        if rng.random() < 0.15:
            if machine.state.record.plan.arena_bytes:
                machine.dissolve()
            else:
                machine.install(cycle)
    served = (
        machine.state.record.follow.hits,
        machine.state.record.iterations.misses + machine.state.record.iterations.conflicts,
    )
    program.end()
    machine.check_counts()
    if machine.state.record.plan.arena_bytes:
        assert machine.dissolve(), "nothing keeps an arena"
    for address in machine.live.addresses():
        machine.free(address)
    machine.give_back_segments()
    assert (
        machine.state.record.statistics.reserved_bytes
        == machine.state.record.total.allocated_bytes
        == machine.state.record.total.requested_bytes
        == 0
    )
    assert machine.state.record.statistics.num_unknown_frees == 0
    assert len(machine.segments) == 0
    return served


@pytest.mark.parametrize("group", range(-(-PROGRAMS // GROUP)))
def test_random_deviations_never_overlap_and_all_comes_back(group: int) -> None:
    print(f"seeds from {group * GROUP}")
    hits, misses = np.sum([deviate(group * GROUP + i) for i in range(GROUP)], axis=0)
    assert hits > 0
    assert misses > 0
