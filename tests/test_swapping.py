"""Parameters that come and go: what published ways choose is the best of all there is, tried one by one."""

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from stalloc.cost.swapping import lohan
from stalloc.cost.swapping.angel_ptm import lay_out, replay_pages
from stalloc.cost.swapping.elixir import replayed, search_chunks, usual_sizes
from stalloc.cost.swapping.harmony import pack_layers, pass_cost
from stalloc.cost.swapping.layers import LayerCost, LinkCost, Stretch, cut_best, least_budget
from stalloc.cost.swapping.mobius import Pipeline, contention, cross_mapping, partition_stages, step_seconds
from stalloc.cost.swapping.patrickstar import in_chunks, least_capacity, replay_chunks
from stalloc.cost.swapping.recorded_model import ModelData, Moment
from stalloc.cost.swapping.smart_infinity import update_near_storage
from stalloc.cost.swapping.stronghold import smallest_window, stall_seconds
from stalloc.errors import BadInputError

MIB = 1 << 20
LINK = LinkCost(16e9)


def fewest_moves(moments: tuple[Moment, ...], capacity: int) -> int:
    """The least that any order of evictions moves, both ways: everything that can go is tried."""

    @functools.cache
    def rest(now: int, here: frozenset[int]) -> int:
        if now == len(moments):
            return 0
        needed = frozenset(moments[now])
        missing, surplus = needed - here, max(0, len(here | needed) - capacity)
        ways = itertools.combinations(sorted(here - needed), surplus)
        return len(missing) + surplus + min(rest(now + 1, (here - set(gone)) | needed) for gone in ways)

    return rest(0, frozenset())


def random_moments(seed: int, chunks: int, count: int) -> tuple[Moment, ...]:
    rng = random.Random(seed)
    return tuple(tuple(sorted(rng.sample(range(chunks), rng.choice((1, 1, 2, 3))))) for _ in range(count))


@pytest.mark.parametrize("seed", range(12))
def test_belady_moves_as_little_as_any_order_of_evictions(seed: int) -> None:
    moments = random_moments(seed, 6, 14)
    for capacity in range(least_capacity(moments), 7):
        assert replay_chunks(moments, capacity, "belady").chunks == fewest_moves(moments, capacity)


@pytest.mark.parametrize("seed", range(4))
def test_belady_moves_no_more_than_least_recently_used_on_every_budget(seed: int) -> None:
    chunks = in_chunks(random_model(seed, 60), 8 * MIB)
    moments, moved = chunks.with_update, []
    for capacity in range(least_capacity(moments), 3 * chunks.count + 1):
        belady, lru = (replay_chunks(moments, capacity, policy).chunks for policy in ("belady", "lru"))
        assert belady <= lru
        moved.append((belady, lru))
    assert any(belady < lru for belady, lru in moved)
    assert moved[-1] == (3 * chunks.count,) * 2  # all have room: each comes once


def test_what_a_moment_needs_has_to_have_room() -> None:
    with pytest.raises(BadInputError, match="2 chunks have room on the device, and 3 are needed at once"):
        replay_chunks([(0, 1, 2)], 2, "belady")


def random_model(seed: int, count: int) -> ModelData:
    """Forward and backward over layers of two parameters, state twice as large."""
    rng = random.Random(seed)
    sizes = tuple(rng.randint(1, 40) * MIB // 8 for _ in range(count))
    forward = [(row, row + 1) for row in range(0, count - 1, 2)]
    return ModelData(sizes, (*forward, *reversed(forward)), 2 * sum(sizes))


def test_chunks_hold_whole_parameters_in_the_order_of_their_use() -> None:
    data = ModelData((3 * MIB, 2 * MIB, 9 * MIB, 2 * MIB, MIB), ((0, 1), (2,), (3, 4)), 28 * MIB)
    chunks = in_chunks(data, 4 * MIB)
    assert chunks.count == 3  # 3 and nothing else, 2 and 2, 1
    assert chunks.moments == ((0, 1), (1, 2))
    assert chunks.outside_bytes == 9 * MIB * 3  # what is larger than a chunk, with its state
    assert chunks.with_update[2:] == ((0, 3, 6), (1, 4, 7), (2, 5, 8))


@pytest.mark.parametrize("seed", range(4))
def test_the_search_of_chunk_sizes_picks_the_best_of_the_whole_grid(seed: int) -> None:
    data = random_model(seed, 30)
    sizes = usual_sizes(data)
    for share in (0.2, 0.6, 1.5, 4):
        budget = int(share * data.parameter_bytes)
        grid = []
        for size in sizes:
            chunks = in_chunks(data, size)
            for residents in range(chunks.count + 1):
                room = (budget - chunks.outside_bytes) // size - 3 * residents
                try:
                    grid.append(replayed(chunks, residents, room) if room >= 0 else None)
                except BadInputError:
                    grid.append(None)
        moved = min((one.moved_bytes for one in grid if one), default=None)
        found = search_chunks(data, budget, sizes)
        assert (found.best and found.best.moved_bytes) == moved
        for one in found.rejected:  # with a reason, or no better
            assert one.refused or moved is None or one.moved_bytes >= moved
        assert found.best not in found.rejected
        rows = [*found.rejected, *([found.best] if found.best else [])]
        assert {one.chunk_bytes for one in rows} == set(sizes)


def fewest_pages(sizes: tuple[int, ...], page: int) -> int:
    """Of all ways in which each tensor begins in the last page, where it may, or in a new one."""

    @functools.cache
    def rest(row: int, free: int, tensors: int) -> int:
        if row == len(sizes):
            return 0
        ways = [(1, page, 0)] + ([(0, free, tensors)] if free and tensors < 2 else [])
        found = []
        for begun, room, held in ways:
            more = max(0, -(-(sizes[row] - room) // page))
            left = room + more * page - sizes[row]
            found.append(begun + more + rest(row + 1, left, 1 if more else held + 1))
        return min(found)

    return rest(0, 0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_tensors_take_as_few_pages_as_can_be_and_share_each_with_one_other_at_the_most(seed: int) -> None:
    rng = random.Random(seed)
    page = 10
    sizes = tuple(rng.choice((1, 3, 5, 9, 10, 11, 20, 27)) for _ in range(12))
    pages = lay_out(sizes, page)
    assert pages[-1].stop == fewest_pages(sizes, page)
    users = Counter(one for tensor in pages for one in tensor)
    assert set(users) == set(range(pages[-1].stop))
    assert max(users.values()) <= 2
    for first in range(len(sizes)):  # what any tensors in a row take fits into their pages
        for last in range(first + 1, len(sizes) + 1):
            assert sum(sizes[first:last]) <= page * (pages[last - 1].stop - pages[first].start)


@pytest.mark.parametrize("seed", range(4))
def test_pages_move_as_little_as_any_order_of_evictions(seed: int) -> None:
    rng = random.Random(seed)
    sizes = tuple(rng.choice((2, 4, 7)) * MIB for _ in range(6))
    data = ModelData(sizes, tuple((rng.randrange(6),) for _ in range(10)), 2 * sum(sizes))
    pages = lay_out(sizes, 4 * MIB)
    moments = tuple(tuple(pages[row]) for ((row,), _) in itertools.groupby(data.uses))
    for capacity in range(1, pages[-1].stop + 1):
        found = replay_pages(data, capacity * 4 * MIB + MIB)
        if capacity < max(map(len, moments)):
            assert found is None
            continue
        assert found is not None
        assert (found.count, found.capacity) == (pages[-1].stop, capacity)
        assert found.empty_bytes == 4 * MIB * found.count - sum(sizes)
        fetched = found.moved_bytes // (4 * MIB) - found.count  # and the gradients of each page
        held = min(capacity, len({page for moment in moments for page in moment}))
        assert 2 * fetched - held <= fewest_moves(moments, capacity) <= 2 * fetched


def test_drives_that_compute_pay_from_where_the_link_holds_the_host_up() -> None:
    data = ModelData((64 * MIB, 32 * MIB), ((0,), (1,)), 192 * MIB)
    for link in (LinkCost(16e9), LinkCost(64e9)):
        found = [update_near_storage(data, count, link) for count in range(1, 65)]
        assert {one.moved_bytes for one in found} == {2 * 96 * MIB}  # gradients there, parameters back
        assert {one.host_moved_bytes for one in found} == {2 * 4 * 96 * MIB}
        quicker = [one.num_drives for one in found if one.seconds < one.host_seconds]
        assert quicker == list(range(found[0].pays_from, 65))
        times = [one.seconds for one in found]
        assert times == sorted(times, reverse=True)
        assert min(times) >= link.seconds(96 * MIB)


def random_layers(seed: int, count: int) -> list[LayerCost]:
    rng = random.Random(seed)
    return [
        LayerCost(
            rng.randint(1, 9) * MIB,
            rng.randint(0, 9) * MIB,
            rng.randint(0, 3) * MIB,
            rng.random() / 1e3,
            rng.random() / 5e2,
        )
        for _ in range(count)
    ]


def stretches(count: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """All ways to cut so many layers into stretches."""
    for number in range(count):
        for cuts in itertools.combinations(range(1, count), number):
            bounds = (0, *cuts, count)
            yield tuple(itertools.pairwise(bounds))


@pytest.mark.parametrize("seed", range(6))
def test_packs_and_stages_answer_from_where_each_layer_fits_alone(seed: int) -> None:
    rng = random.Random(seed)
    layers = [
        dataclasses.replace(
            one, forward_work_bytes=rng.randint(0, 20) * MIB, backward_work_bytes=rng.randint(0, 20) * MIB
        )
        for one in random_layers(seed, 5)
    ]
    least, _, _ = least_budget(layers)
    alone = tuple((row, row + 1) for row in range(5))
    pipeline = Pipeline(num_gpus=2, num_microbatches=2, budget_bytes=least, link=LINK)
    assert pack_layers(layers, least, LINK) is not None
    assert pack_layers(layers, least - 1, LINK) is None
    assert step_seconds(layers, alone, pipeline) is not None
    assert step_seconds(layers, alone, dataclasses.replace(pipeline, budget_bytes=least - 1)) is None
    times = [pack_layers(layers, least + more * MIB, LINK).seconds for more in (0, 10, 20, 1000)]
    assert times == sorted(times, reverse=True), "more room costs no time"


def test_what_has_no_room_beside_a_layer_comes_after_it() -> None:
    layers = [LayerCost(16 * MIB, 0, 0, 1.0, 0.0)] * 2
    whole, half = (
        pass_cost(layers, ((0, 1), (1, 2)), budget, LINK, is_backward=False) for budget in (32 * MIB, 24 * MIB)
    )
    assert whole == (pytest.approx(LINK.seconds(16 * MIB) + 2.0), 32 * MIB)
    assert half == (pytest.approx(LINK.seconds(16 * MIB) + 2.0 + LINK.seconds(8 * MIB)), 32 * MIB)
    times = [
        step_seconds(layers, ((0, 1), (1, 2)), Pipeline(num_gpus=1, num_microbatches=1, budget_bytes=budget, link=LINK))
        for budget in (64 * MIB, 48 * MIB - 8 * MIB)
    ]
    assert times[1] - times[0] == pytest.approx(8 * MIB / LINK.rate), "half of the first stage has no room in backward"


@pytest.mark.parametrize(("seed", "count"), [*((seed, 2 + seed) for seed in range(8)), (8, 12)])
def test_packs_are_the_best_of_all_ways_to_pack(seed: int, count: int) -> None:
    layers = random_layers(seed, count)
    for budget in (24 * MIB, 40 * MIB, 120 * MIB):
        found = pack_layers(layers, budget, LINK)
        best = [
            min(
                (
                    cost
                    for packs in stretches(count)
                    if (cost := pass_cost(layers, packs, budget, LINK, is_backward=back))
                ),
                default=None,
            )
            for back in (False, True)
        ]
        if found is None:
            assert None in best
            continue
        costs = (
            pass_cost(layers, found.forward, budget, LINK, is_backward=False),
            pass_cost(
                layers, [(count - end, count - begin) for begin, end in found.backward], budget, LINK, is_backward=True
            ),
        )
        assert [one and one[0] for one in costs] == [one and pytest.approx(one[0]) for one in best]
        assert found.seconds == pytest.approx(sum(one[0] for one in costs if one))
        assert found.moved_bytes == sum(one[1] for one in costs if one)


@pytest.mark.parametrize(("count", "is_proven"), [(14, True), (15, False), (40, False)])
def test_cuts_of_up_to_fourteen_layers_are_all_tried_and_of_more_none_nearby_costs_less(
    count: int, is_proven: bool
) -> None:
    sizes = [random.Random(count).randint(1, 30) for _ in range(count)]

    def cost(parts: Sequence[Stretch]) -> tuple[float, int] | None:
        totals = [sum(sizes[begin:end]) for begin, end in parts]
        return None if max(totals) > 60 else (float(sum((total - 50) ** 2 for total in totals)), len(parts))

    found = cut_best(count, cost)
    assert found is not None
    best, parts, proven = found
    assert (cost(parts), proven) == (best, is_proven)
    assert [layer for begin, end in parts for layer in range(begin, end)] == list(range(count))
    if is_proven:
        assert best == min(made for other in stretches(count) if (made := cost(other)) is not None)
    cuts = {begin for begin, _ in parts} - {0}
    for cut in range(1, count):
        others = [*sorted(cuts ^ {cut}), count]
        near = cost(tuple(itertools.pairwise([0, *others])))
        assert near is None or near >= best
    assert cut_best(count, lambda parts: None) is None


@pytest.mark.parametrize(("seed", "count", "gpus"), [(0, 3, 1), (1, 5, 2), (2, 6, 3), (3, 7, 2), (4, 8, 4), (5, 12, 4)])
def test_stages_are_the_best_of_all_partitions(seed: int, count: int, gpus: int) -> None:
    layers = random_layers(seed, count)
    for budget in (26 * MIB, 30 * MIB, 60 * MIB)[: 1 if count == 12 else 3]:
        pipeline = Pipeline(num_gpus=gpus, num_microbatches=1 + seed, budget_bytes=budget, link=LINK)
        found = partition_stages(layers, pipeline)
        times = (step_seconds(layers, stages, pipeline) for stages in stretches(count))
        best = min((one for one in times if one is not None), default=None)
        assert (found and found.seconds) == (best and pytest.approx(best))
        assert found is None or found.is_optimal


def test_one_gpu_and_no_copies_takes_what_computing_takes() -> None:
    layers = [LayerCost(0, 0, 0, 1.0, 2.0)] * 3
    pipeline = Pipeline(num_gpus=1, num_microbatches=2, budget_bytes=MIB, link=LINK)
    assert step_seconds(layers, ((0, 1), (1, 3)), pipeline) == 2 * 3 * (1.0 + 1.0 + 2.0)
    halves = Pipeline(num_gpus=3, num_microbatches=1, budget_bytes=MIB, link=LINK)
    assert step_seconds(layers, ((0, 1), (1, 2), (2, 3)), halves) == 3 * (1.0 + 3.0)


@pytest.mark.parametrize(("gpus", "roots"), [(4, 2), (5, 2), (7, 3), (8, 2), (8, 4)])
def test_gpus_under_one_root_are_kept_apart_as_far_as_any_order_does(gpus: int, roots: int) -> None:
    mapped = cross_mapping(gpus, roots)
    orders = set(itertools.permutations(sorted(mapped)))
    assert contention(mapped) == min(map(contention, orders)) < max(map(contention, orders))


@pytest.mark.parametrize("seed", range(4))
def test_the_window_is_the_smallest_without_a_stall(seed: int) -> None:
    layers = random_layers(seed, 8)
    for link in (LinkCost(4e9), LinkCost(16e9), LinkCost(1e12)):
        window = smallest_window(layers, link)
        assert stall_seconds(layers, window, link) == 0
        assert all(stall_seconds(layers, smaller, link) > 0 for smaller in range(1, window))
    assert smallest_window(layers, LinkCost(1e2)) == len(layers)


@pytest.mark.parametrize("seed", range(8))
def test_the_amount_that_is_swapped_is_the_best_of_all_amounts_and_of_all_choices_of_layers(seed: int) -> None:
    layers = random_layers(seed, 3 + seed)
    found = lohan.best_amount(layers, LINK)
    given = sum(min(one.boundary_bytes, one.saved_bytes) for one in layers)
    most = sum(max(0, one.saved_bytes - one.boundary_bytes) for one in layers)
    grid = [lohan.step_seconds(layers, LINK, most * share // 500) for share in range(501)]
    assert found.seconds <= min(grid) * (1 + 1e-12)
    assert found.seconds == lohan.step_seconds(layers, LINK, found.swapped_bytes - given)
    for swapped in itertools.product((False, True), repeat=len(layers)):
        chosen = [one for one, is_swapped in zip(layers, swapped, strict=True) if is_swapped]
        left = [one for one, is_swapped in zip(layers, swapped, strict=True) if not is_swapped]
        size_bytes = given + sum(max(0, one.saved_bytes - one.boundary_bytes) for one in chosen)
        again = sum(one.forward_seconds for one in left if one.saved_bytes > one.boundary_bytes)
        assert found.seconds <= lohan.passes_seconds(layers, LINK, size_bytes, again) * (1 + 1e-12)


def test_a_slow_link_swaps_what_layers_are_given_alone_and_a_quick_one_all() -> None:
    layers = [LayerCost(0, 64 * MIB, 4 * MIB, 0.01, 0.02) for _ in range(4)]
    slow, quick = (lohan.best_amount(layers, LinkCost(rate)) for rate in (1e6, 1e15))
    assert (slow.swapped_bytes, slow.recomputed_seconds) == (4 * 4 * MIB, 0.04)
    assert (quick.swapped_bytes, quick.recomputed_seconds) == (4 * 64 * MIB, 0.0)
