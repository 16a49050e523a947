"""The size of chunks, and how many stay on the device for good: what moves least within a budget.

Source: Huang et al., "Elixir: Train a Large Language Model on a Small GPU Cluster", 2022: some chunks stay on the
device with their state and are updated there; their number and the size of chunks are searched together.
Contract: what is chosen is the best of the whole grid. A candidate is not replayed only where the least that it can
move is more than what the best moves. The first chunks in the order of their use are those that stay.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stalloc.cost.swapping.patrickstar import Chunks, in_chunks, least_capacity, replay_chunks
from stalloc.cost.swapping.recorded_model import ModelData, Moment


@dataclass(frozen=True)
class ChunkChoice:
    """One size of chunks, and one number that stay."""

    chunk_bytes: int
    count: int
    residents: int  #: chunks that stay with their state
    cached: int  #: blocks for the others
    moved_bytes: int  #: by a step, both ways; if it was not replayed, at the least
    is_replayed: bool = True
    refused: str = ""  #: why it cannot be

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """Lower is better."""
        return bool(self.refused), self.moved_bytes, self.chunk_bytes, self.residents


@dataclass(frozen=True)
class ChunkSearch:
    """What was chosen, and what was not."""

    best: ChunkChoice | None
    rejected: tuple[ChunkChoice, ...]  #: those that move least first


def usual_sizes(data: ModelData) -> list[int]:
    """Sizes worth trying, of what one to 64 parameters of the middle take, in steps of a quarter of an octave."""
    middle = sorted(data.sizes)[3 * len(data.sizes) // 4]
    sizes = {-(-int(middle * 2 ** (quarter / 4)) // 4096) * 4096 for quarter in range(4 * 6 + 1)}
    return sorted(size for size in sizes if size <= max(data.parameter_bytes, middle))


def search_chunks(data: ModelData, budget_bytes: int, sizes: Iterable[int]) -> ChunkSearch:
    """The best of all sizes and numbers of residents within a budget for parameters and state on the device."""
    tried: list[ChunkChoice] = []
    best: ChunkChoice | None = None
    grid = [(chunks, one) for chunks in (in_chunks(data, size) for size in sizes) for one in _fit(chunks, budget_bytes)]
    for chunks, choice in sorted(grid, key=lambda pair: pair[1].rank):
        if not choice.refused and (best is None or choice.moved_bytes <= best.moved_bytes):
            choice = replayed(chunks, choice.residents, choice.cached)
            best = min(best or choice, choice, key=lambda one: one.rank)
        tried.append(choice)
    return ChunkSearch(best, tuple(sorted((one for one in tried if one != best), key=lambda one: one.rank)))


def replayed(chunks: Chunks, residents: int, cached: int) -> ChunkChoice:
    """What a step moves: chunks that do not stay come as Belady has it, and their gradients go to the host."""
    fetched = replay_chunks(_without(chunks, residents), cached, "belady").to_device
    moved = (fetched + chunks.count - residents) * chunks.chunk_bytes
    return ChunkChoice(chunks.chunk_bytes, chunks.count, residents, cached, moved)


def _fit(chunks: Chunks, budget_bytes: int) -> Iterator[ChunkChoice]:
    """Each number of residents that has room, with the least that it can move; if none has, why."""
    size, count = chunks.chunk_bytes, chunks.count
    blocks, fits = (budget_bytes - chunks.outside_bytes) // size, False
    for residents in range(count + 1):
        cached = blocks - residents * (1 + chunks.num_states)
        if cached >= least_capacity(_without(chunks, residents)):
            fits = True
            yield ChunkChoice(size, count, residents, cached, 2 * (count - residents) * size, is_replayed=False)
    if not fits:
        reason = f"{max(blocks, 0)} chunks have room, and {least_capacity(chunks.moments)} are needed at once"
        yield ChunkChoice(size, count, 0, max(blocks, 0), 0, is_replayed=False, refused=reason)


def _without(chunks: Chunks, residents: int) -> list[Moment]:
    return [tuple(one for one in moment if one >= residents) for moment in chunks.moments]
