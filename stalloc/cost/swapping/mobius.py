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

from stalloc.cost.swapping.layers import LayerCost, LinkCost, Stretch, backward_bytes, cut_best, forward_bytes, together


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
    needs = [[needed(layers, *stage) for stage in stages] for needed in (forward_bytes, backward_bytes)]
    if max(map(max, needs)) > pipeline.budget_bytes:
        return None
    costs, link, gpus = [together(layers[begin:end]) for begin, end in stages], pipeline.link, pipeline.num_gpus
    load = [link.seconds(one.parameter_bytes) for one in costs]
    hand_on = [link.seconds(one.boundary_bytes) for one in costs]

    def ends(order: Sequence[int], needed: Sequence[int], free: Sequence[float], *, is_backward: bool) -> list[float]:
        """When each stage ends in a pass in this order; `free`: before when it cannot begin."""
        ready = [*free]  # when all of the stage is there
        ended: dict[int, list[float]] = {}  # each microbatch
        for place, stage in enumerate(order):
            one, before, handed = costs[stage], order[place - 1], [0.0] * pipeline.num_microbatches
            if place >= gpus:
                last = order[place - gpus]  # on its GPU
                rest = max(0, one.parameter_bytes + needed[last] - pipeline.budget_bytes) / link.rate
                there = ready[last] + load[stage] - rest
                ready[stage] = max(ready[stage], max(there, ended[last][-1]) + rest)
            if place:
                handed = [moment + hand_on[min(stage, before)] for moment in ended[before]]
            moments = [ready[stage]]
            for moment in handed:
                begin = max(moments[-1], moment)
                moments.append(begin + one.forward_seconds + (one.backward_seconds if is_backward else 0.0))
            ended[stage] = moments[1:]
        return [ended[stage][-1] for stage in range(len(costs))]

    order = range(len(costs))
    forward = ends(order, needs[0], [*load[:gpus], *(0.0 for _ in order[gpus:])], is_backward=False)
    return ends(order[::-1], needs[1], forward, is_backward=True)[0]


def cross_mapping(num_gpus: int, num_roots: int) -> tuple[int, ...]:
    """The root of each GPU in the order of stages: in turn, which has the least contention for up to eight GPUs."""
    return tuple(gpu % num_roots for gpu in range(num_gpus))


def contention(roots: Sequence[int]) -> float:
    """How much neighbours in the order of stages share a root: 1 / distance for each pair under one (section 3.3)."""
    pairs = itertools.combinations(enumerate(roots), 2)
    return sum(1 / (second - first) for (first, one), (second, other) in pairs if one == other)
