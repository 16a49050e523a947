"""The state of one device as Python sees it: the memory of its records, installing a tape, reading counts.

The tables are made once and never move, since compiled code holds their addresses; their pages are touched only as
they fill. Python never holds the core's lock: between two bytecodes another thread could take the GIL and wait for
that lock. Whatever must change together is written by one call into the core.
"""

import ctypes
from dataclasses import dataclass, replace

import numpy as np

from stalloc.compiled import BORROWING, njit
from stalloc.core import (
    arena,
    arena_pages,
    counters,
    growth,
    handovers,
    pages,
    pools,
    segments,
    step_log,
    stream_table,
    tape_cursor,
)
from stalloc.core.arena_tape import ArenaTape, check
from stalloc.core.constants import (
    ACTION_ALLOC,
    BLOCK_DEFERRED,
    GRANULE,
    MAX_STREAMS,
    MODE_FOLLOW,
    MODE_HEAP,
    MODE_REPLAY,
    NO_PREVIOUS_USER,
    NO_STREAM,
    STEP_LOG_ROWS,
    STREAM_BITS,
    TINY,
)
from stalloc.core.host_memory import forget_pages
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.record_types import Words
from stalloc.core.records import (
    Bins,
    Block,
    Event,
    LiveBlock,
    Pool,
    Segment,
    State,
    StepRow,
    Word,
    offset_of,
    table,
    view_at,
    word_at,
)
from stalloc.core.regions import Region, moved_into
from stalloc.core.requests import free_entry, malloc_entry
from stalloc.core.tape_tables import TapeTables, make_tables
from stalloc.device.ordering import Ordering

_MALLOC = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(malloc_entry.address)
_FREE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2)(free_entry.address)

_BLOCKS = 1 << 22
_SEGMENTS = 1 << 17
_POOLS = 1 << 13
_BINS = 1 << 8  # pools that keep free blocks in bins
_LIVE = 1 << 12  # rows of the first table of live blocks; each one that follows has twice as many
_MAX_LIVE = 1 << 22
_EVENTS = 1 << 22
_MAX_KEPT = 1 << 16  # blocks that may live in an arena when it is taken over
_RANGES = 4096  # of pages that lose their memory at a time
_TEXT_BYTES = 4096  # room for what an out-of-memory error says


@dataclass(frozen=True)
class Step:
    """What one pass over the ring of a plan was like."""

    end_ns: int  # monotonic time at which the ring began again
    hits: int  # requests served from the plan
    misses: int  # requests above 512 bytes that were not
    allocated_peak_bytes: int
    reserved_peak_bytes: int


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables that a device has for as long as it lives; each is an array of the record that it is named for."""

    blocks: np.ndarray
    segments: np.ndarray
    pools: np.ndarray
    bins: np.ndarray
    live: np.ndarray  #: all tables of live blocks, one behind the other
    streams: np.ndarray
    events: np.ndarray
    step_log: np.ndarray


@njit(**BORROWING)
def _write(device, words, values):
    """Write several words of a state at once."""
    state = locked(device)
    for i in range(len(words)):
        word_at(device, words[i]).value = values[i]
    unlock(state)


class DeviceState:
    """The memory of one device: `record` are its fields, `tables` its tables, `tape` those of the tape in place."""

    def __init__(self, device: int, slow_function: int) -> None:
        self.device = device
        self.memory = table(State, 1)
        self.address = self.memory.ctypes.data
        self.record = view_at(State, self.address)
        self.tables = Tables(
            blocks=table(Block, _BLOCKS),
            segments=table(Segment, _SEGMENTS),
            pools=table(Pool, _POOLS),
            bins=table(Bins, _BINS),
            live=table(LiveBlock, 2 * _MAX_LIVE),
            streams=table(Word, MAX_STREAMS),
            events=table(Event, _EVENTS),
            step_log=table(StepRow, STEP_LOG_ROWS),
        )
        self.tape: TapeTables | None = None
        self._arena_needs = 0  # bytes of an arena that holds the tape
        self.arena_pages = np.zeros(0, np.int64)  #: a bit for each page of the arena, 1 if it has memory
        self._previous_users = np.zeros(0, np.int64)
        self._last_tape: tuple[TapeTables | None, Words] = (None, self._previous_users)
        self._texts: list[np.ndarray] = []
        record = self.record
        for name, rows in vars(self.tables).items():
            setattr(record, name, rows.ctypes.data)
        for name, value in self._text_fields("stalloc: out of memory").items():
            setattr(record, name, value)
        record.slow_function = slow_function
        record.device = device
        # row 0 of blocks and segments means none; stream 0, the default stream, has index 0
        record.blocks_used = record.segments_used = record.num_streams = 1
        record.blocks_capacity = _BLOCKS
        record.segments_capacity = _SEGMENTS
        record.pools_mask = _POOLS - 1
        record.bins_capacity = _BINS
        record.live_mask = _LIVE - 1
        record.max_live_mask = _MAX_LIVE - 1
        record.events_capacity = _EVENTS

    def malloc(self, requested_bytes: int, stream: int = 0) -> int:
        """Serve a request on a raw stream, as C code would be; its address, 0 if there is no memory."""
        return int(_MALLOC(self.address, requested_bytes, stream))

    def free(self, address: int) -> None:
        """Free what lives at an address, as C code would."""
        _FREE(self.address, address)

    def write(self, **fields: int) -> None:
        """Write several fields of the record at once, under the core's lock."""
        self._write_paths(fields)

    def _write_paths(self, fields: dict[str, int]) -> None:
        words = np.array([offset_of(State, path) // 8 for path in fields], np.int64)
        _write(self.address, words, np.array(list(fields.values()), np.int64))

    def reset_peaks(self) -> None:
        """Let the peaks that the program asks for begin anew (torch.cuda.reset_peak_memory_stats)."""
        counters.reset_peaks(self.address)

    def set_out_of_memory_text(self, text: str, driver_status: int = 0) -> None:
        """What the next out-of-memory error says; with a status of the driver it is no lack of memory."""
        self.write(**self._text_fields(text), driver_error=driver_status)

    def _text_fields(self, text: str) -> dict[str, int]:
        self.out_of_memory_text = text
        data = np.frombuffer(text.encode()[:_TEXT_BYTES], np.uint8)
        # of one size, so that a thread which reads an old address and a new length stays inside
        buffer = np.full(_TEXT_BYTES, ord(" "), np.uint8)
        buffer[: len(data)] = data
        self._texts = [*self._texts[-7:], buffer]  # another thread may still be reading one of the last few
        return {"oom_text": buffer.ctypes.data, "oom_text_length": len(data)}

    def pool_kind(self, pool: int) -> int:
        """The kind of a pool: SMALL_KIND and so on."""
        return int(self.tables.pools["kind"][pool])

    def give_segment(self, pool: int, address: int, size_bytes: int) -> bool:
        """Add a segment; False if the tables are full."""
        return bool(segments.give_segment(self.address, pool, address, size_bytes))

    def general_pool(self, stream: int) -> int:
        """The pool of a stream (index) whose segments are split; -1 if the table is full."""
        return int(pools.general_pool(self.address, stream))

    def unpin_pools(self, kind: int) -> None:
        """The graphs that a private kind of pool served are gone: its free segments may go back."""
        pools.unpin_pools(self.address, kind)

    def remove_free_segments(self, idle_passes: int = 0) -> dict[int, int]:
        """Take every segment without live blocks, not used in the last `idle_passes`, out: address -> bytes."""
        removed: dict[int, int] = {}
        addresses, sizes = np.zeros((2, 4096), np.int64)  # not shared: a finaliser may come here in the middle
        while True:
            count = segments.remove_free_segments(self.address, addresses, sizes, idle_passes)
            removed.update(zip(addresses[:count].tolist(), sizes[:count].tolist(), strict=True))
            if count < len(addresses):
                return removed

    def full_table(self) -> str:
        """The table whose being full keeps the heap from taking a segment; empty if there is room."""
        record = self.record
        if not record.free_block_row and record.blocks_used >= record.blocks_capacity:
            return "blocks"
        if not record.free_segment_row and record.segments_used >= record.segments_capacity:
            return "segments"
        return ""

    def forget_streams(self) -> int:
        """Forget the streams that hold no memory and are on no tape in force; how many."""
        kept = np.zeros(MAX_STREAMS, np.int64)
        if self.tape is not None and (self.record.mode != MODE_HEAP or self.record.arena_bytes):
            kept[self.tape.entries["key"] & (MAX_STREAMS - 1)] = 1
        return int(stream_table.forget_streams(self.address, kept))

    def install_tape(
        self, tape: ArenaTape, cursor: int = 0, kept: Words | None = None, regions: list[Region] | None = None
    ) -> None:
        """Put a tape in place and follow it from entry `cursor`, without serving it yet.

        `kept` (b,) are offsets between which blocks live already where the arena will be. `regions` say whose the bytes
        of the arena to come are already, those that the tape does not use too.
        No arena may be in place: its blocks are known by the tape that they were served from. Raises PlanError for a
        tape that its arena does not hold, and leaves what was in place as it was.
        """
        check(tape, cursor)
        assert self.record.arena_bytes == 0
        tables = make_tables(tape, kept, regions)
        self._arena_needs = tape.arena_bytes
        self._keep(tables, np.zeros(0, np.int64))
        self._write_paths(
            {
                "tape": tables.entries.ctypes.data,
                "num_entries": len(tables.entries),
                "cell_bits": tables.bits.ctypes.data,
                "cells": tables.cells.ctypes.data,
                "num_cells": tables.num_cells,
                "use_starts": tables.use_starts.ctypes.data,
                "uses": tables.uses.ctypes.data if len(tables.uses) else 0,
                "lifespans": tables.lifespans.ctypes.data,
                "keys": tables.keys.ctypes.data,
                "keys_mask": len(tables.keys) - 1,
                "places": tables.places.ctypes.data,
                "slots": tables.slots.ctypes.data,
                "slots_mask": len(tables.slots) - 1,
                "cell_streams": tables.cell_streams,
                "failed_search.released_before": -1,
                "tapes": tables.rings.ctypes.data,
                "num_tapes": len(tables.rings),
                "ring_start": int(tables.rings["begin"][0]),
                "ring_end": int(tables.rings["end"][0]),
                "cursor": cursor,
                "history_count": 0,
                "miss_run": 0,
                "last_miss": 0,
                "excess_misses": 0,
                "ask_at_boundary": 0,
                "mode": MODE_FOLLOW,
            }
        )

    def _keep(self, tape: TapeTables, previous_users: Words) -> None:
        """Hold the memory of a tape, and that of the last one: threads may still be looking at it."""
        self._last_tape = self.tape, self._previous_users
        self.tape, self._previous_users = tape, previous_users

    def share_cells(self, handed_over: Words, ordering: Ordering, events: list[int]) -> None:
        """Let streams share cells of the tape that was just installed, with an event and a wait for each handover.

        `handed_over` (k,) are entries whose event is to be recorded when they are freed. `events` are at least as many
        as there are entries with cells that several streams use.
        """
        assert self.tape is not None
        entries = self.tape.entries
        shared = np.cumsum(np.append(0, self.tape.cells["stream"] == NO_STREAM))
        span = shared[entries["cell_high"]] - shared[entries["cell_low"]]
        rows = np.flatnonzero((entries["offset"] >= 0) & (span > 0))
        entries["event"][rows] = events[: len(rows)]
        entries["hands_over"][handed_over] = entries["event"][handed_over] != 0
        self._previous_users = np.full(len(self.tape.cells), NO_PREVIOUS_USER, np.int64)
        self.write(
            has_handovers=int(len(rows) > 0),
            previous_users=self._previous_users.ctypes.data,
            record_event=ordering.record_event,
            wait_event=ordering.wait_event,
            is_capturing=ordering.is_capturing,
        )

    def end_sharing(self) -> None:
        """Part the cells that streams share, once no tape is served; what is empty goes to the stream that asks most.

        It may be used when the device has done all that it was given before; only then let the arena be dissolved.
        """
        assert self.tape is not None
        streams = self.tape.entries["key"] & (MAX_STREAMS - 1)
        handovers.end_sharing(self.address, int(np.bincount(streams).argmax()))

    def serve_arena(self, address: int, arena_bytes: int) -> None:
        """Serve the tape from an arena, which holds all of it; the counting of planned steps begins."""
        assert arena_bytes >= self._arena_needs
        arena.serve_arena(self.address, address, arena_bytes)

    def serve_pages(self, address: int, arena_bytes: int, *, anew: bool) -> None:
        """Serve the tape from addresses that have no memory so far: it comes by `use_arena_pages`.

        `anew`: it is another plan than before, of which hits are counted from here on.
        """
        assert arena_bytes >= self._arena_needs
        self.arena_pages = np.zeros(arena_bytes // GRANULE // 64 + 1, np.int64)
        arena_pages.serve_pages(self.address, address, arena_bytes, self.arena_pages.ctypes.data, anew)

    def planned_place(self, position: int) -> tuple[int, int]:
        """Where an entry of the tape has its place: bytes [begin, end) from where the arena begins; 0, 0: nowhere."""
        if self.tape is None or self.record.mode != MODE_REPLAY or position >= len(self.tape.entries):
            return 0, 0
        entries = self.tape.entries
        if entries["offset"][position] < 0:
            return 0, 0
        offset = int(entries["offset"][position])
        return offset, offset + (int(entries["key"][position]) >> STREAM_BITS)

    def use_arena_pages(self, begin: int, end: int) -> None:
        """The pages [begin, end), bytes from where the arena begins, have memory now."""
        arena_pages.use_arena_pages(self.address, begin, end)

    def leave_arena_pages(self, wanted_bytes: int, *, anything: bool) -> list[tuple[int, int]]:
        """Serve no more from so many bytes of idle pages of the arena, if there are: their (begin, bytes).

        Those that the plan does not need soon, unless `anything` will do.
        """
        begins, ends = np.zeros((2, _RANGES), np.int64)
        count = arena_pages.leave_arena_pages(self.address, wanted_bytes, anything, begins, ends)
        return [(begin, end - begin) for begin, end in zip(begins[:count].tolist(), ends[:count].tolist(), strict=True)]

    def give_range(self, pool: int, address: int, size_bytes: int) -> bool:
        """Add a segment that is addresses without memory; False if the tables are full."""
        return bool(pages.give_range(self.address, pool, address, size_bytes))

    def find_growth(self, pool: int, size_bytes: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """Where pages are best mapped for a request of a pool: (address, bytes) of each range; none: nowhere.

        And the place of the request then, [begin, end), of which other parts have memory and are free.
        """
        addresses, sizes = np.zeros((2, _RANGES), np.int64)
        count, begin, end = growth.find_growth(self.address, pool, size_bytes, addresses, sizes)
        return list(zip(addresses[:count].tolist(), sizes[:count].tolist(), strict=True)), (int(begin), int(end))

    def use_pages(self, address: int, size_bytes: int) -> bool:
        """Serve from pages of a segment that have memory now; False if the tables are full."""
        return bool(pages.use_pages(self.address, address, size_bytes))

    def leave_pages(self, wanted_bytes: int, between: tuple[int, int] = (0, 0)) -> list[tuple[int, int]]:
        """Serve no more from so many bytes of free pages, if there are: their (address, bytes).

        What is free `between` two addresses stays as it is: memory is to come there.
        """
        addresses, sizes = np.zeros((2, _RANGES), np.int64)
        count = growth.leave_pages(self.address, wanted_bytes, *between, addresses, sizes)
        return list(zip(addresses[:count].tolist(), sizes[:count].tolist(), strict=True))

    def remove_empty_ranges(self) -> list[int]:
        """Take segments without any memory out of the tables: where they began."""
        addresses = np.zeros(_RANGES, np.int64)
        return [int(address) for address in addresses[: pages.remove_empty_ranges(self.address, addresses)]]

    def keep_ranges(self) -> None:
        """Leave what has its memory by pages as it is for good: they are a parent's of this process."""
        pages.keep_ranges(self.address)

    def begin_step(self, begin: int, end: int, position: int) -> None:
        """The program marks a step: follow the tape [begin, end) from a position on, whatever was followed before."""
        tape_cursor.begin_step(self.address, begin, end, position)

    def drop_tape(self) -> None:
        """Serve everything from the heap again; what lives in the arena stays valid until it is freed."""
        self.write(mode=MODE_HEAP, ask_at_boundary=0, ask_after_misses=0)

    def count_arena(self, arena_bytes: int) -> None:
        """Count an arena that came from the device (negative: went back)."""
        counters.count_arena(self.address, arena_bytes)

    def arena_is_idle(self) -> bool:
        """Whether nothing lives in the arena."""
        return bool(arena.arena_is_idle(self.address))

    def forget_arena(self) -> int:
        """Let go of an arena that is not served and in which nothing lives: its bytes, 0 if it has to stay."""
        return int(arena.forget_arena(self.address))

    def dissolve_arena(self) -> list[int]:
        """Make ordinary segments of an arena that is no longer served; where they begin, none if it has to stay."""
        addresses = np.zeros(MAX_STREAMS, np.int64)
        count = arena.dissolve_arena(self.address, addresses)
        return [int(address) for address in addresses[:count]]

    def _segment_rows(self) -> np.ndarray:
        """The rows of segments that are no leases, by address."""
        rows: np.ndarray = self.tables.segments[1 : self.record.segments_used].copy()
        rows = rows[(rows["address"] != 0) & (rows["cell_high"] == 0)]
        return rows[np.argsort(rows["address"])]

    def segment_regions(self, addresses: list[int]) -> list[Region]:
        """What `dissolve_arena` made of an arena, or one segment; none if a part of it is gone."""
        rows = self._segment_rows()
        rows = rows[np.isin(rows["address"], addresses)]
        if not addresses or rows["address"].tolist() != addresses:
            return []
        columns = addresses, rows["size_bytes"].tolist(), self.tables.pools["stream"][rows["pool"]].tolist()
        return [Region(address - addresses[0], size, stream) for address, size, stream in zip(*columns, strict=True)]

    def arena_regions(self) -> list[Region]:
        """What `dissolve_arena` would make of the arena in place; none if streams share a part of it."""
        if not self.record.arena_bytes or self.tape is None:
            return []
        count = self.record.num_cells
        offset, stream = self.tape.cells["offset"][: count + 1], self.tape.cells["stream"][:count]
        if (stream == NO_STREAM).any():
            return []
        first = np.flatnonzero(np.append(True, stream[1:] != stream[:-1]))
        ends = np.append(first[1:], len(stream))
        return [
            Region(int(offset[low]), int(offset[high] - offset[low]), int(stream[low]))
            for low, high in zip(first.tolist(), ends.tolist(), strict=True)
        ]

    def retire(self, addresses: list[int]) -> bool:
        """Serve nothing more from the segments that `dissolve_arena` made of an arena; False if that cannot be."""
        offsets = np.zeros(_MAX_KEPT, np.int64)
        retired = segments.retire_segments(self.address, np.array(addresses, np.int64), offsets) >= 0
        if not retired:
            for address in addresses:
                self.reuse_segment(address)
        return bool(retired)

    def reuse_segment(self, address: int) -> None:
        """Serve from a segment again, if it is retired."""
        segments.reuse_segment(self.address, address)

    def take_over_segments(self, addresses: list[int], tape: ArenaTape) -> bool:
        """Make segments the arena of a tape, around what lives there.

        False if that cannot be: then they are segments still. They have to be those that `dissolve_arena` made of an
        arena, or one that came alone. What the tape has of a stream moves to where that stream's segment is.
        """
        regions = self.segment_regions(addresses)
        moved = moved_into(regions, tape.size, tape.stream, tape.offset) if regions else None
        if moved is None:
            return False
        offsets, column = np.zeros(_MAX_KEPT, np.int64), np.array(addresses, np.int64)
        count = segments.retire_segments(self.address, column, offsets)
        if count >= 0:
            size_bytes = regions[-1].begin + regions[-1].size_bytes
            kept = np.append(offsets[:count], size_bytes)
            self.install_tape(replace(tape, offset=moved, arena_bytes=size_bytes), 0, kept, regions)
            if arena.serve_segments(self.address, column, size_bytes):
                return True
            self.drop_tape()
        for address in addresses:
            self.reuse_segment(address)
        return False

    @property
    def num_displaced(self) -> int:
        """Requests of this pass over the plan that have a place and were served elsewhere."""
        record = self.record
        return int(record.conflicts - record.conflicts_before - record.step_unplanned)

    def take_peak_bytes(self) -> int:
        """What was allocated at most since this was asked last; while a plan is served, in this pass and the last."""
        return int(step_log.take_peak(self.address))

    @property
    def allocated_peak_bytes(self) -> int:
        """The allocated peak since the plan was put in force, or ever if none is."""
        return max(self.record.span_allocated_peak, self.record.step_allocated_peak)

    @property
    def reserved_peak_bytes(self) -> int:
        """The same of what was reserved."""
        return max(self.record.span_reserved_peak, self.record.step_reserved_peak)

    def steps(self) -> list[Step]:
        """The planned steps that ended, oldest first, as far as the log reaches back.

        The log's first row only marks the start of the first planned step.
        """
        count, rows = self.record.step_count, self.tables.step_log.copy()
        order = range(max(1, count - STEP_LOG_ROWS), count)
        return [Step(*rows[i % STEP_LOG_ROWS].tolist()[:5]) for i in order]

    def recorded(self) -> np.ndarray:
        """A copy of the recorded events."""
        return self.tables.events[: self.record.num_events].copy()

    def forget_record(self) -> None:
        """Stop recording and give the memory of what was recorded back."""
        self.write(recording=0, num_events=0, check_at=0)
        forget_pages(self.tables.events)

    def recorded_requests(self, begin: int, end: int) -> tuple[Words, Words, Words]:
        """Sizes in bytes, streams and threads of the requests above TINY among the recorded events [begin, end)."""
        events = self.tables.events.view(np.ndarray)[begin:end]
        tag, size = events["action"], events["requested_bytes"]
        rows = np.flatnonzero(((tag & 0xFF) == ACTION_ALLOC) & (size > TINY))
        return size[rows], tag[rows] >> 8, events["thread"][rows]

    def segments(self) -> tuple[Words, Words]:
        """Where the heap's segments begin, and how many bytes of them have memory, by address."""
        rows = self._segment_rows()
        return rows["address"].copy(), rows["mapped_bytes"].copy()

    def deferred_blocks(self) -> list[int]:
        """Where blocks are that were freed while other streams used them; other threads may free more meanwhile."""
        record, tables = self.record, self.tables
        first = (record.live - tables.live.ctypes.data) // tables.live.itemsize
        rows = tables.live[first : first + record.live_mask + 1]
        rows = rows[rows["address"] != 0]
        found = rows["address"][tables.blocks["state"][rows["block"]] == BLOCK_DEFERRED].tolist()
        if record.arena_bytes and self.tape is not None:
            slots = self.tape.slots
            waiting = (slots["entry"] >= 0) & (slots["state"] == BLOCK_DEFERRED)
            found += (record.arena + slots["offset"][waiting]).tolist()
        return found

    def largest_free_bytes(self) -> int:
        """The largest free block of the heap."""
        return int(pools.largest_free(self.address))
