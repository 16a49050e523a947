"""Compiling before the clock starts.

Contract: after `compile_all`, no method of the table compiles anything, so times are of placement alone.
"""

import numpy as np

from stalloc.planner import plan_arrays

from .baselines import BASELINES


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
