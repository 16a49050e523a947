"""What an out-of-memory error in a trace was about: too little memory, or too little of it in one piece.

Contract: the verdict is "capacity" if the request is larger than all that was free together, on the device and in the
allocator, else "fragmentation", and "unknown" where the file does not say what was free on the device; what would have
served it was replayed, each from an empty device of the same size.
"""

from dataclasses import dataclass, field

import numpy as np

from stalloc.analysis.moments import asked_by, device_free
from stalloc.columns import Column
from stalloc.replay.model_events import recorded_conf
from stalloc.replay.protocol import BlockMap, Events, Kind
from stalloc.replay.simulation import SWEEP, SWEEP_UNDER_PRESSURE, Candidate, Simulated, run_one, with_request
from stalloc.trace import Trace
from stalloc.trace.sites import UNKNOWN


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
    if _held_at_the_end(events) > capacity_bytes:
        return []
    settings = dict.fromkeys([recorded_conf(trace), *SWEEP, *SWEEP_UNDER_PRESSURE])
    tried = [Candidate("stalloc"), *(Candidate("torch", conf) for conf in settings)]
    results = [run_one(trace, candidate, capacity_bytes, events) for candidate in tried]
    return sorted((r for r in results if r.fits), key=lambda r: (r.peak_reserved_bytes, r.device_allocs, r.settings))


def _held_at_the_end(events: Events) -> int:
    """The bytes that the program asked for and has not given up."""
    taken = events.request[events.kind == Kind.ALLOC]
    given_up = events.request[np.isin(events.kind, (Kind.FREE_REQUESTED, Kind.FREE_COMPLETED))]
    return int(events.size[np.setdiff1d(taken, given_up)].sum())
