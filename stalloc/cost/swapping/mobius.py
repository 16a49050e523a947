"""Stages of a pipeline that take turns on few GPUs: which layers make a stage, and which GPUs are neighbours.

Source: Feng et al., "Mobius: Fine Tuning Large-Scale Models on Commodity GPU Servers", ASPLOS 2023: more stages than
GPUs, stage j on GPU j mod N; the next stage of a GPU comes while the one at hand computes; GPUs under one root of the
bus are kept apart in the order of stages (cross mapping).
Contract: that of `cut_best`, by seconds. A stage fits with what it needs itself; what of the next one of its GPU has no
room beside it comes after it. The recorded step is one microbatch; backward computes a stage again.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stalloc.cost.layer_costs import LayerCost, LinkCost
from stalloc.cost.swapping.layers_in_a_row import Stretch, backward_bytes, cut_best, forward_bytes, together


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What stages run on."""

    num_gpus: int
    num_microbatches: int
    budget_bytes: int  #: of each GPU
    link: LinkCost


@dataclass(frozen=True)
class StagePlan:
    """The stages of a step."""

    stages: tuple[Stretch, ...]
    seconds: float  #: modelled, without the optimizer
    is_optimal: bool  #: no others take less


@dataclass(frozen=True)
class MobiusPlan:
    """Stages, and the root of the bus for each GPU in the order of stages."""

    plan: StagePlan
    roots: tuple[int, ...]
    contention: float


def mobius_plan(layers: Sequence[LayerCost], pipeline: Pipeline, num_roots: int) -> MobiusPlan | None:
    """The best stages, and GPUs under these roots of the bus kept apart; None if no stages fit."""
    plan, roots = partition_stages(layers, pipeline), cross_mapping(pipeline.num_gpus, num_roots)
    return MobiusPlan(plan, roots, contention(roots)) if plan else None


def partition_stages(layers: Sequence[LayerCost], pipeline: Pipeline) -> StagePlan | None:
    """The best stages; None if there are none that fit."""

    def cost(stages: Sequence[Stretch]) -> tuple[float, int] | None:
        seconds = step_seconds(layers, stages, pipeline)
        return None if seconds is None else (seconds, 0)

    found = cut_best(len(layers), cost)
    return StagePlan(found[1], found[0][0], found[2]) if found else None


def step_seconds(layers: Sequence[LayerCost], stages: Sequence[Stretch], pipeline: Pipeline) -> float | None:
    """The modelled time of a step in these stages; None if they do not fit.

    A stage is loaded when the one before the last of its GPU has gone. In backward the last stage of each GPU is there,
    and the others come once forward is over on it.
    """
    needs = [(forward_bytes(layers, *stage), backward_bytes(layers, *stage)) for stage in stages]
    if max(map(max, needs)) > pipeline.budget_bytes:
        return None
    costs, seconds = [together(layers[begin:end]) for begin, end in stages], pipeline.link.seconds
    load, hand_on = [seconds(one.parameter_bytes) for one in costs], [seconds(one.boundary_bytes) for one in costs]
    num, gpus, batches = len(stages), pipeline.num_gpus, range(pipeline.num_microbatches)

    def late(row: int, beside_bytes: int) -> float:
        """Seconds of a load for which there is no room beside the stage before it on its GPU."""
        return max(0, costs[row].parameter_bytes + beside_bytes - pipeline.budget_bytes) / pipeline.link.rate

    # of each stage: when it is there but for its late part, that part, when each microbatch of each pass ends
    there, rest, forward = list(load), [0.0] * num, [[0.0 for _ in batches] for _ in stages]
    for j, one in enumerate(costs):
        ready = load[j]
        if j >= gpus:
            rest[j] = late(j, needs[j - gpus][0])
            gone = max(there[j - gpus], forward[j - 2 * gpus][-1] if j >= 2 * gpus else 0.0)
            there[j] = gone + rest[j - gpus] + load[j] - rest[j]
            ready = max(there[j], forward[j - gpus][-1]) + rest[j]
        for m in batches:
            handed = forward[j - 1][m] + hand_on[j - 1] if j else 0.0
            forward[j][m] = max(forward[j][m - 1] if m else ready, handed) + one.forward_seconds
    rest, backward = [0.0] * num, [[0.0 for _ in batches] for _ in stages]
    for j in reversed(range(num)):
        one, ready = costs[j], forward[j][-1]
        if j + gpus < num:
            rest[j] = late(j, needs[j + gpus][1])
            gone = forward[j + gpus][-1]
            if j + 2 * gpus < num:
                gone = max(gone, max(there[j + gpus], backward[j + 2 * gpus][-1]) + rest[j + gpus])
            there[j] = gone + load[j] - rest[j]
            ready = max(ready, max(there[j], backward[j + gpus][-1]) + rest[j])
        for m in batches:
            handed = backward[j + 1][m] + hand_on[j] if j + 1 < num else 0.0
            begin = max(backward[j][m - 1] if m else ready, handed)
            backward[j][m] = begin + one.forward_seconds + one.backward_seconds
    return backward[0][-1]


def cross_mapping(num_gpus: int, num_roots: int) -> tuple[int, ...]:
    """The root of each GPU in the order of stages: in turn, which has the least contention for up to eight GPUs."""
    return tuple(gpu % num_roots for gpu in range(num_gpus))


def contention(roots: Sequence[int]) -> float:
    """How much neighbours in the order of stages share a root: 1 / distance for each pair under one (section 3.3)."""
    pairs = itertools.combinations(enumerate(roots), 2)
    return sum(1 / (second - first) for (first, one), (second, other) in pairs if one == other)
