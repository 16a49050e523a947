"""Parameters in chunks of one size, which come to the device when they are needed and go when others need their place.

Source: Fang et al., "PatrickStar", 2021: parameters lie in chunks in the order of their use, none over a border, and
the optimizer's state in further lists of chunks, each a mirror of theirs. What is needed latest goes first, which moves
least (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966).
Contract: what a moment needs is there all at once; nothing goes that need not. A step begins with nothing on the
device. A parameter larger than a chunk, such as an embedding, is in none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from stalloc.cost.swapping.recorded_model import ModelData, Moment, in_turn
from stalloc.errors import BadInputError


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
        lists = range(1 + self.num_states)
        return (*self.moments, *(tuple(one + state * self.count for state in lists) for one in range(self.count)))


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


def replay_chunks(moments: Sequence[Moment], capacity: int, policy: Literal["belady", "lru"]) -> Moved:
    """What is moved if so many chunks have room. Raises BadInputError if a moment needs more."""
    if capacity < least_capacity(moments):
        raise BadInputError(
            f"{capacity} chunks have room on the device, and {least_capacity(moments)} are needed at once: "
            "give a larger budget, or smaller chunks."
        )
    next_use: dict[int, int] = {}
    ranked: list[dict[int, int]] = []  # of each moment, from the last on: its chunks; what ranks lowest goes first
    for now in reversed(range(len(moments))):
        ranked.append({one: now if policy == "lru" else -next_use.get(one, len(moments)) for one in moments[now]})
        next_use |= dict.fromkeys(moments[now], now)
    here: dict[int, int] = {}
    to_device = to_host = 0
    for needed in reversed(ranked):
        missing = len(needed.keys() - here.keys())
        surplus = max(0, len(here) + missing - capacity)
        for chunk in sorted(here.keys() - needed.keys(), key=lambda one: (here[one], one))[:surplus]:
            del here[chunk]
        to_device, to_host = to_device + missing, to_host + surplus
        here |= needed
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
    for chunks in (in_chunks(data, size) for size in sizes):
        moments, capacity = chunks.with_update, (budget_bytes - chunks.outside_bytes) // chunks.chunk_bytes
        if moments and capacity >= least_capacity(moments):
            belady, lru = (replay_chunks(moments, capacity, policy) for policy in ("belady", "lru"))
            found.append(ChunkReplay(chunks.chunk_bytes, chunks.count, capacity, belady, lru))
    return min(found, key=lambda one: (one.belady.chunks * one.chunk_bytes, one.chunk_bytes), default=None)
