"""The one door to a plan in force: whoever made a plan, the validator judges it here, and arenas serve nothing else.

Contract: what `admit` returns was passed by the validator as it is, or as it is but for a smaller arena. What builds
the arena's tables checks each entry once more, with code of its own (arena_schedule.py).
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from stalloc.columns import distinct
from stalloc.core.arena_schedule import ArenaSchedule
from stalloc.core.constants import ALIGNMENT, MAX_REQUEST, MAX_STREAMS
from stalloc.core.record_types import Words
from stalloc.errors import PlanError
from stalloc.planner import Plan, Verdict, validate, validate_kinds
from stalloc.sizes import aligned, whole_pages

_MOST_REMEMBERED = 4096
_passed: dict[bytes, int] = {}  # names of plans that the validator passed, and the size of the arena then


def admit(plans: Sequence[Plan], *, cycle_only: bool, num_buffers: int = 1) -> ArenaSchedule:
    """Judge the plan of a program, or those of several kinds of steps for one arena, and make ready what is served.

    With `cycle_only` the prologue is left out: it is over, or there was none. Plans of several kinds are served so;
    they may be several for each kind, which take turns.
    Raises PlanError with the validator's reason, or with one of the runtime's own.
    """
    for plan in plans:
        _check_servable(plan)
    shared = len(plans) == 1 and len(plans[0].handover_later) > 0
    verdict = (
        validate(plans[0], handovers=shared) if len(plans) == 1 else validate_kinds(plans, num_buffers, judge=_judged)
    )
    if not verdict.ok:
        raise PlanError(f"the plan is not valid: {verdict.reason}: {verdict.detail}: plan the program again.")
    firsts = [plan.num_prologue if cycle_only else 0 for plan in plans]
    size, stream, offset = (
        np.concatenate([getattr(plan, name)[first:] for plan, first in zip(plans, firsts, strict=True)])
        for name in ("schedule_size", "schedule_stream", "schedule_offset")
    )
    num_prologue, earlier = plans[0].num_prologue - firsts[0], plans[0].handover_earlier
    lengths = [len(plan.schedule_size) - plan.num_prologue for plan in plans]
    return ArenaSchedule(
        arena_bytes=whole_pages(plans[0].peak_bytes),
        size=size,
        stream=stream,
        offset=offset,
        num_prologue=num_prologue,
        begins=tuple((num_prologue + np.cumsum([0, *lengths[:-1]])).tolist()),
        num_buffers=num_buffers,
        ahead=np.concatenate([_bytes_ahead(plan)[first:] for plan, first in zip(plans, firsts, strict=True)]),
        gives=distinct(earlier[earlier >= firsts[0]]) - firsts[0] if shared else None,
    )


def _bytes_ahead(plan: Plan) -> Words:
    """(k,) bytes by which more of the cycle lives at its peak than when each entry of the schedule is asked for."""
    cycle = np.arange(len(plan.schedule_size)) >= plan.num_prologue
    size = np.where(cycle & (plan.schedule_offset >= 0), aligned(plan.schedule_size), 0)
    order = np.argsort(plan.schedule_end, kind="stable")
    begun, ended = (np.concatenate([[0], np.cumsum(sizes)]) for sizes in (size, size[order]))
    ends = plan.schedule_end[order]
    over, after_wrap = (
        np.searchsorted(ends, plan.schedule_start + shift, side="right")
        for shift in (0, plan.cycle_end - plan.cycle_start)
    )
    live = begun[:-1] - ended[over] + (ended[-1] - ended[after_wrap])  # of this iteration, and of the one before
    peak = int((live + size)[cycle].max(initial=0))
    return peak - live


def _judged(plan: Plan) -> Verdict:
    """As `validate`, which is not asked again of a plan that differs from one it passed in a larger arena alone.

    Each kind of step that is added to others brings their plans here once more.
    """
    name = _name_of(plan)
    if _passed.get(name, plan.peak_bytes + 1) <= plan.peak_bytes:
        return Verdict(True)
    verdict = validate(plan)
    if verdict.ok and not plan.optimal:
        if len(_passed) >= _MOST_REMEMBERED:
            _passed.clear()
        _passed[name] = plan.peak_bytes
    return verdict


def _name_of(plan: Plan) -> bytes:
    digest = hashlib.sha256()
    columns: dict[int, str] = {}
    for one in dataclasses.fields(plan):
        value = getattr(plan, one.name)
        if isinstance(value, np.ndarray):
            digest.update(f"{one.name} {value.dtype.str} {value.shape} {columns.get(id(value))}".encode())
            if id(value) not in columns:  # the rows of a plan may be its schedule itself
                digest.update(np.ascontiguousarray(value).data)
            columns[id(value)] = one.name
        elif one.name not in ("peak_bytes", "method", "provenance"):
            digest.update(f"{one.name} {value!r}".encode())
    return digest.digest()


def _check_servable(plan: Plan) -> None:
    if plan.kind != "program":
        raise PlanError(
            f"the plan for device {plan.device} lays out one recording and cannot be run: "
            "record the program with `stalloc record` and plan that."
        )
    if plan.alignment % ALIGNMENT:
        raise PlanError(f"the plan's alignment of {plan.alignment} bytes is not a multiple of {ALIGNMENT}.")
    if plan.peak_bytes > MAX_REQUEST or int(plan.schedule_size.max(initial=0)) > MAX_REQUEST:
        raise PlanError(
            f"the plan asks for more than {MAX_REQUEST} bytes at a time, which no device has: plan it again."
        )
    if int(plan.schedule_stream.max(initial=0)) >= MAX_STREAMS:
        raise PlanError(f"the plan uses more than {MAX_STREAMS} streams, which is more than can be followed.")
