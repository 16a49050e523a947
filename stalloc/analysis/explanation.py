"""Why reserved is above allocated at one event: every byte of the difference under one named cause.

Contract: the causes add up to reserved - allocated, to the byte. Allocated counts requested bytes that the program has
not given up; reserved is what the segments hold.

The names are those people use: hard fragmentation is free space that live blocks enclose, soft fragmentation is free
space at the ends of segments and in whole segments, which would merge if the segments were one range.

The verdict on an out-of-memory error is "capacity" if the request is larger than all that was free together, on the
device and in the allocator, else "fragmentation", and "unknown" where the file does not say what was free on the
device; what would have served it was replayed, each from an empty device of the same size.
"""

from dataclasses import dataclass, field

import numpy as np

from stalloc.analysis.holders import grouped, purposes, role_keys
from stalloc.analysis.moments import asked_by, device_free, event_at, is_oom, moment_text, recorded, reserved_peak
from stalloc.columns import Column
from stalloc.figures import fragmentation, html_table, human_bytes
from stalloc.lifespans import fullest
from stalloc.replay.model_events import events_of, recorded_conf
from stalloc.replay.protocol import BlockMap, Kind
from stalloc.replay.recorded_state import recorded_blocks, request_addresses
from stalloc.replay.registry import make
from stalloc.replay.simulation import SWEEP, SWEEP_UNDER_PRESSURE, Candidate, Simulated, run_one, with_request
from stalloc.trace import Action, Trace
from stalloc.trace.operations import read_operations
from stalloc.trace.sites import UNKNOWN, site_names


@dataclass(frozen=True)
class OutOfMemory:
    """An out-of-memory event: whether there was too little memory, or too little of it in one piece."""

    verdict: str  #: "capacity", "fragmentation" or "unknown"
    wanted_bytes: int
    stream: int
    device_free_bytes: int | None  #: None: the file does not say
    partly_used_bytes: int  #: free in segments that also hold live blocks, all streams
    whole_segments_bytes: int  #: free segments that the allocator still held
    largest_free_bytes: int  #: in one piece inside a segment of the stream
    same_stream_bytes: int  #: free in segments of the stream
    avoided_by: list[Simulated] = field(default_factory=list)  #: best first
    fails_again: bool | None = None  #: with the settings of the file, replayed in the same way; None: not tried
    asked_by: str = UNKNOWN  #: call site


def out_of_memory(trace: Trace, blocks: BlockMap, live_of: Column, event: int, advise: bool) -> OutOfMemory:
    """What an out-of-memory event was about, given the blocks then and the live bytes of each segment."""
    wanted, stream = int(trace.event_size[event]), int(trace.event_stream[event])
    on_device = device_free(trace, event)
    free = blocks.request < 0
    whole = free & (live_of[blocks.segment] == 0)
    partly = free & ~whole
    own = free & (blocks.stream == stream)
    in_all = (on_device or 0) + int(blocks.size_bytes[free].sum())
    capacity = int(blocks.segment_size.sum()) + (on_device or 0)
    advise = advise and on_device is not None
    fitted = what_would_have_fitted(trace, event, capacity) if advise else []
    usual = ("torch", recorded_conf(trace))
    others = [result for result in fitted if (result.allocator, result.settings) != usual]
    return OutOfMemory(
        verdict="unknown" if on_device is None else "fragmentation" if in_all >= wanted else "capacity",
        wanted_bytes=wanted,
        stream=stream,
        device_free_bytes=on_device,
        partly_used_bytes=int(blocks.size_bytes[partly].sum()),
        whole_segments_bytes=int(blocks.size_bytes[whole].sum()),
        largest_free_bytes=int(blocks.size_bytes[own].max(initial=0)),
        same_stream_bytes=int(blocks.size_bytes[own].sum()),
        avoided_by=others,
        fails_again=len(others) == len(fitted) if advise else None,
        asked_by=asked_by(trace, event),
    )


def what_would_have_fitted(trace: Trace, event: int, capacity_bytes: int) -> list[Simulated]:
    """What would have served the request of an out-of-memory event: stalloc and settings of torch's allocator, best
    first, those of the file among them; each replayed from an empty device of `capacity_bytes`. Nothing is replayed
    where what the program holds at that moment is more than the device has.
    """
    events = with_request(trace, event, int(trace.event_size[event]), int(trace.event_stream[event]))
    asked = events.request[events.kind == Kind.ALLOC]
    given_up = events.request[np.isin(events.kind, (Kind.FREE_REQUESTED, Kind.FREE_COMPLETED))]
    if int(events.size[np.setdiff1d(asked, given_up)].sum()) > capacity_bytes:
        return []
    settings = dict.fromkeys([recorded_conf(trace), *SWEEP, *SWEEP_UNDER_PRESSURE])
    tried = [Candidate("stalloc"), *(Candidate("torch", conf) for conf in settings)]
    results = [run_one(trace, candidate, capacity_bytes, events) for candidate in tried]
    return sorted((r for r in results if r.fits), key=lambda r: (r.peak_reserved_bytes, r.device_allocs, r.settings))


#: every cause there is, and what it says
CAUSES = {
    "rounding": "blocks are larger than the requests",
    "hard_fragmentation": "free space between live blocks",
    "soft_fragmentation": "free space at the ends of segments, and in segments that will be used again",
    "other_streams": "cached for another stream",
    "private_pools": "free in private pools, such as those of CUDA graphs",
    "waiting_frees": "freed, but another stream may still use it",
    "cache_never_returned": "whole segments that are not used again in this recording",
}


@dataclass(frozen=True)
class PinnedSegment:
    """A segment that cannot go back because of what lives in it."""

    address: int
    size_bytes: int
    free_bytes: int
    num_blocks: int  #: live
    live_bytes: int
    sites: tuple[str, ...]  #: call sites of its largest live blocks, or what they are for


@dataclass(frozen=True)
class Explanation:
    """Where the reserved bytes of one device are at one event."""

    device: int
    event: int
    reserved_bytes: int
    allocated_bytes: int
    causes: dict[str, int]  #: bytes by name; the names are those of CAUSES
    source: str  #: "record", or the model whose blocks these are
    segments: list[PinnedSegment]  #: most free bytes first
    sites: dict[str, int]  #: free bytes that each call site's blocks keep in their segments, most first
    roles: dict[str, int]  #: allocated bytes by what they are for, most first; empty without operations
    record_allocated_peak_bytes: int  #: of the whole record, rounded up to 512 bytes a request
    record_unseen_bytes: int  #: live throughout, told only as a total
    record_reserved_peak_bytes: int
    is_reserved_told: bool  #: whether the reserved peak is from the file, not from the model
    record_fragmentation: float  #: 1 - allocated peak / reserved peak of the whole record
    out_of_memory: OutOfMemory | None = None

    @property
    def source_text(self) -> str:
        """A sentence on where the blocks come from; empty if they come from the file."""
        if self.source == "record":
            return ""
        missing = "where what was reserved lies" if self.is_reserved_told else "what was reserved"
        return f"the file does not say {missing}: blocks are those of a model, {self.source}"

    def _repr_html_(self) -> str:
        causes = sorted(self.causes.items(), key=lambda item: -item[1])
        error = self.out_of_memory
        failed = [] if error is None else [(f"out of memory by {error.verdict}", human_bytes(error.wanted_bytes))]
        rows = [
            *failed,
            ("reserved", human_bytes(self.reserved_bytes)),
            ("allocated", human_bytes(self.allocated_bytes)),
            *((name.replace("_", " "), human_bytes(size)) for name, size in causes if size),
        ]
        return html_table(f"Memory of device {self.device} {moment_text(self.event)}", rows)


def explain(trace: Trace, at: int | str = "peak", *, top: int = 10, advise: bool = True) -> Explanation:
    """Split reserved - allocated of a trace after an event, "peak" (most reserved) or "oom" (the last one).

    A trace with segments is explained from its own record; any other by replaying it with torch's caching allocator.
    Raises BadInputError for an event that the trace does not have.
    """
    has_blocks = bool(len(trace.segment_address) and len(trace.action))
    blocks, event, source, peak_bytes = _recorded(trace, at) if has_blocks else _replayed(trace, at)
    stream = _stream_at(trace, event)
    never = _never_used_again(trace, blocks, event) if has_blocks else np.zeros(len(blocks.segment_address), bool)
    causes, free_of_segment, live_of_segment = _causes(trace, blocks, stream, never)
    held = blocks.request >= 0
    names = np.full(trace.num_requests, UNKNOWN, object)
    operations = read_operations(trace)
    rows = blocks.request[held]
    names[rows] = site_names(trace, rows) if operations is None else purposes(operations, rows)
    told = recorded(trace)
    taken = blocks.request[held & (blocks.waiting == 0)]
    allocated = int(trace.size[taken].sum())
    roles = grouped(role_keys(operations, taken), trace.size[taken], str) if operations else []
    made = Explanation(
        device=trace.device,
        event=event,
        reserved_bytes=int(blocks.segment_size.sum()),
        allocated_bytes=allocated,
        causes=causes,
        source=source,
        segments=_pinned(blocks, names, free_of_segment, live_of_segment, top),
        sites=dict(list(_pinning_sites(blocks, names, free_of_segment).items())[:top]),
        roles={role.name: role.held_bytes for role in roles},
        record_allocated_peak_bytes=told.allocated_peak_bytes,
        record_unseen_bytes=told.unseen_bytes if told.fragmentation is not None else 0,
        record_reserved_peak_bytes=peak_bytes if told.reserved_peak_bytes is None else told.reserved_peak_bytes,
        is_reserved_told=told.reserved_peak_bytes is not None,
        record_fragmentation=(
            fragmentation(told.allocated_peak_bytes, peak_bytes) if told.fragmentation is None else told.fragmentation
        ),
        out_of_memory=out_of_memory(trace, blocks, live_of_segment, event, advise) if is_oom(trace, event) else None,
    )
    assert sum(causes.values()) == made.reserved_bytes - allocated
    return made


def _recorded(trace: Trace, at: int | str) -> tuple[BlockMap, int, str, int]:
    """The blocks, the event, where they come from, and the reserved peak of the whole record."""
    peak = reserved_peak(trace, trace.size)
    event = (peak.event if peak else -1) if at == "peak" else event_at(trace, at, "peak")
    if trace.info.get("history") is False and at == "peak":
        event = trace.num_events - 1  # the snapshot itself
    return recorded_blocks(trace, event), event, "record", peak.reserved_bytes if peak else 0


def _replayed(trace: Trace, at: int | str) -> tuple[BlockMap, int, str, int]:
    """The blocks, the event, where they come from and the reserved peak, by a model of torch's allocator."""
    events = events_of(trace)
    fed = make("torch", "", 0).feed(events)
    before = int(np.count_nonzero(events.event < 0))
    if at == "peak":
        position = fullest(fed.reserved_bytes, fed.allocated_bytes)
        event = int(events.event[position]) if position >= before else -1
        stop = position + 1
    else:
        event = event_at(trace, at, "peak")
        stop = int(np.searchsorted(events.event, event, side="right"))
    model = make("torch", "", 0)
    model.feed(events._replace(kind=events.kind[:stop], request=events.request[:stop], event=events.event[:stop]))
    peak_bytes = int(fed.reserved_bytes.max(initial=0))
    return model.blocks(), event, "torch's caching allocator, replayed from an empty device", peak_bytes


def _stream_at(trace: Trace, event: int) -> int:
    """The stream of the last request: blocks that are free for it count as free, those of other streams do not."""
    if is_oom(trace, event):
        return int(trace.event_stream[event])
    if len(trace.action):
        allocs = np.flatnonzero(trace.action[: event + 1] == Action.ALLOC)
        if len(allocs):
            return int(trace.event_stream[allocs[-1]])
    begun = int(np.searchsorted(trace.start, event, side="right"))
    return int(trace.stream[begun - 1]) if begun else 0


def _never_used_again(trace: Trace, blocks: BlockMap, event: int) -> Column:
    """(s,) bool: no later request of the record lies in the segment before it goes back to the device."""
    returned = np.isin(trace.action, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP))
    used = _first_later(request_addresses(trace), trace.start, blocks, event)
    gone = _first_later(trace.address[returned].astype(np.int64), np.flatnonzero(returned), blocks, event)
    return used >= gone


def _first_later(address: Column, at: Column, blocks: BlockMap, event: int) -> Column:
    """(s,) the first of the events `at` after `event` whose address lies in the segment; a very late one for none."""
    later = np.flatnonzero(at > event)
    later = later[np.argsort(address[later], kind="stable")]
    low = np.searchsorted(address[later], blocks.segment_address).tolist()
    high = np.searchsorted(address[later], blocks.segment_address + blocks.segment_size).tolist()
    return np.array([at[later[i:j]].min(initial=1 << 62) for i, j in zip(low, high, strict=True)], np.int64)


def _causes(trace: Trace, blocks: BlockMap, stream: int, never: Column) -> tuple[dict[str, int], Column, Column]:
    """Bytes by cause, and the free and live bytes of each segment."""
    num_segments = len(blocks.segment_address)
    free = blocks.request < 0
    held = ~free
    free_of = np.bincount(blocks.segment[free], blocks.size_bytes[free], num_segments).astype(np.int64)
    live_of = np.bincount(blocks.segment[held], blocks.size_bytes[held], num_segments).astype(np.int64)
    enclosed = np.zeros(len(free), bool)
    if len(free) > 2:
        same = blocks.segment[1:] == blocks.segment[:-1]
        enclosed[1:-1] = same[:-1] & same[1:] & held[:-2] & held[2:]
    private = blocks.segment_pool[blocks.segment] > 0 if blocks.segment_pool is not None else np.zeros(len(free), bool)
    whole = live_of[blocks.segment] == 0
    rest = free.copy()
    causes = dict.fromkeys(CAUSES, 0)
    taken = held & (blocks.waiting == 0)
    causes["rounding"] = int((blocks.size_bytes[taken] - trace.size[blocks.request[taken]]).sum())
    causes["waiting_frees"] = int(blocks.size_bytes[held & (blocks.waiting == 1)].sum())
    for name, chosen in (
        ("private_pools", private),
        ("cache_never_returned", whole & never[blocks.segment]),
        ("other_streams", blocks.stream != stream),
        ("hard_fragmentation", enclosed),
        ("soft_fragmentation", np.ones(len(free), bool)),
    ):
        causes[name] = int(blocks.size_bytes[rest & chosen].sum())
        rest &= ~chosen
    return causes, free_of, live_of


def _pinned(blocks: BlockMap, names: Column, free_of: Column, live_of: Column, top: int) -> list[PinnedSegment]:
    partly = np.flatnonzero((free_of > 0) & (live_of > 0))
    found = []
    for segment in partly[np.argsort(-free_of[partly], kind="stable")][:top].tolist():
        rows = np.flatnonzero((blocks.segment == segment) & (blocks.request >= 0))
        largest = rows[np.argsort(-blocks.size_bytes[rows], kind="stable")][:3]
        found.append(
            PinnedSegment(
                address=int(blocks.segment_address[segment]),
                size_bytes=int(blocks.segment_size[segment]),
                free_bytes=int(free_of[segment]),
                num_blocks=len(rows),
                live_bytes=int(live_of[segment]),
                sites=tuple(dict.fromkeys(names[blocks.request[largest]].tolist())),
            )
        )
    return found


def _pinning_sites(blocks: BlockMap, names: Column, free_of: Column) -> dict[str, int]:
    """The free bytes of each partly used segment, shared equally among its live blocks, by call site."""
    rows = np.flatnonzero((blocks.request >= 0) & (free_of[blocks.segment] > 0))
    segment = blocks.segment[rows]
    share = free_of[segment] / np.bincount(segment, minlength=len(free_of))[segment]
    total: dict[str, float] = {}
    for name, part in zip(names[blocks.request[rows]].tolist(), share.tolist(), strict=True):
        total[name] = total.get(name, 0.0) + part
    return {name: round(part) for name, part in sorted(total.items(), key=lambda item: (-item[1], item[0]))}
