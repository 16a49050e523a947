"""Periods: what was planted is found, what only looks like a step is not taken for one."""

import random

import numpy as np
import pytest
from made_up_programs import MIB, Program
from recordings import each, path_of

from stalloc.lifespans import Period, find_period, find_step_period, may_repeat, sequence_rows
from stalloc.trace import MARK_STEP, load_traces

PERIODS = [
    ("training.pickle.gz", 321),
    ("cnn_counterfactuals.pickle.gz", 193),
    ("llm_quantize_sqattn.pickle.gz", 104),
    ("resnet50_pytorch_blog.pickle.gz", 679),
]
SINGLE_STEPS = (
    *("step.pickle.gz", "forward.pickle.gz", "out_of_memory.pickle.gz"),
    *("lm27b_ctx128_fullstep.pickle.gz", "llama3_8b_fsdp4_oom_rank0.pickle.gz", "lm_step_steady.pickle.gz"),
)


def naive_period(keys, min_repeats):
    best = None
    for length in range(1, len(keys)):
        at = 0
        while at + length < len(keys):
            run = 0
            while at + run + length < len(keys) and keys[at + run] == keys[at + run + length]:
                run += 1
            if run + length >= min_repeats * length:
                best = max(best or (0, 0, 0), (run + length, -length, at))
            at += run + 1
    return best and Period(best[2], -best[1], best[0])


@pytest.mark.parametrize("seed", range(200))
def test_the_longest_repetition_is_the_one_that_trying_all_finds(seed):
    print("seed", seed)
    chance = random.Random(seed)
    keys = [chance.randrange(chance.choice([2, 3, 5])) for _ in range(chance.randrange(2, 60))]
    if seed % 2:
        keys += [chance.randrange(3) for _ in range(chance.randrange(1, 9))] * chance.randrange(2, 5)
    for min_repeats in (2, 3):
        assert find_period(np.array(keys), min_repeats) == naive_period(keys, min_repeats)


@pytest.mark.parametrize("seed", range(20))
def test_a_planted_period_is_found_behind_noise(seed):
    print("seed", seed)
    chance = random.Random(seed)
    length, repeats = chance.randrange(40, 300), chance.randrange(2, 6)
    step = [chance.randrange(20) for _ in range(length)]
    noise = [chance.randrange(20) for _ in range(chance.randrange(500))]
    tail = [chance.randrange(100, 200) for _ in range(chance.choice([0, 0, 50]))]
    period = find_period(np.array(noise + step * repeats + tail))
    assert period is not None
    assert period.length == length
    assert period.repeats >= repeats
    assert period.first <= len(noise)
    at_end = find_period(np.array(noise + step * repeats + tail), at_end=True, min_length=40)
    assert (at_end == period) if not tail else at_end is None


def test_nothing_repeats_in_what_does_not_repeat():
    assert find_period(np.arange(1000)) is None
    assert find_period(np.array([], np.int64)) is None
    assert find_period(np.array([5]), at_end=True) is None


def training(num_steps, *, layers=12, microbatches=1, marks=False, extra_in=()):
    """A made-up training loop: forward over equal layers, backward, an optimizer over equal parameters."""
    program = Program()
    for layer in range(layers):
        program.alloc(f"weight{layer}", 4 * MIB)
    for step in range(num_steps):
        if marks:
            program.mark()
        if step in extra_in:
            program.alloc("extra", 3 * MIB)
            program.free("extra")
        for micro in range(microbatches):
            for layer in range(layers):
                program.alloc(f"activation{layer}", 2 * MIB)
                program.alloc("scratch", MIB)
                program.free("scratch")
            for layer in reversed(range(layers)):
                program.alloc("slope", 2 * MIB)
                if micro == 0:
                    program.alloc(f"gradient{layer}", 4 * MIB)
                program.free(f"activation{layer}")
                program.free("slope")
        for layer in range(layers):
            if step == 0:
                program.alloc(f"state{layer}", 8 * MIB)
            program.alloc("update", 4 * MIB)
            program.free("update")
            program.free(f"gradient{layer}")
    return program.trace()


def step_length(layers, microbatches):
    return microbatches * layers * 3 + layers + layers


def test_a_training_step_is_found_and_not_its_layers():
    period = find_step_period(training(3))
    assert period is not None
    assert period.length == step_length(12, 1)


def test_layers_of_a_single_step_are_not_taken_for_steps():
    assert find_step_period(training(1, layers=40)) is None


def test_microbatches_are_not_taken_for_steps():
    period = find_step_period(training(3, microbatches=8))
    assert period is not None
    assert period.length == step_length(12, 8)


def test_an_optimizer_loop_in_a_single_step_is_not_taken_for_steps():
    program = Program()
    for i in range(300):
        program.alloc(f"kept{i}", MIB + 512 * i)
    for _ in range(30):
        program.alloc("update", MIB)
        program.free("update")
    assert find_step_period(program.trace()) is None


def test_marked_steps_decide_where_sizes_alone_would_mislead():
    trace = training(4, marks=True)
    period = find_step_period(trace)
    assert period is not None
    assert period.length == step_length(12, 1)
    # the step begins at its mark, the first one had to make the states of the optimizer
    marks = trace.mark_event[trace.mark_kind == MARK_STEP]
    assert trace.start[sequence_rows(trace, 513)[period.first]] == marks[1]


def test_steps_of_two_kinds_that_alternate_are_one_period():
    program = Program()
    for step in range(8):
        program.mark()
        for _ in range(3 + step % 2):
            program.alloc("x", MIB)
            program.free("x")
    period = find_step_period(program.trace())
    assert period is not None
    assert period.length == 7


def test_one_marked_step_confirms_nothing():
    program = Program()
    for _ in range(2):
        program.mark()
        for _ in range(20):
            program.alloc("x", MIB)
            program.free("x")
    assert find_step_period(program.trace()) is None


def test_an_unusual_step_at_the_end_does_not_hide_the_others():
    period = find_step_period(training(6, marks=True, extra_in=[5]))
    assert period is not None
    assert period.length == step_length(12, 1)
    assert period.repeats == 4


def test_tiny_requests_can_come_and_go():
    program = Program()
    for step in range(6):
        for i in range(30):
            if (i + step) % 3 == 0:
                program.alloc("counter", 8)
                program.free("counter")
            program.alloc("x", MIB + 4096 * i)
            program.free("x")
    trace = program.trace()
    period = find_step_period(trace)
    assert period is not None
    assert period.length == 30
    assert find_step_period(trace, ignore_tiny=False) != period


@pytest.mark.parametrize(("name", "length"), each(PERIODS, always=tuple(name for name, _ in PERIODS)))
def test_real_programs_repeat_as_published(name, length):
    (trace,) = load_traces(path_of(name))
    period = find_step_period(trace, ignore_tiny=False)
    assert period is not None
    assert period.length == length


@pytest.mark.parametrize("name", each(SINGLE_STEPS, always=SINGLE_STEPS))
def test_real_single_steps_are_not_split(name):
    (trace,) = load_traces(path_of(name))
    assert find_step_period(trace) is None


@pytest.mark.parametrize("seed", range(40))
def test_what_repeats_over_most_of_a_sequence_is_never_ruled_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length, total = int(rng.integers(1, 60)), int(rng.integers(40, 400))
    keys = rng.integers(0, 1 << 40, total)
    covered = max(int(total * rng.uniform(0.6, 1.0)), 3 * min(length, total // 5))
    first = int(rng.integers(0, total - covered + 1))
    keys[first : first + covered] = np.resize(rng.integers(0, 5, min(length, total // 5)), covered)
    assert may_repeat(keys)


def test_what_never_repeats_is_ruled_out() -> None:
    assert not may_repeat(np.random.default_rng(0).permutation(1000))
    assert not may_repeat(np.zeros(0, np.int64))
