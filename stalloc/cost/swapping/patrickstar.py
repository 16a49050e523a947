"""Parameters in chunks of one size, which come to the device when they are needed and go when others need their place.

Source: Fang et al., "PatrickStar: Parallel Training of Pre-trained Models via Chunk-based Memory Management", 2021:
parameters lie in chunks of one size in the order in which they are used, none over a border; the state of the optimizer
lies in further lists of chunks, each a mirror of that of the parameters. It knows a step from the one before, so what
is needed latest can go first, which moves least where all are of one size (Belady, "A study of replacement algorithms
for a virtual-storage computer", 1966).
Contract: what a moment needs is there at that moment, all at once; nothing goes that need not. A step begins with
nothing on the device. A parameter larger than a chunk, such as an embedding, is in none.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from stalloc.cost.swapping.model_data import ModelData, Moment, in_turn
from stalloc.errors import BadInputError

Policy = Literal["belady", "lru"]


@dataclass(frozen=True)
class Chunks:
    """Parameters that lie in chunks."""

    chunk_bytes: int
    count: int
    num_states: int  #: chunks of state for each
    moments: tuple[Moment, ...]  #: chunks that operations of the forward and the backward pass use
    outside_bytes: int  #: parameters that are larger than a chunk, and their state: they stay on the device

    @property
    def with_update(self) -> tuple[Moment, ...]:
        """The moments, and those of an update of chunk after chunk, each with those of its state."""
        update = (
            (chunk, *(chunk + state * self.count for state in range(1, self.num_states + 1)))
            for chunk in range(self.count)
        )
        return (*self.moments, *update)


def in_chunks(data: ModelData, chunk_bytes: int) -> Chunks:
    """Parameters one behind the other; one that does not fit into what is left of a chunk begins the next."""
    chunk_of: dict[int, int] = {}
    last, used, outside = -1, chunk_bytes, 0
    for row, size in enumerate(data.sizes):
        if size > chunk_bytes:
            outside += size * (1 + data.num_states)
            continue
        if used + size > chunk_bytes:
            last, used = last + 1, 0
        chunk_of[row] = last
        used += size
    moments = in_turn((chunk_of[row] for row in needed if row in chunk_of) for needed in data.uses)
    return Chunks(chunk_bytes, last + 1, data.num_states, moments, outside)


@dataclass(frozen=True)
class Moved:
    """How many chunks a step moves."""

    to_device: int
    to_host: int

    @property
    def chunks(self) -> int:
        """Chunks moved both ways together."""
        return self.to_device + self.to_host


def least_capacity(moments: Sequence[Moment]) -> int:
    """Chunks that have to be on the device at once."""
    return max(map(len, moments), default=0)


def replay_chunks(moments: Sequence[Moment], capacity: int, policy: Policy) -> Moved:
    """What is moved if so many chunks have room. Raises BadInputError if a moment needs more."""
    if capacity < least_capacity(moments):
        raise BadInputError(
            f"{capacity} chunks have room on the device, and {least_capacity(moments)} are needed at once: "
            "give a larger budget, or smaller chunks."
        )
    used_at: dict[int, list[int]] = {}
    for now, needed in enumerate(moments):
        for chunk in needed:
            used_at.setdefault(chunk, []).append(now)
    last: dict[int, int] = {}  # of what is here: when it was used

    def next_use(chunk: int, now: int) -> int:
        later = bisect_right(used_at[chunk], now)
        return used_at[chunk][later] if later < len(used_at[chunk]) else len(moments)

    to_device = to_host = 0
    for now, needed in enumerate(moments):
        missing = [chunk for chunk in needed if chunk not in last]
        surplus = len(last) + len(missing) - capacity
        if surplus > 0:
            others = (chunk for chunk in last if chunk not in needed)
            if policy == "lru":
                goes = sorted(others, key=lambda chunk: (last[chunk], chunk))
            else:
                goes = sorted(others, key=lambda chunk, now=now: (-next_use(chunk, now), chunk))  # type: ignore[misc]
            for chunk in goes[:surplus]:
                del last[chunk]
            to_host += surplus
        to_device += len(missing)
        last.update(dict.fromkeys(needed, now))
    return Moved(to_device, to_host)


@dataclass(frozen=True)
class ChunkReplay:
    """One size of chunks under two policies."""

    chunk_bytes: int
    count: int  #: of parameters; the state has as many for each of its lists
    capacity: int
    belady: Moved
    lru: Moved


def best_chunks(data: ModelData, sizes: Iterable[int], budget_bytes: int) -> ChunkReplay | None:
    """The size with which Belady moves least; None if what is needed at once has no room with any."""
    found = []
    for chunk_bytes in sizes:
        chunks = in_chunks(data, chunk_bytes)
        moments, capacity = chunks.with_update, (budget_bytes - chunks.outside_bytes) // chunk_bytes
        if moments and capacity >= least_capacity(moments):
            belady, lru = (replay_chunks(moments, capacity, policy) for policy in ("belady", "lru"))
            found.append(ChunkReplay(chunk_bytes, chunks.count, capacity, belady, lru))
    return min(found, key=lambda one: (one.belady.chunks * one.chunk_bytes, one.chunk_bytes), default=None)
