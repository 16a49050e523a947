"""The heap behind the entry points: no overlap, exact accounts, whatever is asked for and in whatever order."""

import numpy as np
import pytest
from programs.core_machine import FIRST_ADDRESS, KIB, MIB, Machine

from stalloc.core import constants
from stalloc.core.arena_schedule import ArenaSchedule


def random_size(rng: np.random.Generator) -> int:
    """Sizes as programs have them: a few that recur, many small ones, some of any size up to 64 MiB."""
    kind = rng.integers(4)
    if kind == 0:
        return int(rng.integers(1, 2 * KIB))
    if kind == 1:
        return int(rng.choice([512, 513, 1 * MIB, 1 * MIB + 1, 4 * MIB, 10 * MIB, 10 * MIB + 512, 20 * MIB]))
    return int(2 ** rng.uniform(0, 26))


def exercise(machine: Machine, rng: np.random.Generator, operations: int, *, streams: int = 3, held: int = 400) -> None:
    """Allocate and free at random, changing between growth and decline, segments now and then given back."""
    live: list[int] = []
    for i in range(operations):
        growing = (i // 500) % 2 == 0
        if live and (len(live) >= held or rng.random() > (0.7 if growing else 0.35)):
            machine.free(live.pop(int(rng.integers(len(live)))))
        else:
            address = machine.allocate(random_size(rng), stream=0x1000 * int(rng.integers(streams)))
            assert address, "the device has room"
            live.append(address)
        if rng.random() < 0.002:
            machine.give_back_segments()
        if rng.random() < 0.001:
            machine.state.write(allocating_persistent=int(rng.integers(2)), memory_is_short=int(rng.integers(2)))
            machine.check_counts()
    for address in live:
        machine.free(address)


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_never_overlap_and_all_comes_back(seed: int) -> None:
    print(f"seed {seed}")
    machine = Machine(lasting=bool(seed % 2))
    exercise(machine, np.random.default_rng(seed), 6000)
    machine.check_counts()
    machine.give_back_segments()
    assert (
        machine.state.record.total.num_live
        == machine.state.record.total.allocated_bytes
        == machine.state.record.total.requested_bytes
        == 0
    )
    assert machine.state.record.statistics.reserved_bytes == 0
    assert len(machine.segments) == 0


def test_freed_neighbours_merge_into_what_was_there_before() -> None:
    machine = Machine()
    addresses = [machine.allocate(3 * MIB) for _ in range(6)]
    taken = machine.taken
    for i in (1, 3, 5, 0, 4, 2):
        machine.free(addresses[i])
    whole = machine.allocate(20 * MIB - 512)
    assert machine.taken == taken, "one free block of the whole segment is there again"
    machine.free(whole)


@pytest.mark.parametrize("size", [512, 4 * KIB, 64 * KIB, MIB])
def test_what_is_freed_serves_requests_of_its_size_again(size: int) -> None:
    machine = Machine()
    addresses = [machine.allocate(size) for _ in range(64)]
    taken = machine.taken
    for _ in range(3):
        for address in addresses[::2]:
            machine.free(address)
        addresses[::2] = [machine.allocate(size) for _ in addresses[::2]]
    assert machine.taken == taken


def test_best_fit_takes_the_smallest_hole_that_is_large_enough() -> None:
    machine = Machine()
    sizes = [600 * KIB, 16 * KIB, 300 * KIB, 16 * KIB, 450 * KIB, 16 * KIB]
    addresses = [machine.allocate(size) for size in sizes]
    for i in (0, 2, 4):
        machine.free(addresses[i])
    assert machine.allocate(420 * KIB) == addresses[4]
    assert machine.allocate(290 * KIB) == addresses[2]


def test_best_fit_is_the_smallest_hole_and_of_those_the_lowest_for_holes_of_all_sizes() -> None:
    seed = 5
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    machine = Machine()
    holes = (2 ** rng.uniform(9, 29, 400)).astype(np.int64) // 512 * 512
    holes = np.concatenate([holes, rng.choice(holes, 200)])  # some sizes several times
    whole = machine.allocate(1 << 40)  # one segment, cut into holes with a live block after each
    machine.free(whole)
    addresses = {}
    for size in np.maximum(holes, 2 * MIB).tolist():
        addresses[machine.allocate(size)] = size
        assert machine.allocate(2 * MIB)
    for address in addresses:
        machine.free(address)
    for wanted in rng.permutation([*addresses.values()])[:300].tolist():
        wanted -= 512 * int(rng.integers(0, 1000))  # less than what is split off a block
        fits = [(size, address) for address, size in addresses.items() if size >= wanted]
        size, expected = min(fits)
        assert machine.allocate(wanted) == expected
        del addresses[expected]


def test_tens_of_thousands_of_live_blocks_are_all_known() -> None:
    seed = 6
    print(f"seed {seed}")
    machine = Machine()
    live = [machine.allocate(512 * (1 + i % 7)) for i in range(40_000)]
    assert len(set(live)) == len(live)
    for i in np.random.default_rng(seed).permutation(len(live)).tolist():
        machine.free(live[i])
    assert (
        machine.state.record.statistics.num_unknown_frees
        == machine.state.record.total.num_live
        == machine.state.record.total.allocated_bytes
        == 0
    )
    machine.give_back_segments()
    assert machine.taken == 0


def test_streams_never_share_segments() -> None:
    machine = Machine()
    first = machine.allocate(MIB, stream=0x10)
    machine.free(first)
    second = machine.allocate(MIB, stream=0x20)
    assert second != first
    assert machine.allocate(MIB, stream=0x10) == first


def test_what_lasts_does_not_keep_other_memory_from_going_back() -> None:
    machine = Machine()
    gone = [machine.allocate(7 * MIB) for _ in range(4)]
    for address in gone[1:]:
        machine.free(address)
    machine.state.write(allocating_persistent=1)
    kept = [machine.allocate(5 * MIB + 512 * i) for i in range(7)]
    machine.state.write(allocating_persistent=0)
    machine.free(gone[0])
    machine.give_back_segments()
    assert machine.taken <= 62 * MIB, "segments of what lasts alone, cut to its size"
    machine.free(kept.pop())
    before = machine.taken
    machine.allocate(4 * MIB)
    assert machine.taken == before, "a hole among what lasts is used before more is taken"


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize(
    "size",
    [(1 << 63) - 1, (1 << 63) - 511, 1 << 62, (1 << 54) + 4 * MIB, (1 << 50) + 512, 1 << 47, (1 << 64) - 1, 1 << 63],
)
def test_absurd_sizes_find_no_memory_and_break_nothing(size: int, lasting: bool) -> None:
    machine = Machine(lasting=lasting)
    kept = machine.allocate(4 * MIB)
    machine.free(machine.allocate(700))
    assert machine.request(0, size, 0) == 0
    machine.check_counts()
    assert machine.allocate(4 * MIB) not in (0, kept)
    assert machine.allocate(600)


def test_an_absurd_size_is_not_taken_for_an_entry_of_the_plan() -> None:
    """Keys of the schedule hold size and stream in one word: a size whose upper bits are cut off must not match."""
    machine = Machine()
    size, stream, offset = np.array([4 * MIB] * 4), np.zeros(4, np.int64), np.arange(4) * 4 * MIB
    machine.state.arena.install(ArenaSchedule(arena_bytes=16 * MIB, size=size, stream=stream, offset=offset))
    base = machine.take(16 * MIB)
    machine.state.arena.serve(base, 16 * MIB)
    assert machine.request(0, (1 << 54) + 4 * MIB, 0) == 0
    assert machine.state.record.plan.arena_live == 0


def test_zero_bytes_get_no_address_and_no_error() -> None:
    machine = Machine()
    assert machine.allocate(0) == 0
    assert machine.state.record.statistics.num_ooms == machine.state.record.total.num_live == 0
    machine.free_unchecked(0)
    assert machine.state.record.statistics.num_unknown_frees == 0


def test_unknown_and_double_frees_are_counted_and_harmless() -> None:
    rng = np.random.default_rng(5)
    machine = Machine()
    address = machine.allocate(MIB)
    inside = [address + 512, address + 7, FIRST_ADDRESS - 512, 512, -512, (1 << 63) - 1]
    for wrong in inside:
        machine.free_unchecked(wrong)
    machine.free(address)
    machine.free_unchecked(address)
    machine.free_unchecked(address)
    assert machine.state.record.statistics.num_unknown_frees == len(inside) + 2
    exercise(machine, rng, 1000)
    machine.give_back_segments()
    assert machine.state.record.statistics.reserved_bytes == machine.state.record.total.allocated_bytes == 0


def test_no_memory_leaves_what_is_live_and_what_is_free() -> None:
    machine = Machine(capacity=64 * MIB)
    held = [machine.allocate(10 * MIB) for _ in range(6)]
    assert all(held)
    assert machine.allocate(10 * MIB) == 0
    assert machine.state.record.statistics.num_ooms == 1
    machine.check_counts()
    machine.free(held[3])
    assert machine.allocate(10 * MIB)
    assert machine.state.record.statistics.num_ooms == 1


def test_before_giving_up_any_free_block_of_the_stream_will_do() -> None:
    machine = Machine(capacity=32 * MIB)
    large, small = machine.allocate(20 * MIB), machine.allocate(300)
    machine.free(large)
    machine.state.write(allocating_persistent=1)
    assert machine.allocate(15 * MIB), "the segment for what is transient is free"
    assert machine.allocate(16 * MIB, stream=0x10) == 0, "another stream's is not"
    machine.free(small)


def test_a_thousand_streams_are_told_apart_and_more_do_not_break_the_rest() -> None:
    machine = Machine()
    addresses = [machine.allocate(600, stream=512 * i) for i in range(constants.MAX_STREAMS)]
    assert all(addresses)
    late = machine.allocate(600, stream=1 << 40)
    if late:
        machine.free(late)
    for address in addresses:
        machine.free(address)
    assert machine.allocate(600, stream=512 * 5)


# --- CUDA graphs -------------------------------------------------------------------------------------------------

GRAPH = constants.PRIVATE_KINDS


def test_memory_of_a_capture_is_nobody_elses_until_the_graph_is_gone() -> None:
    rng = np.random.default_rng(11)
    machine = Machine()
    exercise(machine, rng, 500)
    machine.state.record.hot.private_kind = GRAPH
    captured = [(machine.allocate(size), size) for size in (600, 3 * MIB, 12 * MIB, 800 * KIB)]
    for address, _ in captured:
        machine.free(address)
    machine.state.record.hot.private_kind = 0
    ranges = [(address, size) for address, size in captured]
    machine.give_back_segments()
    assert machine.taken >= sum(size for _, size in captured)
    others = [machine.allocate(random_size(rng)) for _ in range(800)]
    for other, size in machine.live.items():
        assert all(other + size <= start or start + length <= other for start, length in ranges)
    for other in others:
        machine.free(other)
    machine.state.heap.unpin_pools(GRAPH)
    machine.give_back_segments()
    assert machine.taken == 0


def test_a_capture_without_memory_fails_rather_than_take_a_block_that_others_reuse() -> None:
    machine = Machine(capacity=44 * MIB)
    large, kept = machine.allocate(20 * MIB), machine.allocate(20 * MIB)
    machine.free(large)
    machine.state.record.hot.private_kind = GRAPH
    assert machine.allocate(15 * MIB) == 0, "a block of the general pool would be overwritten by replays of the graph"
    machine.state.record.hot.private_kind = 0
    assert machine.allocate(15 * MIB) == large
    assert kept


def test_a_kind_of_pool_that_served_a_graph_before_is_private_again() -> None:
    machine = Machine()
    for i in range(2):
        machine.state.record.hot.private_kind = GRAPH
        address = machine.allocate(2 * MIB)
        machine.free(address)
        machine.state.record.hot.private_kind = 0
        assert machine.give_back_segments() == 0, f"capture {i}"
        machine.state.heap.unpin_pools(GRAPH)
        assert machine.give_back_segments() == 1
