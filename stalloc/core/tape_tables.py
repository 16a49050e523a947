"""The tables of a tape: its entries, and the cells, slots and keys that they are found by.

Contract: made in Python before the tape is put in place, and never resized after that; the core writes into them only
what the records say. They have to outlive the tape in the core.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stalloc.columns import distinct
from stalloc.core.arena_tape import ArenaTape
from stalloc.core.constants import (
    BLOCK_FREE,
    LIFESPAN_ROWS,
    NO_STREAM,
    STREAM_BITS,
)
from stalloc.core.record_types import Record, Words
from stalloc.core.records import Cell, Gap, Key, Ratio, Ring, Slot, TapeEntry, Word, table
from stalloc.core.slots import fill_slots
from stalloc.core.tape_cursor import fill_keys
from stalloc.sizes import aligned

_MAX_USES = 1 << 21  # of cells by entries; beyond, nothing is kept of when cells are needed


@dataclass(frozen=True, eq=False)
class TapeTables:
    """Everything that the core reads of a tape."""

    entries: np.ndarray  #: of TapeEntry
    bits: Words  #: of taken cells
    slots: np.ndarray  #: of Slot, by hash
    cells: np.ndarray  #: of Cell; two more than the plan has: for the arena's bytes beyond it, and where those end
    use_starts: Words
    uses: Words  #: empty: too many to keep
    lifespans: np.ndarray
    gaps: np.ndarray  #: of Gap; row 0 means none
    ratios: np.ndarray  #: of Ratio, as the lifespans of dynamic requests
    rings: np.ndarray  #: of Ring
    num_kinds: int  #: rings of one turn
    keys: np.ndarray  #: of Key, by hash
    places: Words

    def copy(self) -> "TapeTables":
        """The same once more: what the core writes is the copy's own."""
        return replace(
            self,
            entries=_copied(TapeEntry, self.entries),
            bits=self.bits.copy(),
            slots=_copied(Slot, self.slots),
            cells=_copied(Cell, self.cells),
            lifespans=_copied(Word, self.lifespans),
        )

    @property
    def num_cells(self) -> int:
        """Cells that the plan itself has."""
        return len(self.cells) - 2

    def tapes_beside(self, begin: int) -> int:
        """Where the rings of the turn are of which one begins at an entry."""
        address, begins = self._rings
        return address + bisect_left(begins, begin) // self.num_kinds * self.num_kinds * self.rings.dtype.itemsize

    @cached_property
    def _rings(self) -> tuple[int, list[int]]:
        """Where the rings are, and the entries that they begin at."""
        return self.rings.ctypes.data, self.rings["begin"].tolist()

    @property
    def cell_streams(self) -> int:
        """The streams that have any cells: a bit for each index modulo 64, as a signed number."""
        return int(np.bitwise_or.reduce(1 << (distinct(self.cells["stream"]) & 63)))


def make_tables(tape: ArenaTape) -> TapeTables:
    """The tables of a tape."""
    stream, offset = tape.stream, tape.offset
    size = aligned(tape.size)
    planned = offset >= 0
    low, high = offset[planned], (offset + size)[planned]
    bounds = distinct(np.concatenate([[0], low, high])).astype(np.int64)
    entries = table(TapeEntry, len(size))
    entries["key"] = size << STREAM_BITS | stream
    entries["offset"] = np.where(planned, offset, -1)
    spans = np.stack([np.searchsorted(bounds, low), np.searchsorted(bounds, high)], axis=1)
    entries["cell_low"][planned], entries["cell_high"][planned] = spans.T
    slots, rows = _slots(low)
    entries["slot"][planned] = rows
    cells = table(Cell, len(bounds) + 1)
    cells["offset"][:-1] = bounds
    cells["needed_at"] = -1
    cells["stream"] = _cell_streams(spans, stream[planned], bounds)
    use_starts, uses = _cell_uses(spans, np.flatnonzero(planned), len(cells))
    rings = table(Ring, len(tape.rings))
    rings["begin"], rings["end"] = tape.rings.T
    lifespans, gaps, entries["gap"] = _gaps(tape)
    keys, places = _keys(entries["key"].copy())
    return TapeTables(
        entries=entries,
        bits=np.zeros((len(bounds) + 1) // 64 + 1, np.int64),
        slots=slots,
        cells=cells,
        use_starts=use_starts,
        uses=uses,
        lifespans=lifespans,
        gaps=gaps,
        ratios=_ratios(tape),
        rings=rings,
        num_kinds=len(rings) // tape.num_buffers,
        keys=keys,
        places=places,
    )


def _copied(record: type[Record], rows: np.ndarray) -> np.ndarray:
    copy = table(record, len(rows))
    copy[:] = rows
    return copy


def _gaps(tape: ArenaTape) -> tuple[np.ndarray, np.ndarray, Words]:
    """The table of lifespans, that of gaps, and the gap before each entry of a tape."""
    if tape.between is None:
        return table(Word, LIFESPAN_ROWS), table(Gap, 1), np.zeros(len(tape.size), np.int64)
    num_dynamic, lasts, next_sure = tape.between.num_dynamic, tape.between.lasts, tape.between.next_sure
    rows = np.flatnonzero((num_dynamic > 0) | (next_sure != np.arange(len(next_sure))))
    lifespans, gaps = table(Word, LIFESPAN_ROWS + len(lasts)), table(Gap, 1 + len(rows))
    lifespans["value"][LIFESPAN_ROWS:] = lasts
    gaps["first_dynamic"][1:] = (LIFESPAN_ROWS + np.cumsum(num_dynamic) - num_dynamic)[rows]
    gaps["num_dynamic"][1:], gaps["next_sure"][1:] = num_dynamic[rows], next_sure[rows]
    gap = np.zeros(len(tape.size), np.int64)
    gap[rows] = 1 + np.arange(len(rows))
    return lifespans, gaps, gap


def _ratios(tape: ArenaTape) -> np.ndarray:
    """The table of ratios, where the lifespans of dynamic requests are in theirs."""
    if tape.between is None:
        return table(Ratio, 1)
    ratios = table(Ratio, len(tape.between.ratios))
    ratios["times"], ratios["over"] = tape.between.ratios.T
    return ratios


def _hash_rows(count: int) -> int:
    """Rows of a hash table for so many: at most half of them are used."""
    return 1 << max(4, int(2 * count).bit_length())


def _slots(low: Words) -> tuple[np.ndarray, Words]:
    """The table of slots for entries at these offsets, and each one's row."""
    offsets = distinct(low)
    slots, rows = table(Slot, _hash_rows(len(offsets))), np.zeros(len(offsets), np.int64)
    slots["offset"] = slots["entry"] = slots["requested_bytes"] = -1
    slots["state"] = BLOCK_FREE
    fill_slots(slots.ctypes.data, len(slots) - 1, offsets, rows)
    return slots, rows[np.searchsorted(offsets, low)]


def _keys(key: Words) -> tuple[np.ndarray, Words]:
    """The table of keys, and the entries by key and position."""
    places = np.argsort(key, kind="stable")
    keys = table(Key, _hash_rows(len(distinct(key))))
    fill_keys(keys.ctypes.data, len(keys) - 1, key, places)
    return keys, places


def _cell_streams(spans: Words, stream: Words, bounds: Words) -> Words:
    """(b + 1,) the stream of each cell, NO_STREAM if several use it.

    One that none uses goes with the one before it. `spans` (k, 2) are the cells of each
    entry, `stream` (k,) its stream, `bounds` (b,) the offsets where cells begin.
    """
    count = len(bounds) + 1
    owner = np.full(count, NO_STREAM, np.int64)
    users = np.zeros(count, np.int64)
    for index in distinct(stream).tolist():
        of_stream = spans[stream == index]
        change = np.zeros(count + 1, np.int64)
        np.add.at(change, of_stream[:, 0], 1)
        np.subtract.at(change, of_stream[:, 1], 1)
        covered = np.cumsum(change[:-1]) > 0
        owner[covered] = index
        users += covered
    shared = users > 1
    used = np.flatnonzero(users > 0)
    if not len(used):
        return np.zeros(count, np.int64)
    before = np.searchsorted(used, np.arange(count), side="right") - 1
    owner = owner[used[np.maximum(before, 0)]]
    owner[shared] = NO_STREAM
    return owner


def _cell_uses(spans: Words, entries: Words, count: int) -> tuple[Words, Words]:
    """For each cell the entries of the tape that need it, in order: where each cell's begin (count + 1,), and they."""
    lengths = spans[:, 1] - spans[:, 0]
    total = int(lengths.sum())
    if total > _MAX_USES:
        return np.zeros(count + 1, np.int64), np.zeros(0, np.int64)
    first = np.cumsum(lengths) - lengths
    cells = np.arange(total) - np.repeat(first - spans[:, 0], lengths)
    order = np.argsort(cells.astype(np.min_scalar_type(count)), kind="stable")  # few bits are sorted in a few passes
    starts = np.cumsum(np.append(0, np.bincount(cells, minlength=count)))
    return starts, np.ascontiguousarray(np.repeat(entries, lengths)[order])
