"""Plans on their way into force: one door for all of them, whoever made them and whatever they hold."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_runtime_schedules import made_up_kind
from test_runtime_steps import Program

from stalloc.core.arena_schedule import ArenaSchedule, check
from stalloc.errors import PlanError
from stalloc.planner import validate, validate_kinds
from stalloc.planner.kind_plans import KindPlans, plan_steps
from stalloc.runtime.admission import admit

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

from hostility.plans import soak_plans


def test_changed_plans_never_make_an_address_that_is_not_ours() -> None:
    figures = soak_plans(120, 1)
    assert figures["problems"] == []
    assert figures["refused"] > 80
    assert figures["hits"] > 40, "some are harmless, and served"


@pytest.mark.slow
def test_many_changed_plans_never_make_an_address_that_is_not_ours() -> None:
    assert soak_plans(800, 3)["problems"] == []


def tampered(schedules: KindPlans, **changes: Any) -> KindPlans:
    """The same kinds with other columns in the plan of the last of them."""
    return dataclasses.replace(
        schedules, plans=[*schedules.plans[:-1], dataclasses.replace(schedules.plans[-1], **changes)]
    )


def moved_row(schedules: KindPlans) -> dict[str, Any]:
    """Changes that put the first two requests of the last kind, which are live together, in one place."""
    plan = schedules.plans[-1]
    offset = plan.schedule_offset.copy()
    first = plan.num_prologue
    offset[first + 1] = offset[first]
    return {"schedule_offset": offset, "offset": offset}


def some_kinds() -> KindPlans:
    """Three kinds of steps, the last of which begins with two requests that are live together."""
    for seed in range(100):
        kinds = [made_up_kind(np.random.default_rng(3 * seed + i)) for i in range(3)]
        schedules = plan_steps(kinds, {})
        first = schedules.plans[-1].num_prologue
        if (
            kinds[-1].end[0] > 2
            and kinds[-1].end[1] > 2
            and (schedules.plans[-1].schedule_offset[first : first + 2] >= 0).all()
        ):
            return schedules
    raise AssertionError("no such kinds")


def test_kinds_of_steps_are_judged_each_and_together() -> None:
    schedules = some_kinds()
    assert validate_kinds(schedules.plans).ok
    verdict = validate_kinds(tampered(schedules, **moved_row(schedules)).plans)
    assert (verdict.ok, verdict.reason) == (False, "overlap")
    assert verdict.detail.startswith("kind 2: ")


def test_what_is_handed_on_has_to_lie_where_all_kinds_keep_a_place_for_it() -> None:
    schedules = some_kinds()
    plan = schedules.plans[-1]
    sizes = {name: getattr(plan, name).copy() for name in ("schedule_size", "size")}
    for column in sizes.values():
        column[: plan.num_prologue] = 0
    assert validate_kinds(tampered(schedules, **sizes).plans).reason in ("bad-handed-on", "wrong-lower-bound")
    smaller = []
    for one in schedules.plans:
        size = one.schedule_size.copy()
        size[: one.num_prologue] = np.maximum(size[: one.num_prologue] - 512, 0)
        smaller.append(dataclasses.replace(one, schedule_size=size))
    assert validate_kinds(smaller, judge=lambda _: validate(plan)).reason == "bad-handed-on", "it reaches beyond it"
    unequal = tampered(schedules, peak_bytes=plan.peak_bytes + 512)
    assert validate_kinds(unequal.plans).reason == "bad-handed-on"


def test_only_plans_that_the_validator_passes_are_admitted() -> None:
    schedules = some_kinds()
    schedule = admit(schedules.plans, cycle_only=True)
    assert schedule.arena_bytes >= schedules.peak_bytes
    assert list(schedule.begins) == schedules.begins
    assert np.array_equal(schedule.offset, schedules.offset)
    with pytest.raises(PlanError, match="overlap: kind 2"):
        admit(tampered(schedules, **moved_row(schedules)).plans, cycle_only=True)


def test_a_plan_that_passed_is_judged_anew_once_anything_but_the_size_of_its_arena_differs() -> None:
    schedules = some_kinds()
    admit(schedules.plans, cycle_only=True, num_buffers=schedules.num_buffers)
    larger = [dataclasses.replace(plan, peak_bytes=plan.peak_bytes + 512) for plan in schedules.plans]
    assert admit(larger, cycle_only=True).arena_bytes >= schedules.peak_bytes + 512
    with pytest.raises(PlanError, match="beyond-peak"):
        admit(
            [dataclasses.replace(plan, peak_bytes=plan.peak_bytes - 512) for plan in schedules.plans], cycle_only=True
        )
    with pytest.raises(PlanError, match="overlap: kind 2"):
        admit(tampered(schedules, **moved_row(schedules)).plans, cycle_only=True)
    longer = schedules.plans[-1].schedule_end.copy()
    longer[schedules.plans[-1].num_prologue] = len(longer)
    with pytest.raises(PlanError, match="kind 2"):
        admit(tampered(schedules, schedule_end=longer, end=longer).plans, cycle_only=True)


def test_kinds_of_steps_with_a_wrong_plan_are_left_to_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that puts two live requests in one place: its plan never comes into force."""

    def plan_badly(*arguments: Any, **options: Any) -> KindPlans:
        schedules = plan_steps(*arguments, **options)
        offsets = [np.minimum(plan.schedule_offset, 0) for plan in schedules.plans]
        plans = [
            dataclasses.replace(plan, schedule_offset=offset, offset=offset)
            for plan, offset in zip(schedules.plans, offsets, strict=True)
        ]
        return dataclasses.replace(schedules, plans=plans)

    def plan_in_force() -> str:
        program = Program()
        for number in np.random.default_rng(4).integers(0, 3, 40).tolist():
            program.step(lambda width=2000 + 500 * number: program.train(width))
        return program.controller.status.plan.method if program.controller.status.plan is not None else ""

    assert "3 kinds of steps" in plan_in_force()
    monkeypatch.setattr("stalloc.planner.kind_plans.plan_steps", plan_badly)
    assert "kinds of steps" not in plan_in_force()


def test_no_entry_may_end_beyond_the_arena() -> None:
    schedule = ArenaSchedule(arena_bytes=1024, size=np.array([512]), stream=np.array([0]), offset=np.array([512]))
    check(schedule, 0)
    with pytest.raises(PlanError, match="is not inside an arena of 1024 bytes"):
        check(dataclasses.replace(schedule, size=np.array([513])), 0)
