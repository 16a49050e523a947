"""The heap of a device at one moment: the only reader for statistics, poison, compaction and replay.

Contract: what it shows was true at once, under the lock; it only reads. An arena is shown as one segment, what the heap
has borrowed of it as blocks like any other; where memory comes by pages, each range in a row that has memory is one.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stalloc.compiled import BORROWING
from stalloc.core.constants import (
    BLOCK_FREE,
    BLOCK_LENT,
    BLOCK_UNMAPPED,
    GRANULE,
    MAX_STREAMS,
    PRIVATE_KINDS,
    SMALL_KIND,
    STATE_MASK,
    STREAM_BITS,
)
from stalloc.core.frees import find_block, own_stream, size_at, status_at
from stalloc.core.graph_loans import is_loan
from stalloc.core.intrinsics import copy_words, under_lock
from stalloc.core.lending import intervals_empty
from stalloc.core.record_types import Words, structure
from stalloc.core.records import ScheduleEntry, Slot, State, block_at, interval_at, pool_at, segment_at, table
from stalloc.core.segments import pool_of
from stalloc.core.state import DeviceState

ARENA_KIND = -1
_SLACK = 4096  # rows that other threads may add until the lock is taken


@dataclass(frozen=True)
class HeapBlock:
    """A range of a segment that is live or free."""

    address: int
    size_bytes: int
    requested_bytes: int  #: 0 if it is free
    state: int  #: BLOCK_FREE and so on
    stream: int  #: the raw stream that has it; 0 if it is a free range of an arena


@dataclass(frozen=True)
class HeapSegment:
    """Memory that the device has given, and the blocks that cover it, in the order of their addresses."""

    address: int
    size_bytes: int
    stream: int  #: the raw stream whose pool it belongs to; 0 for an arena
    kind: int  #: kind of the pool, SMALL_KIND and so on; ARENA_KIND: an arena
    blocks: list[HeapBlock]


@dataclass(frozen=True)
class Inactive:
    """Free ranges beside live blocks, in segments and the arena; those in small pools are a part of the others."""

    size_bytes: int
    number: int
    small_bytes: int
    small_number: int


class Owner(NamedTuple):
    """What is known of the block at an address."""

    size_bytes: int
    raw_stream: int  #: handle
    state: int  #: BLOCK_LIVE and so on
    is_private: bool  #: it belongs to CUDA graphs
    is_loan: bool  #: they have lent it


@under_lock(**BORROWING)
def _copy(state, sources, targets, num_words):
    for i in range(len(num_words)):
        copy_words(sources[i], targets[i], num_words[i])


def _copies(state: DeviceState, *tables: np.ndarray) -> list[np.ndarray]:
    """Tables of a device, as they were at one moment."""
    copies = [np.empty(len(source), source.dtype) for source in tables]
    addresses = np.array([[one.ctypes.data for one in tables], [one.ctypes.data for one in copies]], np.int64)
    _copy(state.address, *addresses, np.array([one.nbytes // 8 for one in copies], np.int64))
    return copies


def segments(state: DeviceState) -> list[HeapSegment]:
    """Every segment of a device with its blocks, as they were at one moment; the arena of a plan is one of them."""
    record, tables, schedule = state.record, state.tables, state.arena.schedule
    slots: np.ndarray = table(Slot, 0)
    entries: np.ndarray = table(ScheduleEntry, 0)
    if schedule is not None and record.plan.arena_bytes > 0:
        slots, entries = schedule.slots, schedule.entries
    used_segments, used_blocks = record.heap.segments_used + _SLACK, record.heap.blocks_used + _SLACK
    used = tables.segments[:used_segments], tables.pools, tables.blocks[:used_blocks], slots, state.arena.pages
    memory, rows, pools, blocks, slots, pages = _copies(state, tables.memory, *used)
    raw_streams = tables.streams["value"].tolist()
    found, leased = [], []  # what the arena lends to the heap is shown as part of the arena
    for row in rows[1:][rows["address"][1:] != 0]:
        pool = pools[int(row["pool"])]
        stream = raw_streams[int(pool["stream"])]
        inside = _blocks(blocks, int(row["first"]), stream)
        if row["interval_high"]:
            leased += inside
        else:
            found += _mapped_parts(inside, stream, int(pool["kind"]))
    plan = memory["plan"][0]
    arena, arena_bytes = int(plan["arena"]), int(plan["arena_bytes"])
    if arena_bytes:
        planned = _planned_blocks(arena, slots, entries, raw_streams)
        taken = [block for block in leased if block.state != BLOCK_FREE] + planned
        for begin, end in _mapped_ranges(pages, arena_bytes) if plan["arena_pages"] else [(0, arena_bytes)]:
            inside = _filled_up(arena + begin, end - begin, taken)
            found.append(HeapSegment(arena + begin, end - begin, 0, ARENA_KIND, inside))
    return found


def _mapped_ranges(pages: Words, arena_bytes: int) -> list[tuple[int, int]]:
    """The ranges of an arena that have memory, bytes from where it begins; `pages` (w,) has a bit for each page."""
    bits = np.unpackbits(pages.view(np.uint8), bitorder="little")[: -(-arena_bytes // GRANULE)].astype(np.int8)
    edges = np.flatnonzero(np.diff(bits, prepend=0, append=0)) * GRANULE
    return [(begin, min(end, arena_bytes)) for begin, end in edges.reshape(-1, 2).tolist()]


def _mapped_parts(blocks: list[HeapBlock], stream: int, kind: int) -> list[HeapSegment]:
    """The ranges of a segment that have memory which is used from there."""
    parts = []
    for is_gap, group in itertools.groupby(blocks, key=lambda block: block.state in (BLOCK_UNMAPPED, BLOCK_LENT)):
        if not is_gap:
            inside = list(group)
            begin, end = inside[0].address, inside[-1].address + inside[-1].size_bytes
            parts.append(HeapSegment(begin, end - begin, stream, kind, inside))
    return parts


def _blocks(blocks: np.ndarray, row: int, stream: int) -> list[HeapBlock]:
    inside = []
    while row:
        block = blocks[row]
        status = int(block["state"]) & STATE_MASK
        requested = int(block["requested_bytes"]) if status not in (BLOCK_FREE, BLOCK_UNMAPPED) else 0
        inside.append(HeapBlock(int(block["address"]), int(block["size_bytes"]), requested, status, stream))
        row = int(block["next"])
    return inside


def _planned_blocks(arena: int, slots: np.ndarray, entries: np.ndarray, raw_streams: list[int]) -> list[HeapBlock]:
    live = slots[slots["entry"] >= 0]
    key = entries["key"][live["entry"]]
    columns = live["offset"], key >> STREAM_BITS, live["requested_bytes"], live["state"] & STATE_MASK
    streams = (key & (MAX_STREAMS - 1)).tolist()
    return [
        HeapBlock(arena + offset, size, requested, status, raw_streams[stream])
        for offset, size, requested, status, stream in zip(*(one.tolist() for one in columns), streams, strict=True)
    ]


def _filled_up(address: int, size_bytes: int, taken: list[HeapBlock]) -> list[HeapBlock]:
    """The live blocks in a range of an arena, and the free ranges between them."""
    blocks, end = [], address
    inside = (block for block in taken if address <= block.address < address + size_bytes)
    for block in sorted(inside, key=lambda block: block.address):
        if block.address > end:
            blocks.append(HeapBlock(end, block.address - end, 0, BLOCK_FREE, 0))
        blocks.append(block)
        end = block.address + block.size_bytes
    if end < address + size_bytes:
        blocks.append(HeapBlock(end, address + size_bytes - end, 0, BLOCK_FREE, 0))
    return blocks


def counts(state: DeviceState) -> State:
    """The record of a device as it was at one moment."""
    memory = _copies(state, state.tables.memory)[0]
    return structure(State).from_buffer(memory.view(np.uint8).data)  # type: ignore[return-value]


@under_lock()
def _count_inactive(state):
    size = number = small_size = small_number = 0
    for row in range(1, state.heap.segments_used):
        segment = segment_at(state, row)
        if segment.address == 0 or (segment.num_live == 0 and segment.interval_high == 0):
            continue
        is_small = pool_at(state, segment.pool).kind == SMALL_KIND
        index = segment.first
        while index != 0:
            block = block_at(state, index)
            if block.state == BLOCK_FREE:
                size, number = size + block.size_bytes, number + 1
                small_size += is_small * block.size_bytes
                small_number += is_small
            index = block.next
    idle = False
    for i in range(state.plan.num_intervals if state.plan.arena_bytes > 0 else 0):
        empty = intervals_empty(state.plan.interval_bits, i, i + 1)
        if empty:
            size += interval_at(state, i + 1).offset - interval_at(state, i).offset
            number += not idle
        idle = empty
    return size, number, small_size, small_number


def inactive(state: DeviceState) -> Inactive:
    """What lies free beside live blocks."""
    return Inactive(*_count_inactive(state.address))


@under_lock()
def _owner(state, address):
    """What an Owner has, of size 0 where nothing lives at an address."""
    slot, block = find_block(state, address)
    if slot < 0 and block == 0:
        return 0, 0, 0, False, False
    is_lent = slot < 0 and is_loan(state, block)
    is_private = slot < 0 and not is_lent and pool_at(state, pool_of(state, block)).kind >= PRIVATE_KINDS
    status = status_at(state, slot, block) & STATE_MASK
    return size_at(state, slot, block), own_stream(state, slot, block), status, is_private, is_lent


def owner_of(device: int, address: int) -> Owner | None:
    """What is known of the block at an address that is not free, None if there is none; `device` is a state's address.

    For slow ways: nothing on the way of a request calls it.
    """
    owner = Owner(*_owner(device, address))
    return owner if owner.size_bytes else None


def live_addresses(state: DeviceState) -> list[int]:
    """Where blocks are that were asked for and not freed."""
    return [block.address for segment in segments(state) for block in segment.blocks if block.requested_bytes]
