"""The state of one device as Python sees it: the tables' memory, installing a tape, reading statistics.

The tables are made once and never move, since compiled code holds their addresses; their pages are touched only as
they fill. Python never holds the core's lock: between two bytecodes another thread could take the GIL and wait for
that lock. Whatever must change together is written by one call into the core.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stalloc.device.ordering import Ordering
from stalloc.runtime import core, layout, matching
from stalloc.runtime.arena_tape import ArenaTape, check
from stalloc.runtime.host_memory import forget_pages
from stalloc.runtime.layout import (
    BINS_ROW,
    BLOCK_ROW,
    CELL_ROW,
    CHUNK_ROW,
    EVENT_ROW,
    LIVE_ROW,
    MAX_STREAMS,
    POOL_ROW,
    SLOT_ROW,
    STATE_WORDS,
    STEP_LOG_ROWS,
    STEP_ROW,
    STREAM_BITS,
    TAPE_ROW,
)
from stalloc.runtime.regions import Region, moved_into

Column = NDArray[np.int64]

_BLOCKS = 1 << 22
_CHUNKS = 1 << 17
_POOLS = 1 << 13
_BINS = 1 << 8  # pools that keep free blocks in bins
_LIVE = 1 << 12  # rows of the first table of live blocks; each one that follows has twice as many
_MOST_LIVE = 1 << 22
_EVENTS = 1 << 22
_MOST_USES = 1 << 21  # of cells by entries; beyond, nothing is kept of when cells are needed
_MOST_KEPT = 1 << 16  # blocks that may live in an arena when it is taken over
_LINE_WORDS = 8  # of a line of the cache
_TEXT_BYTES = 4096  # room for what an out-of-memory error says


@dataclass(frozen=True)
class Step:
    """What one pass over the ring of a plan was like."""

    end_ns: int  # monotonic time at which the ring began again
    hits: int  # requests served from the plan
    misses: int  # requests above 512 bytes that were not
    allocated_peak_bytes: int
    reserved_peak_bytes: int


class DeviceState:
    """The tables of one device."""

    def __init__(self, device: int, slow_function: int) -> None:
        self.device = device
        self.words = _table(1, STATE_WORDS)[0]
        self.address = self.words.ctypes.data
        self.blocks = _table(_BLOCKS, BLOCK_ROW)
        self.chunks = _table(_CHUNKS, CHUNK_ROW)
        self.pools = _table(_POOLS, POOL_ROW)
        self.bins = _table(_BINS, BINS_ROW)
        self._live = _table(2 * _MOST_LIVE, LIVE_ROW)
        self.streams = np.zeros(MAX_STREAMS, np.int64)
        self.events = _table(_EVENTS, EVENT_ROW)
        self.step_log = np.zeros((STEP_LOG_ROWS, STEP_ROW), np.int64)
        self._tape: tuple[np.ndarray, ...] = ()
        self._arena_needs = 0  # bytes of an arena that holds the tape
        self._last_tape: tuple[np.ndarray, ...] = ()
        self._texts: list[np.ndarray] = []
        tables = {
            "BLOCKS": self.blocks,
            "CHUNKS": self.chunks,
            "POOLS": self.pools,
            "BINS": self.bins,
            "LIVE": self._live,
            "STREAMS": self.streams,
            "EVENTS": self.events,
            "STEP_LOG": self.step_log,
        }
        for name, table in tables.items():
            self[name] = table.ctypes.data
        # row 0 of blocks and chunks means none; stream 0, the default stream, has index 0
        for name, value in {
            "SLOW_FUNCTION": slow_function,
            "DEVICE": device,
            "BLOCKS_USED": 1,
            "BLOCKS_CAPACITY": _BLOCKS,
            "CHUNKS_USED": 1,
            "CHUNKS_CAPACITY": _CHUNKS,
            "POOLS_MASK": _POOLS - 1,
            "BINS_CAPACITY": _BINS,
            "LIVE_MASK": _LIVE - 1,
            "MOST_LIVE": _MOST_LIVE - 1,
            "EVENTS_CAPACITY": _EVENTS,
            "NUM_STREAMS": 1,
        }.items():
            self[name] = value
        self.set_out_of_memory_text("stalloc: out of memory")

    @property
    def live(self) -> np.ndarray:
        """The table of live blocks that is in use; address 0: no row."""
        first, rows = (self["LIVE"] - self._live.ctypes.data) // (8 * LIVE_ROW), self["LIVE_MASK"] + 1
        return self._live[first : first + rows]

    def __getitem__(self, name: str) -> int:
        return int(self.words[getattr(layout, name)])

    def __setitem__(self, name: str, value: int) -> None:
        self.words[getattr(layout, name)] = value

    def write(self, **words: int) -> None:
        """Write several words at once, under the core's lock."""
        names = np.array([getattr(layout, name) for name in words], np.int64)
        core.write_words(self.address, names, np.array(list(words.values()), np.int64))

    def reset_peaks(self) -> None:
        """Let the peaks that the program asks for begin anew (torch.cuda.reset_peak_memory_stats)."""
        core.reset_peaks(self.address)

    def set_out_of_memory_text(self, text: str, driver_status: int = 0) -> None:
        """What the next out-of-memory error says; with a status of the driver it is no lack of memory."""
        self.out_of_memory_text = text
        data = np.frombuffer(text.encode()[:_TEXT_BYTES], np.uint8)
        # of one size, so that a thread which reads an old address and a new length stays inside
        buffer = np.full(_TEXT_BYTES, ord(" "), np.uint8)
        buffer[: len(data)] = data
        self._texts = [*self._texts[-7:], buffer]  # another thread may still be reading one of the last few
        self.write(OOM_TEXT=buffer.ctypes.data, OOM_TEXT_LENGTH=len(data), FAILED=driver_status)

    # --- segments

    def pool_kind(self, pool: int) -> int:
        """The kind of a pool: SMALL_KIND and so on."""
        return int(self.pools[pool, layout.P_KIND])

    def give_segment(self, pool: int, base: int, size_bytes: int) -> bool:
        """Add a segment; False if the tables are full."""
        return bool(core.give_segment(self.address, pool, base, size_bytes))

    def take_free_segments(self, idle_passes: int = 0) -> dict[int, int]:
        """Take every segment without live blocks, not used in the last `idle_passes`, out: base -> bytes."""
        taken: dict[int, int] = {}
        bases, sizes = np.zeros((2, 4096), np.int64)  # not shared: a finaliser may come here in the middle
        while True:
            count = core.take_segments(self.address, bases.ctypes.data, sizes.ctypes.data, len(bases), idle_passes)
            taken.update(zip(bases[:count].tolist(), sizes[:count].tolist(), strict=True))
            if count < len(bases):
                return taken

    def full_table(self) -> str:
        """The table whose being full keeps the heap from taking a segment; empty if there is room."""
        if not self["BLOCKS_SPARE"] and self["BLOCKS_USED"] >= self["BLOCKS_CAPACITY"]:
            return "blocks"
        if not self["CHUNKS_FREE"] and self["CHUNKS_USED"] >= self["CHUNKS_CAPACITY"]:
            return "segments"
        return ""

    def forget_streams(self) -> int:
        """Forget the streams that hold no memory and are on no tape in force; how many."""
        kept = np.zeros(MAX_STREAMS, np.int64)
        if self["MODE"] != layout.MODE_HEAP or self["ARENA_BYTES"]:
            kept[self.tape_entries()[:, layout.T_KEY] & (MAX_STREAMS - 1)] = 1
        return int(core.forget_streams(self.address, kept))

    # --- the tape

    def install_tape(
        self, tape: ArenaTape, cursor: int = 0, kept: Column | None = None, regions: list[Region] | None = None
    ) -> None:
        """Put a tape in place and follow it from entry `cursor`, without serving it yet.

        `kept` (b,) are offsets between which blocks live already where the arena will be. `regions` say whose the bytes
        of the arena to come are already, those that the tape does not use too.
        No arena may be in place: its blocks are known by the tape that they were served from. Raises PlanError for a
        tape that its arena does not hold, and leaves what was in place as it was.
        """
        check(tape, cursor)
        assert self["ARENA_BYTES"] == 0
        stream, offset = tape.stream, tape.offset
        rounded = (tape.size + (layout.ALIGNMENT - 1)) & -layout.ALIGNMENT
        planned = offset >= 0
        low, high = offset[planned], (offset + rounded)[planned]
        bounds = np.unique(np.concatenate([[0], low, high, kept if kept is not None else low[:0]])).astype(np.int64)
        offsets = np.unique(low)
        table = _table(len(rounded), TAPE_ROW)
        table[:, layout.T_KEY] = rounded << STREAM_BITS | stream
        table[:, layout.T_OFFSET] = np.where(planned, offset, -1)
        table[planned, layout.T_CELL_LOW] = np.searchsorted(bounds, low)
        table[planned, layout.T_CELL_HIGH] = np.searchsorted(bounds, high)
        cells = np.zeros((len(bounds) + 1) // 64 + 1, np.int64)
        num_slots = 1 << max(4, int(2 * len(offsets)).bit_length())
        slots = _table(num_slots, SLOT_ROW)
        slots[:] = -1
        slots[:, layout.S_STATE] = layout.BLOCK_FREE
        rows = np.zeros(len(offsets), np.int64)
        core.make_slots(slots, num_slots - 1, offsets, rows)
        table[planned, layout.T_SLOT] = rows[np.searchsorted(offsets, low)]
        info = np.zeros((len(bounds) + 1, CELL_ROW), np.int64)  # the last row is for what the arena has beyond the plan
        info[:-1, layout.CI_OFFSET] = bounds
        info[:, layout.CI_NEXT] = -1
        spans = table[planned][:, [layout.T_CELL_LOW, layout.T_CELL_HIGH]]
        info[:, layout.CI_STREAM] = _cell_streams(spans, stream[planned], bounds, regions)
        has_cells = np.bitwise_or.reduce(1 << (np.unique(info[:, layout.CI_STREAM]) & 63))
        starts, uses = _cell_uses(spans, np.flatnonzero(planned), len(info))
        tapes = tape.rings
        places = np.argsort(table[:, layout.T_KEY], kind="stable")
        num_keys = 1 << max(4, int(2 * len(np.unique(table[:, layout.T_KEY]))).bit_length())
        keys = np.zeros((num_keys, layout.KEY_ROW), np.int64)
        matching.make_places(keys, num_keys - 1, table[:, layout.T_KEY].copy(), places)
        lifespans = np.zeros(layout.LIFESPAN_PLACES * layout.LIFESPAN_SIZES, np.int64)
        self._arena_needs = tape.arena_bytes
        self._last_tape = self._tape  # threads may still be looking at it; both are kept, wherever an error comes
        self._tape = (table, cells, slots, info, starts, uses, lifespans, tapes, keys, places)
        self.write(
            TAPE=table.ctypes.data,
            CELLS=cells.ctypes.data,
            CELL_INFO=info.ctypes.data,
            NUM_CELLS=len(bounds) - 1,
            USE_STARTS=starts.ctypes.data,
            USES=uses.ctypes.data if len(uses) else 0,
            LIFESPANS=lifespans.ctypes.data,
            KEYS=keys.ctypes.data,
            CELL_STREAMS=int(has_cells),
            VAIN_AT=-1,
            KEYS_MASK=num_keys - 1,
            PLACES=places.ctypes.data,
            SLOTS=slots.ctypes.data,
            SLOTS_MASK=num_slots - 1,
            TAPES=tapes.ctypes.data,
            NUM_TAPES=len(tapes),
            TAPE_LENGTH=int(tapes[0, layout.TP_END]),
            RING_START=int(tapes[0, layout.TP_BEGIN]),
            CURSOR=cursor,
            HISTORY_COUNT=0,
            MISS_RUN=0,
            LAST_MISS=0,
            SURPLUS_MISSES=0,
            ASK_AT_BOUNDARY=0,
            MODE=layout.MODE_FOLLOW,
        )

    def hand_over(self, gives: Column, ordering: Ordering, events: list[int]) -> None:
        """Let streams share cells of the tape that was just installed, with an event and a wait for each hand-over.

        `gives` (k,) are entries whose event is to be recorded when they are freed. `events` are at least as many as
        there are entries with cells that several streams use.
        """
        tape, _, _, info = self._tape[:4]
        shared = np.cumsum(np.append(0, info[:, layout.CI_STREAM] == layout.NO_STREAM))
        span = shared[tape[:, layout.T_CELL_HIGH]] - shared[tape[:, layout.T_CELL_LOW]]
        rows = np.flatnonzero((tape[:, layout.T_OFFSET] >= 0) & (span > 0))
        tape[rows, layout.T_EVENT] = events[: len(rows)]
        tape[gives, layout.T_GIVES] = tape[gives, layout.T_EVENT] != 0
        givers = np.full(len(info), layout.NOBODY, np.int64)
        self._tape = (*self._tape, givers)
        self.write(
            HANDING=int(len(rows) > 0),
            GIVERS=givers.ctypes.data,
            RECORD_EVENT=ordering.record_event,
            WAIT_EVENT=ordering.wait_event,
            IS_CAPTURING=ordering.is_capturing,
        )

    def tape_entries(self) -> Column:
        """The rows of the tape in place."""
        return self._tape[0] if self._tape else np.empty((0, TAPE_ROW), np.int64)

    def end_sharing(self) -> None:
        """Part the cells that streams share, once no tape is served; what is empty goes to the stream that asks most.

        It may be used when the device has done all that it was given before; only then let the arena be dissolved.
        """
        streams = self._tape[0][:, layout.T_KEY] & (MAX_STREAMS - 1)
        core.end_sharing(self.address, int(np.bincount(streams).argmax()))

    def serve_arena(self, arena: int, arena_bytes: int) -> None:
        """Serve the tape from an arena, which holds all of it; the counting of planned steps begins."""
        assert arena_bytes >= self._arena_needs
        core.serve_arena(self.address, arena, arena_bytes)

    def drop_tape(self) -> None:
        """Serve everything from the heap again; what lives in the arena stays valid until it is freed."""
        self.write(MODE=layout.MODE_HEAP, ASK_AT_BOUNDARY=0, ASK_AFTER_MISSES=0)

    def forget_arena(self) -> int:
        """Let go of an arena that is not served and in which nothing lives: its bytes, 0 if it has to stay."""
        return int(core.forget_arena(self.address))

    def dissolve_arena(self) -> list[int]:
        """Make ordinary segments of an arena that is no longer served; their bases, none if it has to stay."""
        bases = np.zeros(MAX_STREAMS, np.int64)
        count = core.dissolve_arena(self.address, bases)
        return [int(base) for base in bases[:count]]

    def segment_regions(self, bases: list[int]) -> list[Region]:
        """What `dissolve_arena` made of an arena, or one segment; none if a part of it is gone."""
        rows = self.chunks[1 : self["CHUNKS_USED"]]
        rows = rows[(rows[:, layout.C_HIGH] == 0) & np.isin(rows[:, layout.C_BASE], bases)]
        rows = rows[np.argsort(rows[:, layout.C_BASE])]
        if not bases or rows[:, layout.C_BASE].tolist() != bases:
            return []
        streams = self.pools[rows[:, layout.C_POOL], layout.P_STREAM].tolist()
        sizes = rows[:, layout.C_SIZE].tolist()
        return [Region(base - bases[0], size, stream) for base, size, stream in zip(bases, sizes, streams, strict=True)]

    def arena_regions(self) -> list[Region]:
        """What `dissolve_arena` would make of the arena in place; none if streams share a part of it."""
        if not self["ARENA_BYTES"]:
            return []
        info = self._tape[3]
        offset, stream = info[: self["NUM_CELLS"] + 1, layout.CI_OFFSET], info[: self["NUM_CELLS"], layout.CI_STREAM]
        if (stream == layout.NO_STREAM).any():
            return []
        first = np.flatnonzero(np.append(True, stream[1:] != stream[:-1]))
        ends = np.append(first[1:], len(stream))
        return [
            Region(int(offset[low]), int(offset[high] - offset[low]), int(stream[low]))
            for low, high in zip(first.tolist(), ends.tolist(), strict=True)
        ]

    def fence(self, bases: list[int]) -> bool:
        """Serve nothing more from the segments that `dissolve_arena` made of an arena; False if that cannot be."""
        fenced = core.fence_segments(self.address, np.array(bases, np.int64), np.zeros(_MOST_KEPT, np.int64)) >= 0
        if not fenced:
            for base in bases:
                core.unfence_segment(self.address, base)
        return bool(fenced)

    def resize_segment(self, base: int, size_bytes: int) -> bool:
        """Let a segment end elsewhere, where its memory has grown or is to shrink; False if a block is in the way."""
        return bool(core.resize_segment(self.address, base, size_bytes))

    def segment_needs(self, base: int) -> int:
        """Bytes from the base of a segment to the end of the last block in it that is not free."""
        return int(core.segment_needs(self.address, base))

    def cut_arena(self, size_bytes: int) -> bool:
        """Let the arena end where what its tape needs does (`take_over_segments`); False if a block is beyond."""
        return bool(core.cut_arena(self.address, size_bytes))

    def take_over_segments(self, bases: list[int], tape: ArenaTape, arena_bytes: int = 0) -> bool:
        """Make segments the arena of a tape, around what lives there.

        False if that cannot be: then they are segments still. They have to be those that `dissolve_arena` made of an
        arena, or one that came alone. What the tape has of a stream moves to where that stream's segment is.
        `arena_bytes` are those that the tape needs; what is beyond may be cut off later.
        """
        regions = self.segment_regions(bases)
        moved = moved_into(regions, tape.size, tape.stream, tape.offset) if regions else None
        if moved is None:
            return False
        offsets, table = np.zeros(_MOST_KEPT, np.int64), np.array(bases, np.int64)
        count = core.fence_segments(self.address, table, offsets)
        if count >= 0:
            size_bytes = regions[-1].begin + regions[-1].size_bytes
            kept = np.append(offsets[:count], [arena_bytes, size_bytes])
            self.install_tape(replace(tape, offset=moved, arena_bytes=size_bytes), 0, kept, regions)
            if core.serve_segments(self.address, table, size_bytes):
                return True
            self.drop_tape()
        for base in bases:
            core.unfence_segment(self.address, base)
        return False

    # --- reading

    def span_peak(self, what: str) -> int:
        """The peak of ALLOCATED or RESERVED (bytes) since the plan was put in force, or ever if none is."""
        return max(self[f"SPAN_{what}_PEAK"], self[f"STEP_{what}_PEAK"])

    def steps(self) -> list[Step]:
        """The planned steps that ended, oldest first, as far as the log reaches back.

        The log's first row only marks the begin of the first planned step.
        """
        count, rows = self["STEP_COUNT"], self.step_log.copy()
        order = range(max(1, count - STEP_LOG_ROWS), count)
        return [Step(*(int(value) for value in rows[i % STEP_LOG_ROWS, :5])) for i in order]

    def recorded(self) -> np.ndarray:
        """A copy of the recorded events: rows of action and stream, address, bytes, nanoseconds."""
        return self.events[: self["NUM_EVENTS"]].copy()

    def forget_record(self) -> None:
        """Stop recording and give the memory of what was recorded back."""
        self.write(RECORDING=0, NUM_EVENTS=0, CHECK_AT=0)
        forget_pages(self.events)

    def recorded_requests(self, begin: int, end: int) -> tuple[Column, Column]:
        """Requested bytes and stream index of each request above TINY among the recorded events [begin, end)."""
        events = self.events[begin:end]
        alloc = (events[:, layout.E_ACTION] & 0xFF) == layout.ACTION_ALLOC
        rows = events[alloc & (events[:, layout.E_SIZE] > layout.TINY)]
        return rows[:, layout.E_SIZE], rows[:, layout.E_ACTION] >> 8

    def segments(self) -> tuple[Column, Column]:
        """Bases and sizes (bytes) of the heap's segments, by address."""
        rows = self.chunks[1 : self["CHUNKS_USED"]].copy()
        rows = rows[(rows[:, layout.C_BASE] != 0) & (rows[:, layout.C_HIGH] == 0)]
        rows = rows[np.argsort(rows[:, layout.C_BASE])]
        return rows[:, layout.C_BASE].copy(), rows[:, layout.C_SIZE].copy()

    def live_blocks(self, limit: int) -> list[tuple[int, int]]:
        """The largest live blocks that no plan placed: (address, requested bytes)."""
        addresses, sizes = np.zeros((2, self["LIVE_COUNT"] + 64), np.int64)
        count = min(int(core.copy_live(self.address, addresses, sizes)), len(sizes))
        order = np.argsort(-sizes[:count], kind="stable")[:limit]
        return [(int(addresses[i]), int(sizes[i])) for i in order]

    def deferred_blocks(self) -> list[int]:
        """Where blocks are that were freed while other streams used them; other threads may free more meanwhile."""
        rows = self.live[self.live[:, layout.L_ADDRESS] != 0]
        held = self.blocks[rows[:, layout.L_BLOCK], layout.B_STATE]
        found = rows[held == layout.BLOCK_DEFERRED, layout.L_ADDRESS].tolist()
        if self["ARENA_BYTES"]:
            slots = self._tape[2]
            waiting = (slots[:, layout.S_ENTRY] >= 0) & (slots[:, layout.S_STATE] == layout.BLOCK_DEFERRED)
            found += (self["ARENA"] + slots[waiting, layout.S_OFFSET]).tolist()
        return found

    def largest_free_bytes(self) -> int:
        """The largest free block of the heap."""
        return int(core.largest_free(self.address))


def _table(rows: int, words: int) -> np.ndarray:
    """(rows, words) zeros that begin at a line of the cache; pages that are never touched cost nothing."""
    data = np.zeros(rows * words + _LINE_WORDS, np.int64)
    first = -data.ctypes.data // 8 % _LINE_WORDS
    return data[first : first + rows * words].reshape(rows, words)


def _cell_streams(spans: Column, stream: Column, bounds: Column, regions: list[Region] | None) -> Column:
    """(b + 1,) the stream of each cell, NO_STREAM if several use it.

    One that none uses belongs to its region, or goes with the one before it. `spans` (k, 2) are the cells of each
    entry, `stream` (k,) its stream, `bounds` (b,) the offsets where cells begin.
    """
    count = len(bounds) + 1
    owner = np.full(count, layout.NO_STREAM, np.int64)
    users = np.zeros(count, np.int64)
    for index in np.unique(stream).tolist():
        of_stream = spans[stream == index]
        change = np.zeros(count + 1, np.int64)
        np.add.at(change, of_stream[:, 0], 1)
        np.subtract.at(change, of_stream[:, 1], 1)
        covered = np.cumsum(change[:-1]) > 0
        owner[covered] = index
        users += covered
    shared = users > 1
    used = np.flatnonzero(users > 0)
    if not len(used) and regions is None:
        return np.zeros(count, np.int64)
    if regions is not None:
        place = np.searchsorted([region.begin for region in regions], bounds, side="right") - 1
        of_region = np.array([region.stream for region in regions], np.int64)[np.append(place, len(regions) - 1)]
        owner = np.where(users > 0, owner, of_region)
    else:
        before = np.searchsorted(used, np.arange(count), side="right") - 1
        owner = owner[used[np.maximum(before, 0)]]
    owner[shared] = layout.NO_STREAM
    return owner


def _cell_uses(spans: Column, entries: Column, count: int) -> tuple[Column, Column]:
    """For each cell the entries of the tape that need it, in order: where each cell's begin (count + 1,), and they."""
    lengths = spans[:, 1] - spans[:, 0]
    total = int(lengths.sum())
    if total > _MOST_USES:
        return np.zeros(count + 1, np.int64), np.zeros(0, np.int64)
    first = np.cumsum(lengths) - lengths
    cells = np.arange(total) - np.repeat(first - spans[:, 0], lengths)
    uses = np.repeat(entries, lengths)
    order = np.lexsort((uses, cells))
    starts = np.searchsorted(cells[order], np.arange(count + 1))
    return starts.astype(np.int64), np.ascontiguousarray(uses[order])
