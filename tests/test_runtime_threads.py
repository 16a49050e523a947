"""Threads that hold no GIL, in the entry points at once: every block keeps what its owner wrote."""

import mmap
import threading

import numpy as np
import pytest
from programs.core_machine import KIB, MIB, Cycle, Machine, hammer

from stalloc.core import constants

RESERVE = 4 << 30  # bytes of address space; only what is used gets pages


def hammer_in_threads(
    machine: Machine, sizes: list[np.ndarray], *, order: bool, streams: list[int], operations: int = 400_000
) -> None:
    """Each thread allocates and frees its sizes on its stream; a word that another thread wrote fails the test."""
    results: dict[int, tuple[int, int]] = {}

    def work(index: int) -> None:
        seed, tag = 77 + index, index + 1
        results[index] = hammer(*machine.entries, streams[index], sizes[index], order, operations, 24, seed, tag)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    assert [foreign for foreign, _ in results.values()] == [0] * len(sizes)
    assert [failed for _, failed in results.values()] == [0] * len(sizes)
    state = machine.state
    assert (
        state.record.statistics.num_unknown_frees
        == state.record.total.num_live
        == state.record.total.allocated_bytes
        == state.record.total.requested_bytes
        == 0
    )


@pytest.fixture
def machine() -> Machine:
    """A machine whose memory is real, so that blocks can be written to."""
    return Machine(RESERVE, memory=mmap.mmap(-1, RESERVE))


@pytest.mark.parametrize("streams", [[0, 0, 0], [0, 0x10, 0x20]])
@pytest.mark.parametrize("lasting", [False, True])
def test_heap_under_three_threads(machine: Machine, lasting: bool, streams: list[int]) -> None:
    machine.state.write(allocating_persistent=int(lasting))
    rng = np.random.default_rng(1)
    sizes = [np.concatenate([rng.integers(1, 64 * KIB, 40), rng.integers(MIB, MIB + 64 * KIB, 4)]) for _ in range(3)]
    hammer_in_threads(machine, sizes, order=False, streams=streams)


@pytest.mark.parametrize("order", [True, False])
def test_a_plan_under_three_threads_that_all_follow_it(machine: Machine, order: bool) -> None:
    """Each thread follows the schedule on its own, so together they deviate from it all the time."""
    rng = np.random.default_rng(2)
    cycle = Cycle(rng, 60)
    cycle.size[:] = cycle.size // 32  # small enough to write to every granule
    machine.install(cycle)
    hammer_in_threads(machine, [cycle.size] * 3, order=order, streams=[0, 0, 0])
    state = machine.state
    assert state.record.plan.arena_live == 0
    assert state.record.follow.hits > 1000
    assert state.record.iterations.conflicts + state.record.iterations.misses > 1000


def test_plans_come_and_go_while_threads_run(machine: Machine) -> None:
    rng = np.random.default_rng(3)
    cycle = Cycle(rng, 40)
    cycle.size[:] = cycle.size // 32
    enough, whole, switches = threading.Event(), threading.Event(), 0

    def work() -> None:
        while not enough.is_set():
            hammer_in_threads(machine, [cycle.size] * 2, order=True, streams=[0, 0], operations=100_000)
        whole.set()

    worker = threading.Thread(target=work)
    worker.start()
    while switches < 50 and worker.is_alive():
        if machine.state.record.plan.arena_bytes == 0:
            machine.install(cycle)
            switches += 1
        else:
            machine.state.arena.drop_schedule()
            base = machine.state.record.plan.arena
            if machine.state.arena.forget():
                machine.give_back(base)
        machine.give_back_segments()
    enough.set()
    worker.join()
    assert whole.is_set()
    assert switches == 50


def test_recording_in_threads_holds_every_event(machine: Machine) -> None:
    machine.state.write(recording=1)
    sizes = [np.array([600 * (index + 1)]) for index in range(3)]
    hammer_in_threads(machine, sizes, order=True, streams=[0, 0, 0])
    events = machine.state.recorded()
    action = events["action"] & 0xFF
    assert (action == constants.ACTION_ALLOC).sum() == machine.state.record.total.num_allocs
    assert (
        action == constants.ACTION_FREE_COMPLETED
    ).sum() == machine.state.record.total.num_allocs - machine.state.record.total.num_live
    assert (np.diff(events["time_ns"]) >= 0).all()
    live: set[int] = set()
    for what, address in zip(action, events["address"], strict=True):
        if what == constants.ACTION_ALLOC:
            assert address not in live
            live.add(int(address))
        elif what == constants.ACTION_FREE_COMPLETED:
            live.remove(int(address))
    assert not live
