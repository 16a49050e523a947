"""Steps that are watched on a device that is hardly large enough: they fit where a caching allocator fits."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from stalloc.replay.offline import make_controller
from stalloc.replay.protocol import Events, Kind
from stalloc.replay.registry import make
from stalloc.runtime.controller import MARK_STEP
from stalloc.runtime.runtime_settings import Phase, Settings
from stalloc.sizes import PAGE_BYTES

MIB = 1 << 20
LASTING, STEP = "lasting", "step"
WEIGHTS = (96, 32, 86, 86, 86)  # MiB, of a layer of the 7B transformer
KEPT = (32, 16, 48, 16, 43, 43, 43)  # what its forward pass keeps
NUM_LAYERS = 6


class Program:
    """A training program written down: allocations, frees and what its optimizer says, before it is run."""

    def __init__(self, unit_bytes: int, num_steps: int) -> None:
        self.unit_bytes = unit_bytes
        self.sizes: list[int] = []
        self.script: list[tuple[Kind, int] | str] = []
        weights = [self.allocate(size) for _ in range(NUM_LAYERS) for size in WEIGHTS]
        gradients: list[int] = []
        for number in range(num_steps):
            self.free(gradients)
            kept = [[self.allocate(size) for size in KEPT] for _ in range(NUM_LAYERS)]
            gradients = []
            for of_layer in reversed(kept):
                workspace = self.allocate(64)
                for size in WEIGHTS:
                    gradients.append(self.allocate(size))
                    self.free([of_layer.pop()])
                self.free([workspace, *of_layer])
            if number == 0:
                self.script.append(LASTING)
                weights += [self.allocate(size) for _ in range(2 * NUM_LAYERS) for size in WEIGHTS]
            self.free([self.allocate(size) for _ in range(NUM_LAYERS) for size in WEIGHTS])
            self.script.append(STEP)

    def allocate(self, size: int) -> int:
        """The row of a new request."""
        self.sizes.append(size * self.unit_bytes)
        self.script.append((Kind.ALLOC, len(self.sizes) - 1))
        return len(self.sizes) - 1

    def free(self, rows: list[int]) -> None:
        """The end of several."""
        self.script += [(Kind.FREE_COMPLETED, row) for row in rows]

    def events(self) -> Events:
        """The program as models of allocators take it."""
        rows = [entry for entry in self.script if not isinstance(entry, str)]
        kind, request = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        sizes = np.array(self.sizes)
        return Events(kind.astype(np.int8), request, np.arange(len(rows)), sizes, np.zeros(len(sizes), np.int64))

    def fits_natively(self, capacity_bytes: int) -> bool:
        """Whether torch's caching allocator runs it, giving back what it caches when the device is full."""
        return make("torch", "", capacity_bytes).feed(self.events()).failed < 0

    def unserved(self, capacity_bytes: int) -> Iterator[int]:
        """Run it under the runtime, without a plan in force; yields the sizes (bytes) that were not served."""
        controller = make_controller(capacity_bytes, Settings(plan_wait_seconds=1e6, planning_share=math.inf))
        controller.expects_marks = True
        address: dict[int, int] = {}
        for entry in self.script:
            if entry == LASTING:
                controller.expect_persistent()
            elif entry == STEP:
                controller.mark(MARK_STEP, "")
            elif entry[0] == Kind.ALLOC:
                address[entry[1]] = controller.state.malloc(self.sizes[entry[1]], 0)
                if not address[entry[1]]:
                    yield self.sizes[entry[1]]
            else:
                controller.state.free(address.pop(entry[1]))


@pytest.mark.parametrize("unit_bytes", [MIB, MIB // 2, MIB // 3 // 512 * 512, MIB // 10 // 512 * 512])
def test_watched_steps_fit_where_a_caching_allocator_fits(unit_bytes: int) -> None:
    program = Program(unit_bytes, num_steps=4)
    too_little, enough = 0, 1 << 13  # granules
    while enough - too_little > 1:
        middle = (too_little + enough) // 2
        fits = program.fits_natively(middle * PAGE_BYTES)
        too_little, enough = (too_little, middle) if fits else (middle, enough)
    assert list(program.unserved(enough * PAGE_BYTES)) == []


def test_watched_steps_of_whole_granules_fit_into_hardly_more_than_they_allocate() -> None:
    program = Program(MIB, num_steps=4)
    allocated = 5 * NUM_LAYERS * sum(WEIGHTS) * MIB  # weights, gradients, the optimizer's state and its workspace
    assert list(program.unserved(allocated + 20 * MIB)) == []


@pytest.mark.parametrize("capacity_bytes", [340 * MIB, 1360 * MIB])
def test_where_a_program_fills_the_device_a_plan_knows_what_needs_most_and_goes_once_it_is_left(
    capacity_bytes: int,
) -> None:
    """Small steps that repeat, and now and then a large one, each time of other sizes."""
    controller = make_controller(
        capacity_bytes, Settings(plan_wait_seconds=1e6, planning_share=math.inf, arena="pages")
    )
    controller.expects_marks = True
    state, is_full = controller.state, capacity_bytes < 600 * MIB

    def step(sizes: list[int]) -> None:
        addresses = [int(state.malloc(size)) for size in sizes]
        assert all(addresses)
        for address in addresses:
            state.free(address)
        controller.mark(MARK_STEP, "")

    small = [3 * MIB, 5 * MIB, 7 * MIB, 4 * MIB] * 4
    step([9 * MIB + 4096 * nth for nth in range(33)])
    for _ in range(6):
        step(small)
    assert (controller.status.phase is Phase.PLANNED) == (not is_full)
    for _ in range(6):
        step(small)
    assert controller.status.phase is Phase.PLANNED
    step([9 * MIB + 8192 * nth for nth in range(33)])
    assert (controller.status.phase is Phase.PLANNED) == (not is_full)
    assert controller.status.num_dropped == int(is_full)
