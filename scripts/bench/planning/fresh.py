"""What a user waits for and pays in a process of its own: the first plan, and the memory of a large one.

Contract: each figure comes from a new interpreter, so nothing that this process has loaded or compiled counts.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from .cases import Case

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
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=True,
    )
    return float(done.stdout)


def warm_seconds(repeat: int) -> float:
    """Import and first plan with everything compiled before: the median."""
    _figure(_FIRST_PLAN)
    return statistics.median(_figure(_FIRST_PLAN) for _ in range(repeat))


def cold_seconds() -> float:
    """Import and first plan with an empty cache of compiled functions."""
    with tempfile.TemporaryDirectory() as folder:
        return _figure(_FIRST_PLAN, NUMBA_CACHE_DIR=folder)


def bytes_a_request(case: Case) -> float:
    """The highest memory while planning, input and result included, above what the loaded library takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "columns.npy"
        np.save(path, np.stack([case.start, case.end, case.size]))
        return _figure(_MEMORY, str(path))
