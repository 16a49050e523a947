"""A fork while other threads are inside the allocator: the child's tables are whole, and it cannot hang."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cupy_installed")

_FORKS = """
import json, os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import numpy as np
import stalloc
from stalloc.device import VirtualGPU
RUNTIME = stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=2 << 30, copy_limit_bytes=None))
CONTROLLER = RUNTIME.controllers[0]
STATE = CONTROLLER.state
from programs.core_machine import hammer
from stalloc.core.entry import cupy_entries
from stalloc.core.snapshot import segments
ALLOCATE, FREE = cupy_entries(RUNTIME.states.ctypes.data)
SIZES = np.array([600, 5000, 70_000, 300_000, 1_500_000])

def churn(seed, operations, slots=40):
    return hammer(ALLOCATE, FREE, 0, SIZES, False, operations, slots, seed, seed)

def whole():
    for segment in segments(STATE):
        assert sum(block.size_bytes for block in segment.blocks) == segment.size_bytes, "a segment is torn"

def in_child(check):
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(60)  # one that hangs is killed by the system
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

churn(1, 100), whole(), CONTROLLER.memory.release_unused()
done = False
def work(seed):
    while not done:
        assert churn(seed, 20_000) == (0, 0)
def give_back():
    while not done:
        CONTROLLER.memory.release_unused()
        time.sleep(0.001)
threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in (2, 3)]
threads.append(threading.Thread(target=give_back, daemon=True))
for thread in threads:
    thread.start()
"""


def test_children_of_a_process_whose_threads_are_inside_the_allocator(run_checks: Any) -> None:
    codes, end = run_checks(
        _FORKS
        + """
def check():
    whole()
    live, allocated = STATE.record.total.num_live, STATE.record.total.allocated_bytes
    assert churn(9, 2_000) == (0, 0)
    assert (STATE.record.total.num_live, STATE.record.total.allocated_bytes) == (live, allocated)
    CONTROLLER.memory.release_unused()
    assert STATE.record.statistics.num_unknown_frees == 0
    whole()
codes = [in_child(check) for _ in range(8)]
done = True
for thread in threads:
    thread.join()
CONTROLLER.memory.release_unused()
print(json.dumps([codes, [STATE.record.total.allocated_bytes, STATE.record.total.num_live,
    STATE.record.statistics.reserved_bytes, STATE.record.statistics.num_unknown_frees]]))
""",
        str(Path(__file__).parent),
    )
    assert codes == [0] * 8
    assert end == [0, 0, 0, 0], "the parent goes on as if nothing had been"


@pytest.mark.slow
def test_a_child_of_a_process_that_compiles_in_another_thread_can_compile_too(run_checks: Any) -> None:
    """The planner compiles in a thread of its own."""
    (codes,) = run_checks(
        _FORKS
        + """
import numba
def compile_for_long(i):
    while not done:
        numba.njit(lambda x: x * i + sum(range(i)) + x ** 3)(i)
        i += 1
compiling = threading.Thread(target=compile_for_long, args=(1,), daemon=True)
compiling.start()
def check():
    assert numba.njit(lambda x: x + 7)(1) == 8
    assert churn(9, 200) == (0, 0)
codes = [in_child(check) for _ in range(5)]
done = True
compiling.join()
print(json.dumps([codes]))
""",
        str(Path(__file__).parent),
    )
    assert codes == [0] * 5
