"""The caching allocator's state at the start of a recording, and the calls that followed.

Upheld: the blocks cover the segments that were there, every request that was live has one, and none overlap. How far
a block of the large pool reaches beyond its request is not recorded: torch leaves a rest of up to 1 MiB with the
block. What tells is, in this order, the list of blocks at the end of the recording, the lowest address handed out
behind the block while it lived, and a gap too small to be a block.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np

from stalloc.allocator_conf import TorchSettings, parse_settings
from stalloc.columns import Column
from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.record_types import record_at
from stalloc.errors import BadInputError
from stalloc.replay.blocks import GRANULE, at, count_reserved, hold, store_at
from stalloc.replay.model_events import recorded_conf, recorded_kinds
from stalloc.replay.protocol import BlockMap, Events, Kind
from stalloc.replay.recorded_state import recorded_blocks
from stalloc.replay.torch_cache import (
    OWN,
    RELEASE,
    add_free,
    add_segment,
    add_unmapped,
    interval_of,
    pool_of,
    raise_next_address,
    round_size,
)
from stalloc.sizes import MIB
from stalloc.trace.record import Action, Trace

own_at = record_at(OWN)


def recorded_settings(trace: Trace) -> TorchSettings:
    """The settings that a snapshot names, torch's defaults where it names none or some that torch 2.11 has not."""
    try:
        settings = parse_settings(recorded_conf(trace))
    except BadInputError:
        settings = TorchSettings()
    if np.any((trace.action == Action.SEGMENT_MAP) | (trace.action == Action.SEGMENT_UNMAP)):
        settings = replace(settings, expandable_segments=True)
    return settings


def recorded_calls(trace: Trace, settings: TorchSettings) -> tuple[Events, Column]:
    """What the program asked for while it was recorded, and the addresses that the device gave to new segments.

    Segments that went back tell of a call of empty_cache, or of an allocation that had to empty the cache first, which
    leaves the allocator in the same state. Its event is the last of the segments that went. Settings that give back
    some segments of many (a limit of splitting, a collection threshold) get each as a RELEASE of its own.
    """
    one_by_one = bool(settings.max_split_bytes or settings.garbage_collection_threshold)
    action = trace.action
    kinds = recorded_kinds(trace)
    asks = kinds >= 0
    returns = (action == Action.SEGMENT_FREE) | (action == Action.SEGMENT_UNMAP)
    takes = (action == Action.SEGMENT_ALLOC) | (action == Action.SEGMENT_MAP)
    told = np.flatnonzero(asks | returns | takes)
    ends_run = np.ones(len(told), bool)
    ends_run[:-1] = one_by_one | ~returns[told[1:]]
    rows = told[asks[told] | (returns[told] & ends_run)]
    gone = trace.address[rows].astype(np.int64) if one_by_one else -1
    events = Events(
        kind=np.where(asks[rows], kinds[rows], np.int8(RELEASE if one_by_one else Kind.EMPTY_CACHE)),
        request=np.where(asks[rows], trace.event_request[rows], gone),
        event=rows.astype(np.int64),
        size=trace.size,
        stream=trace.stream,
    )
    return events, trace.address[action == Action.SEGMENT_ALLOC].astype(np.int64)


def starting_blocks(trace: Trace, settings: TorchSettings) -> BlockMap:
    """Every block before the first event. Raises BadInputError for a trace without segments."""
    if np.any(trace.extra.get("segment_pool", 0)):
        raise BadInputError(f"device {trace.device}: the trace has private pools, which the model has not.")
    blocks = recorded_blocks(trace, -1)
    held = np.flatnonzero(blocks.request >= 0)
    request = blocks.request[held]
    start, segment = blocks.address[held], blocks.segment[held]
    is_last = np.append(segment[1:] != segment[:-1], True)[: len(held)]
    segment_end = (blocks.segment_address + blocks.segment_size)[segment]
    limit = np.where(is_last, segment_end, np.append(start[1:], 0)[: len(held)])
    divisions = np.array(settings.roundup_divisions, np.int64)
    rounded = [round_size(divisions[interval_of(size)], size) for size in trace.size[request].tolist()]
    end = np.minimum(start + np.array(rounded, np.int64), limit)
    if not settings.expandable_segments:
        if settings.max_split_bytes:
            end = np.where(end - start >= settings.max_split_bytes, limit, end)
        end = _real_ends(trace, request, start, end, limit, blocks.segment_size[segment] == GRANULE)
    owner = blocks.stream[np.searchsorted(blocks.segment, np.arange(len(blocks.segment_address)))]
    segments = np.stack([blocks.segment_address, blocks.segment_size, owner], axis=1).tolist()
    taken = np.stack([start, end - start, request, np.zeros_like(request), owner[segment]], axis=1).tolist()
    return BlockMap.covering(segments, taken)


def _real_ends(trace: Trace, request: Column, address: Column, end: Column, limit: Column, small: Column) -> Column:
    """Where the block of each live request ends, given where it must end at least and at most."""
    allocs = np.flatnonzero(trace.action == Action.ALLOC)
    allocs = allocs[np.argsort(trace.address[allocs], kind="stable")]
    places = trace.address[allocs].astype(np.int64)
    lasting = trace.extra.get("block_request")
    known = {} if lasting is None else dict(zip(lasting.tolist(), trace.extra["block_size"].tolist(), strict=True))
    real = end.copy()
    for i in np.flatnonzero((end < limit) & ~small):
        row = int(request[i])
        if row in known:
            real[i] = address[i] + known[row]
            continue
        inside = slice(np.searchsorted(places, end[i]), np.searchsorted(places, min(limit[i], end[i] + MIB + 1)))
        during = places[inside][allocs[inside] < trace.end[row]]
        if len(during):
            real[i] = during[0]
        elif limit[i] - end[i] <= MIB:
            real[i] = limit[i]
    return real


def is_whole(blocks: BlockMap) -> bool:
    """Whether no segments overlap, and the blocks of each cover it without gaps from begin to end."""
    begin, end = blocks.segment_address, blocks.segment_address + blocks.segment_size
    first = np.flatnonzero(np.diff(blocks.segment, prepend=-1))
    last = np.append(first[1:], len(blocks.segment)) - 1
    if len(blocks.segment) == 0 or not np.array_equal(blocks.segment[first], np.arange(len(begin))):
        return len(begin) == 0
    beyond = blocks.address + blocks.size_bytes
    follows = blocks.address[1:] == beyond[:-1]
    follows[last[:-1]] = True  # another segment begins
    fits = np.array_equal(blocks.address[first], begin) and np.array_equal(beyond[last], end)
    return bool(fits and follows.all() and (blocks.size_bytes > 0).all() and (begin[1:] >= end[:-1]).all())


def segment_pools(trace: Trace, blocks: BlockMap, settings: TorchSettings) -> tuple[Column, Column, Column]:
    """Which segments of a map are small (s,), where the expandable segment of each begins (s,), or 0, and where those
    expandable segments begin that the recording adds, in the order of their first use."""
    small = (blocks.segment_size == GRANULE).astype(np.int64)
    kinds = trace.extra.get("segment_is_small", np.empty(0))
    for address, size, kind in zip(trace.segment_address.tolist(), trace.segment_size.tolist(), kinds, strict=False):
        small[_touched(blocks, address, address + size)] = int(kind != 0)
    base = np.zeros(len(small), np.int64)
    if not settings.expandable_segments:
        return small, base, np.empty(0, np.int64)
    owners = blocks.stream[np.searchsorted(blocks.segment, np.arange(len(small)))]
    begins: dict[tuple[int, int], int] = {}  # of each pool's segment that was there at the start
    mapped: dict[tuple[int, int], int] = defaultdict(int)  # bytes of each pool
    pools = list(zip(owners.tolist(), small.tolist(), strict=True))
    for pool, address, size in zip(pools, blocks.segment_address.tolist(), blocks.segment_size.tolist(), strict=True):
        begins[pool] = min(begins.get(pool, address), address)
        mapped[pool] += size
    old, added = set(begins), []
    maps = (trace.action == Action.SEGMENT_MAP) | (trace.action == Action.SEGMENT_UNMAP)
    for row in np.flatnonzero(maps).tolist():
        size, address = int(trace.event_size[row]), int(trace.address[row])
        pool = int(trace.event_stream[row]), int(size % settings.large_segment_bytes > 0)
        if trace.action[row] == Action.SEGMENT_UNMAP:
            mapped[pool] -= size
            continue
        if mapped[pool] == 0:  # a segment goes with its last page
            added.append(address)
            old.discard(pool)
        elif pool in old:
            begins[pool] = min(begins[pool], address)
        mapped[pool] += size
    met, previous = set(), 0
    for number in np.flatnonzero(_expandable(trace, blocks)).tolist():
        begin = begins[pools[number]]
        if begin != previous and begin in met:  # a pool with two segments: each range by itself is safe
            begin = int(blocks.segment_address[number])
        base[number] = previous = begin
        met.add(begin)
    return small, base, np.array(added, np.int64)


def _expandable(trace: Trace, blocks: BlockMap) -> Column:
    """(s,) whether a segment is a range of an expandable one: the final list says so, or pages of it were unmapped."""
    found = np.zeros(len(blocks.segment_address), bool)
    kinds = trace.extra.get("segment_is_expandable", np.zeros(len(trace.segment_address), np.int8))
    unmapped = trace.action == Action.SEGMENT_UNMAP
    begin = np.concatenate([trace.segment_address[kinds > 0], trace.address[unmapped]]).astype(np.int64)
    size = np.concatenate([trace.segment_size[kinds > 0], trace.event_size[unmapped]])
    for first, beyond in zip(begin, begin + size, strict=True):
        found |= _touched(blocks, first, beyond)
    return found


def _touched(blocks: BlockMap, begin: int, end: int) -> Column:
    """(s,) whether a segment has a part of these addresses."""
    return (blocks.segment_address < end) & (begin < blocks.segment_address + blocks.segment_size)


@njit(**BORROWING)
def load_blocks(store, own, columns, requested, small, base):
    """Put blocks into an empty model that has rows enough, whose store and own record are at these addresses.

    `columns` are the address, bytes, request, stream and segment of each (b,), ordered by address; `requested` (b,)
    is the bytes asked for of a held block, `small` (s,) the pool of each segment, `base` (s,) the start of the
    expandable segment that it is a range of, or 0.
    """
    t, m = store_at(store), own_at(own)
    address, size, request, stream, segment = columns
    before = 0
    for i in range(len(address)):
        start = base[segment[i]]
        pool = 2 * stream[i] + 1 - small[segment[i]]
        if start != 0:
            joined = before != 0 and at(t, before).extra == start
        else:
            joined = i > 0 and segment[i] == segment[i - 1]
        if not joined:
            before = _close(t, m, before)
        if start != 0:
            from_here = at(t, before).address + at(t, before).size if joined else start
            if from_here < address[i]:
                before = _append(t, before, pool, from_here, address[i] - from_here, start)
                add_unmapped(t, before)
        before = _append(t, before, pool, address[i], size[i], start)
        if request[i] < 0:
            add_free(t, m, before)
        else:
            hold(t, request[i], before, requested[i])
            m.block_bytes += size[i]
        count_reserved(t, size[i])
        raise_next_address(t, address[i] + size[i])
    _close(t, m, before)


@inner()
def _append(t, before, pool, address, size, base):
    block = add_segment(t, pool, address, size, base)
    at(t, block).previous = before
    if before != 0:
        at(t, before).next = block
    return block


@inner()
def _close(t, m, before):
    """Add the unmapped rest of an expandable segment, if the block before is of one; returns no block."""
    if before == 0 or at(t, before).extra == 0:
        return 0
    start, base = at(t, before).address + at(t, before).size, at(t, before).extra
    if start < base + m.space_bytes:
        add_unmapped(t, _append(t, before, pool_of(t, before), start, base + m.space_bytes - start, base))
        raise_next_address(t, base + m.space_bytes)
    return 0
