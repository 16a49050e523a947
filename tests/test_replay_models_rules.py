"""The special rules of each model, on programs small enough to follow by hand."""

from typing import Any

import numpy as np

from stalloc.replay import Events, Kind
from stalloc.replay.registry import make

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Script:
    """A model driven by hand: `new` allocates, `free` frees, `reserved` is what it holds now."""

    def __init__(self, name: str, settings: str = "", capacity: int = 0) -> None:
        self.model: Any = make(name, settings, capacity)
        self._size: list[int] = []
        self._stream: list[int] = []

    def _feed(self, kind: Kind, request: int) -> bool:
        column = np.array([kind], np.int8), np.array([request]), np.array([0])
        fed = self.model.feed(Events(*column, np.array(self._size), np.array(self._stream)))
        return bool(fed.failed < 0)

    def new(self, size: int, stream: int = 0) -> int | None:
        """Allocate; the request, or None if there is no memory."""
        self._size.append(size)
        self._stream.append(stream)
        request = len(self._size) - 1
        return request if self._feed(Kind.ALLOC, request) else None

    def free(self, *requests: int | None) -> None:
        """Free."""
        for request in requests:
            assert request is not None
            self._feed(Kind.FREE_COMPLETED, request)

    def empty_cache(self) -> None:
        """Empty the cache."""
        self._size = self._size or [0]
        self._stream = self._stream or [0]
        self._feed(Kind.EMPTY_CACHE, -1)

    def at(self, request: int | None) -> int:
        """The address of a request."""
        return int(self.model.addresses()[request])

    @property
    def reserved(self) -> int:
        """Bytes held."""
        return int(self.model.counters().reserved_bytes)

    def count(self, name: str) -> int:
        """What only this model counts."""
        return int(self.model.counters().more[name])


# --- CuPy


def test_cupy_rounds_to_512_bytes_and_splits_whatever_remains() -> None:
    pool = Script("cupy")
    big = pool.new(10 * KIB)
    pool.free(big)
    small = pool.new(1)
    assert pool.reserved == 10 * KIB
    assert pool.at(small) == pool.at(big)
    assert pool.model.blocks().size_bytes.tolist() == [512, 10 * KIB - 512]


def test_cupy_merges_what_was_split_but_never_two_chunks_of_the_device() -> None:
    pool = Script("cupy")
    first, second = pool.new(4 * KIB), pool.new(4 * KIB)
    pool.free(first, second)
    assert pool.model.blocks().size_bytes.tolist() == [4 * KIB, 4 * KIB]
    parts = [pool.new(KIB) for _ in range(4)]
    pool.free(*parts)
    assert pool.model.blocks().size_bytes.tolist() == [4 * KIB, 4 * KIB]


def test_cupy_caches_by_stream() -> None:
    pool = Script("cupy")
    pool.free(pool.new(MIB, stream=0))
    pool.new(MIB, stream=1)
    assert pool.reserved == 2 * MIB
    pool.new(MIB, stream=0)
    assert pool.reserved == 2 * MIB


def test_cupy_gives_chunks_back_that_are_not_split_when_the_limit_is_reached() -> None:
    pool = Script("cupy", "limit:4MiB")
    whole, halved = pool.new(MIB), pool.new(2 * MIB)
    pool.free(whole, halved)
    pool.new(3 * MIB // 2)  # of the two MiB, which are split now
    assert pool.new(2 * MIB) is not None
    assert pool.reserved == 4 * MIB
    assert pool.new(MIB) is None
    assert pool.model.counters().retries == 2


# --- CUDA's stream-ordered pool


def test_stream_ordered_takes_the_smallest_block_that_another_stream_has_freed() -> None:
    pool = Script("stream_ordered")
    large, small = pool.new(64 * MIB, stream=1), pool.new(40 * MIB, stream=2)
    pool.free(large, small)
    assert pool.at(pool.new(36 * MIB)) == pool.at(small)


# --- GMLake


def test_gmlake_takes_a_block_of_the_size_or_splits_a_larger_one() -> None:
    lake = Script("gmlake")
    lake.free(lake.new(40 * MIB))
    lake.free(lake.new(40 * MIB))
    assert (lake.reserved, lake.count("exact"), lake.count("splits")) == (40 * MIB, 1, 0)
    lake.new(15 * MIB)
    assert (lake.reserved, lake.count("splits")) == (40 * MIB, 1)
    assert lake.model.blocks().size_bytes.tolist() == [16 * MIB, 24 * MIB]


def test_gmlake_stitches_free_blocks_and_knows_the_stitched_block_afterwards() -> None:
    lake = Script("gmlake", "fragmentation_limit:4MiB")
    first, second = lake.new(16 * MIB), lake.new(32 * MIB)
    lake.free(first, second)
    stitched = lake.new(48 * MIB)
    assert (lake.reserved, lake.count("stitches")) == (48 * MIB, 1)
    blocks = lake.model.blocks()
    assert blocks.request.tolist() == [stitched, stitched]
    lake.free(stitched)
    again = lake.new(48 * MIB)
    assert (lake.reserved, lake.count("stitches"), lake.count("exact")) == (48 * MIB, 1, 1)
    assert lake.at(again) == lake.at(stitched)


def test_gmlake_cannot_have_a_stitched_block_while_one_of_its_parts_is_taken() -> None:
    lake = Script("gmlake", "fragmentation_limit:4MiB")
    lake.free(*[lake.new(size * MIB) for size in (16, 32)])
    lake.free(lake.new(48 * MIB))
    part = lake.new(16 * MIB)
    lake.new(48 * MIB)
    assert (lake.reserved, lake.count("stitches_with_new_memory")) == (64 * MIB, 1)
    lake.free(part)


def test_gmlake_splits_the_last_block_that_it_stitches() -> None:
    lake = Script("gmlake", "fragmentation_limit:4MiB")
    lake.free(*[lake.new(size * MIB) for size in (16, 32)])
    stitched = lake.new(40 * MIB)
    blocks = lake.model.blocks()
    assert blocks.size_bytes.tolist() == [8 * MIB, 8 * MIB, 32 * MIB]
    assert blocks.request.tolist() == [stitched, -1, stitched]


def test_gmlake_adds_what_free_blocks_lack() -> None:
    lake = Script("gmlake", "fragmentation_limit:4MiB")
    lake.free(lake.new(16 * MIB))
    lake.new(20 * MIB)
    assert (lake.reserved, lake.count("stitches_with_new_memory")) == (20 * MIB, 1)
    without = Script("gmlake", "fragmentation_limit:4MiB,allocate_and_stitch:0")
    without.free(without.new(16 * MIB))
    without.new(20 * MIB)
    assert without.reserved == 36 * MIB


def test_gmlake_does_not_stitch_below_the_limit_nor_parts_that_are_too_small() -> None:
    for settings in ("fragmentation_limit:64MiB", "fragmentation_limit:4MiB,smallest_part:20MiB,allocate_and_stitch:0"):
        lake = Script("gmlake", settings)
        lake.free(*[lake.new(size * MIB) for size in (16, 32)])
        lake.new(48 * MIB)
        assert lake.reserved == 96 * MIB
        assert lake.count("stitches") == 0


def test_gmlake_reuses_a_larger_stitched_block_in_part() -> None:
    lake = Script("gmlake", "fragmentation_limit:4MiB")
    lake.free(*[lake.new(size * MIB) for size in (16, 32)])
    stitched = lake.new(48 * MIB)
    lake.free(stitched)
    smaller = lake.new(40 * MIB)
    assert (lake.count("larger_stitched"), lake.reserved) == (1, 48 * MIB)
    assert lake.at(smaller) == lake.at(stitched)
    assert (lake.model.blocks().request == -1).sum() == 1
    lake.free(smaller)
    assert lake.new(48 * MIB) is not None
    assert lake.reserved == 48 * MIB


def test_gmlake_stitches_where_a_caching_allocator_runs_out_of_memory() -> None:
    lake = Script("gmlake", "fragmentation_limit:4MiB", capacity=64 * MIB)
    blocks = [lake.new(16 * MIB) for _ in range(4)]
    lake.free(blocks[0], blocks[2])
    assert lake.new(32 * MIB) is not None
    assert lake.new(2 * MIB) is None


def test_gmlake_forgets_stitched_blocks_with_their_memory_and_beyond_the_limit() -> None:
    lake = Script("gmlake", "fragmentation_limit:4MiB,stitch_limit:1MiB")
    lake.free(*[lake.new(size * MIB) for size in (16, 32)])
    lake.free(lake.new(48 * MIB))
    assert lake.count("stitched_bytes") == 48 * MIB
    lake.new(2 * MIB)
    assert (lake.count("stitched_bytes"), lake.count("forgotten")) == (0, 1)
    other = Script("gmlake", "fragmentation_limit:4MiB")
    other.free(*[other.new(size * MIB) for size in (16, 32)])
    other.free(other.new(48 * MIB))
    other.empty_cache()
    assert (other.reserved, other.count("stitched_bytes")) == (0, 0)


# --- BFC


def test_bfc_begins_with_two_mebibytes_and_doubles() -> None:
    bfc = Script("bfc")
    sizes = []
    for _ in range(4):
        bfc.new(2 * MIB)
        sizes.append(bfc.reserved // MIB)
    assert sizes == [2, 6, 6, 14], "regions of 2, 4 and 8 MiB"


def test_bfc_doubles_until_the_request_fits_and_not_once_more() -> None:
    bfc = Script("bfc")
    bfc.new(5 * MIB)
    assert bfc.reserved == 8 * MIB
    bfc.new(8 * MIB)
    assert bfc.reserved == 16 * MIB


def test_bfc_takes_all_of_its_limit_at_once_where_growth_is_off() -> None:
    bfc = Script("bfc", "growth:0,fraction:75", capacity=64 * MIB)
    bfc.new(1)
    assert bfc.reserved == 48 * MIB
    assert bfc.new(48 * MIB) is None


def test_bfc_splits_only_what_is_twice_as_large_or_wastes_too_much() -> None:
    bfc = Script("bfc", "growth:0,limit:1000MiB")
    bfc.new(600 * MIB)
    assert bfc.model.blocks().size_bytes.tolist() == [600 * MIB, 400 * MIB], "400 MiB would be wasted"
    bfc.new(300 * MIB)
    assert bfc.model.blocks().size_bytes.tolist() == [600 * MIB, 400 * MIB], "100 MiB may be wasted"
    other = Script("bfc", "growth:0,limit:200MiB")
    other.new(100 * MIB)
    assert other.model.blocks().size_bytes.tolist() == [100 * MIB, 100 * MIB], "just twice as large"


def test_bfc_takes_smaller_regions_once_when_the_device_is_short() -> None:
    bfc = Script("bfc", "limit:1GiB", capacity=30 * MIB)
    bfc.new(10 * MIB)  # a region of 16 MiB; the next one would be of 16 MiB too
    bfc.new(10 * MIB)
    tenths = 16 * MIB
    while 16 * MIB + tenths > 30 * MIB:
        tenths = -(-int(tenths * 0.9) // 256) * 256
    assert bfc.reserved == 16 * MIB + tenths


def test_bfc_collects_free_regions_when_nothing_else_helps() -> None:
    settings = "growth:1,limit:32MiB"
    for collect, fits in ((1, True), (0, False)):
        bfc = Script("bfc", f"{settings},garbage_collection:{collect}")
        bfc.free(bfc.new(2 * MIB), bfc.new(4 * MIB), bfc.new(8 * MIB))
        assert (bfc.new(31 * MIB) is not None) is fits


# --- RMM's pool


def test_rmm_pool_doubles_without_a_maximum_and_halves_the_rest_with_one() -> None:
    pool = Script("rmm_pool", "initial:1MiB")
    pool.new(MIB)
    pool.new(256)
    assert pool.reserved == 2 * MIB
    bounded = Script("rmm_pool", "initial:1MiB,maximum:17MiB")
    bounded.new(MIB)
    bounded.new(256)
    assert bounded.reserved == 9 * MIB
    assert bounded.new(17 * MIB) is None


def test_rmm_pool_begins_with_half_of_the_device() -> None:
    pool = Script("rmm_pool", capacity=64 * MIB)
    pool.new(256)
    assert pool.reserved == 32 * MIB


def test_rmm_pool_grows_by_less_when_the_device_has_less() -> None:
    pool = Script("rmm_pool", "initial:16MiB", capacity=20 * MIB)
    pool.new(16 * MIB)
    pool.new(MIB)
    assert pool.reserved == 20 * MIB


def test_rmm_pool_takes_over_the_free_list_of_another_stream() -> None:
    pool = Script("rmm_pool", "initial:0")
    mine, other, last = pool.new(MIB, stream=1), pool.new(MIB, stream=0), pool.new(512 * KIB, stream=0)
    pool.free(other, last)
    taken = pool.new(MIB, stream=1)
    assert pool.at(taken) == pool.at(other)
    assert (pool.reserved, pool.count("lists_taken_over")) == (4 * MIB, 1)
    free = pool.model.blocks().request == -1
    assert set(pool.model.blocks().stream[free].tolist()) == {1}
    pool.free(mine)


def test_rmm_pool_merges_lists_where_no_single_one_has_a_block() -> None:
    pool = Script("rmm_pool", "initial:4MiB")
    halves = [pool.new(2 * MIB, stream=0), pool.new(2 * MIB, stream=1)]
    pool.free(*halves)
    whole = pool.new(4 * MIB, stream=1)
    assert (pool.reserved, pool.at(whole)) == (4 * MIB, pool.at(halves[0]))


# --- stream-ordered


def test_stream_ordered_takes_chunks_of_32_mebibytes_or_what_a_larger_request_needs() -> None:
    pool = Script("stream_ordered")
    pool.new(1)
    assert pool.reserved == 32 * MIB
    pool.new(33 * MIB)
    assert pool.reserved == (32 + 34) * MIB


def test_stream_ordered_reuses_across_streams_only_if_it_may() -> None:
    for allowed, reserved in ((1, 32 * MIB), (0, 64 * MIB)):
        pool = Script("stream_ordered", f"opportunistic:{allowed}")
        pool.free(pool.new(20 * MIB, stream=0))
        pool.new(20 * MIB, stream=1)
        assert pool.reserved == reserved
        assert pool.count("reused_across_streams") == allowed


def test_stream_ordered_waits_for_another_stream_before_it_runs_out_of_memory() -> None:
    pool = Script("stream_ordered", "opportunistic:0", capacity=40 * MIB)
    pool.free(pool.new(20 * MIB, stream=0))
    assert pool.new(20 * MIB, stream=1) is not None
    assert pool.count("dependencies_inserted") == 1
    assert pool.new(20 * MIB, stream=1) is None


def test_stream_ordered_keeps_the_threshold_when_the_program_waits() -> None:
    for threshold, reserved in (("0", 0), ("40MiB", 32 * MIB), ("1GiB", 64 * MIB)):
        pool = Script("stream_ordered", f"release_threshold:{threshold},synchronize_every:4")
        pool.free(pool.new(20 * MIB), pool.new(20 * MIB))
        assert pool.reserved == reserved


# --- TLSF


def test_tlsf_searches_from_the_next_list_on() -> None:
    tlsf = Script("tlsf", "region:64KiB,divisions:1")
    kept = [tlsf.new(size * KIB) for size in (24, 8, 16, 8, 8)]
    tlsf.free(kept[0], kept[2])
    found = tlsf.new(12 * KIB)
    assert tlsf.at(found) == tlsf.at(kept[2]), "24 KiB lies in the same list as 16 KiB, which was freed last"
    assert tlsf.new(20 * KIB) is not None
    assert tlsf.reserved > 64 * KIB, "a list of 16 to 32 KiB may hold less than 20 KiB, so it is not searched"


def test_tlsf_merges_at_once() -> None:
    tlsf = Script("tlsf", "region:64KiB")
    parts = [tlsf.new(16 * KIB) for _ in range(4)]
    tlsf.free(parts[1], parts[3], parts[2])
    assert tlsf.model.blocks().size_bytes.tolist() == [16 * KIB, 48 * KIB]
    tlsf.new(48 * KIB)
    assert tlsf.reserved == 64 * KIB


def test_tlsf_gives_free_regions_back_when_the_device_is_full() -> None:
    tlsf = Script("tlsf", "region:8MiB", capacity=16 * MIB)
    tlsf.free(tlsf.new(MIB))
    assert tlsf.new(16 * MIB) is not None
    assert tlsf.reserved == 16 * MIB


# --- RMM's arena


def test_rmm_arena_takes_half_of_the_device_at_once() -> None:
    arena = Script("rmm_arena", capacity=64 * MIB)
    arena.new(256)
    assert arena.reserved == 32 * MIB
    assert arena.new(32 * MIB) is None


def test_rmm_arena_lends_superblocks_of_a_mebibyte_to_streams() -> None:
    arena = Script("rmm_arena", "size:8MiB")
    first, other, second = arena.new(KIB, stream=0), arena.new(KIB, stream=1), arena.new(KIB, stream=0)
    assert arena.at(other) - arena.at(first) == MIB
    assert arena.at(second) - arena.at(first) == KIB
    large = arena.new(3 * MIB, stream=0)
    assert arena.at(large) - arena.at(first) == 2 * MIB


def test_rmm_arena_takes_the_first_fit_and_not_the_best() -> None:
    arena = Script("rmm_arena", "size:8MiB")
    blocks = [arena.new(size * KIB) for size in (64, 1, 32, 1)]
    arena.free(blocks[0], blocks[2])
    assert arena.at(arena.new(32 * KIB)) == arena.at(blocks[0])


def test_rmm_arena_gathers_superblocks_when_a_request_fails() -> None:
    arena = Script("rmm_arena", "size:8MiB")
    arena.free(*[arena.new(MIB, stream=stream) for stream in range(8)])
    assert arena.new(6 * MIB) is not None
    assert arena.model.counters().retries == 1


def test_rmm_arena_without_a_size_is_as_large_as_it_has_to_be() -> None:
    arena = Script("rmm_arena")
    small, large = arena.new(1), arena.new(5 * MIB + 1)
    assert arena.reserved == 6 * MIB + 256
    arena.free(large)
    larger = arena.new(7 * MIB)
    assert (arena.reserved, arena.at(larger)) == (8 * MIB, arena.at(large))
    arena.free(small, larger)
    assert arena.reserved == 8 * MIB


# --- RMM's binning


def test_rmm_binning_prepares_128_blocks_of_each_bin() -> None:
    bins = Script("rmm_binning", "initial:0,smallest_exponent:10,largest_exponent:11")
    bins.new(1)
    blocks = bins.model.blocks()
    assert (blocks.size_bytes == KIB).sum() == 128
    assert (blocks.size_bytes == 2 * KIB).sum() == 128
    assert bins.reserved == 128 * (1 + 2) * KIB


def test_rmm_binning_serves_each_size_from_its_bin_and_the_rest_from_the_pool() -> None:
    bins = Script("rmm_binning", "initial:1MiB,smallest_exponent:10,largest_exponent:11")
    for size, held in ((1, KIB), (KIB, KIB), (KIB + 1, 2 * KIB), (2 * KIB + 1, 2 * KIB + 256)):
        request = bins.new(size)
        blocks = bins.model.blocks()
        assert blocks.size_bytes[blocks.request == request].tolist() == [held]


def test_rmm_binning_takes_more_blocks_when_a_bin_is_empty_and_keeps_them() -> None:
    bins = Script("rmm_binning", "initial:1MiB,smallest_exponent:10,largest_exponent:10")
    blocks = [bins.new(KIB) for _ in range(129)]
    assert bins.count("bin_chunks") == 2
    bins.free(*blocks)
    assert (bins.model.blocks().size_bytes == KIB).sum() == 256


# --- contiguous buffers


def test_contiguous_buffers_hold_what_lives_long_and_nothing_else() -> None:
    kinds, requests, sizes = [Kind.ALLOC], [0], [3 * MIB]  # never freed
    for _ in range(50):
        row = len(sizes)
        sizes.append(4 * MIB)
        kinds += [Kind.ALLOC, Kind.FREE_COMPLETED]
        requests += [row, row]
    row = len(sizes)
    sizes.append(5 * MIB)
    middle = len(kinds) // 2
    kinds.insert(middle, Kind.ALLOC)
    requests.insert(middle, row)
    kinds.append(Kind.FREE_COMPLETED)
    requests.append(row)
    column = np.array(kinds, np.int8), np.array(requests), np.arange(len(kinds))
    model: Any = make("contiguous", "scoped_percent:20")
    model.feed(Events(*column, np.array(sizes), np.zeros(len(sizes), np.int64)))
    more = model.counters().more
    assert (more["persistent_buffer_bytes"], more["scoped_buffer_bytes"], more["spilled"]) == (3 * MIB, 5 * MIB, 0)
    assert model.counters().reserved_bytes == (3 + 5 + 20) * MIB


def test_tlsf_finds_a_free_region_that_was_made_for_one_request_again() -> None:
    tlsf = Script("tlsf")
    for _ in range(3):
        tlsf.free(tlsf.new(70 * MIB + 12345))
    assert tlsf.model.counters().device_allocs == 1
