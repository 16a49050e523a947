"""Ranks of one job that do the same plan once: the first to ask plans, the others take its plan from the job's store.

Contract: a rank uses another's plan only if it was made for exactly its own schedule (sizes, streams and lifespans),
and after the validator has passed it; whatever is amiss (no job, no store, a rank that died, other versions), it plans
for itself. The store is only asked, never waited in, since other threads of the rank share its connection. It is a
process of one rank, so each rank asks in its turn: however many there are, few ask at a time.
"""

import dataclasses
import hashlib
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from stalloc.lifespans.repeating_schedule import Schedule
    from stalloc.planner import Plan
    from stalloc.planner.planning import Streams

_COLUMNS = ("size", "stream", "start", "end", "planned")
_PATIENCE_SECONDS = 60.0  # for a rank that said it would plan
_POLL_SECONDS = 0.02
#: a rank's turn: torch's TCPStore took 0.02 ms to answer that a plan is not there, 1.4 ms to hand over a megabyte
_TURN_SECONDS = 0.002


def plan_together(schedule: "Schedule", *, streams: "Streams" = "separate") -> "Plan":
    """The plan of a schedule (options: plan_schedule's), made here or by another rank that has the same schedule."""
    from stalloc.planner import plan_schedule, plans_to_bytes

    job = _job()
    if job is None:
        return plan_schedule(schedule, streams=streams)
    store, rank, num_ranks = job
    key = f"stalloc/plan/{streams}/{digest(schedule)}"
    try:
        time.sleep(seconds_to_turn(time.time(), rank, num_ranks))
        mine = store.add(f"{key}/ranks", 1) == 1
        found = None if mine else _take(job, key, schedule, handovers=streams != "separate")
    except Exception:  # of many kinds: a store whose server is gone, a backend that cannot add
        mine, found = False, None
    if found is not None:
        return found
    plan = plan_schedule(schedule, streams=streams)
    if mine:
        try:
            store.set(key, plans_to_bytes([plan]))
        except Exception:
            return plan  # the others lose patience and plan for themselves
    return plan


def digest(schedule: "Schedule") -> str:
    """What two ranks have to have in common to share a plan: the schedule and the version of stalloc."""
    from stalloc import __version__

    numbers = f"{__version__} {schedule.num_prologue} {schedule.cycle_start} {schedule.cycle_end}"
    found = hashlib.sha256(numbers.encode())
    for name in _COLUMNS:
        found.update(np.ascontiguousarray(getattr(schedule, name)).tobytes())
    return found.hexdigest()[:32]


def fits(plan: "Plan", schedule: "Schedule", *, handovers: bool = False) -> bool:
    """Whether a plan is one of exactly this schedule, and valid; with `handovers` streams may share memory."""
    from stalloc.planner import validate

    same = (
        (plan.num_prologue, plan.cycle_start, plan.cycle_end)
        == (schedule.num_prologue, schedule.cycle_start, schedule.cycle_end)
        and np.array_equal(plan.schedule_size, schedule.size)
        and np.array_equal(plan.schedule_stream, schedule.stream)
        and np.array_equal(plan.schedule_start, schedule.start)
        and np.array_equal(plan.schedule_end, schedule.end)
        and bool(((plan.schedule_offset < 0) | schedule.planned).all())
    )
    return same and validate(plan, handovers=handovers).ok


def seconds_to_turn(now: float, rank: int, num_ranks: int) -> float:
    """How long until a rank's next turn to ask the store, by the clock that all ranks have in common."""
    return (rank * _TURN_SECONDS - now) % max(_POLL_SECONDS, num_ranks * _TURN_SECONDS)


def _job() -> tuple[Any, int, int] | None:
    """The store of this job, this rank, and how many there are; None outside of one or with a single rank."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_initialized() or distributed.get_world_size() < 2:
            return None
        store = distributed.distributed_c10d._get_default_store()
        return store, distributed.get_rank(), distributed.get_world_size()
    except Exception:  # a build without it, or a job that is just ending
        return None


def _take(job: tuple[Any, int, int], key: str, schedule: "Schedule", *, handovers: bool) -> "Plan | None":
    from stalloc.planner import plans_from_bytes

    store, rank, num_ranks = job
    end, is_there = time.monotonic() + _PATIENCE_SECONDS, False
    while not is_there:
        if time.monotonic() > end:
            return None
        time.sleep(seconds_to_turn(time.time(), rank, num_ranks))
        is_there = store.check([key])
    [plan] = plans_from_bytes(bytes(store.get(key)), "what another rank handed over")
    fitting = fits(plan, schedule, handovers=handovers)
    return dataclasses.replace(plan, method=f"{plan.method}, by another rank") if fitting else None
