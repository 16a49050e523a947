"""Where several kinds of steps place what is carried over from one step to the next.

Contract: carried-over requests of a stream are ranked by size, and those of one rank have one address in all kinds,
with room for the largest. Every kind keeps it free for as long as what was carried over to a step of that kind has been
seen to live in it. A request that replaces one of an earlier step while that still lives (a batch, a model's output)
needs another address than that one has: its rank is double-buffered. A step switches to the other buffer if its kind
carries over anything of such a rank; so whatever kinds follow one another, one of the two addresses is free when it is
asked for.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stalloc.columns import Column
from stalloc.lifespans.units import StepKind
from stalloc.sizes import PAGE_BYTES, aligned


@dataclass(frozen=True, eq=False)
class Keeping:
    """What one kind of step does with each place, by the buffer that it uses: (p,) columns by place."""

    own: Column  #: (r,) rows of the step that are carried over and have a place, by rank
    home: Column  #: (r,) the place of each
    until: Column  #: position in the step before which what came from earlier steps is gone; -1: there is nothing
    begin: Column  #: the place is needed from here to `end`, which may lie in the next iteration
    end: Column


@dataclass(frozen=True, eq=False)
class CarriedOver:
    """What all kinds of steps carry over, on one stream; see `carried_over`."""

    stream: int
    lengths: list[int]  #: of the steps
    rows: list[Column]  #: for each kind, by rank
    kept: Column  #: (kinds, r) position in each kind before which what is carried over to it is gone
    rank_size: Column  #: (r,) bytes
    has_two: NDArray[np.bool_]  #: (r,) ranks that have two places
    switches_buffers: list[bool]  #: the kinds of steps that carry over anything of such a rank, on whichever stream

    @property
    def size(self) -> Column:
        """(p,) bytes of each place: those of all ranks, then the second ones of those that have two."""
        return np.concatenate([self.rank_size, self.rank_size[self.has_two]])

    @property
    def num_buffers(self) -> int:
        """2 if any rank has two places."""
        return 1 + int(self.has_two.any())

    def places(self, buffer: int) -> Column:
        """(r,) the place of each rank for what is carried over by a step that uses this buffer."""
        first = np.arange(len(self.has_two))
        if buffer == 0:
            return first
        return np.where(self.has_two, len(first) - 1 + np.cumsum(self.has_two), first)

    def keeping(self, kind: int, buffer: int) -> Keeping:
        """What a step of this kind does with the places."""
        length, rows, kept = self.lengths[kind], self.rows[kind], self.kept[kind]
        home, theirs = self.places(buffer), self.places(1 - buffer)
        until, begin = np.full(len(self.size), -1, np.int64), np.zeros(len(self.size), np.int64)
        until[theirs] = kept
        end = np.maximum(until, 0)
        ranks = np.flatnonzero(self.has_two[: len(rows)] | (rows >= kept[: len(rows)]))
        own, home = rows[ranks], home[ranks]
        begin[home] = own
        end[home] += length
        return Keeping(own, home, until, begin, end)

    def needed_double_buffered(self, kind: int) -> tuple[Column, Column]:
        """(p,) when each place is needed in a cycle of two steps of a kind that carries all such ranks over.

        What is live at a time in any kind of step is so here too.
        """
        length, rows, two = self.lengths[kind], self.rows[kind], np.flatnonzero(self.has_two)
        begin, end = np.zeros(len(self.size), np.int64), np.full(len(self.size), 2 * length)
        first, second = self.places(0)[two], self.places(1)[two]
        last = self.kept[kind][two]
        for own, kept in zip(self.rows, self.kept, strict=True):
            beside = np.flatnonzero(two < len(own))
            meets = kept[two][:, None] > own[two[beside]]  # what is there yet, and what replaces any of it
            last = np.maximum(last, np.where(meets, rows[two[beside]] + 1, 0).max(axis=1, initial=0))
        begin[first], end[first] = rows[two], length + last
        begin[second], end[second] = length + rows[two], 2 * length + last
        return begin, end


def carried_over(kinds: list[StepKind], streams: list[int], *, double_buffered: bool) -> list[CarriedOver]:
    """What several kinds of steps carry over, on each stream; `double_buffered`: a rank may have two places."""
    lengths = [len(kind.size) for kind in kinds]
    found: list[CarriedOver] = []
    for stream in streams:
        rows = [kind.handed_on(stream) for kind in kinds]
        size = np.zeros(max(len(own) for own in rows), np.int64)
        for kind, own in zip(kinds, rows, strict=True):
            size[: len(own)] = np.maximum(size[: len(own)], aligned(kind.size[own]))
        no_second = np.zeros(len(size), bool), [False] * len(kinds)
        found.append(CarriedOver(stream, lengths, rows, _kept(kinds, stream, len(size)), size, *no_second))
    return _double_buffered(found) if double_buffered else found


def _double_buffered(found: list[CarriedOver]) -> list[CarriedOver]:
    """`found` with two places for each rank that can have them, if what is replaced is a page or more."""
    hands = [np.arange(len(one.rank_size)) < np.array([[len(own)] for own in one.rows]) for one in found]
    passes = [one.kept >= np.array(one.lengths)[:, None] for one in found]
    wanted, was = [_replaces(one) for one in found], -1
    while was != (was := sum(map(np.count_nonzero, wanted))):
        ends = np.any([(does & rank).any(axis=1) for does, rank in zip(hands, wanted, strict=True)], axis=0)
        # what an earlier step carried over has to be gone when such a step is over
        may = [~whole[ends].any(axis=0) for whole in passes]
        wanted = [rank & able for rank, able in zip(wanted, may, strict=True)]
    if not any((one.rank_size[rank] >= PAGE_BYTES).any() for one, rank in zip(found, wanted, strict=True)):
        return found
    two = [able & does.any(axis=0) & ~does[~ends].any(axis=0) for able, does in zip(may, hands, strict=True)]
    return [replace(one, has_two=rank, switches_buffers=ends.tolist()) for one, rank in zip(found, two, strict=True)]


def _replaces(carried: CarriedOver) -> NDArray[np.bool_]:
    """(r,) ranks that some kind of step asks for before what was carried over to it is gone."""
    replaces = np.zeros(len(carried.rank_size), bool)
    for own, until in zip(carried.rows, carried.kept, strict=True):
        replaces[: len(own)] |= own < until[: len(own)]
    return replaces


def _kept(kinds: list[StepKind], stream: int, num_ranks: int) -> Column:
    """(kinds, r) the position up to which a step of each kind keeps each place for what was carried over to it.

    Where that was not seen, the same share of the step as in the kind in which it was longest.
    """
    until = np.full((len(kinds), num_ranks), -1, np.int64)
    for row, kind in zip(until, kinds, strict=True):
        if stream in kind.until:
            seen = kind.until[stream][:num_ranks]
            row[: len(seen)] = seen
    length = np.array([[len(kind.size)] for kind in kinds])
    share = (until / length).max(axis=0)
    share[share < 0] = 1.0
    return np.where(until < 0, np.ceil(share * length).astype(np.int64), until)
