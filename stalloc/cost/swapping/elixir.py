"""The size of chunks, and how many stay on the device for good: what moves least within a budget.

Source: Huang et al., "Elixir: Train a Large Language Model on a Small GPU Cluster", 2022: chunks of parameters are
cached in blocks of the device, and some stay there with their state, so that their update is made there; both
numbers, and the size, are searched together. Here all of it is on one device, and the cost is what a step moves.
Contract: what is chosen is the best of the whole grid. A candidate is left out only where the least that it can move
is more than what the best moves. The first chunks in the order of their use are those that stay.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from stalloc.cost.swapping.model_data import ModelData, Moment
from stalloc.cost.swapping.patrickstar import Chunks, in_chunks, least_capacity, replay_chunks


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
    open_choices: list[tuple[Chunks, ChunkChoice]] = []
    for chunk_bytes in sizes:
        chunks = in_chunks(data, chunk_bytes)
        for choice in _choices(chunks, budget_bytes):
            if choice.refused:
                tried.append(choice)
            else:
                open_choices.append((chunks, choice))
    best: ChunkChoice | None = None
    for chunks, choice in sorted(open_choices, key=lambda one: _rank(one[1])):
        if best is None or choice.moved_bytes <= best.moved_bytes:
            choice = replayed(chunks, choice.residents, choice.cached)
            best = choice if best is None else min(best, choice, key=_rank)
        tried.append(choice)
    rejected = sorted((one for one in tried if one != best), key=lambda one: (bool(one.refused), *_rank(one)))
    return ChunkSearch(best, tuple(rejected))


def replayed(chunks: Chunks, residents: int, cached: int) -> ChunkChoice:
    """What a step moves: chunks that do not stay come as Belady has it, and their gradients go to the host."""
    moments = _without(chunks, residents)
    fetched = replay_chunks(moments, cached, "belady").to_device if moments else 0
    moved = (fetched + chunks.count - residents) * chunks.chunk_bytes
    return ChunkChoice(chunks.chunk_bytes, chunks.count, residents, cached, moved)


def _choices(chunks: Chunks, budget_bytes: int) -> Iterable[ChunkChoice]:
    """Each number of residents, with the least that it can move; why there is none."""
    blocks = (budget_bytes - chunks.outside_bytes) // chunks.chunk_bytes
    fitting = 0
    for residents in range(chunks.count + 1):
        cached = blocks - residents * (1 + chunks.num_states)
        if cached < least_capacity(_without(chunks, residents)):
            break
        fitting += 1
        least = 2 * (chunks.count - residents) * chunks.chunk_bytes
        yield ChunkChoice(chunks.chunk_bytes, chunks.count, residents, cached, least, is_replayed=False)
    if not fitting:
        needed = least_capacity(chunks.moments)
        reason = f"{max(blocks, 0)} chunks have room, and {needed} are needed at once"
        yield ChunkChoice(chunks.chunk_bytes, chunks.count, 0, max(blocks, 0), 0, is_replayed=False, refused=reason)


def _without(chunks: Chunks, residents: int) -> list[Moment]:
    moments = (tuple(chunk for chunk in moment if chunk >= residents) for moment in chunks.moments)
    return [moment for moment in moments if moment]


def _rank(choice: ChunkChoice) -> tuple[int, int, int]:
    return choice.moved_bytes, choice.chunk_bytes, choice.residents
