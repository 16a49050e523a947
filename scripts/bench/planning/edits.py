"""Small edits of a case, planned from scratch and from the plan of the case before.

Contract: both plans are judged by the naive validator; times are medians of the same number of runs.
"""

import statistics
import time
from dataclasses import replace

import numpy as np

from stalloc.planner import plan, replan

from .cases import Case
from .judging import judged
from .targets import Row

NUM_EDITS, QUICK_EDITS = 6, 2  #: of each case
TIMES_QUICKER = 20
#: cases with fewer requests are planned in less time than a call takes, those with more take too long for a table
WORTH_IT, MOST = 2_000, 200_000
#: seconds from scratch above which planning anew is worth avoiding
NOTICED = 0.02


def edited(case: Case, seed: int) -> Case:
    """One to three requests gone, new, larger, smaller or living longer."""
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


def rows_of(cases: list[Case], repeat: int, num_edits: int) -> list[Row]:
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
