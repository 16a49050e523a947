"""Programs of many steps: allocations and frees in order, made from the stages that the planner's benchmark makes up.

Contract: a program is the same for the same arguments; what a step allocates it frees, except what lives from the begin
to the end (weights, gradients, optimizer). Steps may differ: each has a kind, and steps of one kind are the same.
"""

from dataclasses import dataclass

import numpy as np
from planning import generator
from planning.generator import FORWARD, Column, Model, _forward, _play, _Script, _script, _weights, _Writer


@dataclass(frozen=True, eq=False)
class Step:
    """One step: requests of `size` (n,) bytes, and its events in order: row + 1 an allocation, -(row + 1) its free."""

    size: Column
    events: Column

    @property
    def num_requests(self) -> int:
        """Allocations of the step."""
        return len(self.size)

    @property
    def peak_bytes(self) -> int:
        """The most that is live at once."""
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
    """The step with one more request, allocated before event `at` and freed `lasts` events later."""
    row = step.num_requests + 1
    until = min(at + lasts, len(step.events))
    events = np.concatenate([step.events[:at], [row], step.events[at:until], [-row], step.events[until:]])
    return Step(np.append(step.size, size_bytes), events)


def without(step: Step, rows: list[int]) -> Step:
    """The step without some of its requests; their rows are left unused."""
    return Step(step.size, step.events[~np.isin(np.abs(step.events) - 1, rows)])


def halved(step: Step) -> Step:
    """The step with all sizes halved."""
    return Step(np.maximum(step.size // 2, 1), step.events)
