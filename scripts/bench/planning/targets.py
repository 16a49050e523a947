"""The targets that the planner is held to, and rows that say how far it is.

Contract: a row's `ok` is what its value and target say; the figures of the table are rows too, without a target. Plans
of small edits are judged by the naive validator, too; what a user waits for and pays is measured in a new interpreter,
so nothing that this process has loaded or compiled counts.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stalloc.planner import plan, replan

from .cases import A_MILLION, CAPACITY, MANY, Case
from .judging import Result, judged, run_stalloc

#: what MiniMalloc takes for A to K given the capacity, seconds on two cores: as they are, reversed in time
MINIMALLOC_SECONDS, MINIMALLOC_REVERSED_SECONDS = 26.65, 30.5
TIMES_QUICKER = 20
#: for an instance that is not solved within the usual effort
LONG_SECONDS = 60
#: the lowest peaks known of the two instances whose load nobody reaches
KNOWN_PEAKS = {"D": 995_328, "J": 1_005_568}
#: device traces that annealing has to place at the load
ANNEALED = 20
IDEALLOC_SECONDS = {"pangu_2.6B": 1.0, "resnet50": 0.05, "iopddl_G_1": 0.05, "iopddl_S_1": 0.2, "iopddl_Y_1": 0.2}

Measured = list[tuple[Case, int, Result]]


@dataclass(frozen=True)
class Row:
    name: str
    value: Any
    target: str | None = None
    ok: bool | None = None


def at_most(name: str, value: float, limit: float, unit: str) -> Row:
    return Row(f"{name}, {unit}", round(value, 5), f"<= {limit:g}", value <= limit)


def at_least(name: str, value: int, limit: int) -> Row:
    return Row(name, value, f">= {limit}", value >= limit)


def gap_percent(load_bytes: int, result: Result) -> float:
    return 100 * (result.peak_bytes / load_bytes - 1)


def of_traces(measured: Measured) -> list[Row]:
    if not measured:
        return []
    seconds = [result.seconds for _, _, result in measured]
    done = sum(result.proven for _, _, result in measured)
    return [
        at_least("device traces at the bound or proven", done, len(measured)),
        at_most("slowest device trace", max(seconds), 0.25, "s"),
        at_most("all device traces", sum(seconds), 2.0, "s"),
    ]


def of_method(name: str, results: list[tuple[int, Result]], least: int | None = None) -> list[Row]:
    """One method alone on device traces, with their loads in bytes: how many it has to place there, all by default."""
    at_bound = sum(result.peak_bytes == load for load, result in results)
    return [at_least(f"{name}: device traces at the load", at_bound, min(least or len(results), len(results)))]


def of_minimalloc(measured: Measured, backwards: Measured, shuffled: Measured) -> list[Row]:
    """MiniMalloc A to K, the capacity not given: the time until it is kept, and that of whole calls."""
    if not measured:
        return []
    rows = []
    for suffix, results, limit in (
        ("", measured, 1.0),
        (", reversed in time", backwards, MINIMALLOC_REVERSED_SECONDS / TIMES_QUICKER),
        (", rows permuted", shuffled, MINIMALLOC_SECONDS / TIMES_QUICKER),
    ):
        within = sum(result.peak_bytes <= CAPACITY for _, _, result in results)
        rows.append(at_least(f"MiniMalloc within {CAPACITY:,}{suffix}", within, len(results)))
        found, whole = (
            sum(times) for times in zip(*((r.within_seconds, r.seconds) for _, _, r in results), strict=True)
        )
        rows.append(at_most(f"MiniMalloc A to K{suffix}, until the capacity is kept", found, limit, "s"))
        rows.append(Row(f"MiniMalloc A to K{suffix}, whole calls, s", round(whole, 5)))
    at_bound = sum(result.peak_bytes == load for _, load, result in measured)
    rows.append(at_least("MiniMalloc at the load", at_bound, max(len(measured) - 2, 0)))
    for case, load, result in measured:
        known = KNOWN_PEAKS.get(case.name)
        if known is not None:
            ok = result.peak_bytes <= known or result.proven
            rows.append(Row(f"MiniMalloc {case.name}, bytes", result.peak_bytes, f"<= {known} or proven", ok))
            if not ok:
                longer = run_stalloc(case, load, 1, time_budget_seconds=LONG_SECONDS)
                ok = longer.peak_bytes <= known or longer.proven
                name = f"MiniMalloc {case.name}, bytes, with a time budget of {LONG_SECONDS} s"
                rows.append(Row(name, longer.peak_bytes, f"<= {known} or proven", ok))
    return rows


def of_idealloc(measured: Measured) -> list[Row]:
    rows = []
    for case, load, result in measured:
        rows.append(at_most(f"{case.name} above the load", gap_percent(load, result), 0.0, "%"))
        rows.append(at_most(case.name, result.seconds, IDEALLOC_SECONDS[case.name], "s"))
    return rows


def of_stages(measured: Measured) -> list[Row]:
    rows = []
    for case, load, result in measured:
        rows.append(at_most(f"{case.name} above the load", gap_percent(load, result), 0.1, "%"))
        if case.num_asked >= MANY:
            limit = 0.3 if case.num_asked < A_MILLION else 3.0 if case.num_steps > 1 else 8.0
            rows.append(at_most(case.name, result.seconds, limit, "s"))
    return rows


NUM_EDITS, QUICK_EDITS = 6, 2  #: of each case
#: cases with fewer requests are planned in less time than a call takes, those with more take too long for a table
WORTH_IT, MOST = 2_000, 200_000
#: seconds from scratch above which planning anew is worth avoiding
NOTICED = 0.02


def edited(case: Case, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    start, end, size = case.start.copy(), case.end.copy(), case.size.copy()
    rows = rng.choice(len(size), 1 + seed % 3, replace=False)
    change = seed % 5
    if change == 0:
        start, end, size = (np.delete(column, rows) for column in (start, end, size))
    elif change == 1:
        start, end, size = (np.concatenate([column, column[rows]]) for column in (start, end, size))
    elif change == 2:
        size[rows] += 2 * case.alignment
    elif change == 3:
        size[rows] = np.maximum(size[rows] // 2 // case.alignment, 1) * case.alignment
    else:
        end[rows] += rng.integers(1, 20, len(rows))
    return replace(case, start=start, end=end, size=size)


def of_edits(cases: list[Case], repeat: int, num_edits: int) -> list[Row]:
    """How much quicker a small edit is planned from the plan before, and how often the peak is the same."""
    slow, quick, same, worse, count = [], [], 0, 0.0, 0
    for case in cases:
        if not WORTH_IT <= len(case.size) <= MOST:
            continue
        before = plan((case.start, case.end, case.size), alignment=case.alignment)
        for seed in range(num_edits):
            changed = edited(case, seed)
            given = (changed.start, changed.end, changed.size)
            scratch, again = [], []
            for _ in range(repeat):
                began = time.perf_counter()
                anew = plan(given, alignment=case.alignment)
                scratch.append(time.perf_counter() - began)
                began = time.perf_counter()
                made = replan(before, given)
                again.append(time.perf_counter() - began)
            judged(changed, made.offset, made.lower_bound_bytes)
            seconds = statistics.median(scratch)
            (slow if seconds >= NOTICED else quick).append(seconds / statistics.median(again))
            same += made.peak_bytes <= anew.peak_bytes
            worse = max(worse, made.peak_bytes / anew.peak_bytes - 1)
            count += 1
    rows = []
    if slow:
        times = statistics.median(slow)
        name = f"small edits, {NOTICED:g} s or more from scratch: times quicker, median of {len(slow)}"
        rows.append(Row(name, round(times, 1), f">= {TIMES_QUICKER}", times >= TIMES_QUICKER))
    if quick:
        times = statistics.median(quick)
        rows.append(Row(f"small edits, less from scratch: times quicker, median of {len(quick)}", round(times, 1)))
    if count:
        most = count // 2 + 1
        rows.append(Row(f"small edits: peak no higher than from scratch, of {count}", same, f">= {most}", same >= most))
        rows.append(Row("small edits: highest peak above that from scratch, %", round(100 * worse, 5)))
    return rows


_FIRST_PLAN = """
import time
began = time.perf_counter()
import stalloc.planner
starts = list(range(200))
sizes = [512 * (1 + 7 * i % 11) for i in starts]
stalloc.planner.plan_arrays(starts, [start + 1 + 5 * start % 17 for start in starts], sizes)
print(time.perf_counter() - began)
"""

_MEMORY = """
import sys
def kilobytes(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1])
import numpy as np
import stalloc.planner
starts = list(range(200))
sizes = [512 * (1 + 7 * i % 11) for i in starts]
stalloc.planner.plan_arrays(starts, [start + 1 + 5 * start % 17 for start in starts], sizes)
open("/proc/self/clear_refs", "w").write("5")
before = kilobytes("VmRSS")
columns = np.load(sys.argv[1])
layout = stalloc.planner.plan_arrays(columns[0], columns[1], columns[2])
print((kilobytes("VmHWM") - before) * 1024 / columns.shape[1])
"""


def _figure(source: str, *arguments: str, **environment: str) -> float:
    kept: Any = {"capture_output": True, "text": True, "env": os.environ | environment}
    done = subprocess.run([sys.executable, "-c", source, *arguments], check=True, **kept)
    return float(done.stdout)


def warm_seconds(repeat: int) -> float:
    _figure(_FIRST_PLAN)
    return statistics.median(_figure(_FIRST_PLAN) for _ in range(repeat))


def cold_seconds() -> float:
    with tempfile.TemporaryDirectory() as folder:
        return _figure(_FIRST_PLAN, NUMBA_CACHE_DIR=folder)


def bytes_a_request(case: Case) -> float:
    """The highest memory while planning, input and result included, above what the loaded library takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "columns.npy"
        np.save(path, np.stack([case.start, case.end, case.size]))
        return _figure(_MEMORY, str(path))
