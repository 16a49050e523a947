"""The fold: each kind of request is on the schedule as what it is, and offsets that fit it fit the program."""

import dataclasses
import random

import numpy as np
import pytest
from made_up_programs import MIB, Program
from recordings import ALL, each, path_of

from stalloc.lifespans import Schedule, expand, fold, lower_bound, peak_load
from stalloc.planner import plan, validate
from stalloc.trace import Trace, load_traces

KEPT, HELD, LOSS, LONG, LEAK, TINY, WORK = (MIB * (10 + i) for i in range(7))


def steps(num_steps, *, teardown=False):
    """Every kind of request there is: `held` is given back at the beginning of the next step, `loss` is rebound in
    the next step, `long` lives for two steps and a half, `leak` for ever."""
    program = Program()
    program.alloc("kept", KEPT)
    for step in range(num_steps):
        program.mark()
        if step > 0:
            program.free("held")
        program.alloc("work", WORK)
        program.alloc("tiny", 512)
        program.alloc("held", HELD)
        program.free("work")
        program.alloc("loss", LOSS)
        program.alloc(f"long{step}", LONG)
        if step >= 3:
            program.free(f"long{step - 3}")
        program.alloc(f"leak{step}", LEAK)
        program.alloc("work", WORK)
        program.free("work")
        program.free("tiny")
    if teardown:
        for name in ("held", "loss", "kept"):
            program.free(name)
    return program.trace()


def cycle_rows(schedule: Schedule, size: int) -> np.ndarray:
    return schedule.num_prologue + np.flatnonzero(schedule.size[schedule.num_prologue :] == size)


def lived(schedule: Schedule, size: int) -> set[int]:
    rows = cycle_rows(schedule, size)
    return set((schedule.end - schedule.start)[rows].tolist())


@pytest.mark.parametrize("teardown", [False, True])
def test_each_kind_of_request_is_what_it_is(teardown):
    schedule = fold(steps(12, teardown=teardown), rotate=False)
    assert schedule is not None
    assert schedule.period_requests == 6  # work, held, loss, long, leak, work
    assert schedule.cycle_length == 4 * 6  # `long` needs four periods
    assert schedule.size[schedule.persistent].tolist().count(KEPT) == 1
    assert lived(schedule, HELD) == {5}  # it is gone when the next step allocates
    assert lived(schedule, LOSS) == {6 + 1}  # until the next one has been allocated
    assert lived(schedule, LONG) == {3 * 6 + 1}
    assert not schedule.planned[cycle_rows(schedule, LEAK)].any()
    assert schedule.planned[cycle_rows(schedule, HELD)].all()
    assert schedule.planned[cycle_rows(schedule, LONG)].all()
    assert 512 not in schedule.size
    assert_well_formed(schedule)


def test_what_outlives_four_periods_is_not_planned():
    program = Program()
    for step in range(20):
        program.mark()
        program.alloc(f"old{step}", LONG)
        program.alloc("work", WORK)
        program.free("work")
        if step >= 5:
            program.free(f"old{step - 5}")
    schedule = fold(program.trace())
    assert schedule is not None
    assert not schedule.planned[cycle_rows(schedule, LONG)].any()
    assert schedule.planned[cycle_rows(schedule, WORK)].all()
    assert schedule.cycle_length == schedule.period_requests


def vary(program: "Program", step: int) -> None:
    """Free a block early in one step and late in the next."""
    program.alloc("varies", HELD)
    program.alloc("work", WORK)
    if step % 2:
        program.free("varies")
    for _ in range(5):
        program.alloc("work", WORK)
    if not step % 2:
        program.free("varies")
    program.free("work")


def test_a_lifespan_that_varies_is_not_planned():
    program = Program()
    for step in range(9):
        program.mark()
        vary(program, step)
    schedule = fold(program.trace())
    assert schedule is not None
    assert schedule.period_requests == 7
    assert not schedule.planned[cycle_rows(schedule, HELD)].any()
    assert schedule.planned[cycle_rows(schedule, WORK)].all()


def test_a_lifespan_that_varies_is_planned_where_its_longest_adds_nothing_to_the_load():
    """A collector of garbage frees a block now here, now there, while little else is live."""
    program = Program()
    for step in range(9):
        program.mark()
        program.alloc("big", 100 * MIB)
        program.free("big")
        vary(program, step)
    schedule = fold(program.trace())
    assert schedule is not None
    assert schedule.planned.all()
    assert lived(schedule, HELD) == {7}


def test_the_cycle_begins_where_the_fewest_bytes_are_live():
    program = Program()
    for _ in range(6):  # the memory is full at the step boundary and empty in its middle
        program.mark()
        program.alloc("a", MIB)
        if "big" in program.names:
            program.free("big")
        program.free("a")
        program.alloc("b", 2 * MIB)
        program.free("b")
        program.alloc("big", 100 * MIB)
        program.alloc("c", 3 * MIB)
        program.free("c")
    trace = program.trace()
    turned, straight = fold(trace), fold(trace, rotate=False)
    assert turned is not None
    assert straight is not None
    assert turned.size[turned.num_prologue] == 2 * MIB
    assert straight.size[straight.num_prologue] in (MIB, 100 * MIB)

    def crossing(schedule):
        wraps = (schedule.start >= schedule.cycle_start) & (schedule.end > schedule.cycle_end)
        return int(schedule.size[wraps].sum())

    assert crossing(turned) == 0
    assert crossing(straight) == 100 * MIB


def test_nothing_that_does_not_repeat_is_folded():
    program = Program()
    for i in range(50):
        program.alloc("x", MIB + 512 * i)
    assert fold(program.trace()) is None


def test_a_request_kept_in_the_first_pass_by_chance_belongs_to_the_prologue():
    program = Program()
    for step in range(8):
        program.mark()
        program.alloc("work", WORK)
        program.alloc("state" if step == 0 else "work", WORK)  # as large as what later steps only use for a moment
        program.free("work")
        program.alloc("other", HELD)
        program.free("other")
    schedule = fold(program.trace())
    assert schedule is not None
    assert schedule.planned.all()
    assert schedule.size[schedule.persistent].tolist() == [WORK]


def assert_well_formed(schedule: Schedule) -> None:
    prologue = np.arange(schedule.num_requests) < schedule.num_prologue
    start, end = schedule.start, schedule.end
    assert np.all(np.diff(start) >= 0)
    assert np.all((start[prologue] >= 0) & (start[prologue] < schedule.cycle_start))
    last = np.where(schedule.persistent, schedule.cycle_end + schedule.cycle_length, schedule.cycle_end)
    assert np.all((end > start) & (~prologue | (end <= last)))
    assert np.all((start[~prologue] >= schedule.cycle_start) & (start[~prologue] < schedule.cycle_end))
    assert np.all(end[~prologue] - start[~prologue] <= schedule.cycle_length)


def first_fit(schedule: Schedule) -> np.ndarray:
    """Offsets in which no two planned rows share bytes while both are live, later iterations included."""

    def times(row: int) -> set[int]:
        """Schedule events at which a row is live: positive in the prologue and the first iteration, negative later."""
        start, end = int(schedule.start[row]), int(schedule.end[row])
        once = set(range(start, min(end, schedule.cycle_end)))
        if schedule.persistent[row]:
            return once | {-1 - at for at in range(schedule.cycle_start, schedule.cycle_end)}
        if row < schedule.num_prologue:
            return once
        wrapped = {at if at < schedule.cycle_end else at - schedule.cycle_length for at in range(start, end)}
        return once | {-1 - at for at in wrapped}

    offsets = np.full(schedule.num_requests, -1, np.int64)
    placed: list[tuple[int, int, set[int]]] = []
    for row in np.flatnonzero(schedule.planned):
        when, size = times(int(row)), int(schedule.size[row])
        at = 0
        for low, high, other in sorted(placed, key=lambda entry: entry[0]):
            if when & other and at + size > low and high > at:
                at = high
        offsets[row] = at
        placed.append((at, at + size, when))
    return offsets


def assert_nothing_overlaps(trace: Trace, offsets: np.ndarray) -> None:
    live: dict[int, tuple[int, int]] = {}
    served = np.flatnonzero(offsets >= 0)
    happens = sorted(
        [(int(trace.end[r]), 0, int(r)) for r in served] + [(int(trace.start[r]), 1, int(r)) for r in served]
    )
    for _, begins, row in happens:
        if not begins:
            del live[row]
            continue
        low, high = int(offsets[row]), int(offsets[row] + trace.size[row])
        for other_low, other_high in live.values():
            assert high <= other_low or other_high <= low
        live[row] = (low, high)


def periodic_program(chance: random.Random, num_steps: int) -> Trace:
    """Random requests with random lifespans of up to three steps and a half, the same in every step."""
    program, length = Program(), chance.randrange(3, 12)
    script = [(chance.randrange(1, 40) * 4096, chance.choice([1, 2, 3, length, chance.randrange(1, 7 * length // 2)]))
              for _ in range(length)]  # fmt: skip
    for i in range(chance.randrange(8)):
        program.alloc(f"early{i}", chance.randrange(1, 40) * 4096)
    early_deaths = {i: chance.randrange(3 * length) for i in range(len(program.names)) if chance.random() < 0.5}
    due: dict[int, list[str]] = {}
    for i, at in early_deaths.items():
        due.setdefault(at, []).append(f"early{i}")
    clock = 0
    for _ in range(num_steps):
        program.mark()
        for size, lasts in script:
            for name in due.pop(clock, []):
                program.free(name)
            program.alloc(f"at{clock}", size)
            due.setdefault(clock + lasts, []).append(f"at{clock}")
            clock += 1
            if chance.random() < 0.3:
                program.alloc("tiny", 8)
    return program.trace()


@pytest.mark.parametrize("with_prologue", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_offsets_that_fit_the_schedule_fit_the_program(seed, with_prologue):
    print("seed", seed)
    trace = periodic_program(random.Random(seed), 12)
    schedule = fold(trace, with_prologue=with_prologue)
    assert schedule is not None
    assert schedule.planned.all()
    assert_well_formed(schedule)
    offsets = expand(schedule, first_fit(schedule), trace)
    large = trace.size > 512
    unserved = large & (offsets < 0)
    # everything from the schedule's first row on is served
    assert np.flatnonzero(unserved).max(initial=-1) < (0 if with_prologue else schedule.row[0])
    assert not np.any(offsets[~large] >= 0)
    assert_nothing_overlaps(trace, offsets)


@pytest.mark.parametrize("seed", range(20))
def test_the_load_of_a_schedule_is_the_load_of_the_program(seed):
    print("seed", seed)
    trace = periodic_program(random.Random(seed), 16)
    schedule = fold(trace)
    assert schedule is not None
    large = trace.size > 512
    load = peak_load(trace.start[large], trace.end[large], trace.size[large])
    on_schedule = peak_load(schedule.start, schedule.end, schedule.size, (schedule.cycle_start, schedule.cycle_end))
    early = schedule.size[schedule.persistent].sum()  # what dies after the first pass counts as kept for ever
    assert load <= on_schedule <= load + early


@pytest.mark.parametrize("name", each(["training.pickle.gz", "lm_fb_ctx200.pickle.gz"], always=ALL))
def test_a_real_training_folds_to_its_load(name):
    (trace,) = load_traces(path_of(name))
    schedule = fold(trace)
    assert schedule is not None
    assert_well_formed(schedule)
    assert schedule.planned.all()
    rounded = (schedule.size + 511) // 512 * 512
    peak = peak_load(schedule.start, schedule.end, rounded, (schedule.cycle_start, schedule.cycle_end))
    assert 0.999 * lower_bound(trace) < peak <= lower_bound(trace)


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_is_valid_where_the_cycle_is_longer_than_what_was_recorded_of_it(seed):
    chance, program = random.Random(seed), Program()
    length = chance.randrange(4, 10)
    lasting = [1, 2, length - 1, length, length + 1, length + 2]
    script = [(chance.randrange(1, 40) * 4096, chance.choice(lasting)) for _ in range(length)]
    program.alloc("weights", 8 * MIB)
    due: dict[int, list[str]] = {}
    for clock in range(2 * length + 1 + seed % 2):
        if clock % length == 0:
            program.mark()
        size, lasts = script[clock % length]
        for name in due.pop(clock, []):
            program.free(name)
        program.alloc(f"at{clock}", size)
        due.setdefault(clock + lasts, []).append(f"at{clock}")
    trace = program.trace()
    made = plan(dataclasses.replace(trace, info=trace.info | {"source": "stalloc recorder"}))
    verdict = validate(made)
    assert verdict.ok, verdict.detail
    assert made.kind == "program"
