"""Stages of a pipeline that take turns on few GPUs: which layers make a stage, and which GPUs are neighbours.

Source: Feng et al., "Mobius: Fine Tuning Large-Scale Models on Commodity GPU Servers", ASPLOS 2023: more stages than
GPUs, stage j on GPU j mod N; the next stage of a GPU comes while the one at hand computes; an integer program makes the
stages, and GPUs under one root of the bus are kept apart in the order of stages (cross mapping).
Contract: of all ways to make stages of layers in a row that fit, one with the least modelled time of a step, proven
unless the solver's time was over. A stage fits with what it needs itself; what of the next one of its GPU has no room
beside it comes after it (their constraint on prefetching). The recorded step is one microbatch; backward computes a
stage again.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stalloc.cost.layer_costs import LayerCost, LinkCost
from stalloc.cost.swapping.recorded_layers import backward_bytes, forward_bytes, together
from stalloc.integer_program import IntegerProgram, Terms, find_solver

Stage = tuple[int, int]
"""Layers [begin, end)."""
Event = tuple[str, int, int]
"""When forward (f), backward (b) or the load before it (u and v) ends: which, of which stage, of which microbatch."""
Delay = tuple[tuple[str, int, int], ...]
"""A sum of figures of stages: the figure, the stage, and 1 or -1."""
_LIMIT_SECONDS = 60.0
_BESIDE = (("rest", "forward_work", -1), ("back_rest", "backward_work", 1))
"""The seconds of a load for which there is no room beside the stage before it on its GPU, what that one needs, and
whether it is the one before or after in the order of stages."""


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

    stages: tuple[Stage, ...]
    seconds: float  #: modelled, without the optimizer
    is_optimal: bool


@dataclass(frozen=True)
class MobiusPlan:
    """Stages, and the root of the bus for each GPU in the order of stages."""

    plan: StagePlan
    roots: tuple[int, ...]
    contention: float


def partition_stages(layers: Sequence[LayerCost], pipeline: Pipeline) -> StagePlan | None:
    """The best stages; None if there are none that fit. Raises SetupError without SciPy."""
    num = len(layers)
    even = [tuple(itertools.pairwise(num * row // count for row in range(count + 1))) for count in range(1, num + 1)]
    known = sorted(
        (seconds, stages) for stages in even if (seconds := step_seconds(layers, stages, pipeline)) is not None
    )
    best, is_optimal, until = (known[0] if known else None), True, time.monotonic() + _LIMIT_SECONDS
    find_solver()
    likely = {len(stages): seconds for seconds, stages in known}
    for count in sorted(range(1, num + 1), key=lambda one: likely.get(one, math.inf)):
        most_seconds = best[0] if best else math.inf
        solved, is_proven = _solved(layers, count, pipeline, most_seconds, max(0.1, until - time.monotonic()))
        is_optimal &= is_proven
        seconds = step_seconds(layers, solved, pipeline) if solved else None
        if solved and seconds is not None and (best is None or seconds < best[0]):
            best = seconds, solved
    return best and StagePlan(best[1], best[0], is_optimal)


def step_seconds(layers: Sequence[LayerCost], stages: Sequence[Stage], pipeline: Pipeline) -> float | None:
    """The modelled time of a step in these stages; None if they do not fit."""
    figures = [_figures(layers, stage, pipeline.link) for stage in stages]
    if any(max(one["forward_work"], one["backward_work"]) > pipeline.budget_bytes for one in figures):
        return None
    for row, one in enumerate(figures):
        for rest, work, way in _BESIDE:
            other = row + way * pipeline.num_gpus
            beside = figures[other][work] if 0 <= other < len(stages) else -math.inf
            one[rest] = max(0, one["bytes"] + beside - pipeline.budget_bytes) / pipeline.link.rate
    end: dict[Event, float] = {}
    for event, waits in _schedule(len(stages), pipeline):
        end[event] = max(
            (end[before] + sum(sign * figures[row][name] for name, row, sign in delay) for before, delay in waits),
            default=0.0,
        )
    return end[event]


def _figures(layers: Sequence[LayerCost], stage: Stage, link: LinkCost) -> dict[str, float]:
    """What a stage takes, in seconds, and needs, in bytes."""
    one = together(layers[slice(*stage)])
    return {
        "forward": one.forward_seconds,
        "backward": one.forward_seconds + one.backward_seconds,
        "load": link.seconds(one.parameter_bytes),
        "hand_on": link.seconds(one.boundary_bytes),
        "bytes": one.parameter_bytes,
        "forward_work": forward_bytes(layers, *stage),
        "backward_work": backward_bytes(layers, *stage),
    }


def _schedule(num: int, pipeline: Pipeline) -> Iterator[tuple[Event, list[tuple[Event, Delay]]]]:
    """Each event of a step, the last one last, with what it waits for and for how long after that.

    A stage is loaded when the one before the last of its GPU has gone; in backward the last stage of each GPU is there,
    and the others come once forward is over on it.
    """
    gpus, last = pipeline.num_gpus, pipeline.num_microbatches - 1
    start: Event = ("start", 0, 0)
    yield start, []
    for j in range(num):
        compute, load = ("forward", j, 1), (("load", j, 1), ("rest", j, -1))
        waits: list[tuple[Event, Delay]] = [(start, load)]
        if j >= gpus:
            before = (*load, ("rest", j - gpus, 1))
            waits = [(("u", j - gpus, 0), before)]
            waits += [(("f", j - 2 * gpus, last), before)] if j >= 2 * gpus else []
        yield ("u", j, 0), waits
        for m in range(last + 1):
            waits = [(("f", j, m - 1), (compute,))] if m else [(("u", j, 0), (("rest", j, 1), compute))]
            waits += [(("f", j - 1, m), (compute, ("hand_on", j - 1, 1)))] if j else []
            waits += [(("f", j - gpus, last), (("rest", j, 1), compute))] if j >= gpus and not m else []
            yield ("f", j, m), waits
    for j in reversed(range(num)):
        compute, load = ("backward", j, 1), (("load", j, 1), ("back_rest", j, -1))
        is_loaded = j + gpus < num
        if is_loaded:
            waits = [(("f", j + gpus, last), load)]
            if j + 2 * gpus < num:
                before = (*load, ("back_rest", j + gpus, 1))
                waits += [(("v", j + gpus, 0), before), (("b", j + 2 * gpus, last), before)]
            yield ("v", j, 0), waits
        for m in range(last + 1):
            waits = [(("b", j, m - 1), (compute,))] if m else [(("f", j, last), (compute,))]
            if is_loaded and not m:
                waits += [(one, (("back_rest", j, 1), compute)) for one in (("v", j, 0), ("b", j + gpus, last))]
            waits += [(("b", j + 1, m), (compute, ("hand_on", j, 1)))] if j + 1 < num else []
            yield ("b", j, m), waits


def _solved(
    layers: Sequence[LayerCost], count: int, pipeline: Pipeline, most_seconds: float, limit_seconds: float
) -> tuple[tuple[Stage, ...] | None, bool]:
    """(the best of so many stages, whether that is proven). Times count in those of all layers, memory in budgets."""
    program, num, budget = IntegerProgram(), len(layers), max(1, pipeline.budget_bytes)
    unit = sum(one.forward_seconds + one.backward_seconds for one in layers) or 1.0
    possible = list(itertools.combinations(range(num + 1), 2))
    known = {stage: _figures(layers, stage, pipeline.link) for stage in possible}
    chosen = [
        {stage: program.variable(0.0) for stage in possible if _may_be(*stage, row, count, num)} for row in range(count)
    ]

    def figure(row: int, name: str, scale: float) -> Terms:
        return [(variable, known[stage][name] / scale) for stage, variable in chosen[row].items()]

    for row, choices in enumerate(chosen):
        program.limit([(one, 1) for one in choices.values()], 1, 1)
        if row:
            ends = [(one, float(end)) for (_, end), one in chosen[row - 1].items()]
            program.limit([*ends, *((one, -float(begin)) for (begin, _), one in choices.items())], 0, 0)
    sums: list[dict[str, Terms]] = []
    for row in range(count):
        sums.append({name: figure(row, name, unit) for name in ("forward", "backward", "load", "hand_on")})
        for rest, work, way in _BESIDE:
            program.limit(figure(row, work, budget), -math.inf, 1)
            other, sums[row][rest] = row + way * pipeline.num_gpus, []
            if 0 <= other < count:  # in those times, what does not fit beside the other stage
                late = program.variable(0.0, is_integer=False, highest=math.inf)
                sums[row][rest] = [(late, 1.0)]
                both = [*figure(row, "bytes", budget), *figure(other, work, budget)]
                moved = pipeline.link.rate * unit / budget
                program.limit([(late, moved), *((one, -share) for one, share in both)], -1, math.inf)
    end: dict[Event, int] = {}
    for event, waits in _schedule(count, pipeline):
        is_last = event == ("b", 0, pipeline.num_microbatches - 1)
        highest = most_seconds / unit if is_last else math.inf
        end[event] = program.variable(float(is_last), is_integer=False, highest=highest)
        for before, delay in waits:
            terms = [(one, -sign * factor) for name, row, sign in delay for one, factor in sums[row][name]]
            program.limit([(end[event], 1), (end[before], -1), *terms], 0, math.inf)
    values, is_proven = program.solve(limit_seconds)
    if values is None:
        return None, is_proven
    return tuple(max(choices, key=lambda stage: values[choices[stage]]) for choices in chosen), is_proven


def _may_be(begin: int, end: int, row: int, count: int, num: int) -> bool:
    """Whether the stages before and after it can have a layer each, and the first and the last are at the ends."""
    return begin >= row and num - end >= count - 1 - row and (row > 0 or not begin) and (row < count - 1 or end == num)


def cross_mapping(num_gpus: int, num_roots: int) -> tuple[int, ...]:
    """The root of each GPU in the order of stages: in turn, which has the least contention for up to eight GPUs."""
    return tuple(gpu % num_roots for gpu in range(num_gpus))


def contention(roots: Sequence[int]) -> float:
    """How much neighbours in the order of stages share a root: 1 / distance for each pair under one (section 3.3)."""
    pairs = itertools.combinations(enumerate(roots), 2)
    return sum(1 / (second - first) for (first, one), (second, other) in pairs if one == other)
