"""The end of a program: its own exit code and no word of stalloc's, whatever its threads are at."""

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cupy_installed")

_PROLOGUE = """
import atexit, gc, os, signal, sys, threading, time
from stalloc.device import VirtualGPU
import stalloc
def late():
    '''Registered before stalloc is there, so that it runs after whatever stalloc does at the end.'''
    for action in at_end:
        action()
at_end = []
atexit.register(late)
from stalloc.integrations import ranks
planners = [ranks.plan_together]
ranks.plan_together = lambda schedule, **options: planners[-1](schedule, **options)
RUNTIME = stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=1 << 30))
CONTROLLER = RUNTIME.controllers[0]
STATE = CONTROLLER.state
import cupy as cp
MIB = 1 << 20
alloc = cp.cuda.alloc
entered = threading.Event()
def observer(*facts):
    entered.set()
    time.sleep(0.7)
class Slow:
    '''Python's end takes a while.'''
    def __del__(self, sleep=time.sleep):
        sleep(0.5)
def in_thread(function):
    def work():
        while True:
            try:
                function()
            except cp.cuda.memory.OutOfMemoryError:
                pass
    threading.Thread(target=work, daemon=True).start()
def steps(count):
    for _ in range(count):
        held = [alloc(MIB + 4096 * i) for i in range(8)]
        del held
        stalloc.step()
"""

_ENDINGS = {
    "a thread that is inside for long": """
RUNTIME.observers.append(observer)
in_thread(lambda: alloc(1 << 40))
entered.wait()
sys.slow = Slow()
""",
    "a planner that never ends": """
planners.append(lambda schedule, **options: time.sleep(1e6))
CONTROLLER.status.settings = stalloc.integrations.Settings(plan_wait_seconds=0.0)
steps(6)
assert CONTROLLER.status.phase.value == "planning"
sys.slow = Slow()
""",
    "a thread that waits for such a planner": """
def search(schedule, **options):
    entered.set()
    while True:
        time.sleep(0.01)
planners.append(search)
in_thread(lambda: steps(1))
entered.wait()
time.sleep(0.1)
sys.slow = Slow()
""",
    "a planner at work": """
CONTROLLER.status.settings = stalloc.integrations.Settings(plan_wait_seconds=0.0)
for _ in range(4):
    for i in range(3000):
        block = alloc(600 + 512 * (i % 700))
    stalloc.step()
""",
    "threads that allocate, share and mark steps": """
streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
def work():
    block = alloc(3 * MIB)
    STATE.share(block.ptr, streams[0].ptr)
in_thread(work)
in_thread(lambda: steps(1))
in_thread(CONTROLLER.memory.release_unused)
steps(10)
sys.slow = Slow()
""",
    "handlers at exit that go on as before": """
def go_on():
    before = STATE.record.statistics.num_ooms
    held = [alloc(70 * MIB) for _ in range(3)]
    held.clear()
    steps(10)
    CONTROLLER.memory.release_unused()
    assert STATE.record.statistics.num_ooms == before, "memory was refused"
at_end.append(go_on)
""",
    "what is freed and asked for while modules go": """
stream = cp.cuda.Stream(non_blocking=True)
class Late:
    def __init__(self):
        self.blocks = [alloc(i * MIB) for i in range(1, 6)]
        for block in self.blocks:
            STATE.share(block.ptr, stream.ptr)
    def __del__(self):
        self.blocks.clear()
sys.late = Late()
late_one = Late()
late_one.itself = late_one
""",
}


def test_a_thread_is_stopped_in_silence_where_exceptions_can_only_be_reported(run_fresh: Any) -> None:
    done = run_fresh(
        """
import threading
from stalloc.threads import start_thread
class Slow:
    def __del__(self):
        entered.set()
        while True:
            pass
def work():
    try:
        Slow()
        while True:
            pass
    finally:
        print("over")
entered = threading.Event()
start_thread(work)
entered.wait()
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


#: the program ends once the planner has set `entered`
_END_WHILE_PLANNING = """
CONTROLLER.status.settings = stalloc.integrations.Settings(plan_wait_seconds=0.0)
steps(6)
entered.wait()
sys.exit(7)
"""


def test_a_planner_at_work_is_stopped_and_waited_for(run_fresh: Any) -> None:
    work = """
def plan_for_ever(schedule, **options):
    entered.set()
    try:
        while True:
            sum(range(1000))
    finally:
        time.sleep(0.3)
        os.write(1, b"stopped")
planners.append(plan_for_ever)
"""
    done = run_fresh(_PROLOGUE + work + _END_WHILE_PLANNING)
    assert (done.returncode, done.stdout, done.stderr) == (7, "stopped", "")


@pytest.mark.slow
def test_a_thread_that_compiles_is_stopped_once_it_has_compiled(run_fresh: Any) -> None:
    """Not in the middle: LLVM's text was given back twice where it came between giving it back and a note of that."""
    work = """
from stalloc.threads import uninterrupted
def compile():
    entered.set()
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        sum(range(100))
    os.write(1, b"compiled")
def plan_and_compile(schedule, **options):
    while True:
        uninterrupted(uninterrupted, compile)
planners.append(plan_and_compile)
"""
    done = run_fresh(_PROLOGUE + work + _END_WHILE_PLANNING)
    assert (done.returncode, done.stdout, done.stderr) == (7, "compiled", "")


#: the others take long
_ALWAYS = (
    "a planner at work",
    "threads that allocate, share and mark steps",
    "what is freed and asked for while modules go",
)


@pytest.mark.parametrize(
    "name", [name if name in _ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in _ENDINGS]
)
def test_a_program_ends_by_itself(run_fresh: Any, name: str) -> None:
    done = run_fresh(_PROLOGUE + _ENDINGS[name] + "\nsys.exit(7)\n")  # which does not wait for ever
    assert (done.returncode, done.stderr) == (7, "")


def test_a_child_of_a_thread_of_a_process_that_plans(run_checks: Any) -> None:
    """A fork in the middle of planning, by a thread, while others allocate: the child allocates, and ends."""
    codes = run_checks(
        _PROLOGUE
        + """
import json
over = threading.Event()
planners.append(lambda schedule, **options: over.wait())
CONTROLLER.status.settings = stalloc.integrations.Settings(plan_wait_seconds=0.0)
steps(6)
assert CONTROLLER.status.phase.value == "planning"
stop = False
def work():
    while not stop:
        alloc(3 * MIB)
threading.Thread(target=work, daemon=True).start()
codes = []
def fork():
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            code = 1
            try:
                held = [alloc(i * MIB) for i in range(1, 30)]
                spans = sorted((block.ptr, block.ptr + block.mem.size) for block in held)
                assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:]))
                del held
                steps(5)
                CONTROLLER.memory.release_unused()
                code = 0
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
forking = threading.Thread(target=fork)
forking.start()
forking.join()
stop = True
over.set()
print(json.dumps(codes))
"""
    )
    assert codes == [0] * 4


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_torch")
def test_a_program_whose_last_statement_computes_gradients_ends_with_its_own_code(run_fresh: Any) -> None:
    """The thread that computed them is slow to drop them: it gets little of the one processor, and no lock in time."""
    done = run_fresh(
        """
import os, sys
from pathlib import Path
from stalloc.device import VirtualGPU
import stalloc
stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=1 << 30))
import torch
weights = [torch.ones(1000, device="cuda", requires_grad=True) for _ in range(1000)]
loss = sum(weight.sum() for weight in weights)
torch.autograd.grad(loss, weights, retain_graph=True)
processors = list(os.sched_getaffinity(0))[:1]
os.sched_setaffinity(0, processors)
sys.setswitchinterval(10)
for task in Path("/proc/self/task").iterdir():
    if (task / "comm").read_text().startswith("pt_autograd"):
        os.sched_setaffinity(int(task.name), processors)
        os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
torch.autograd.grad(loss, weights)
sys.exit(7)
"""
    )
    assert (done.returncode, done.stderr) == (7, "")
