"""Published ways to keep parameters in host memory, replayed on the last step of a recording, side by side.

Contract: nothing is run; what a system cannot do with the step is left out, and a note says why.
"""

from dataclasses import dataclass
from typing import Any

from stalloc.cost.gpu_rates import rates_of
from stalloc.cost.swapping.angel_ptm import PageReplay, replay_pages
from stalloc.cost.swapping.elixir import ChunkSearch, search_chunks, usual_sizes
from stalloc.cost.swapping.harmony import PackPlan, pack_layers
from stalloc.cost.swapping.layers import LinkCost, least_budget
from stalloc.cost.swapping.lohan import SwapAmount, best_amount
from stalloc.cost.swapping.mobius import MobiusPlan, Pipeline, mobius_plan
from stalloc.cost.swapping.patrickstar import ChunkReplay, best_chunks
from stalloc.cost.swapping.recorded_model import ModelData, layer_costs, model_data, recorded_passes, saved_tensors
from stalloc.cost.swapping.smart_infinity import NearStorage, update_near_storage
from stalloc.cost.swapping.stronghold import Window, stream_layers
from stalloc.cost.swapping.tmo import LinkSharing, share_link
from stalloc.errors import BadInputError
from stalloc.figures import human_bytes
from stalloc.sizes import MIB
from stalloc.trace import Trace


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
    tmo: LinkSharing | None
    harmony: PackPlan | None = None
    stronghold: Window | None = None
    lohan: SwapAmount | None = None
    mobius: MobiusPlan | None = None
    least_layers_bytes: int | None = None
    """The least budget for layers one by one, in packs and stages."""
    notes: tuple[str, ...] = ()


def replay_swapping(trace: Trace, machine: Machine) -> Swapping:
    """All of them. Raises BadInputError for a trace without operations, or without parameters."""
    rates, budget_bytes = rates_of(machine.gpu), machine.budget_bytes
    passes, link = recorded_passes(trace, rates), LinkCost(rates.link_bytes_per_second)
    data = model_data(passes)
    sizes, host_bytes = usual_sizes(data), trace.info.get("host_bytes")
    chunks, pages = best_chunks(data, sizes, budget_bytes), replay_pages(data, budget_bytes)
    ranks = share_link(saved_tensors(passes), budget_bytes, machine.num_ranks, link)
    notes = [] if chunks else ["PatrickStar: no size of chunks has room for what is needed at once"]
    if isinstance(host_bytes, int) and host_bytes > 0:
        notes.append(
            f"the program keeps {human_bytes(host_bytes)} in host memory itself, which is not among its parameters and "
            "state here: record it without that"
        )
    notes += [] if pages else ["Angel-PTM: the pages that are needed at once have no room"]
    notes += [] if ranks else ["TMO: what the backward pass uses at once has no room"]
    layered: dict[str, Any] = {}
    try:
        layers = layer_costs(passes)
    except BadInputError as error:
        notes.append(str(error))
    else:
        least, layer, which = least_budget(layers)
        if budget_bytes < least:
            ends = {0: "what comes before the first block", len(layers) - 1: "what comes after the last block"}
            block = ends.get(layer, f"block {layer} of {len(layers) - 2}")
            notes.append(
                f"Harmony, Mobius: the least budget is {-(-least // MIB):,} MiB, which {block} needs in its {which} "
                "pass, with what it works on"
            )
        pipeline = Pipeline(
            num_gpus=machine.num_gpus, num_microbatches=machine.num_microbatches, budget_bytes=budget_bytes, link=link
        )
        layered = {
            "harmony": pack_layers(layers, budget_bytes, link),
            "stronghold": stream_layers(layers, link),
            "lohan": best_amount(layers, link),
            "mobius": mobius_plan(layers, pipeline, machine.num_roots),
            "least_layers_bytes": least,
        }
    return Swapping(
        data,
        chunks,
        search_chunks(data, budget_bytes, sizes),
        pages,
        update_near_storage(data, machine.num_drives, link),
        ranks,
        **layered,
        notes=tuple(notes),
    )
