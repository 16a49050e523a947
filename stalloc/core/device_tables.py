"""The memory of one device's records: its state, and the tables that it has for as long as it lives.

They are made once and never move, since compiled code holds their addresses; their pages are touched only as they fill.
Python never holds the core's lock: between two bytecodes another thread could take the GIL and wait for that lock.
Whatever must change together is written by one call into the core.
"""

import numpy as np

from stalloc.compiled import BORROWING, njit
from stalloc.core.constants import CLOCK, ITERATION_LOG_ROWS, MAX_STREAMS
from stalloc.core.intrinsics import locked, unlock
from stalloc.core.records import (
    Bins,
    Block,
    Event,
    IterationRow,
    LiveBlock,
    Pool,
    Segment,
    State,
    StreamUse,
    Word,
    offset_of,
    path_of,
    table,
    view_at,
    word_at,
)

_BLOCKS = 1 << 22
_SEGMENTS = 1 << 17
_POOLS = 1 << 13
_BINS = 1 << 8  # pools that keep free blocks in bins
_LIVE = 1 << 12  # rows of the first table of live blocks; each one that follows has twice as many
_MAX_LIVE = 1 << 22
_EVENTS = 1 << 22
_STREAM_USES = 1 << 20

MAX_RANGES = 4096  # of pages that lose their memory at a time


@njit(**BORROWING)
def _write(device, words, values):
    """Write several words of a state at once."""
    state = locked(device)
    for i in range(len(words)):
        word_at(device, words[i]).value = values[i]
    unlock(state)


class DeviceTables:
    """The tables of one device; each is an array of the record that it is named for. `record` are its own fields."""

    def __init__(self) -> None:
        self.memory = table(State, 1)  #: of the record
        self.address: int = self.memory.ctypes.data
        self.record = view_at(State, self.address)
        self.blocks = table(Block, _BLOCKS)
        self.segments = table(Segment, _SEGMENTS)
        self.pools = table(Pool, _POOLS)
        self.bins = table(Bins, _BINS)
        self.live = table(LiveBlock, 2 * _MAX_LIVE)  #: all tables of live blocks, one behind the other
        self.streams = table(Word, MAX_STREAMS)
        self.events = table(Event, _EVENTS)
        self.stream_uses = table(StreamUse, _STREAM_USES)
        self.iteration_log = table(IterationRow, ITERATION_LOG_ROWS)
        record = self.record
        tables = ("blocks", "segments", "pools", "bins", "live", "streams", "events", "iteration_log", "stream_uses")
        self.write({name: getattr(self, name).ctypes.data for name in tables})
        # row 0 of blocks, segments and uses means none; stream 0, the default stream, has index 0
        record.heap.blocks_used = record.heap.segments_used = record.shared.stream_uses_used = (
            record.lookup.num_streams
        ) = 1
        record.heap.blocks_capacity = _BLOCKS
        record.heap.segments_capacity = _SEGMENTS
        record.heap.pools_mask = _POOLS - 1
        record.heap.bins_capacity = _BINS
        record.lookup.live_mask = _LIVE - 1
        record.lookup.max_live_mask = _MAX_LIVE - 1
        record.log.events_capacity, record.log.events_clock = _EVENTS, CLOCK

    def write(self, fields: dict[str, int]) -> None:
        """Write several fields of the record at once, under the core's lock: by their names, or as `a.b`."""
        words = np.array([offset_of(State, path_of(State, name)) // 8 for name in fields], np.int64)
        _write(self.address, words, np.array(list(fields.values()), np.int64))
