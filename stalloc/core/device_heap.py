"""The heap of one device as Python sees it: segments and pages come and go, and what is free in them."""

from collections.abc import Iterable

import numpy as np

from stalloc.core import capture_plan, growth, pages, pools, segments, stitching
from stalloc.core.device_tables import MAX_RANGES, DeviceTables
from stalloc.core.record_types import Words


class DeviceHeap:
    """The heap's segments and pools. Addresses and sizes are in bytes; a pool and a stream are indices."""

    def __init__(self, tables: DeviceTables) -> None:
        self._tables = tables

    def pool_kind(self, pool: int) -> int:
        """The kind of a pool: SMALL_KIND and so on."""
        return int(self._tables.pools["kind"][pool])

    def unpin_pools(self, kind: int) -> None:
        """The graphs that a private kind of pool served are gone: its free segments may go back."""
        pools.unpin_pools(self._tables.address, kind)

    def let_pools_sleep(self, pages: Iterable[int]) -> None:
        """Serve nobody from the pools that have memory in any of the pages (addresses), until `wake_pools`."""
        pools.let_pools_sleep(self._tables.address, np.fromiter(pages, np.int64))

    def wake_pools(self) -> None:
        """Serve from all pools again."""
        pools.wake_pools(self._tables.address)

    def find_place(self, pool: int, size_bytes: int) -> int:
        """Where a pool has so many free bytes in one piece; 0: nowhere."""
        return int(capture_plan.find_place(self._tables.address, pool, size_bytes))

    def find_range(self, pool: int, size_bytes: int) -> int:
        """Where a pool has addresses for so many bytes, with memory or without; 0: nowhere."""
        return int(capture_plan.find_range(self._tables.address, pool, size_bytes))

    def is_idle(self, pool: int) -> bool:
        """Whether nothing lives in a pool."""
        return bool(capture_plan.is_idle(self._tables.address, pool))

    def full_table(self) -> str:
        """The table whose being full keeps the heap from taking a segment; empty if there is room."""
        record = self._tables.record
        if not record.heap.free_block_row and record.heap.blocks_used >= record.heap.blocks_capacity:
            return "blocks"
        if not record.heap.free_segment_row and record.heap.segments_used >= record.heap.segments_capacity:
            return "segments"
        return ""

    def give_segment(self, pool: int, address: int, size_bytes: int) -> bool:
        """Add a segment; False if the tables are full."""
        return bool(segments.give_segment(self._tables.address, pool, address, size_bytes))

    def remove_free_segments(self, idle_iterations: int = 0) -> dict[int, int]:
        """Take every segment without live blocks, not used in the last `idle_iterations`, out: address -> bytes."""
        removed: dict[int, int] = {}
        addresses, sizes = np.zeros((2, 4096), np.int64)  # not shared: a finaliser may come here in the middle
        while True:
            count = segments.remove_free_segments(self._tables.address, addresses, sizes, idle_iterations)
            removed.update(zip(addresses[:count].tolist(), sizes[:count].tolist(), strict=True))
            if count < len(addresses):
                return removed

    def give_range(self, pool: int, address: int, size_bytes: int) -> bool:
        """Add a segment that is addresses without memory; False if the tables are full."""
        return bool(pages.give_range(self._tables.address, pool, address, size_bytes))

    def find_growth(self, pool: int, size_bytes: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Where pages are best mapped for a request of a pool: (address, bytes) of each range; none: nowhere.

        And the place of the request then, [begin, end), of which other parts have memory and are free.
        """
        addresses, sizes = np.empty((2, MAX_RANGES), np.int64)
        count, begin, end = growth.find_growth(self._tables.address, pool, size_bytes, addresses, sizes)
        return list(zip(addresses[:count].tolist(), sizes[:count].tolist(), strict=True)), (int(begin), int(end))

    def use_pages(self, address: int, size_bytes: int) -> bool:
        """Serve from pages of a segment that have memory now; False if the tables are full."""
        return bool(pages.use_pages(self._tables.address, address, size_bytes))

    def find_stitch(self, pool: int, size_bytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """What a segment stitched for a request best begins and ends with: address and bytes of each, 0 bytes: none."""
        tail_at, tail, head_at, head = stitching.find_stitch(self._tables.address, pool, size_bytes)
        return (int(tail_at), int(tail)), (int(head_at), int(head))

    def begin_stitch(
        self, pool: int, address: int, own_bytes: int, tail: tuple[int, int], head: tuple[int, int]
    ) -> bool:
        """Serve from a stitched segment whose own pages begin at an address; False if it cannot be made any more."""
        return bool(stitching.begin_stitch(self._tables.address, pool, address, own_bytes, *tail, *head))

    def end_stitched(self) -> list[int]:
        """Take stitched segments in which nothing lives out of the tables: where they began."""
        addresses = np.empty(MAX_RANGES, np.int64)
        return [int(address) for address in addresses[: stitching.end_stitched(self._tables.address, addresses)]]

    def remove_empty_ranges(self) -> list[int]:
        """Take segments without any memory out of the tables: where they began."""
        addresses = np.empty(MAX_RANGES, np.int64)
        return [int(address) for address in addresses[: pages.remove_empty_ranges(self._tables.address, addresses)]]

    def keep_ranges(self) -> None:
        """Leave what has its memory by pages as it is for good: they are a parent's of this process."""
        pages.keep_ranges(self._tables.address)

    def segments(self) -> tuple[Words, Words]:
        """Where the heap's segments begin, and how many bytes of them have memory, by address."""
        rows = self._segment_rows()
        return rows["address"].copy(), rows["mapped_bytes"].copy()

    def _segment_rows(self) -> np.ndarray:
        """The rows of segments that are no leases, by address."""
        rows: np.ndarray = self._tables.segments[1 : self._tables.record.heap.segments_used].copy()
        rows = rows[(rows["address"] != 0) & (rows["interval_high"] == 0)]
        return rows[np.argsort(rows["address"])]

    def largest_free_bytes(self) -> int:
        """The largest free block of the heap."""
        return int(pools.largest_free(self._tables.address))
