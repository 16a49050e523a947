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
