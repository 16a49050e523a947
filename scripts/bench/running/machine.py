"""The whole runtime on a device of numbers, and programs for it that deviate, vary or recur: rows of counts and bytes.

Contract: what a program asks for goes through the core exactly as torch's and CuPy's requests do; figures are the
core's own counters, and equal from run to run. A program is made from the planner's made-up stages and is the same for
the same arguments; what a step allocates it frees, except what lives from the begin to the end (weights, gradients,
optimizer). Steps may differ: steps of one kind are the same.
"""

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from planning import generator
from planning.generator import FORWARD, MODELS, Column, Model, _forward, _play, _Script, _script, _weights, _Writer

from stalloc.compiled import njit
from stalloc.core.constants import TINY
from stalloc.core.frees import free
from stalloc.core.records import state_at
from stalloc.core.requests import malloc
from stalloc.replay.offline import make_controller
from stalloc.runtime.controller import MARK_STEP
from stalloc.runtime.runtime_settings import Phase, Settings


@dataclass(frozen=True, eq=False)
class Step:
    """One step: requests of `size` (n,) bytes, and its events in order: row + 1 an allocation, -(row + 1) its free."""

    size: Column
    events: Column

    @property
    def num_requests(self) -> int:
        return len(self.size)

    @property
    def peak_bytes(self) -> int:
        row = np.abs(self.events) - 1
        return int(np.cumsum(np.where(self.events > 0, self.size[row], -self.size[row])).max())


def from_lifespans(start: Column, end: Column, size: Column) -> Step:
    """A step from lifespans [start, end) in events; of frees and allocations at one event the frees come first."""
    rows = np.arange(1, len(size) + 1)
    time, event = np.concatenate([start, end]), np.concatenate([rows, -rows])
    order = np.lexsort((event > 0, time))
    first = np.argsort(start, kind="stable")  # rows in the order of their allocation
    place = np.empty(len(size), np.int64)
    place[first] = np.arange(len(size))
    event = event[order]
    return Step(size[first], np.sign(event) * (place[np.abs(event) - 1] + 1))


def training_step(model: Model, microbatches: int, seed: int = 0) -> tuple[Step, Column]:
    """A step of a pipeline stage, and the sizes (w,) of what lives throughout."""
    weights = _weights(model)
    stage = _play("", model, _script(model), weights, 1, microbatches, seed)
    standing = 3 * len(weights)
    return from_lifespans(stage.start[standing:], stage.end[standing:], stage.size[standing:]), stage.size[:standing]


def evaluation_step(model: Model, microbatches: int) -> Step:
    writer = _Writer()
    hidden = writer.alloc(FORWARD, 2 * model.hidden)
    for layer in range(model.num_layers):
        _, output = _forward(writer, FORWARD, model, layer, keep=False)
        writer.free(FORWARD, hidden)
        hidden = output
    writer.free(FORWARD, hidden)
    script = _Script(*np.array(writer.rows, np.int64).T, *writer.clock)
    size = script.rate * model.tokens + script.fixed
    size = -(-np.maximum(size, 1) // generator.GRANULE) * generator.GRANULE
    shift = script.num_forward * np.arange(microbatches)[:, None]
    return from_lifespans((shift + script.birth).ravel(), (shift + script.death).ravel(), np.tile(size, microbatches))


def with_extra(step: Step, size_bytes: int, at: int, lasts: int) -> Step:
    row = step.num_requests + 1
    until = min(at + lasts, len(step.events))
    events = np.concatenate([step.events[:at], [row], step.events[at:until], [-row], step.events[until:]])
    return Step(np.append(step.size, size_bytes), events)


def without(step: Step, rows: list[int]) -> Step:
    return Step(step.size, step.events[~np.isin(np.abs(step.events) - 1, rows)])


def halved(step: Step) -> Step:
    return Step(np.maximum(step.size // 2, 1), step.events)


@njit(nogil=True)
def _run(device, size, events, address, peaks):
    state = state_at(device)
    for event in events:
        row = abs(event) - 1
        if event > 0:
            address[row] = malloc(device, size[row], 0)
            if address[row] == 0:
                return False
            peaks[0] = max(peaks[0], state.total.allocated_bytes)
            peaks[1] = max(peaks[1], state.statistics.reserved_bytes)
        else:
            free(device, address[row])
    return True


@dataclass(frozen=True)
class Figures:
    hits: int
    missed: int  #: requests above 512 bytes that the plan did not serve
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    reserved_bytes: int  #: at the end of the step
    planned: bool  #: whether a plan was in force at its begin and at its end


class Machine:
    def __init__(self, standing: Column | None = None, *, marked: bool = True, capacity_bytes: int = 0) -> None:
        settings = Settings(plan_wait_seconds=1e6, planning_share=math.inf)
        self.controller = make_controller(capacity_bytes, settings)
        self.controller.expects_marks = marked
        self.state = self.controller.state
        self.marked = marked
        for size in (standing if standing is not None else np.zeros(0, np.int64)).tolist():
            assert self.state.malloc(size)

    def run(self, step: Step) -> Figures:
        before = self._counts()
        began_planned = self.controller.status.phase is Phase.PLANNED
        plans = self.controller.status.num_plans
        peaks = np.zeros(2, np.int64)
        address = np.zeros(step.num_requests, np.int64)
        assert _run(self.state.address, step.size, step.events, address, peaks), "the device has no end"
        if self.marked:
            self._mark()
        status = self.controller.status
        planned = began_planned and status.phase is Phase.PLANNED and plans == status.num_plans
        if planned:
            hits, missed = (now - then for now, then in zip(self._counts(), before, strict=True))
        else:
            hits, missed = 0, int((step.size > TINY).sum())
        return Figures(hits, missed, int(peaks[0]), int(peaks[1]), self.state.record.statistics.reserved_bytes, planned)

    def follow(self, size: Column, events: Column, step_ends: Sequence[int]) -> bool:
        """Run a program whose requests may outlive its steps, and mark their ends; False if it runs out of memory."""
        address, peaks = np.zeros(len(size), np.int64), np.zeros(2, np.int64)
        start = 0
        for end in step_ends:
            if not _run(self.state.address, size, events[start:end], address, peaks):
                return False
            self._mark()
            start = end
        return True

    def _mark(self) -> None:
        self.controller.mark(MARK_STEP, "")
        search = self.controller.steps.search
        if search is not None:  # equal runs give equal figures: what runs beside the program is waited for
            search.done.wait()

    def _counts(self) -> tuple[int, int]:
        state = self.state
        return state.record.follow.hits, state.record.iterations.misses + state.record.iterations.conflicts


MIB = 1 << 20
_STAGE = Model(num_layers=8)


def _planned(marked: bool = True, microbatches: int = 31) -> tuple[Machine, Step]:
    """A machine that runs a stage of about 8,000 requests a step on its plan."""
    step, standing = training_step(_STAGE, microbatches)
    machine = Machine(standing, marked=marked)
    for _ in range(12):
        figures = machine.run(step)
    assert figures.planned, "a plan is in force"
    assert figures.missed == 0, "it is the step's"
    return machine, step


def _after(machine: Machine, step: Step, count: int = 20) -> list[Figures]:
    return [machine.run(step) for _ in range(count)]


def one_extra() -> list[tuple[str, float, float]]:
    machine, step = _planned()
    before = machine.run(step)
    odd = machine.run(with_extra(step, 4 * MIB, len(step.events) // 3, 500))
    after = _after(machine, step)
    return [
        ("one_extra_request_left_the_plan", odd.missed, 4),
        ("one_extra_request_reserved_growth_mib", (odd.reserved_peak_bytes - before.reserved_peak_bytes) / MIB, 4),
        ("one_extra_request_missed_in_the_steps_after", sum(figures.missed for figures in after), 0),
        ("one_extra_request_reserved_stays_mib", (after[-1].reserved_bytes - before.reserved_bytes) / MIB, 0),
    ]


def deviations() -> list[tuple[str, float, float]]:
    """Two requests missing once; all sizes halved for one step."""
    rows: list[tuple[str, float, float]] = []
    for name in ("two_missing", "all_halved"):
        machine, step = _planned()
        before = machine.run(step)
        odd = without(step, [step.num_requests // 3, step.num_requests // 2]) if name == "two_missing" else halved(step)
        figures = machine.run(odd)
        after = _after(machine, step)
        growth = figures.reserved_peak_bytes - before.reserved_peak_bytes
        rows += [
            (f"{name}_missed_in_the_steps_after", sum(figures.missed for figures in after), 0),
            (f"{name}_reserved_growth_share", growth / before.reserved_peak_bytes, 0.03),
            (f"{name}_reserved_stays_mib", (after[-1].reserved_bytes - before.reserved_bytes) / MIB, 0),
        ]
    return rows


def recurring() -> list[tuple[str, float, float]]:
    """An evaluation every third step; three sequence lengths, in turn and at random."""
    train, standing = training_step(_STAGE, 8)
    evaluate = evaluation_step(_STAGE, 8)
    machine = Machine(standing)
    kinds = [machine.run(evaluate if i % 3 == 2 else train) for i in range(24)]
    rows = [("evaluation_every_third_missed_share_from_its_third_on", _missed_share(kinds[8:]), 0.0)]
    lengths = [training_step(Model(num_layers=8, tokens=tokens), 8)[0] for tokens in (4096, 3072, 2048)]
    machine = Machine(standing)
    kinds = [machine.run(lengths[i % 3]) for i in range(24)]
    rows.append(("three_lengths_in_turn_missed_share_from_the_fourth_round_on", _missed_share(kinds[9:]), 0.0))
    machine, rng = Machine(standing), np.random.default_rng(3)
    order = [*np.concatenate([rng.permutation(3) for _ in range(10)])]
    kinds = [machine.run(lengths[kind]) for kind in order]
    rows.append(("three_lengths_at_random_missed_share_from_the_fourth_round_on", _missed_share(kinds[9:]), 0.0))
    return rows


def _missed_share(figures: list[Figures]) -> float:
    served = sum(each.hits for each in figures)
    return sum(each.missed for each in figures) / max(served + sum(each.missed for each in figures), 1)


def mixture_of_experts(num_steps: int) -> list[tuple[str, float, float]]:
    """Eight experts, random routing, four microbatches: new sizes in every step."""
    moe = MODELS["moe"]
    rows = []
    for name, jitter in (("", 0.0), ("_and_random_lengths", moe.jitter)):
        model = Model(num_experts=8, hidden=moe.hidden, feed_forward=moe.feed_forward, num_heads=16, jitter=jitter)
        machine = Machine(training_step(model, 4)[1])
        figures = [machine.run(training_step(model, 4, seed)[0]) for seed in range(num_steps)]
        late = figures[num_steps // 2 :]
        ratio = max(each.reserved_peak_bytes for each in late) / max(each.allocated_peak_bytes for each in late)
        rows.append((f"mixture_of_experts{name}_reserved_by_allocated_peak", ratio, 1.03))
    return rows


def random_shapes(num_steps: int) -> list[tuple[str, float, float]]:
    shapes = [training_step(Model(num_layers=4, tokens=int(k)), 4)[0] for k in np.linspace(1024, 4096, 12)]
    machine = Machine(training_step(Model(num_layers=4), 4)[1])
    rng = np.random.default_rng(1)
    figures = [machine.run(shapes[int(rng.integers(12))]) for _ in range(num_steps)]
    late = figures[num_steps // 2 :]
    peak = max(each.allocated_peak_bytes for each in figures)
    reserved = [each.reserved_peak_bytes for each in late]
    return [
        ("twelve_shapes_reserved_at_the_end_by_largest_allocated_peak", figures[-1].reserved_bytes / peak, 1.05),
        ("twelve_shapes_reserved_spread_over_the_last_half", (max(reserved) - min(reserved)) / peak, 0.0),
        ("twelve_shapes_missed_share_over_the_last_half", _missed_share(late), 0.0),
    ]


def host_memory(num_requests: int = 100_000) -> list[tuple[str, float, float]]:
    small, standing = training_step(_STAGE, 4)
    machine = Machine(standing)
    for _ in range(6):
        machine.run(small)  # compiles everything
    step, standing = training_step(_STAGE, num_requests // 250)
    assert step.num_requests >= num_requests
    gc.collect()
    before = _resident_bytes()
    machine = Machine(standing)
    for _ in range(8):
        figures = machine.run(step)
    assert figures.planned, "a plan is in force"
    assert figures.missed == 0, "it is the step's"
    gc.collect()
    return [("host_memory_at_100000_planned_requests_mib", (_resident_bytes() - before) / MIB, 64)]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
