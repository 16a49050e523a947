"""Google OR-Tools' CP-SAT on small cases: rectangles that may not overlap, the highest top as small as possible.

Source: the OR-Tools project's documentation of CP-SAT (NoOverlap2D). Needs the package ortools; a check on the other
figures rather than a rival, since it takes the whole time limit on most instances.
"""

import importlib
import importlib.util

import numpy as np

from .placing import Column, fit_in_order

SECONDS = 25.0


def missing() -> str:
    return "" if importlib.util.find_spec("ortools") else "ortools is not installed"


def place(start: Column, end: Column, size: Column) -> Column:
    """(n,) offsets after at most 25 seconds, never worse than greedy by size, from which it starts."""
    cp_model = importlib.import_module("ortools.sat.python.cp_model")

    hint = fit_in_order(start, end, size, np.argsort(-size, kind="stable"), True)
    most = int((hint + size).max(initial=0))
    unit = int(np.gcd.reduce(size)) or 1
    model = cp_model.CpModel()
    peak = model.NewIntVar(0, most // unit, "peak")
    offsets, wide, high = [], [], []
    for row, (a, b, bytes_, at) in enumerate(
        zip(start.tolist(), end.tolist(), size.tolist(), hint.tolist(), strict=True)
    ):
        offset = model.NewIntVar(0, (most - bytes_) // unit, f"offset {row}")
        model.AddHint(offset, at // unit)
        model.Add(offset + bytes_ // unit <= peak)
        offsets.append(offset)
        wide.append(model.NewFixedSizeIntervalVar(a, b - a, f"time {row}"))
        high.append(model.NewFixedSizeIntervalVar(offset, bytes_ // unit, f"space {row}"))
    model.AddNoOverlap2D(wide, high)
    model.AddCumulative(wide, [bytes_ // unit for bytes_ in size.tolist()], peak)
    model.Minimize(peak)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = SECONDS
    solver.parameters.random_seed = 0
    if solver.Solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return hint
    return np.array([solver.Value(offset) * unit for offset in offsets], np.int64)
