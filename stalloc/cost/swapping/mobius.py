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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stalloc.columns import Column
from stalloc.cost.layer_costs import LayerCost, LinkCost, backward_bytes, forward_bytes, together
from stalloc.integer_program import IntegerProgram, Terms, find_solver

Stage = tuple[int, int]
"""Layers [begin, end)."""
_MANY_GPUS = 8  #: more are mapped to roots in turn, without looking for better


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
class _Weights:
    """One stage."""

    forward: float
    backward: float
    load: float
    hand_on: float
    num_bytes: int
    forward_work: int
    backward_work: int


def partition_stages(
    layers: Sequence[LayerCost], pipeline: Pipeline, *, limit_seconds: float = 60.0
) -> StagePlan | None:
    """The best stages; None if there are none that fit. Raises SetupError without SciPy."""
    even = [_even(len(layers), count) for count in range(1, len(layers) + 1)]
    known = sorted(
        (seconds, stages) for stages in even if (seconds := step_seconds(layers, stages, pipeline)) is not None
    )
    best, is_optimal, until = (known[0] if known else None), True, time.monotonic() + limit_seconds
    find_solver()
    likely = {len(stages): seconds for seconds, stages in known}
    for count in sorted(range(1, len(layers) + 1), key=lambda one: likely.get(one, np.inf)):
        program = _Program(layers, count, pipeline, best[0] if best else np.inf)
        values, is_proven = program.program.solve(max(0.1, until - time.monotonic()))
        is_optimal &= is_proven
        if values is not None:
            stages = program.stages(values)
            seconds = step_seconds(layers, stages, pipeline)
            if seconds is not None and (best is None or seconds < best[0]):
                best = seconds, stages
    return best and StagePlan(best[1], best[0], is_optimal)


def _even(num_layers: int, count: int) -> tuple[Stage, ...]:
    """As many layers in each stage as in the others, or one more."""
    bounds = [num_layers * row // count for row in range(count + 1)]
    return tuple(itertools.pairwise(bounds))


def step_seconds(layers: Sequence[LayerCost], stages: Sequence[Stage], pipeline: Pipeline) -> float | None:
    """The modelled time of a step in these stages; None if they do not fit."""
    weights = [_weights(layers, stage, pipeline.link) for stage in stages]
    num, gpus = len(stages), pipeline.num_gpus
    if any(max(one.forward_work, one.backward_work) > pipeline.budget_bytes for one in weights):
        return None

    def late(row: int, beside_bytes: int) -> float:
        return max(0, weights[row].num_bytes + beside_bytes - pipeline.budget_bytes) / pipeline.link.rate

    forward = [late(row, weights[row - gpus].forward_work) if row >= gpus else 0.0 for row in range(num)]
    backward = [late(row, weights[row + gpus].backward_work) if row + gpus < num else 0.0 for row in range(num)]
    end: dict[str, float] = {}

    def at_least(name: str, *after: tuple[str, float]) -> None:
        end[name] = max((end[one] + seconds for one, seconds in after), default=0.0)

    _constrain(num, pipeline, weights, (forward, backward), at_least)
    return end[_name("b", 0, pipeline.num_microbatches - 1)]


_After = tuple[str, float]


def _name(kind: str, stage: int, microbatch: int = 0) -> str:
    return f"{kind}{stage}.{microbatch}"


def _constrain(
    num: int,
    pipeline: Pipeline,
    weights: Sequence[Any],
    late: tuple[Sequence[Any], Sequence[Any]],
    at_least: Callable[..., None],
) -> None:
    """When everything ends, each after what it waits for: f forward, b backward, u and v the loads before them.

    `weights` are those of stages, or sums over those that they may be; `late`, for the forward and the backward pass,
    the seconds of each load for which there is no room before the stage at hand has gone.

    A stage is loaded when the one before the last of its GPU has gone; in backward the last stage of each GPU is there,
    and the others come once forward is over on it. `at_least` gets a name, and (name, seconds) of what comes before.
    """
    gpus, last = pipeline.num_gpus, pipeline.num_microbatches - 1
    later, back_later = late
    at_least("start")
    for j in range(num):
        rest, compute = later[j], weights[j].forward
        early = weights[j].load - rest
        if j >= gpus:
            came = (_name("u", j - gpus), later[j - gpus] + early)
            room = [(_name("f", j - 2 * gpus, last), later[j - gpus] + early)] if j >= 2 * gpus else []
            at_least(_name("u", j), came, *room)
        else:
            at_least(_name("u", j), ("start", early))
        for m in range(last + 1):
            after: list[_After] = [(_name("f", j, m - 1), compute)] if m else [(_name("u", j), rest + compute)]
            after += [(_name("f", j - 1, m), compute + weights[j - 1].hand_on)] if j else []
            after += [(_name("f", j - gpus, last), rest + compute)] if j >= gpus and not m else []
            at_least(_name("f", j, m), *after)
    for j in range(num - 1, -1, -1):
        rest, compute = back_later[j], weights[j].backward
        early = weights[j].load - rest
        there = j + gpus >= num
        if not there:
            room = [(_name("f", j + gpus, last), early)]
            if j + 2 * gpus < num:
                before = back_later[j + gpus] + early
                room += [(_name("v", j + gpus), before), (_name("b", j + 2 * gpus, last), before)]
            at_least(_name("v", j), *room)
        for m in range(last + 1):
            after = [(_name("b", j, m - 1), compute)] if m else [(_name("f", j, last), compute)]
            if not there and not m:
                after += [(_name("v", j), rest + compute), (_name("b", j + gpus, last), rest + compute)]
            after += [(_name("b", j + 1, m), compute + weights[j].hand_on)] if j + 1 < num else []
            at_least(_name("b", j, m), *after)


def _weights(layers: Sequence[LayerCost], stage: Stage, link: LinkCost) -> _Weights:
    one = together(layers[slice(*stage)])
    return _Weights(
        one.forward_seconds,
        one.forward_seconds + one.backward_seconds,
        link.seconds(one.parameter_bytes),
        link.seconds(one.boundary_bytes),
        one.parameter_bytes,
        forward_bytes(layers, *stage),
        backward_bytes(layers, *stage),
    )


class _Sum:
    """A figure of a stage that is to be chosen: a sum over the stages that it may be."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms

    def __add__(self, other: "_Sum") -> "_Sum":
        return _Sum(self.terms + other.terms)

    def __sub__(self, other: "_Sum") -> "_Sum":
        return self + _Sum([(variable, -factor) for variable, factor in other.terms])


class _Program:
    """Which layers each of so many stages has. Times are counted in those of all layers, memory in budgets."""

    def __init__(self, layers: Sequence[LayerCost], count: int, pipeline: Pipeline, most_seconds: float) -> None:
        self.program, self._count = IntegerProgram(), count
        num, unit = len(layers), sum(one.forward_seconds + one.backward_seconds for one in layers) or 1.0
        possible = [(begin, end) for begin in range(num) for end in range(begin + 1, num + 1)]
        known = {stage: _weights(layers, stage, pipeline.link) for stage in possible}
        self._chosen = [
            {
                (begin, end): self.program.variable(0.0)
                for begin, end in possible
                if _may_be(begin, end, row, count, num)
            }
            for row in range(count)
        ]
        for row, choices in enumerate(self._chosen):
            self.program.limit([(one, 1) for one in choices.values()], 1, 1)
            if row:
                ends = [(one, float(end)) for (_, end), one in self._chosen[row - 1].items()]
                self.program.limit([*ends, *((one, -float(begin)) for (begin, _), one in choices.items())], 0, 0)

        def figure(row: int, name: str, scale: float) -> Terms:
            return [(one, getattr(known[stage], name) / scale) for stage, one in self._chosen[row].items()]

        budget = max(1, pipeline.budget_bytes)
        late: tuple[list[_Sum], list[_Sum]] = ([], [])
        for row in range(count):
            for name in ("forward_work", "backward_work"):
                self.program.limit(figure(row, name, budget), -np.inf, 1)
            for sums, name, other in (
                (late[0], "forward_work", row - pipeline.num_gpus),
                (late[1], "backward_work", row + pipeline.num_gpus),
            ):
                rest = (
                    [(self.program.variable(0.0, is_integer=False, highest=np.inf), 1.0)] if 0 <= other < count else []
                )
                if rest:  # in those times, what does not fit beside the stage at hand
                    together_bytes = [*figure(row, "num_bytes", budget), *figure(other, name, budget)]
                    moved = pipeline.link.rate * unit / budget
                    more = [(variable, -share) for variable, share in together_bytes]
                    self.program.limit([(rest[0][0], moved), *more], -1, np.inf)
                sums.append(_Sum(rest))
        self._times(count, pipeline, figure, late, unit, most_seconds)

    def stages(self, values: Column) -> tuple[Stage, ...]:
        """What was chosen."""
        return tuple(max(choices, key=lambda stage: values[choices[stage]]) for choices in self._chosen)

    def _times(
        self,
        count: int,
        pipeline: Pipeline,
        figure: Callable[[int, str, float], Terms],
        late: tuple[list[_Sum], list[_Sum]],
        unit: float,
        most_seconds: float,
    ) -> None:
        """The same constraints as of `step_seconds`, with sums in place of figures."""
        end: dict[str, int] = {}
        sums = [
            _Symbols(*(_Sum(figure(row, name, unit)) for name in ("forward", "backward", "load", "hand_on")))
            for row in range(count)
        ]
        final = _name("b", 0, pipeline.num_microbatches - 1)

        def at_least(name: str, *after: tuple[str, _Sum]) -> None:
            highest = most_seconds / unit if name == final else np.inf
            end[name] = self.program.variable(float(name == final), is_integer=False, highest=highest)
            for one, seconds in after:
                self.program.limit([(end[name], 1), (end[one], -1), *((v, -f) for v, f in seconds.terms)], 0, np.inf)

        _constrain(count, pipeline, sums, late, at_least)


@dataclass(frozen=True)
class _Symbols:
    """As _Weights, of a stage that is to be chosen."""

    forward: _Sum
    backward: _Sum
    load: _Sum
    hand_on: _Sum


def _may_be(begin: int, end: int, row: int, count: int, num: int) -> bool:
    """Whether the stages before and after it can have a layer each, and the first and the last are at the ends."""
    return begin >= row and num - end >= count - 1 - row and (row > 0 or not begin) and (row < count - 1 or end == num)


def cross_mapping(num_gpus: int, num_roots: int) -> tuple[tuple[int, ...], float]:
    """(the root of each GPU in the order of stages, its contention): as equal shares of GPUs as there can be.

    The contention is the sum of 1 / distance over pairs of GPUs under one root (their section 3.3), the least there is.
    """
    shares = [gpu % num_roots for gpu in range(num_gpus)]
    ways = set(itertools.permutations(shares)) if num_gpus <= _MANY_GPUS else {tuple(shares)}
    best = min(ways, key=lambda way: (contention(way), way))
    return best, contention(best)


def contention(roots: Sequence[int]) -> float:
    """How much neighbours in the order of stages share a root."""
    pairs = itertools.combinations(enumerate(roots), 2)
    return sum(1 / (second - first) for (first, one), (second, other) in pairs if one == other)
