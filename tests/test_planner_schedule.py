"""Plans of schedules and of traces: streams apart, rows expanded, and every choice repeated exactly."""

import dataclasses

import numpy as np
import pytest
from made_up_programs import MIB, Program

from stalloc.errors import BadInputError
from stalloc.lifespans.repeating_schedule import fold
from stalloc.planner import plan, plan_schedule, validate
from stalloc.trace import Trace


def training(steps: int = 6, second_stream: bool = False) -> Trace:
    """Weights for ever; activations, a copy, gradients that live into the next step."""
    program = Program()
    for layer in range(5):
        program.alloc(f"weight {layer}", (layer + 2) * MIB)
    for _ in range(steps):
        program.mark()
        for layer in range(5):
            if f"gradient {layer}" in program.names:
                program.free(f"gradient {layer}")
        for layer in range(5):
            program.alloc(f"activation {layer}", (7 - layer) * MIB)
            if second_stream:
                program.alloc("copy", 3 * MIB, stream=1)
                program.free("copy")
        for layer in reversed(range(5)):
            program.alloc(f"gradient {layer}", (layer + 2) * MIB)
            program.free(f"activation {layer}")
    return program.trace()


def test_a_recording_that_repeats_becomes_a_program():
    trace = training()
    made = plan(trace)
    assert made.kind == "program"
    assert validate(made, trace).ok
    assert made.num_requests == trace.num_requests
    assert made.num_planned == trace.num_requests
    assert made.optimal
    assert (made.offset[made.schedule_row] == made.schedule_offset).all()


def test_fold_never_plans_the_recording_as_it_is():
    trace = training()
    made = plan(trace, fold="never")
    assert made.kind == "trace"
    assert validate(made, trace).ok


def test_a_trace_of_others_is_planned_as_it_is():
    trace = training()
    trace = dataclasses.replace(trace, info=trace.info | {"source": "torch snapshot"})
    assert plan(trace).kind == "trace"


def test_a_recording_that_does_not_repeat_is_planned_as_it_is():
    program = Program()
    rng = np.random.default_rng(3)
    for i in range(60):
        program.alloc(f"{rng.integers(8)}", int(rng.integers(1, 1 << 30)))
        program.mark() if i == 30 else None
    assert plan(program.trace()).kind == "trace"


def test_an_unknown_fold_is_refused():
    with pytest.raises(BadInputError, match="fold"):
        plan(training(), fold="always")


def test_streams_never_share_addresses_in_a_program():
    trace = training(second_stream=True)
    made = plan(trace)
    assert made.kind == "program"
    assert validate(made, trace).ok
    first, second = (made.schedule_stream == stream for stream in (0, 1))
    used = [
        set(np.concatenate([np.arange(low, low + size, 512) for low, size in zip(lows, sizes, strict=True)]).tolist())
        for lows, sizes in ((made.schedule_offset[chosen], made.schedule_size[chosen]) for chosen in (first, second))
    ]
    assert not used[0] & used[1]


def test_a_trace_shares_addresses_among_streams():
    trace = training(second_stream=True)
    assert plan(trace, fold="never").peak_bytes < plan(trace).peak_bytes


def test_a_schedule_is_planned_without_a_trace():
    schedule = fold(training())
    made = plan_schedule(schedule)
    assert validate(made).ok
    assert (made.schedule_size == schedule.size).all()
    assert (made.num_prologue, made.cycle_start, made.cycle_end) == (
        schedule.num_prologue,
        schedule.cycle_start,
        schedule.cycle_end,
    )


def test_entries_that_are_not_planned_have_no_offset():
    schedule = fold(training())
    planned = schedule.planned.copy()
    planned[schedule.num_prologue] = False
    made = plan_schedule(dataclasses.replace(schedule, planned=planned))
    assert validate(made).ok
    assert made.schedule_offset[schedule.num_prologue] == -1
    assert made.num_planned == len(schedule.size) - 1


def test_planning_twice_gives_the_same_offsets():
    one, two = plan(training(), fold="never"), plan(training(), fold="never")
    assert (one.offset == two.offset).all()
    assert one.provenance == two.provenance
