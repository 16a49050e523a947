"""Running a method on a case: its time, and its peak as the naive validator confirms it.

Contract: no peak is reported that the naive validator has not accepted, whoever made the offsets; after `compile_all`
no method of the table compiles anything, so times are of placement alone.
"""

import gc
import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stalloc.planner import Plan, Progress, plan, plan_arrays, validate
from stalloc.planner.problem import parts_of, pieces_of

from .baselines import BASELINES, Baseline
from .baselines.placing import Column
from .cases import CAPACITY, Case


@dataclass(frozen=True)
class Result:
    peak_bytes: int
    seconds: float  #: median of the runs
    proven: bool = False  #: stalloc says that no plan has a lower peak
    within_seconds: float = 0.0  #: until stalloc's packings of all parts kept the capacity, median of the runs


def judged(case: Case, offset: Column, load_bytes: int) -> int:
    """The peak of the offsets. Raises AssertionError with the validator's reason if they are no packing."""
    peak = int((offset + case.size).max())
    lifespans = {"size": case.size, "start": case.start, "end": case.end, "stream": np.zeros(len(case.size), np.int64)}
    stated = {"peak_bytes": peak, "lower_bound_bytes": load_bytes, "optimal": peak == load_bytes}
    made_by = {"method": "", "kind": "trace", "provenance": {}, "schedule_row": np.empty(0, np.int64)}
    offset = np.ascontiguousarray(offset, np.int64)
    verdict = validate(Plan(offset=offset, device=0, alignment=case.alignment, **lifespans, **stated, **made_by))
    assert verdict.ok, f"{case.name}: {verdict.reason}: {verdict.detail}"
    return peak


def run_stalloc(case: Case, load_bytes: int, repeat: int, time_budget_seconds: float | None = None) -> Result:
    """The library's own planner, `stalloc.plan` with no options but the alignment, or with a time budget."""
    times, within = [], []
    for _ in range(repeat):
        reports: list[tuple[float, Progress]] = []
        gc.collect()
        began = time.perf_counter()
        made = plan(
            (case.start, case.end, case.size),
            alignment=case.alignment,
            time_budget_seconds=time_budget_seconds,
            progress=lambda told, reports=reports: reports.append((time.perf_counter(), told)),  # type: ignore[misc]
        )
        times.append(time.perf_counter() - began)
        within.append(_within(case, reports, times[-1] + began) - began if case.group == "minimalloc" else 0.0)
    peak = judged(case, made.offset, load_bytes)
    assert peak == made.peak_bytes, f"{case.name}: the plan states a peak of {made.peak_bytes}, it is {peak}"
    return Result(peak, statistics.median(times), made.optimal, statistics.median(within))


def _within(case: Case, reports: list[tuple[float, Progress]], ended: float) -> float:
    """When every part of the case had a packing that keeps the capacity, which the planner was not told.

    A part is known by its number of requests; what was never reported counts as found at the end.
    """
    found: dict[int, float] = {}
    for piece in pieces_of(parts_of(case.start, case.end, case.size)):
        count = len(piece.rows)
        kept = (
            at for at, told in reports if told.num_requests == count and piece.base_bytes + told.peak_bytes <= CAPACITY
        )
        found[count] = next(kept, ended)
    return max(found.values(), default=ended)


def run_baseline(case: Case, load_bytes: int, baseline: Baseline) -> Result | str:
    if baseline.missing:
        return baseline.missing
    if len(case.size) > baseline.max_requests:
        return f"left out above {baseline.max_requests:,} requests"
    place: Callable[..., Column] = baseline.place
    takes_phases = case.phase_edges is not None and "phase_edges" in inspect.signature(place).parameters
    options = {"phase_edges": case.phase_edges} if takes_phases else {}
    began = time.perf_counter()
    offset = place(case.start, case.end, case.size, **options)
    seconds = time.perf_counter() - began
    return Result(judged(case, offset, load_bytes), seconds)


def compile_all() -> None:
    """Run everything once on a problem that is small, and hard enough that the planner searches."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, 60, 80)
    end = start + rng.integers(1, 30, 80)
    size = rng.integers(1, 100, 80)
    plan_arrays(start, end, size)
    plan_arrays(start, end, size, alignment=1)
    for baseline in BASELINES:
        if not baseline.missing and baseline.name != "CP-SAT":
            baseline.place(start, end, size)
