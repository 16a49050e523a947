"""Training in steps on a device of numbers, with every address checked."""

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from programs.core_machine import Intervals, Owners

from stalloc.planner.kind_plans import plan_steps
from stalloc.replay.offline import make_controller
from stalloc.runtime.controller import MARK_STEP, Controller
from stalloc.runtime.runtime_settings import Arena, Settings

MIB = 1 << 20


class Program:
    """Steps of layers on a device of numbers: activations, gradients that are zeroed before the backward pass.

    With several streams batches come on one and workspaces are another's. Every address is checked: no two live blocks
    overlap, and no byte passes from one stream to another. (The device never hands out an address twice.)
    """

    def __init__(
        self,
        *,
        plan: bool = True,
        capacity_bytes: int = 0,
        keeps_batch: bool = False,
        streams: int = 1,
        arena: Arena = "pages",
        hears_all: bool = False,
    ) -> None:
        """`hears_all`: each mark of a step is looked at, one of a step that goes as planned too."""
        settings = Settings(
            plan=plan, plan_wait_seconds=1e6, planning_share=math.inf, keep_recording=not plan, arena=arena
        )
        self.controller: Controller = make_controller(capacity_bytes, settings)
        self.controller.expects_marks = True
        self._mark = self.controller.hear_mark if hears_all else self.controller.mark
        self.state = self.controller.state
        self.streams = streams
        self.live, self.owners = Intervals(), Owners()
        self.gradients: list[int] = []
        self.keeps_batch = keeps_batch  # until there is the next one
        self.batch = 0
        self.weights = [self.allocate(MIB + 512 * i) for i in range(12)]

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        """One request; it has to be served."""
        stream %= self.streams
        address = int(self.state.malloc(size_bytes, stream))
        assert address
        self.live.add(address, size_bytes)
        self.owners.note(address, size_bytes, stream)
        return address

    def free(self, address: int) -> None:
        """The end of one."""
        self.live.remove(address)
        self.state.free(address)

    def forward(self, width: int) -> list[int]:
        """A batch and activations."""
        batch = self.allocate(width * 900, 2)
        if self.batch:
            self.free(self.batch)
        self.batch = batch
        return [self.allocate(width * (1000 + 7 * i)) for i in range(12)]

    def train(self, width: int) -> None:
        """A training step; `width` decides the sizes of the activations."""
        activations = self.forward(width)
        self.drop_batch()
        for address in self.gradients:
            self.free(address)
        self.gradients = []
        for i in reversed(range(12)):
            workspace = self.allocate(width * 500, 1)
            self.gradients.append(self.allocate(MIB + 512 * i))
            self.free(workspace)
            self.free(activations.pop())

    def evaluate(self, width: int) -> None:
        """A forward pass of which nothing is kept."""
        for address in self.forward(width):
            self.free(address)
        self.drop_batch()

    def drop_batch(self) -> None:
        """The end of the batch, if it is not kept."""
        if not self.keeps_batch:
            self.free(self.batch)
            self.batch = 0

    def make_state(self, count: int) -> None:
        """What an optimizer makes in its first step, and keeps."""
        self.controller.expect_persistent()
        self.weights += [self.allocate(21 * MIB) for _ in range(count)]

    def step(self, *parts: Callable[[], None], waits: bool = True) -> tuple[int, int]:
        """One step, with a mark at its end: requests that the plan served, and that it did not."""
        plans, before = self.controller.status.num_plans, self.counts()
        for part in parts:
            part()
        after = self.counts()
        if plans != self.controller.status.num_plans:  # the counting begins anew with a plan
            before = (0, 0)
        self._mark(MARK_STEP, "")
        search = self.controller.steps.search
        if search is not None and waits:  # equal runs, equal figures: what runs beside the program is waited for
            assert search.done.wait(60)
        return after[0] - before[0], after[1] - before[1]

    def wait_for_plans(self, seconds: float) -> None:
        """Let steps wait no longer than this for plans, from here on."""
        status = self.controller.status
        status.settings = replace(status.settings, plan_wait_seconds=seconds)

    def counts(self) -> tuple[int, int]:
        """Hits and misses so far."""
        return (
            self.state.record.follow.hits,
            self.state.record.iterations.misses + self.state.record.iterations.conflicts,
        )


def in_rounds(seed: int, kinds: int, rounds: int) -> Iterator[int]:
    """Every kind once a round, in a random order."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        yield from rng.permutation(kinds).tolist()


def planned_late(monkeypatch: pytest.MonkeyPatch) -> tuple[Program, threading.Event]:
    """A program on its plan, whose next plans are not there before an event, and which does not wait for them."""
    go_on = threading.Event()

    def plan_late(*arguments: Any, **options: Any) -> Any:
        assert go_on.wait(60)
        return plan_steps(*arguments, **options)

    program = Program()
    for _ in range(10):
        program.step(lambda: program.train(2000))
    program.wait_for_plans(0.0)
    monkeypatch.setattr("stalloc.planner.kind_plans.plan_steps", plan_late)
    return program, go_on
