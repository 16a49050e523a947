"""What a replay takes and gives: columns in, columns out, so that every model is one compiled loop.

Contract: a model that is fed the same events in one call or in many ends in the same state and reports the same
figures. A model never moves a live block (save `compacting`, which is about that), and the blocks of its map cover its
segments without a gap or an overlap.
"""

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from stalloc.columns import Column


class Kind(enum.IntEnum):
    """What a program asks of an allocator."""

    ALLOC = 0
    FREE_REQUESTED = 1  #: the program gave the block up; streams may still use it
    FREE_COMPLETED = 2  #: its bytes may be handed out again
    EMPTY_CACHE = 3


class Events(NamedTuple):
    """A program as an allocator sees it. Columns, so that compiled code takes them as they are."""

    kind: Column  #: (m,) int8 of Kind
    request: Column  #: (m,) int64 row of the request, -1 for EMPTY_CACHE
    event: Column  #: (m,) int64 event index in the trace; -1 for what was live before recording
    size: Column  #: (n,) int64 requested bytes of each request
    stream: Column  #: (n,) int64 index of each request's stream
    step_marks: Column | None = None
    """(k,) int64 event indices at which the program marked a step, in order; None if it marks none."""


@dataclass(frozen=True, eq=False)
class Fed:
    """A model's answers to the events that it was fed; columns are int64."""

    reserved_bytes: Column  #: (m,) after each event
    allocated_bytes: Column  #: (m,) requested bytes in blocks that are not yet given up, after each event
    failed: int  #: position of the first event that ran out of memory; -1 for none. Nothing was done from there on


@dataclass(frozen=True)
class Counters:
    """What a model has done so far."""

    reserved_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int  #: requested bytes that are live
    peak_allocated_bytes: int
    device_allocs: int  #: cudaMalloc, or cuMemCreate for a mapped page
    device_frees: int
    retries: int  #: requests that had to empty the cache first
    more: dict[str, int]  #: what only this model counts


@dataclass(frozen=True, eq=False)
class BlockMap:
    """Every block of a model, ordered by address; columns are int64."""

    address: Column  #: (b,)
    size_bytes: Column  #: (b,)
    request: Column  #: (b,) row of the request that holds it; -1 for a free block
    waiting: Column  #: (b,) 1 if the program gave the block up and its free is not completed
    stream: Column  #: (b,) index of the stream whose cache it belongs to
    segment: Column  #: (b,) index into the segments
    segment_address: Column  #: (s,)
    segment_size: Column  #: (s,) bytes mapped
    segment_pool: Column | None = None  #: (s,) 0 for the usual pool, others are private; None: all are usual

    @classmethod
    def covering(
        cls, segments: Sequence[tuple[int, int, int]], taken: Iterable[tuple[int, int, int, int, int]]
    ) -> "BlockMap":
        """The map of segments, (address, bytes, stream), and of the blocks in them that are not free.

        Those are (address, bytes, request, waiting, stream), and lie within segments; both are ordered by address. What
        is between them is free, and of the stream of its segment, or where that is -1 of that of the block behind it.
        """
        rows: list[tuple[int, int, int, int, int, int]] = []
        blocks = deque(taken)
        for number, (begin, size, of_segment) in enumerate(segments):
            at, stream = begin, max(of_segment, 0)
            while blocks and blocks[0][0] < begin + size:
                address, length, request, waiting, of_block = blocks.popleft()
                stream = of_block if of_segment < 0 else stream
                if address > at:
                    rows.append((at, address - at, -1, 0, stream, number))
                rows.append((address, length, request, waiting, of_block, number))
                at = address + length
            if at < begin + size:
                rows.append((at, begin + size - at, -1, 0, stream, number))
        of_segments = np.array(segments, np.int64).reshape(-1, 3).T.copy()
        return cls(*np.array(rows, np.int64).reshape(-1, 6).T.copy(), *of_segments[:2])


class Allocator(Protocol):
    """One model. Built by a factory that takes settings and a capacity in bytes (0: without limit)."""

    name: str

    def feed(self, events: Events) -> Fed:
        """Feed further events; `size` and `stream` hold every request that was ever fed, by the same rows."""
        ...

    def counters(self) -> Counters:
        """What was done so far."""
        ...

    def blocks(self) -> BlockMap:
        """All blocks with their places."""
        ...
