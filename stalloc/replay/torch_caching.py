"""PyTorch's CUDA caching allocator as a model: one device, the native backend, its default pools.

Contract: given the device addresses of a run, every request gets the address that torch 2.11 gave it there, under
every setting that parse_settings takes. Private pools (CUDA graphs, MemPool) are not part of it. A check of a snapshot
is `exact` if from the reconstructed start, every allocation of the recording got its recorded address and the reserved
bytes agreed after every event; the first event where either is not so is named otherwise.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.allocator_conf import TorchSettings, parse_settings
from stalloc.columns import Column
from stalloc.errors import BadInputError
from stalloc.replay.blocks import FREE
from stalloc.replay.model import TableModel
from stalloc.replay.protocol import BlockMap, Events, Fed, Kind
from stalloc.replay.recorded_state import SEGMENT_ACTIONS
from stalloc.replay.torch_cache import OWN, RELEASE, TREES, run
from stalloc.replay.torch_start import (
    is_whole,
    load_blocks,
    recorded_calls,
    recorded_settings,
    segment_pools,
    starting_blocks,
)
from stalloc.trace.record import Trace

__all__ = ["TorchBlockMap", "TorchCaching", "TorchFed", "parse_settings"]

_UNLIMITED_SPACE_BYTES = 1 << 44
_NOT_SET = -1


@dataclass(frozen=True, eq=False, kw_only=True)
class TorchFed(Fed):
    """The model's answers to its events; columns are int64."""

    block_bytes: Column  #: (m,) whole blocks that are not yet given up, which torch.cuda.memory_allocated() counts
    address: Column  #: (m,) where an allocation was put; -1 for other events
    num_out_of_memory: int  #: requests that ran out of memory, which is at most 1 unless told to keep going


@dataclass(frozen=True, eq=False, kw_only=True)
class TorchBlockMap(BlockMap):
    """Every block, and what torch knows about it; an expandable segment counts as one segment a mapped range."""

    requested_bytes: Column  #: (b,) of the request that holds it, 0 for a free block
    segment_small: Column  #: (s,) 1 for the pool of requests up to 1 MiB
    segment_expandable: Column  #: (s,) 1 for a range of an expandable segment


class TorchCaching(TableModel):
    """The caching allocator of one device.

    `capacity_bytes` is what the device has for this process, 0 for no limit; the settings' memory fraction and
    collection threshold count from it. `device_addresses` (k,) are handed out in order to new segments, the rest is
    made up: ties between blocks of one size go to the lower address.
    """

    name = "torch"
    settings_type = TorchSettings
    own = OWN
    driver = run
    shows = ("block_bytes", "out_of_memory", "waiting_blocks")
    trees_per_stream = TREES
    num_columns = 3

    def __init__(
        self, settings: TorchSettings | None = None, capacity_bytes: int = 0, device_addresses: Column | None = None
    ) -> None:
        self._given = np.ascontiguousarray([] if device_addresses is None else device_addresses, np.int64)
        super().__init__(settings, capacity_bytes)

    def _own_tables(self) -> dict[str, Column]:
        return {
            "searches": np.zeros(2, np.int64),
            "divisions": np.array(self.options.roundup_divisions, np.int64),
            "given": self._given,
        }

    def _start(self, capacity_bytes: int) -> None:
        allowed = collect_above = _NOT_SET
        if capacity_bytes and self.options.memory_fraction is not None:
            allowed = int(self.options.memory_fraction * capacity_bytes)
            if self.options.garbage_collection_threshold > 0:
                collect_above = int(self.options.garbage_collection_threshold * allowed)
        space = capacity_bytes + capacity_bytes // 8 if capacity_bytes else _UNLIMITED_SPACE_BYTES
        self._own.write(allowed=allowed, collect_above=collect_above, space_bytes=space)

    @classmethod
    def from_record(
        cls, trace: Trace, settings: TorchSettings | None = None, blocks: BlockMap | None = None
    ) -> "TorchCaching":
        """The allocator that a snapshot recorded, as it was before the first event; `recorded_calls` follow.

        `settings` are the recorded ones if not given, `blocks` those that `starting_blocks` finds. New segments get the
        recorded addresses. Raises BadInputError for a trace without segments or with private pools, or whose segments
        and blocks do not fit each other.
        """
        settings = settings or recorded_settings(trace)
        blocks = blocks if blocks is not None else starting_blocks(trace, settings)
        if not is_whole(blocks):
            raise BadInputError("the segments and blocks of the recording do not fit each other: record it again.")
        small, base, added = segment_pools(trace, blocks, settings)
        given = added if settings.expandable_segments else recorded_calls(trace, settings)[1]
        model = cls(settings, device_addresses=given)
        none = np.empty(0, np.int64)
        streams = np.concatenate([trace.stream, blocks.stream])  # a segment may be of a stream without a request
        model._make_room(Events(none, none, none, trace.size, streams))
        model._store.lengthen(blocks=model._store["num_blocks"] + 3 * len(blocks.address) + 64)
        requested = np.where(blocks.request >= 0, trace.size[blocks.request] if trace.num_requests else 0, 0)
        columns = blocks.address, blocks.size_bytes, blocks.request, blocks.stream, blocks.segment
        load_blocks(model._store.pointer, model._own.pointer, columns, requested, small, base)
        return model

    def feed(self, events: Events, *, keep_going: bool = False) -> TorchFed:
        """Go on with these events. With `keep_going`, a request that runs out of memory is left out and all others
        are served; otherwise nothing is done from the first such request on."""
        before = self._own["out_of_memory"]
        columns, failed = self._drive(events, keep_going=keep_going)
        done = len(events.kind) if failed < 0 else failed
        columns[2, done:] = self._own["block_bytes"]
        allocs = events.kind == Kind.ALLOC
        address = np.where(allocs, self._store.tables["addresses"][np.where(allocs, events.request, 0)], 0)
        address[done:] = 0
        num_out_of_memory = self._own["out_of_memory"] - before
        if keep_going and num_out_of_memory:
            allocs[allocs] = events.size[events.request[allocs]] > 0
            failed = int(np.argmax(allocs & (address == 0)))
        return TorchFed(
            reserved_bytes=columns[0],
            allocated_bytes=columns[1],
            failed=failed,
            block_bytes=columns[2],
            address=np.where(address == 0, -1, address),
            num_out_of_memory=num_out_of_memory,
        )

    def blocks(self) -> TorchBlockMap:
        """All blocks with their places, as torch.cuda.memory_snapshot() shows them."""
        blocks, found = super().blocks(), self.used_rows()[self.memory_rows()]
        first = found[np.searchsorted(blocks.segment, np.arange(len(blocks.segment_address)))]  # of each segment
        return TorchBlockMap(
            **vars(blocks),
            requested_bytes=np.where(found["state"] == FREE, 0, found["requested"]),
            segment_small=1 - (first["tree"] // 2 & 1),
            segment_expandable=(first["extra"] != 0).astype(np.int64),
        )


@dataclass(frozen=True)
class RecordCheck:
    """Whether the model does what the recorded allocator did."""

    exact: bool
    first_difference: int | None  #: event index; None if exact, or if the model has no such state to start from
    reason: str  #: what differs there, empty if exact
    num_segment_events: int  #: segments and pages taken and given back
    num_compared: int  #: events of the program that were compared


def check_record(trace: Trace, settings: TorchSettings | None = None) -> RecordCheck:
    """Replay a snapshot's calls from its reconstructed start, with the recorded settings if none are given.

    A trace with private pools is not exact. Raises BadInputError for a trace without segments.
    """
    settings = settings or recorded_settings(trace)
    events, _ = recorded_calls(trace, settings)
    num_segment_events = int(np.isin(trace.action, SEGMENT_ACTIONS).sum())

    def checked(num_compared: int, first: int | None = None, reason: str = "") -> RecordCheck:
        return RecordCheck(not reason, first, reason, num_segment_events, num_compared)

    if np.any(trace.extra.get("segment_pool", 0)):
        return checked(0, reason="the trace has private pools, which the model has not")
    blocks = starting_blocks(trace, settings)
    if not is_whole(blocks):
        return checked(0, reason="its segments and blocks do not fit each other")
    fed = TorchCaching.from_record(trace, settings, blocks).feed(events)
    recorded = trace.reserved_bytes()[events.event]
    differs = (events.kind == Kind.ALLOC) & (fed.address != trace.address[events.event].astype(np.int64))
    differs |= fed.reserved_bytes != recorded
    if not differs.any():
        return checked(len(events.kind))
    at = int(np.argmax(differs))
    return checked(len(events.kind), int(events.event[at]), _reason(trace, events, fed, at, int(recorded[at])))


def _reason(trace: Trace, events: Events, fed: TorchFed, at: int, recorded: int) -> str:
    event = int(events.event[at])
    what = {
        int(Kind.ALLOC): f"an allocation of {int(trace.event_size[event])} bytes",
        int(Kind.EMPTY_CACHE): "the segments given back up to here",
        RELEASE: "a segment given back",
    }.get(int(events.kind[at]), "a free")
    reserved = int(fed.reserved_bytes[at])
    if reserved != recorded:
        return f"after {what} the file has {recorded} bytes reserved, the model {reserved}"
    return f"{what} went to {int(trace.address[event]):#x} in the file, to {int(fed.address[at]):#x} in the model"
