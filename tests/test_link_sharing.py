"""Ranks on one link to the host: who swaps what and when, and two processes whose copies take turns."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from warm_programs import told_by_file

from stalloc.cost.disjoint_sets import DisjointSets
from stalloc.cost.swapping.layers import LinkCost
from stalloc.cost.swapping.recorded_model import SavedTensor, SavedTensors
from stalloc.cost.swapping.tmo import LinkSharing, RanksSwap, share_link
from stalloc.techniques.offload_order import OffloadOrder

MIB = 1 << 20
PROGRAM = Path(__file__).parent / "programs" / "link_turns.py"


def saved_at_random(seed: int, count: int) -> SavedTensors:
    """A forward pass that saves, and a backward pass that needs what was saved last first."""
    rng = random.Random(seed)
    forward = [rng.random() / 1e3 for _ in range(count)]
    backward = [2 * one for one in reversed(forward)]
    saved = list(itertools.accumulate(forward))
    needed = list(itertools.accumulate(backward, initial=saved[-1]))
    tensors = [
        SavedTensor(rng.randint(1, 9) * MIB, saved[number], needed[count - 1 - number], needed[count - number])
        for number in range(count)
    ]
    return SavedTensors(tuple(tensors), needed[-1])


def alike(count: int) -> SavedTensors:
    """Layers of one size."""
    tensors = [SavedTensor(8 * MIB, at + 1.0, 3.0 * count - 2 * at - 2, 3.0 * count - 2 * at) for at in range(count)]
    return SavedTensors(tuple(tensors), 3.0 * count)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("ratio", [0.125, 0.4, 0.5, 0.75, 1.0])
def test_as_few_ranks_as_can_be_swap_a_tensor_and_none_more_than_its_share(num_ranks: int, ratio: float) -> None:
    rng = random.Random(num_ranks)
    sets, total, left = DisjointSets(ratio, num_ranks), 0, [0] * num_ranks
    for _ in range(200):
        size_bytes = rng.randint(1, 9)
        total += size_bytes
        takers = sets.takers(size_bytes)
        for rank in takers:
            sets.left(rank, size_bytes)
            left[rank] += size_bytes
        assert len(takers) == len(set(takers)) <= -(-ratio * num_ranks // 1)
        assert max(left) <= ratio * total
    assert min(left) >= ratio * total - 3 * 9, "each about its share"


def test_ranks_decide_the_same_without_a_word_between_them() -> None:
    sizes = [random.Random(3).randint(1, 9) for _ in range(60)]
    orders = [OffloadOrder(1 / 3, 4, rank, 3) for rank in range(3)]
    for _ in range(2):
        for number, size_bytes in enumerate(sizes):
            wanted = [order.is_wanted(size_bytes) for order in orders]
            assert sum(wanted) <= 1
            for order, is_wanted in zip(orders, wanted, strict=True):
                if is_wanted:
                    order.leaves(number, size_bytes)
        for order in orders:
            order.needed(len(sizes) - 1)


def check(saved: SavedTensors, told: RanksSwap, budget_bytes: int, link: LinkCost) -> None:
    """No way of the link carries two copies at once, each comes in its order, and no device holds too much."""
    for way in (False, True):
        slots = sorted((slot.begin, slot.end) for slot in told.slots if slot.to_device is way)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(slots))
    for rank, chosen in enumerate(told.sets):
        mine = [slot for slot in told.slots if slot.rank == rank]
        out = {slot.tensor: slot for slot in mine if not slot.to_device}
        back = {slot.tensor: slot for slot in mine if slot.to_device}
        assert sorted(out) == sorted(chosen)
        assert set(back) <= set(out)
        assert len(mine) == len(out) + len(back), "each once"
        changes = []  # what is held at the least: a rank that is late saves later, and needs later
        for number, one in enumerate(saved.tensors):
            if number in out:
                slot = out[number]
                assert slot.begin >= one.saved - 1e-9
                assert slot.end - slot.begin == pytest.approx(link.seconds(one.size_bytes))
                if number in back:
                    assert back[number].begin >= slot.end
                    assert back[number].end <= one.needed + told.waited_seconds + 1e-9
                    changes += [(slot.begin, one.size_bytes), (slot.end, -one.size_bytes)]
                    changes += [(back[number].begin, one.size_bytes), (back[number].end, -one.size_bytes)]
        held = 0
        for _, change in sorted(changes):
            held += change
            assert held <= budget_bytes
    assert told.seconds >= saved.seconds + told.waited_seconds - 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_the_link_never_carries_more_than_it_can_and_devices_hold_no_more_than_their_budget(seed: int) -> None:
    saved = saved_at_random(seed, 6 + 3 * seed)
    for share, num_ranks, rate in itertools.product((0.3, 0.6, 0.9), (1, 2, 5), (2e9, 2e10, 1e15)):
        budget_bytes = max(int(share * saved.peak_bytes()), saved.at_once_bytes)
        link = LinkCost(rate)
        found = share_link(saved, budget_bytes, num_ranks, link)
        assert found is not None
        check(saved, found.in_turn, budget_bytes, link)
        assert found.in_turn.most_at_once <= 1
        assert found.at_once.most_at_once in (0, num_ranks)
        for told in (found.at_once, found.in_turn):
            for chosen in told.sets:  # what stays, and what backward needs at once, has room
                assert saved.peak_bytes(without=chosen) <= budget_bytes
        if num_ranks == 1:
            assert found.in_turn == found.at_once
        if rate == 1e15 and share == 0.9:
            assert found.in_turn.waited_seconds <= 4e-5 * len(saved.tensors) * num_ranks, "a copy takes 10 µs to begin"


def shared(count: int, budget_bytes: int, num_ranks: int, rate: float) -> LinkSharing:
    found = share_link(alike(count), budget_bytes, num_ranks, LinkCost(rate))
    assert found is not None
    return found


@pytest.mark.parametrize("copy_seconds", [0.6, 1.2, 4.0])
def test_ranks_wait_no_longer_in_turn_than_all_at_once(copy_seconds: float) -> None:
    """A layer computes for one second, forward."""
    rate = 8 * MIB / 0.8 / copy_seconds
    for num_ranks, budget in itertools.product((2, 4), (96, 64, 24)):
        found = shared(16, budget * MIB, num_ranks, rate)
        assert found.in_turn.waited_seconds <= found.at_once.waited_seconds
        assert found.at_once.common_bytes == found.at_once.swapped_bytes > 0
    assert found.in_turn.waited_seconds < 0.75 * found.at_once.waited_seconds


def test_ranks_that_swap_a_part_each_have_other_tensors() -> None:
    found = shared(16, 96 * MIB, 2, 8 * MIB / 0.8 / 2)
    assert found.in_turn.common_bytes == 0
    assert found.in_turn.waited_seconds < found.at_once.waited_seconds


def test_what_has_room_is_not_swapped_and_what_has_none_is_none() -> None:
    found = shared(4, 32 * MIB, 4, 1e9)
    assert found.in_turn == found.at_once
    assert (found.in_turn.moved_bytes, found.in_turn.seconds, found.in_turn.most_at_once) == (0, 12.0, 0)
    assert share_link(alike(4), 8 * MIB - 1, 4, LinkCost(1e9)) is None
    assert shared(4, 8 * MIB, 4, 1e9).in_turn.swapped_bytes == 4 * 8 * MIB


@pytest.fixture(scope="module")
def found(cuda_torch: Any, cupy_installed: Any) -> dict[str, Any]:
    told: dict[str, Any] = told_by_file(PROGRAM)
    return told


def test_two_processes_copy_one_at_a_time_each_way_and_take_turns(found: dict[str, Any]) -> None:
    first, second, order = found["both"]
    for told, each_step in ((first, 4), (second, 3)):  # of eight
        assert (told["overlaps"], told["wrong"], told["without"]) == (0, 0, 0)
        assert told["left_bytes"] == 6 * each_step * 4 * (1 << 16)
        assert told["copies"] > 6 * each_step, "and some come back"
    assert order.count("0") == first["copies"]
    assert order.count("01") >= 4, "nobody waits until the other is done"


def test_a_process_that_dies_in_its_turn_holds_nobody_up(found: dict[str, Any]) -> None:
    first, second, order = found["one dies"]
    assert first is None
    assert order.count("0") >= 5, "a copy the other way may have begun"
    assert (second["wrong"], second["without"]) == (0, 0)


def test_a_process_that_hangs_in_its_turn_is_not_waited_for_longer_than_was_asked(found: dict[str, Any]) -> None:
    first, second, order = found["one hangs"]
    assert first is None
    assert order.count("0") >= 5, "a copy the other way may have begun"
    assert second["wrong"] == 0
    assert 18 <= second["without"] <= second["copies"] == 24, "all those out at the least"


def test_losses_gradients_and_parameters_are_the_programs_own_to_the_last_bit(found: dict[str, Any]) -> None:
    assert found["equal"]


def test_a_link_that_cannot_be_shared_is_refused_in_a_sentence(found: dict[str, Any]) -> None:
    assert found["no file"] == (
        "/proc/none/link cannot be locked (No such file or directory): name a file that can be written."
    )
    assert found["no rank"] == "rank 2 of 2 is not possible: give 0 to 1."
