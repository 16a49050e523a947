"""Programs that deviate, vary or recur, through the whole runtime on a device of numbers: the rows of its table.

Contract: figures are counts and bytes, not times, and equal from run to run.
"""

import gc
from pathlib import Path

import numpy as np
from planning.generator import MODELS, Model

from running.machine import Figures, Machine, Step, evaluation_step, halved, training_step, with_extra, without

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
    """One extra request of 4 MiB, once."""
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
    """Shapes at random from a set of twelve."""
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
    """What the runtime holds on the host with so many requests planned."""
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
