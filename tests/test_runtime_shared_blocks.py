"""Blocks that other streams use: nobody gets one before every stream that used it is done with it."""

import numpy as np
import pytest
from programs.core_machine import MIB, Cycle
from programs.cycle_program import DROP, INSERT, LINGER, RESIZE, SWAP, Program
from programs.ordered_machine import Checked

from stalloc.core import frees
from stalloc.core.constants import POLL


def poll(machine: Checked) -> int:
    """Free what the driver says is over; what the poll says of it."""
    return int(frees.poll(machine.state.address, 0))


def freed_block(machine: Checked, *streams: int) -> int:
    """A block of stream 0 that these streams use, freed; where it was."""
    address = machine.allocate(3 * MIB)
    for stream in streams:
        machine.share(address, stream)
        machine.share(address, stream)
    machine.free(address)
    return address


def is_free(machine: Checked, address: int) -> bool:
    """Whether the next block of that size is handed out there."""
    taken = machine.allocate(3 * MIB)
    machine.free(taken)
    return taken == address


def test_a_block_waits_for_every_stream_that_used_it() -> None:
    machine = Checked(4)
    address = freed_block(machine, 1, 2, 3)
    assert sorted(stream for what, stream, _ in machine.driver.calls if what == "record") == [1, 2, 3], "once for each"
    for stream in (2, 1, 3):
        assert poll(machine) == frees.KNOWN
        assert machine.state.record.hot.num_deferred == 1
        assert not is_free(machine, address)
        machine.driver.finish(stream)
    poll(machine)
    assert machine.state.record.hot.num_deferred == 0
    assert is_free(machine, address)
    machine.check_counts()


def test_what_a_stream_is_given_after_the_free_is_not_waited_for() -> None:
    machine = Checked(2)
    address = freed_block(machine, 1)
    machine.driver.finish(1)
    machine.driver.work(1)
    poll(machine)
    assert is_free(machine, address)


def test_the_stream_that_a_block_was_asked_for_on_and_foreign_addresses_need_no_event() -> None:
    machine = Checked(2)
    address = freed_block(machine, 0)
    machine.state.share(12345, 16)
    assert machine.state.record.hot.num_deferred == 0
    assert machine.driver.calls == []
    assert is_free(machine, address)


def test_blocks_are_freed_without_python_while_the_program_goes_on() -> None:
    machine = Checked(2)
    addresses = [freed_block(machine, 1) for _ in range(50)]
    assert machine.state.record.hot.num_deferred == len(set(addresses)) == 50
    machine.driver.finish(1)
    machine.asked.clear()
    for _ in range(64):
        machine.free(machine.allocate(MIB))
    assert machine.state.record.hot.num_deferred == 0
    assert POLL not in machine.asked


def test_a_stream_that_is_held_up_holds_up_no_other() -> None:
    machine = Checked(3)
    waiting = [freed_block(machine, 1) for _ in range(20)]
    address = freed_block(machine, 2)
    machine.driver.finish(2)
    machine.driver.calls.clear()
    poll(machine)
    assert is_free(machine, address)
    assert machine.state.record.hot.num_deferred == len(waiting)
    assert len(machine.driver.calls) == 2, "the first block of each stream says enough of its others"


@pytest.mark.parametrize("failing", ["record", "query"])
def test_what_the_driver_refuses_is_tried_again(failing: str) -> None:
    machine = Checked(2)
    machine.driver.fails.add(failing)
    address = freed_block(machine, 1)
    machine.driver.finish(1)
    assert poll(machine) == frees.UNKNOWN
    assert not is_free(machine, address)
    machine.driver.fails.clear()
    poll(machine)
    poll(machine)
    assert machine.state.record.hot.num_deferred == 0
    assert is_free(machine, address)


def test_a_stream_for_which_no_event_can_be_recorded_is_known_to_be_done_when_it_is_idle() -> None:
    machine = Checked(3)
    recorded = freed_block(machine, 2)
    machine.driver.fails.add("record")
    before = freed_block(machine, 1)
    num_idle = machine.state.record.shared.num_unrecorded
    machine.driver.finish(1)
    after = freed_block(machine, 1)
    assert machine.state.awaited()[1] == [16]
    assert frees.poll(machine.state.address, num_idle) == frees.UNKNOWN
    assert machine.state.record.hot.num_deferred == 2, "of the other streams' work nothing is known"
    assert is_free(machine, before)
    assert len({recorded, before, after}) == 3


@pytest.mark.parametrize("failing", ["record", "query"])
def test_a_stream_that_was_not_known_to_be_needed_is_not_taken_for_idle(failing: str) -> None:
    """The event of a block fails after it was seen which streams are to be looked at."""
    machine = Checked(2)
    seen = []

    def look() -> None:
        if not seen:
            seen.append((machine.state.record.shared.num_unrecorded, machine.state.awaited()[1]))

    machine.driver.before_record = look
    machine.driver.fails.add(failing)
    address = freed_block(machine, 1)
    [(num_idle, streams)] = seen
    assert streams == []
    for before in (0, num_idle):
        assert frees.poll(machine.state.address, before) == frees.UNKNOWN
    assert machine.state.record.hot.num_deferred == 1
    assert not is_free(machine, address)


def test_events_are_neither_recorded_nor_asked_while_a_graph_is_captured() -> None:
    machine = Checked(2)
    address = machine.allocate(3 * MIB)
    machine.share(address, 1)
    machine.state.record.hot.private_kind = 1 << 50
    machine.free(address)
    inside = [machine.allocate(MIB) for _ in range(40)]
    assert machine.driver.calls == []
    machine.state.record.hot.private_kind = 0
    assert poll(machine) == frees.KNOWN
    assert machine.state.record.hot.num_deferred == 1
    machine.driver.finish(1)
    poll(machine)
    assert is_free(machine, address)
    for one in inside:
        machine.free(one)


@pytest.mark.parametrize("seed", range(6))
def test_no_stream_gets_what_another_still_uses_on_a_plan_or_beside_it(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(100 + seed)
    cycle = Cycle(rng, 60, streams=1 + seed % 3)
    machine = Checked(3)
    machine.install(cycle)
    program = Program(machine, cycle, rng)
    for _ in range(30):
        where = rng.integers(0, cycle.length, 6)
        what = rng.choice([INSERT, DROP, RESIZE, SWAP, LINGER], 6)
        program.one_pass(dict(zip(where.tolist(), what.tolist(), strict=True)))
        for address in machine.live.addresses():
            for stream in rng.permutation(3)[: int(rng.integers(0, 3))].tolist():
                machine.share(address, stream)
        machine.driver.finish(int(rng.integers(3)))
    assert machine.state.record.follow.hits > 3 * cycle.length
    program.end()
    machine.driver.synchronize()
    poll(machine)
    machine.check_counts()
    assert machine.state.record.hot.num_deferred == machine.state.record.total.allocated_bytes == 0
