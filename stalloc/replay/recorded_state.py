"""Where everything was at an event, by what the file itself records: no model has a say.

Contract: the blocks of the map cover the segments that the events and the final list imply, without a gap or an
overlap. Torch rounds a block up to 512 bytes and, in its large pool, does not split off 1 MiB or less: so a gap of up
to that much behind a live block of that pool belongs to the block. What lies behind it in a larger gap is free.
"""

from bisect import bisect_right
from dataclasses import replace

import numpy as np

from stalloc.errors import BadInputError
from stalloc.replay.protocol import BlockMap
from stalloc.sizes import aligned
from stalloc.trace import Action, Trace

#: what torch rounds up to, the largest rest that its large pool keeps with a block, the segments of its small pool
_UNSPLIT, _SMALL_SEGMENT = 1 << 20, 2 << 20
SEGMENT_ACTIONS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
_Range = tuple[int, int, int]  # address, bytes, stream


def recorded_blocks(trace: Trace, event: int) -> BlockMap:
    """Every block after the event. Raises BadInputError for a trace without addresses and segments.

    Event -1 is the start of the recording.
    """
    if not len(trace.segment_address) or not len(trace.action):
        raise BadInputError(f"device {trace.device}: the trace has no segments: replay it with a model instead.")
    segments = _segments(trace, event)
    live = np.flatnonzero((trace.start <= event) & (event < trace.end) & (trace.size > 0))
    address = request_addresses(trace)[live]
    order = np.argsort(address, kind="stable")
    live, address = live[order], address[order]
    begins = [segment[0] for segment in segments]
    following = np.append(address, 1 << 62)[1:].tolist()
    taken = []
    for row, start, beyond in zip(live.tolist(), address.tolist(), following, strict=True):
        begin, size, stream = segments[max(bisect_right(begins, start) - 1, 0)] if segments else (0, 0, 0)
        if not begin <= start < begin + size:
            continue  # in no segment: a plug-in's, or cut away
        room = min(beyond, begin + size) - start
        block = min(aligned(int(trace.size[row])), room)
        if room - block <= _UNSPLIT and size != _SMALL_SEGMENT:
            block = room
        taken.append((start, block, row, int(trace.free_requested[row] <= event), stream))
    made = BlockMap.covering(segments, taken)
    return replace(made, segment_pool=_pools(trace, made.segment_address, made.segment_size))


def request_addresses(trace: Trace) -> np.ndarray:
    """(n,) int64 address of each request; -1 where no event and no segment tells."""
    address = np.full(trace.num_requests, -1, np.int64)
    known = np.flatnonzero(trace.event_request >= 0)
    address[trace.event_request[known]] = trace.address[known].astype(np.int64)
    rows, places = trace.extra.get("block_request"), trace.extra.get("block_address")
    if rows is not None and places is not None:  # blocks at the end; those live throughout have no event
        held = rows >= 0
        address[rows[held]] = places[held].astype(np.int64)
    return address


def _pools(trace: Trace, address: np.ndarray, size: np.ndarray) -> np.ndarray:
    """(s,) 1 for a segment of a private pool, as far as the final list tells."""
    private = np.zeros(len(address), np.int64)
    pools = trace.extra.get("segment_pool")
    if pools is not None:
        for begin in trace.segment_address[(pools != 0).any(axis=1)].astype(np.int64).tolist():
            private |= (address <= begin) & (begin < address + size)
    return private


def _segments(trace: Trace, event: int) -> list[_Range]:
    """Each mapped range after the event, in order, found by undoing all later events."""
    columns = trace.segment_address.astype(np.int64), trace.segment_size, trace.segment_stream
    ranges = sorted(zip(*(column.tolist() for column in columns), strict=True))
    later = np.arange(event + 1, trace.num_events)[::-1]
    for at in later[np.isin(trace.action[later], SEGMENT_ACTIONS)].tolist():
        begin, size, stream = int(trace.address[at]), int(trace.event_size[at]), int(trace.event_stream[at])
        action = trace.action[at]
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            _remove(ranges, begin, size)
        else:
            _add(ranges, begin, size, stream, joins=action == Action.SEGMENT_UNMAP)
    return ranges


def _add(ranges: list[_Range], begin: int, size: int, stream: int, *, joins: bool) -> None:
    """Add a range to disjoint ones in order; one that `joins` becomes one with neighbours of its stream that touch."""
    at = bisect_right(ranges, (begin, 0, 0))
    if joins and at < len(ranges) and ranges[at][0] == begin + size and ranges[at][2] == stream:
        size += ranges.pop(at)[1]
    if joins and at and sum(ranges[at - 1][:2]) == begin and ranges[at - 1][2] == stream:
        at -= 1
        before, more, _ = ranges.pop(at)
        begin, size = before, size + more
    ranges.insert(at, (begin, size, stream))


def _remove(ranges: list[_Range], begin: int, size: int) -> None:
    """Take a range out of the one that holds it; a part that no range holds is ignored."""
    at = bisect_right(ranges, (begin, 1 << 62, 0)) - 1
    if at >= 0 and begin + size <= sum(ranges[at][:2]):
        first, length, stream = ranges[at]
        rest = [(first, begin - first, stream), (begin + size, first + length - begin - size, stream)]
        ranges[at : at + 1] = [piece for piece in rest if piece[1]]
