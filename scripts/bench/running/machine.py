"""The whole runtime on a device of numbers, and programs of many steps for it, made from the planner's made-up stages.

Contract: what a program asks for goes through the core exactly as torch's and CuPy's requests do; figures are the
core's own counters. A program is the same for the same arguments; what a step allocates it frees, except what lives
from the begin to the end (weights, gradients, optimizer). Steps may differ: steps of one kind are the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from planning import generator
from planning.generator import FORWARD, Column, Model, _forward, _play, _Script, _script, _weights, _Writer

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
    """Forward passes one after the other, of which nothing is kept."""
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
