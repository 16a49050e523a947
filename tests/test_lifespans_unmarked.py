"""Steps of several kinds without marks: planted ones are found, and parts of a step are not taken for steps."""

import itertools
import random

import numpy as np
import pytest
from made_up_programs import Program

from stalloc.lifespans.recurring_steps import with_steps_marked
from stalloc.trace import Trace

LAYERS = 5


def inference(program: Program, width: int) -> None:
    """A pass through equal layers, with a beginning and an end of its own; all widths have the same result."""
    program.alloc("x", 3000 * width)
    for _ in range(LAYERS):
        for part in range(6):
            program.alloc(f"part {part}", (1000 + 8 * part) * width)
        for part in range(6):
            program.free(f"part {part}")
        program.alloc("x", 2000 * width)
    program.alloc("result", 1000)
    program.free("x")


def lengths_between_marks(trace: Trace) -> list[int]:
    return [int(((trace.start >= a) & (trace.start < b)).sum()) for a, b in itertools.pairwise(trace.mark_event)]


@pytest.mark.parametrize("seed", range(30))
def test_kinds_of_steps_in_random_order_are_found(seed: int) -> None:
    print("seed", seed)
    rng, program = random.Random(seed), Program()
    for number in range(rng.randrange(20)):
        program.alloc(f"weight {number}", rng.randrange(1000, 100_000))
    for _ in range(40):
        inference(program, rng.choice([3, 5, 8]))
    marked = with_steps_marked(program.trace())
    assert marked is not None
    lengths = lengths_between_marks(marked)
    assert set(lengths) == {7 * LAYERS + 2}
    assert len(lengths) >= 36


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 9, 20])
@pytest.mark.parametrize("part", range(0, 7 * LAYERS, 5))
def test_the_layers_of_one_kind_of_step_are_no_steps(num_steps: int, part: int) -> None:
    program = Program()
    for _ in range(num_steps + 1):
        inference(program, 4)
    trace = program.trace()
    born = np.flatnonzero(trace.start >= 0)
    end = int(trace.start[born[(7 * LAYERS + 2) * num_steps + part]])
    cut = Program()
    for event, request in zip(trace.action[:end].tolist(), trace.event_request[:end].tolist(), strict=True):
        if event == 0:
            cut.alloc(str(request), int(trace.size[request]))
        else:
            cut.free(str(request))
    assert with_steps_marked(cut.trace()) is None


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("part", range(0, 61, 6))
def test_the_layers_of_a_training_step_are_no_steps(num_steps: int, part: int) -> None:
    program, count = Program(), 0
    for _ in range(num_steps + 1):
        for kind, layer in itertools.product("abc", range(4)):  # forwards through blocks of layers
            for number in range(3):
                program.alloc(f"{kind} {layer} {number}", 1000 + 8 * number + 100 * ord(kind))
                count += 1
        for kind, layer in itertools.product("cba", range(3, -1, -1)):  # backwards
            if count >= 61 * num_steps + part:
                break
            program.alloc("gradient", 5000 + 100 * ord(kind))
            for number in range(3):
                program.free(f"{kind} {layer} {number}")
            program.alloc("gradient", 6000 + 100 * ord(kind))
            count += 2
    assert with_steps_marked(program.trace()) is None


@pytest.mark.parametrize("seed", range(10))
def test_what_does_not_repeat_has_no_steps(seed: int) -> None:
    print("seed", seed)
    rng, program = random.Random(seed), Program()
    for _ in range(2000):
        program.alloc(str(rng.randrange(20)), rng.randrange(1000, 1_000_000))
    assert with_steps_marked(program.trace()) is None
    assert with_steps_marked(Program().trace()) is None
