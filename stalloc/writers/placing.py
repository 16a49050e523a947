"""An address for every request of a trace, for formats that need one.

Upheld: no two requests share an address while both live, and every request lies inside a segment while it lives. What
the source says is taken as it is; what it does not say is made up, and `notes` has a sentence for each thing that is.
"""

from dataclasses import dataclass

import numpy as np

from stalloc.columns import Column
from stalloc.planner import plan
from stalloc.sizes import ALIGNMENT_BYTES
from stalloc.trace.record import Action, Trace

MADE_UP_BASE = 1 << 40
"""Where addresses begin that a plan made up."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Places:
    """Where the n requests of a trace are, and the s segments around them."""

    address: Column  #: (n,) uint64
    segment_address: Column  #: (s,) uint64, increasing where they are made up
    segment_size: Column  #: (s,) bytes
    segment_stream: Column  #: (s,) index into the trace's streams
    segments_recorded: bool
    """Whether the segments are those of the record; if not, its segment events say nothing of them."""
    notes: tuple[str, ...]


def places_of(trace: Trace) -> Places:
    """Addresses as recorded, else from a plan of the whole record; segments as recorded, else as few as cover them."""
    address = recorded_addresses(trace)
    if address is not None:
        if _inside_segments(trace, address):
            return Places(
                address=address,
                segment_address=trace.segment_address,
                segment_size=trace.segment_size,
                segment_stream=trace.segment_stream,
                segments_recorded=True,
                notes=(),
            )
        begin, size = covered_ranges(address, np.maximum(trace.size, 1))
        notes = ["segments are not in the source: they are made up to cover its addresses, so reserved means nothing"]
    else:
        offset, peak_bytes, said = _offsets(trace)
        address = offset.astype(np.uint64) + np.uint64(MADE_UP_BASE)
        begin, size = np.array([MADE_UP_BASE], np.uint64), np.array([peak_bytes], np.int64)
        notes = [said]
        if len(trace.streams) > 1:
            notes.append("the plan places all streams in one segment")
    return Places(
        address=address,
        segment_address=begin,
        segment_size=size,
        segment_stream=np.zeros(len(begin), np.int64),
        segments_recorded=False,
        notes=tuple(notes),
    )


def _offsets(trace: Trace) -> tuple[Column, int, str]:
    """Offsets of the requests in one segment, how long that is, and the sentence about it."""
    told = trace.extra.get("offset")
    if told is not None and told.shape == trace.size.shape and told.dtype == np.int64 and trace.size.min(initial=1) > 0:
        kept = plan((trace.start, trace.end, trace.size), alignment=1, fixed=told)  # refuses offsets that overlap
        return kept.offset, kept.peak_bytes, "addresses are the offsets in the source, in one segment that is made up"
    made = plan((trace.start, trace.end, np.maximum(trace.size, 1)), alignment=ALIGNMENT_BYTES, method="greedy")
    said = "addresses are not in the source: they are made up by a plan of stalloc, and so is the one segment"
    return made.offset, made.peak_bytes, said


def recorded_addresses(trace: Trace) -> Column | None:
    """(n,) uint64: the address of each request by the record, None if it does not say so for all of them."""
    if not trace.num_requests or not len(trace.action):
        return None
    known = np.zeros(trace.num_requests, bool)
    address = np.zeros(trace.num_requests, np.uint64)
    seen = (trace.event_request >= 0) & (trace.action <= Action.FREE_COMPLETED)
    address[trace.event_request[seen]] = trace.address[seen]
    known[trace.event_request[seen]] = True
    blocks = recorded_blocks(trace)
    if blocks is not None:
        block, _, request = blocks
        used = request >= 0
        address[request[used]] = block[used]
        known[request[used]] = True
    return address if bool(np.all(known & (address > 0))) else None


def recorded_blocks(trace: Trace) -> tuple[Column, Column, Column] | None:
    """Address (uint64), bytes and request (-1: free) of each block at the end, None if the record has no such table."""
    told = [trace.extra.get(name) for name in ("block_address", "block_size", "block_request")]
    columns = [column for column in told if column is not None and column.ndim == 1 and column.dtype.kind in "iu"]
    if len(columns) < 3 or len({len(column) for column in columns}) > 1:
        return None
    address, size, request = columns
    if request.max(initial=-1) >= trace.num_requests:
        return None
    return address.astype(np.uint64), size.astype(np.int64), request.astype(np.int64)


def _inside_segments(trace: Trace, address: Column) -> bool:
    """Whether what lives at the end lies in the segments at the end, and less than they hold was live at any time."""
    if not len(trace.segment_address) or not len(trace.action):
        return False
    order = np.argsort(trace.segment_address)
    begin, size = trace.segment_address[order], trace.segment_size[order].astype(np.uint64)
    alive = np.flatnonzero(trace.end == trace.num_events)
    at = np.searchsorted(begin, address[alive], side="right") - 1
    ends = address[alive] + trace.size[alive].astype(np.uint64)
    if not bool(np.all((at >= 0) & (ends <= begin[at] + size[at]))):
        return False
    reserved, live = trace.reserved_bytes(), trace.live_bytes(trace.size)[1:]
    return int(reserved[-1]) == int(trace.segment_size.sum()) and bool(np.all(live <= reserved))


def covered_ranges(address: Column, size: Column) -> tuple[Column, Column]:
    """The ranges [begin, begin + size) that cover all addresses ever used, in blocks of 512 bytes, the longest ones."""
    align = np.uint64(ALIGNMENT_BYTES)
    begin = address // align * align
    end = (address + size.astype(np.uint64) + align - np.uint64(1)) // align * align
    order = np.argsort(begin)
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], begin[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return begin[first], (reach[last] - begin[first]).astype(np.int64)
