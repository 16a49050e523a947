"""PyTorch's CUDA caching allocator as a model: one device, the native backend, its default pools.

Contract: given the device addresses of a run, every request gets the address that torch 2.11 gave it there, under
every setting that parse_settings takes. Private pools (CUDA graphs, MemPool) are not part of it.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stalloc.errors import BadInputError
from stalloc.replay import torch_blocks as rows
from stalloc.replay.protocol import BlockMap, Counters, Events, Fed, Kind
from stalloc.replay.torch_cache import FAILED, NEED_ROWS, empty_cache, run
from stalloc.replay.torch_settings import TorchSettings, parse_settings
from stalloc.replay.torch_start import load_blocks, recorded_calls, recorded_settings, segment_pools, starting_blocks
from stalloc.trace.record import Column, Trace

__all__ = ["TorchBlockMap", "TorchCaching", "TorchFed", "parse_settings"]

_FIRST_ADDRESS = 1 << 44
_UNLIMITED_SPACE_BYTES = 1 << 44
_NOT_SET = -1


@dataclass(frozen=True, eq=False, kw_only=True)
class TorchFed(Fed):
    """What the model said to its events; columns are int64."""

    block_bytes: Column  #: (m,) whole blocks that are not yet given up, which torch.cuda.memory_allocated() counts
    address: Column  #: (m,) where an allocation was put; -1 for other events
    num_out_of_memory: int  #: requests that ran out of memory, which is at most 1 unless told to keep going


@dataclass(frozen=True, eq=False, kw_only=True)
class TorchBlockMap(BlockMap):
    """Every block, and what torch knows about it; an expandable segment counts as one segment a mapped range."""

    requested_bytes: Column  #: (b,) of the request that holds it, 0 for a free block
    segment_small: Column  #: (s,) 1 for the pool of requests up to 1 MiB
    segment_expandable: Column  #: (s,) 1 for a range of an expandable segment


class TorchCaching:
    """The caching allocator of one device.

    `capacity_bytes` is what the device has for this process, 0 for no limit; the settings' memory fraction and
    collection threshold count from it. `device_addresses` (k,) are handed out in order to new segments, the rest is
    made up: ties between blocks of one size go to the lower address.
    """

    name = "torch"

    def __init__(
        self,
        settings: TorchSettings | None = None,
        capacity_bytes: int = 0,
        device_addresses: Column | None = None,
    ) -> None:
        self.torch_settings = settings or TorchSettings()
        self.settings: dict[str, Any] = asdict(self.torch_settings)
        if capacity_bytes < 0:
            raise BadInputError(f"the capacity is {capacity_bytes} bytes: give a positive number, or 0 for no limit.")
        given = np.empty(0, np.int64) if device_addresses is None else np.asarray(device_addresses, np.int64)
        self._state = rows.State(
            cells=np.zeros(256 * rows.ROW, np.int64),
            holder=np.zeros(0, np.int64),
            roots=np.zeros(0, np.int64),
            numbers=np.zeros(rows.NUM_NUMBERS, np.int64),
            divisions=self.torch_settings.divisions(),
            given=np.ascontiguousarray(given),
        )
        self._set_numbers(capacity_bytes)

    def _set_numbers(self, capacity_bytes: int) -> None:
        settings, numbers = self.torch_settings, self._state.numbers
        numbers[rows.ROWS_END] = rows.ROW  # no block has the name 0
        numbers[rows.NEXT_ADDRESS] = _FIRST_ADDRESS
        numbers[rows.CAPACITY] = capacity_bytes
        numbers[rows.ALLOWED] = numbers[rows.COLLECT_ABOVE] = _NOT_SET
        numbers[rows.MAX_SPLIT] = settings.max_split_bytes
        numbers[rows.MAX_ROUNDING] = settings.max_non_split_rounding_bytes
        numbers[rows.LARGE_SEGMENT] = settings.large_segment_bytes
        numbers[rows.EXPANDABLE] = settings.expandable_segments
        numbers[rows.SPACE_BYTES] = _UNLIMITED_SPACE_BYTES
        if capacity_bytes:
            numbers[rows.SPACE_BYTES] = capacity_bytes + capacity_bytes // 8
        if capacity_bytes and settings.memory_fraction is not None:
            allowed = int(settings.memory_fraction * capacity_bytes)
            numbers[rows.ALLOWED] = allowed
            if settings.garbage_collection_threshold > 0:
                numbers[rows.COLLECT_ABOVE] = int(settings.garbage_collection_threshold * allowed)

    @classmethod
    def from_record(cls, trace: Trace, settings: TorchSettings | None = None) -> "TorchCaching":
        """The allocator that a snapshot recorded, as it was before the first event; `recorded_calls` follow.

        `settings` are the recorded ones if not given. New segments get the recorded addresses. Raises BadInputError
        for a trace without segments or with private pools.
        """
        settings = settings or recorded_settings(trace)
        blocks = starting_blocks(trace, settings)
        small, base, added = segment_pools(trace, blocks, settings)
        given = added if settings.expandable_segments else recorded_calls(trace, settings)[1]
        model = cls(settings, device_addresses=given)
        none = np.empty(0, np.int64)
        model._make_room(Events(none, none, none, trace.size, trace.stream))
        model._grow("cells", len(model._state.cells) + (3 * len(blocks.address) + 64) * rows.ROW)
        requested = np.where(blocks.request >= 0, trace.size[blocks.request] if trace.num_requests else 0, 0)
        columns = blocks.address, blocks.size_bytes, blocks.request, blocks.stream, blocks.segment
        load_blocks(model._state, columns, requested, small, base, int(model._state.numbers[rows.SPACE_BYTES]))
        return model

    def feed(self, events: Events, *, keep_going: bool = False) -> TorchFed:
        """Go on with these events. With `keep_going`, a request that runs out of memory is left out and all others
        are served; otherwise nothing is done from the first such request on."""
        count = len(events.kind)
        self._make_room(events)
        columns = [np.empty(count, np.int64) for _ in range(4)]
        before, failed, at = int(self._state.numbers[rows.OUT_OF_MEMORY]), -1, 0
        while True:
            at, why = run(self._state, events, keep_going, at, *columns)
            if why == NEED_ROWS:
                self._grow("cells", 2 * len(self._state.cells))
                continue
            break
        reserved, allocated, block_bytes, address = columns
        numbers = self._state.numbers
        if why == FAILED:
            failed = at
            for column, last in zip(columns, (rows.RESERVED, rows.ALLOCATED, rows.BLOCK_BYTES), strict=False):
                column[at:] = numbers[last]
            address[at:] = -1
        elif keep_going and numbers[rows.OUT_OF_MEMORY] > before:
            allocs = (events.kind == Kind.ALLOC) & (address < 0)
            allocs[allocs] = events.size[events.request[allocs]] > 0
            failed = int(np.argmax(allocs))
        return TorchFed(
            reserved_bytes=reserved,
            allocated_bytes=allocated,
            failed=failed,
            block_bytes=block_bytes,
            address=address,
            num_out_of_memory=int(numbers[rows.OUT_OF_MEMORY]) - before,
        )

    def _grow(self, name: str, length: int) -> None:
        old: Column = getattr(self._state, name)
        if length > len(old):
            new = np.zeros(length, np.int64)
            new[: len(old)] = old
            self._state = self._state._replace(**{name: new})

    def _make_room(self, events: Events) -> None:
        """Rows for all requests, and trees for all streams."""
        if len(events.size) > len(self._state.holder):
            self._grow("holder", max(len(events.size), 2 * len(self._state.holder)))
        first = len(self._state.roots)
        self._grow("roots", 4 * (int(events.stream.max(initial=-1)) + 1))
        new = len(self._state.roots) - first
        self._grow("cells", len(self._state.cells) + new * rows.ROW)
        numbers = self._state.numbers
        for tree in range(first, first + new):
            header = int(numbers[rows.ROWS_END])
            numbers[rows.ROWS_END] += rows.ROW
            self._state.cells[header : header + rows.ROW] = 0
            self._state.cells[header + rows.STATUS] = rows.HEADER
            self._state.cells[header + rows.PRIORITY] = rows.SEED + tree
            self._state.roots[tree] = header

    def empty_cache(self) -> None:
        """Give back what no live block needs."""
        self._grow("cells", 4 * len(self._state.cells))
        empty_cache(self._state)

    def counters(self) -> Counters:
        """What was done so far."""
        numbers = {
            name: int(self._state.numbers[getattr(rows, name)])
            for name in (
                "RESERVED",
                "PEAK_RESERVED",
                "ALLOCATED",
                "PEAK_ALLOCATED",
                "DEVICE_ALLOCS",
                "DEVICE_FREES",
                "RETRIES",
                "BLOCK_BYTES",
                "OUT_OF_MEMORY",
                "NUM_WAITING",
            )
        }
        return Counters(
            reserved_bytes=numbers["RESERVED"],
            peak_reserved_bytes=numbers["PEAK_RESERVED"],
            allocated_bytes=numbers["ALLOCATED"],
            peak_allocated_bytes=numbers["PEAK_ALLOCATED"],
            device_allocs=numbers["DEVICE_ALLOCS"],
            device_frees=numbers["DEVICE_FREES"],
            retries=numbers["RETRIES"],
            more={
                "block_bytes": numbers["BLOCK_BYTES"],
                "out_of_memory": numbers["OUT_OF_MEMORY"],
                "waiting_blocks": numbers["NUM_WAITING"],
            },
        )

    def blocks(self) -> TorchBlockMap:
        """Where everything is, as torch.cuda.memory_snapshot() shows it."""
        end = int(self._state.numbers[rows.ROWS_END])
        table = self._state.cells[:end].reshape(-1, rows.ROW)
        chosen = np.flatnonzero(np.isin(table[:, rows.STATUS], (rows.FREE, rows.LIVE, rows.WAITING)))
        chosen = chosen[np.argsort(table[chosen, rows.ADDRESS])]
        found = table[chosen]
        is_head = np.ones(len(found), bool)
        is_head[1:] = found[1:, rows.PREVIOUS] != chosen[:-1] * rows.ROW
        is_head |= found[:, rows.PREVIOUS] == 0
        heads = np.flatnonzero(is_head)
        is_held = found[:, rows.STATUS] != rows.FREE
        return TorchBlockMap(
            address=found[:, rows.ADDRESS].copy(),
            size_bytes=found[:, rows.SIZE].copy(),
            request=np.where(is_held, found[:, rows.REQUEST], -1),
            waiting=(found[:, rows.STATUS] == rows.WAITING).astype(np.int64),
            stream=found[:, rows.POOL] >> 1,
            segment=np.cumsum(is_head) - 1,
            segment_address=found[heads, rows.ADDRESS].copy(),
            segment_size=np.add.reduceat(found[:, rows.SIZE], heads) if len(heads) else np.empty(0, np.int64),
            requested_bytes=np.where(is_held, found[:, rows.REQUESTED], 0),
            segment_small=1 - (found[heads, rows.POOL] & 1),
            segment_expandable=(found[heads, rows.BASE] != 0).astype(np.int64),
        )
