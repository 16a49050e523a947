"""Published ways to keep parameters in host memory, replayed on the last step of a recording, side by side.

Contract: nothing is run; what a system cannot do with the step is left out, and a note says why.
"""

from dataclasses import dataclass, replace

from stalloc.cost.gpu_rates import rates_of
from stalloc.cost.layer_costs import LayerCost, LinkCost
from stalloc.cost.swapping.angel_ptm import PageReplay, replay_pages
from stalloc.cost.swapping.elixir import ChunkSearch, search_chunks, usual_sizes
from stalloc.cost.swapping.harmony import PackPlan, pack_layers
from stalloc.cost.swapping.lohan import SwapAmount, best_amount
from stalloc.cost.swapping.mobius import MobiusPlan, Pipeline, contention, cross_mapping, partition_stages
from stalloc.cost.swapping.model_data import ModelData, model_data
from stalloc.cost.swapping.patrickstar import ChunkReplay, best_chunks
from stalloc.cost.swapping.recorded_layers import layer_costs, least_budget
from stalloc.cost.swapping.recorded_passes import recorded_passes
from stalloc.cost.swapping.saved_tensors import saved_tensors
from stalloc.cost.swapping.smart_infinity import NearStorage, update_near_storage
from stalloc.cost.swapping.stronghold import Window, stream_layers
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
    num_drives: int
    num_ranks: int  #: on one link


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
    rates, budget_bytes = rates_of(machine.gpu), machine.budget_bytes
    passes, link = recorded_passes(trace, rates), LinkCost(rates.link_bytes_per_second)
    data = model_data(passes)
    sizes, host_bytes = usual_sizes(data), trace.info.get("host_bytes")
    made = Swapping(
        data,
        best_chunks(data, sizes, budget_bytes),
        search_chunks(data, budget_bytes, sizes),
        replay_pages(data, budget_bytes),
        update_near_storage(data, machine.num_drives, link),
        tmo=share_link(saved_tensors(passes), budget_bytes, machine.num_ranks, link),
    )
    notes = [] if made.patrickstar else ["PatrickStar: no size of chunks has room for what is needed at once"]
    if isinstance(host_bytes, int) and host_bytes > 0:
        notes.append(
            f"the program keeps {human_bytes(host_bytes)} in host memory itself, which is not among its parameters and "
            "state here: record it without that"
        )
    if made.angel is None:
        notes.append("Angel-PTM: the pages that are needed at once have no room")
    if made.tmo is None:
        notes.append("TMO: what the backward pass uses at once has no room")
    made = replace(made, notes=tuple(notes))
    try:
        layers, parts = layer_costs(passes), layer_costs(passes, ends_apart=True)
    except BadInputError as error:
        return replace(made, notes=(*notes, str(error)))
    made = replace(made, stronghold=stream_layers(layers, link), lohan=best_amount(layers, link))
    return _with_packs(made, parts, machine, link)


def _with_packs(made: Swapping, layers: list[LayerCost], machine: Machine, link: LinkCost) -> Swapping:
    """With packs and stages of `layers`, of which the first and the last are what is outside of blocks."""
    least = least_budget(layers)
    made = replace(made, least_layers_bytes=least.num_bytes)
    if machine.budget_bytes < least.num_bytes:
        named = {0: "what comes before the first block", len(layers) - 1: "what comes after the last block"}
        layer = named.get(least.layer, f"block {least.layer} of {len(layers) - 2}")
        when = "backward" if least.is_backward else "forward"
        note = (
            f"Harmony, Mobius: the least budget is {-(-least.num_bytes // _MIB):,} MiB, which {layer} needs in its "
            f"{when} pass, with what it works on"
        )
        return replace(made, notes=(*made.notes, note))
    made = replace(made, harmony=pack_layers(layers, machine.budget_bytes, link))
    pipeline = Pipeline(
        num_gpus=machine.num_gpus,
        num_microbatches=machine.num_microbatches,
        budget_bytes=machine.budget_bytes,
        link=link,
    )
    try:
        stages = partition_stages(layers, pipeline)
    except SetupError as error:
        return replace(made, notes=(*made.notes, f"Mobius: {error}"))
    assert stages is not None, "stages of one layer fit"
    roots = cross_mapping(machine.num_gpus, machine.num_roots)
    return replace(made, mobius=MobiusPlan(stages, roots, contention(roots)))
