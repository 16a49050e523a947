"""The heap of a device at one moment: the only reader for statistics, poison, compaction and replay.

Contract: what it shows was true at once, under the lock; it only reads. An arena is shown as one segment, what the heap
has borrowed of it as blocks like any other; where memory comes by pages, each range in a row that has memory is one.
"""

import ctypes
import itertools
from dataclasses import dataclass

import numpy as np

from stalloc.compiled import BORROWING, inner, njit
from stalloc.core.arena_intervals import intervals_empty
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
from stalloc.core.free_lists import pool_of
from stalloc.core.hash_table import find_live
from stalloc.core.heap import rounded_bytes
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.record_types import Words, structure
from stalloc.core.records import (
    Owner,
    ScheduleEntry,
    Slot,
    State,
    block_at,
    entry_at,
    interval_at,
    owner_at,
    pool_at,
    segment_at,
    slot_at,
    stream_at,
    table,
)
from stalloc.core.slots import find_slot, in_arena
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


@inner(**BORROWING)
def _copy_one(source, target):
    for i in range(len(source)):  # not a slice: it would bring in the making of an error's text, seconds to compile
        target[i] = source[i]


@njit(**BORROWING)
def _copy(
    device, words, words_to, segments, segments_to, pools, pools_to, blocks, blocks_to, slots, slots_to, pages, pages_to
):
    """Copy tables, as words, while nobody changes them."""
    state = locked(device)
    _copy_one(pages, pages_to)
    _copy_one(words, words_to)
    _copy_one(segments, segments_to)
    _copy_one(pools, pools_to)
    _copy_one(blocks, blocks_to)
    _copy_one(slots, slots_to)
    unlock(state)


def _words(rows: np.ndarray) -> Words:
    return rows.view(np.ndarray).view(np.int64).reshape(-1)


def _copies(state: DeviceState, tables: list[np.ndarray]) -> list[np.ndarray]:
    """The record and five tables of a device, as they were at one moment."""
    sources = [state.tables.memory, *tables]
    copies = [np.empty(len(source), source.dtype) for source in sources]
    _copy(state.address, *(_words(rows) for pair in zip(sources, copies, strict=True) for rows in pair))
    return copies


def segments(state: DeviceState) -> list[HeapSegment]:
    """Every segment of a device with its blocks, as they were at one moment; the arena of a plan is one of them."""
    record, tables, schedule = state.record, state.tables, state.arena.schedule
    has_arena = record.plan.arena_bytes > 0 and schedule is not None
    slots: np.ndarray = schedule.slots if schedule is not None and has_arena else table(Slot, 0)
    entries: np.ndarray = schedule.entries if schedule is not None and has_arena else table(ScheduleEntry, 0)
    used_segments, used_blocks = record.heap.segments_used + _SLACK, record.heap.blocks_used + _SLACK
    memory, rows, pools, blocks, slots, pages = _copies(
        state, [tables.segments[:used_segments], tables.pools, tables.blocks[:used_blocks], slots, state.arena.pages]
    )
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
    """The blocks of a segment from its first on."""
    inside = []
    while row:
        block = blocks[row]
        status = int(block["state"]) & STATE_MASK
        requested = int(block["requested_bytes"]) if status not in (BLOCK_FREE, BLOCK_UNMAPPED) else 0
        inside.append(HeapBlock(int(block["address"]), int(block["size_bytes"]), requested, status, stream))
        row = int(block["next"])
    return inside


def _planned_blocks(arena: int, slots: np.ndarray, entries: np.ndarray, raw_streams: list[int]) -> list[HeapBlock]:
    """What lives in an arena as the plan has it."""
    live = slots[slots["entry"] >= 0]
    key = entries["key"][live["entry"]]
    columns = (
        live["offset"],
        key >> STREAM_BITS,
        live["requested_bytes"],
        live["state"] & STATE_MASK,
        key & (MAX_STREAMS - 1),
    )
    return [
        HeapBlock(arena + offset, size, requested, status, raw_streams[stream])
        for offset, size, requested, status, stream in zip(*(column.tolist() for column in columns), strict=True)
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


@njit(**BORROWING)
def _copy_words(device, words, words_to):
    state = locked(device)
    _copy_one(words, words_to)
    unlock(state)


def counts(state: DeviceState) -> State:
    """The record of a device as it was at one moment."""
    copy = structure(State)()
    words = np.frombuffer(copy, np.int64)  # type: ignore[call-overload]
    _copy_words(state.address, _words(state.tables.memory), words)
    return copy  # type: ignore[return-value]


@njit()
def _count_inactive(device):
    state = locked(device)
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
    unlock(state)
    return size, number, small_size, small_number


def inactive(state: DeviceState) -> Inactive:
    """What lies free beside live blocks."""
    return Inactive(*_count_inactive(state.address))


@njit()
def _find_owner(device, address, owner_address):
    """Write what is known of the block at an address that is not free; False if there is none."""
    state, owner = locked(device), owner_at(owner_address)
    slot = find_slot(state, address) if in_arena(state, address) else -1
    block = find_live(state, address) if slot < 0 else 0
    if slot >= 0:
        planned = slot_at(state, slot)
        key = entry_at(state, planned.entry).key
        owner.size_bytes = key >> STREAM_BITS
        owner.raw_stream = stream_at(state, key & (MAX_STREAMS - 1)).value
        owner.state = planned.state & STATE_MASK
        owner.is_private = 0
    elif block != 0:
        pool = pool_at(state, pool_of(state, block))
        owner.size_bytes = rounded_bytes(state, block)
        owner.raw_stream = stream_at(state, pool.stream).value
        owner.state = block_at(state, block).state & STATE_MASK
        owner.is_private = pool.kind >= PRIVATE_KINDS
    unlock(state)
    return slot >= 0 or block != 0


def owner_of(device: int, address: int) -> Owner | None:
    """What is known of the block at an address that is not free, None if there is none; `device` is a state's address.

    For slow ways: nothing on the way of a request calls it.
    """
    owner = structure(Owner)()
    found = _find_owner(device, address, ctypes.addressof(owner))
    return owner if found else None  # type: ignore[return-value]


def live_addresses(state: DeviceState) -> list[int]:
    """Where blocks are that were asked for and not freed."""
    return [block.address for segment in segments(state) for block in segment.blocks if block.requested_bytes]
