"""Published ways to keep parameters in host memory, replayed on the last step of a recording, side by side.

Contract: nothing is run; what a system cannot do with the step is left out, and a note says why.
"""

from dataclasses import dataclass, replace

from stalloc.cost.gpu_rates import rates_of
from stalloc.cost.layer_costs import LayerCost, LinkCost, layer_costs, least_budget
from stalloc.cost.stream_window import pass_turns, smallest_window, stall_seconds
from stalloc.cost.swapping.angel_ptm import PageReplay, replay_pages
from stalloc.cost.swapping.chunk_cache import Moved, least_capacity, replay_chunks
from stalloc.cost.swapping.elixir import ChunkSearch, search_chunks, usual_sizes
from stalloc.cost.swapping.harmony import PackPlan, pack_layers
from stalloc.cost.swapping.lohan import SwapAmount, best_amount
from stalloc.cost.swapping.mobius import MobiusPlan, Pipeline, contention, cross_mapping, partition_stages
from stalloc.cost.swapping.patrickstar import ModelData, in_chunks, model_data
from stalloc.cost.swapping.saved_tensors import saved_tensors
from stalloc.cost.swapping.smart_infinity import NearStorage, update_near_storage
from stalloc.cost.swapping.tmo import LinkSharing, share_link
from stalloc.errors import BadInputError, SetupError
from stalloc.figures import human_bytes
from stalloc.trace import Trace

_MIB = 1 << 20


@dataclass(frozen=True)
class Machine:
    """What the step is to run on."""

    gpu: str
    budget_bytes: int  #: of each GPU
    num_gpus: int
    num_roots: int
    num_microbatches: int
    num_drives: int = 4
    num_ranks: int = 4  #: on one link


@dataclass(frozen=True)
class ChunkReplay:
    """One size of chunks under two policies."""

    chunk_bytes: int
    count: int  #: of parameters; the state has as many for each of its lists
    capacity: int
    belady: Moved
    lru: Moved


@dataclass(frozen=True)
class Window:
    """Layers that are streamed."""

    layers: int  #: on the device at once
    num_layers: int
    num_bytes: int  #: of their parameters, at the most
    moved_bytes: int
    seconds: float  #: estimated


@dataclass(frozen=True)
class Swapping:
    """What each system makes of a step."""

    data: ModelData
    patrickstar: ChunkReplay | None
    elixir: ChunkSearch
    angel: PageReplay | None
    smart_infinity: NearStorage
    harmony: PackPlan | None = None
    stronghold: Window | None = None
    lohan: SwapAmount | None = None
    mobius: MobiusPlan | None = None
    tmo: LinkSharing | None = None
    least_layers_bytes: int | None = None
    """The least budget for layers one by one, in packs and stages."""
    notes: tuple[str, ...] = ()


def replay_swapping(trace: Trace, machine: Machine) -> Swapping:
    """All of them. Raises BadInputError for a trace without operations, or without parameters."""
    data = model_data(trace)
    sizes = usual_sizes(data)
    replays = [one for size in sizes if (one := _in_chunks(data, size, machine.budget_bytes))]
    best = min(replays, key=lambda one: (one.belady.chunks * one.chunk_bytes, one.chunk_bytes), default=None)
    notes = [] if best else ["PatrickStar: no size of chunks has room for what is needed at once"]
    host_bytes = trace.info.get("host_bytes")
    if isinstance(host_bytes, int) and host_bytes > 0:
        notes.append(
            f"the program keeps {human_bytes(host_bytes)} in host memory itself, which is not among its parameters and "
            "state here: record it without that"
        )
    pages, rates = replay_pages(data, machine.budget_bytes), rates_of(machine.gpu)
    if pages is None:
        notes.append("Angel-PTM: the pages that are needed at once have no room")
    link = LinkCost(rates.link_bytes_per_second)
    sharing = share_link(saved_tensors(trace, rates), machine.budget_bytes, machine.num_ranks, link)
    if sharing is None:
        notes.append("TMO: what the backward pass uses at once has no room")
    made = Swapping(
        data,
        best,
        search_chunks(data, machine.budget_bytes, sizes),
        pages,
        update_near_storage(data, machine.num_drives, link),
        tmo=sharing,
        notes=tuple(notes),
    )
    try:
        layers, parts = layer_costs(trace, rates), layer_costs(trace, rates, ends_apart=True)
    except BadInputError as error:
        return replace(made, notes=(*notes, str(error)))
    made = replace(made, stronghold=_window(layers, link), lohan=best_amount(layers, link))
    return _with_packs(made, parts, machine, link)


def _in_chunks(data: ModelData, chunk_bytes: int, budget_bytes: int) -> ChunkReplay | None:
    chunks = in_chunks(data, chunk_bytes)
    moments = chunks.with_update
    capacity = (budget_bytes - chunks.outside_bytes) // chunk_bytes
    if not moments or capacity < least_capacity(moments):
        return None
    belady, lru = (replay_chunks(moments, capacity, policy) for policy in ("belady", "lru"))
    return ChunkReplay(chunk_bytes, chunks.count, capacity, belady, lru)


def _with_packs(made: Swapping, layers: list[LayerCost], machine: Machine, link: LinkCost) -> Swapping:
    """With packs and stages of `layers`, of which the first and the last are what is outside of blocks."""
    notes, least = list(made.notes), least_budget(layers)
    made = replace(made, least_layers_bytes=least.num_bytes)
    if machine.budget_bytes < least.num_bytes:
        named = {0: "what comes before the first block", len(layers) - 1: "what comes after the last block"}
        layer = named.get(least.layer, f"block {least.layer} of {len(layers) - 2}")
        when = "backward" if least.is_backward else "forward"
        notes.append(
            f"Harmony, Mobius: the least budget is {-(-least.num_bytes // _MIB):,} MiB, which {layer} needs in its "
            f"{when} pass, with what it works on"
        )
        return replace(made, notes=tuple(notes))
    pipeline = Pipeline(
        num_gpus=machine.num_gpus,
        num_microbatches=machine.num_microbatches,
        budget_bytes=machine.budget_bytes,
        link=link,
    )
    mobius = None
    try:
        stages = partition_stages(layers, pipeline)
    except SetupError as error:
        notes.append(f"Mobius: {error}")
    else:
        assert stages is not None, "stages of one layer fit"
        roots = cross_mapping(machine.num_gpus, machine.num_roots)
        mobius = MobiusPlan(stages, roots, contention(roots))
    packs = pack_layers(layers, machine.budget_bytes, link)
    return replace(made, harmony=packs, mobius=mobius, notes=tuple(notes))


def _window(layers: list[LayerCost], link: LinkCost) -> Window:
    """The smallest window that is never waited for."""
    count = smallest_window(layers, link)
    sizes = [one.parameter_bytes for one in layers]
    at_once = max(sum(sizes[first : first + count]) for first in range(len(sizes) - count + 1))
    passes = pass_turns(layers)
    moved = sum(num_bytes for turns in passes for num_bytes, _ in turns[count:])
    seconds = sum(taken for turns in passes for _, taken in turns) + stall_seconds(layers, count, link)
    return Window(count, len(layers), at_once, moved, seconds)
