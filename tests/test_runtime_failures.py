"""Slow paths that fail or are interrupted, wherever it may be: the allocator stays usable and loses nothing."""

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cupy_installed")

#: lines of the slow path that fail, for each kind of error, with and without marks
LINES = [6, pytest.param(20, marks=pytest.mark.slow)]
#: programs that a signal interrupts, or comes too late for
ROUNDS = [30, pytest.param(60, marks=pytest.mark.slow)]

_PROLOGUE = """
import ctypes, gc, json, signal, sys, threading, warnings
from operator import attrgetter
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
import numpy as np
import stalloc
from stalloc.device import VirtualGPU, virtual
from stalloc.core import constants
from stalloc.runtime import process
RUNTIME = stalloc.install(
    device="virtual", gpu=VirtualGPU(total_bytes=1 << 30), settings=stalloc.integrations.Settings(max_plans=1 << 30)
)
CONTROLLER = RUNTIME.controllers[0]
STATE = CONTROLLER.state
import cupy as cp
MIB = 1 << 20
alloc = cp.cuda.alloc
warnings.simplefilter("ignore")
"""

_EVERY_LINE = """
folder = process.__file__.rpartition("/")[0]
inside, lines, at, error = 0, 0, 0, None
def trace(frame, event, argument):
    # counts the lines of the slow path that run, and lets one of them fail
    global inside, lines
    code = frame.f_code
    entered = code.co_filename == process.__file__ and code.co_name == "_help"
    if event == "call":
        inside += entered
        return trace if inside and code.co_filename.startswith(folder) else None
    if event == "line" and inside:
        lines += 1
        if lines == at:
            raise error
    inside -= event == "return" and entered
    return trace

streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
def program(marked):
    '''Steps that are planned, then others that are not; blocks that two streams use; memory given back.'''
    refused = 0
    for step in range(14):
        held = []
        for i in range(8):
            try:
                size = MIB + 4096 * i if step < 9 else 3 * MIB - 8192 * (i * step % 11)
                held.append(alloc(size))
                if i % 3 == 0:
                    STATE.share(held[-1].ptr, streams[0].ptr)
            except cp.cuda.memory.OutOfMemoryError:
                refused += 1
        if marked:
            stalloc.step()
    return refused

def left_over():
    '''What is left when all is given back.'''
    global error
    error = None  # it holds the frames that it went through, and they hold blocks
    gc.collect()
    CONTROLLER.help(constants.POLL, 0)
    RUNTIME.rest()
    names = ("total.allocated_bytes", "total.requested_bytes", "total.num_live", "statistics.reserved_bytes",
        "hot.num_deferred", "plan.arena_bytes", "dynamic.num_leases", "lock")
    found = {name: attrgetter(name)(STATE.record) for name in names if attrgetter(name)(STATE.record)}
    if virtual.used_bytes() or CONTROLLER.memory.segments:
        found["held"] = [virtual.used_bytes(), len(CONTROLLER.memory.segments)]
    RUNTIME.resume()
    return found

def run(marked, fail_at=0, raised=None):
    global at, lines, error, inside
    at, lines, error, inside = fail_at, 0, raised, 0
    sys.settrace(trace)
    try:
        refused = program(marked)
    finally:
        sys.settrace(None)
    return refused

program(True), left_over()  # everything is compiled
"""


@pytest.mark.parametrize("num_lines", LINES)
@pytest.mark.parametrize("raised", ["RuntimeError('made up')", "MemoryError()", "RecursionError()"])
def test_an_error_at_any_line_of_the_slow_path_loses_nothing(run_checks: Any, raised: str, num_lines: int) -> None:
    total, refused, left, planned = run_checks(
        _PROLOGUE
        + _EVERY_LINE
        + f"""
raised = lambda: {raised}
NUM = {num_lines}
"""
        + """
rng = np.random.default_rng(5)
total = refused = planned = 0
left = []
for marked in (True, False):
    run(marked)
    number = lines
    total += number
    left_over()
    for nth in sorted(rng.choice(number, min(number, NUM), replace=False).tolist()):
        try:
            refused += run(marked, nth + 1, raised())
        except KeyboardInterrupt:
            refused += 1  # where the program goes on
        found = left_over()
        if found:
            left.append([marked, nth + 1, found])
            break
        planned += CONTROLLER.status.num_plans
print(json.dumps([total, refused, left, planned]))
"""
    )
    assert total > 300, "the slow path is run"
    assert left == []
    assert (refused > 0) == (raised != "RecursionError()"), "it is done again, with more room"
    assert planned > 0


def test_an_interruption_of_the_slow_path_is_raised_where_the_program_goes_on(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
def interrupt(*facts):
    raise KeyboardInterrupt
RUNTIME.observers.append(interrupt)
try:
    try:
        alloc(1 << 40)
    except cp.cuda.memory.OutOfMemoryError:
        pass
    for _ in range(100):
        pass
    heard = False
except KeyboardInterrupt:
    heard = True
RUNTIME.observers.clear()
after = alloc(MIB)
print(json.dumps([heard, after.mem.size]))
"""
    ) == [True, 1 << 20]


_SIGNALS = """
class Stop(Exception):
    pass
raised, seed, rounds = {raised}, {seed}, {rounds}
fired, held = 0, []
def handler(number, frame):
    global fired
    fired += 1
    raise raised(fired)
signal.signal(signal.SIGALRM, handler)
warnings.simplefilter("error")

def program(marked):
    for step in range(14):
        held.clear()
        for i in range(8):
            held.append(alloc(MIB + 4096 * i if step < 9 else 3 * MIB - 8192 * (i * step % 11)))
            if i % 3 == 0:
                STATE.share(held[-1].ptr, streams[0].ptr)
        if marked:
            stalloc.step()
        if step == 12:
            CONTROLLER.memory.release_unused()

def overlaps():
    spans = sorted((block.ptr, block.ptr + block.mem.size) for block in held)
    return sum(end > begin for (_, end), (begin, _) in zip(spans, spans[1:]))

def seconds():
    begin = time.monotonic()
    program(True)
    return time.monotonic() - begin

took = min(seconds() for _ in range(4))
rng = np.random.default_rng(seed)
heard, wrong = [], []
for number in range(rounds):
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-5, took)))
            program(number % 2 == 0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except raised as error:
        heard += error.args
    if overlaps():
        wrong.append([number, "overlap"])
    held.clear()
    found = left_over()
    if found:
        wrong.append([number, found])
print(json.dumps([fired, sorted(set(range(1, fired + 1)) - set(heard)), wrong, CONTROLLER.status.num_plans]))
"""


@pytest.mark.parametrize("num_rounds", ROUNDS)
@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "Stop"])
def test_a_signal_at_any_moment_reaches_the_program_and_loses_nothing(
    run_checks: Any, raised: str, num_rounds: int
) -> None:
    """What a handler raises, ends a program that allocates, shares blocks with other streams and marks steps."""
    source = _SIGNALS.format(raised=raised, seed=7, rounds=num_rounds)
    fired, unheard, wrong, planned = run_checks(_PROLOGUE + "import time\n" + _EVERY_LINE + source)
    assert fired > num_rounds // 10
    assert unheard == []
    assert wrong == []
    assert planned > 0


@pytest.mark.usefixtures("cuda_torch")
def test_an_interruption_while_torch_asks_stalloc_for_something_ends_nothing_halfway(run_checks: Any) -> None:
    """Signals that come while C++ code runs are handled at the first line of Python: in the middle of its request."""
    results = run_checks(
        _PROLOGUE
        + """
import _thread, collections, functools, operator
import torch
def interrupted(function, *arguments, **options):
    '''Interrupt just before a call, with no Python code between; whether that is heard of.'''
    calls = _thread.interrupt_main, functools.partial(function, *arguments, **options)
    answers = iter([])
    try:
        collections.deque(map(operator.call, calls), maxlen=0)
        return False
    except KeyboardInterrupt:
        return True
new = functools.partial(torch.empty, dtype=torch.uint8, device="cuda")
first = new(3 * MIB)
heard = [interrupted(new, 40 * MIB)]
stream = torch.cuda.Stream()
heard.append(interrupted(first.record_stream, stream))
del first
deferred = STATE.record.hot.num_deferred
heard.append(interrupted(torch._C._cuda_emptyCache))
graph = torch.cuda.CUDAGraph()
with torch.cuda.stream(stream):
    heard.append(interrupted(torch._C._CUDAGraph.capture_begin, graph, None, "global"))
    private = STATE.record.hot.private_kind > 0
    block = new(MIB)
    heard.append(interrupted(torch._C._CUDAGraph.capture_end, graph))
    after = STATE.record.hot.private_kind
kinds = len(CONTROLLER.captures.pools)
del block
heard.append(interrupted(torch._C._CUDAGraph.reset, graph))
again = new(5 * MIB)
print(json.dumps([heard, deferred, private, after, kinds, len(CONTROLLER.captures.pools),
                  STATE.record.statistics.num_ooms]))
"""
    )
    assert results == [[True] * 6, 1, True, 0, 1, 0, 0]


def test_deep_recursion_finds_memory(run_checks: Any) -> None:
    """The slow path is Python code: where the program has no calls left, it gets some."""
    depths, limit, note, ooms = run_checks(
        _PROLOGUE
        + """
served = []
def deeper(size):
    try:
        served.append(alloc(size).mem.size)
        deeper(size + 2 * MIB)
    except RecursionError:
        pass
sys.setrecursionlimit(150)
deeper(11 * MIB)
print(json.dumps([len(served), sys.getrecursionlimit(), CONTROLLER.status.note, STATE.record.statistics.num_ooms]))
"""
    )
    assert depths > 20
    assert limit == 150
    assert note == ""
    assert ooms == 0


_FAILING_POOL = """
class FailingPool:
    '''The pool of a device; some of its allocations fail.'''
    def __init__(self, pool):
        self.pool, self.calls, self.failing, self.error = pool, 0, range(0), None
    def __getattr__(self, name):
        return getattr(self.pool, name)
    def malloc(self, size):
        self.calls += 1
        if self.calls in self.failing:
            raise self.error()
        return self.pool.malloc(size)
SOURCE = CONTROLLER.memory.source
POOL = SOURCE.pool = FailingPool(SOURCE.pool)
out_of_memory = lambda: cp.cuda.memory.OutOfMemoryError(1, 1, 1)
driver = lambda: cp.cuda.runtime.CUDARuntimeError(700)
"""


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_an_allocation_from_the_device_that_fails_at_any_time_has_its_own_error_and_loses_nothing(
    run_checks: Any, every: int
) -> None:
    """While steps are observed, at the switch, on the plan, and when the program does something else."""
    calls, refused, wrong, planned = run_checks(
        _PROLOGUE
        + _EVERY_LINE
        + _FAILING_POOL
        + """
class Wrong(Exception):
    pass
def attempt(make, marked):
    '''How many requests were refused, with the error that the pool gave.'''
    refused = 0
    for step in range(12):
        held = []
        for i in range(8):
            try:
                held.append(alloc(MIB + 4096 * i if step < 9 else 3 * MIB - 8192 * (i * step % 11)))
            except Exception as error:
                if type(error) is not type(make()):
                    raise Wrong(repr(error))
                refused += 1
        if marked:
            stalloc.step()
    return refused
wrong, total, refused, planned = [], 0, 0, 0
for marked in (True, False):
    POOL.calls = 0
    attempt(out_of_memory, marked), left_over()
    number = POOL.calls
    total += number
    for make in (out_of_memory, driver):
        for nth in range(1, number + 1, int(sys.argv[1])):
            for many in (1, 8):
                POOL.calls, POOL.error, POOL.failing = 0, make, range(nth, nth + many)
                refused += attempt(make, marked)
                POOL.failing = range(0)
                found = left_over()
                refused_now, plans = attempt(make, marked), CONTROLLER.status.num_plans
                planned += CONTROLLER.status.phase.value == "running on the plan"
                found |= left_over()
                if found or refused_now:
                    wrong.append([marked, nth, many, found, refused_now])
print(json.dumps([total, refused, wrong, planned]))
""",
        str(every),
    )
    assert calls > 10
    assert wrong == []
    assert refused > 20
    assert planned > 10


@pytest.mark.usefixtures("cuda_torch")
def test_torch_hears_of_a_driver_that_fails_and_of_memory_that_has_run_out(run_checks: Any) -> None:
    """A program that catches out-of-memory errors would try again for ever."""
    assert run_checks(
        _PROLOGUE
        + _FAILING_POOL
        + """
import torch
def name(make):
    POOL.calls, POOL.error, POOL.failing = 0, make, range(1, 9)
    try:
        torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        return [type(error).__name__, "CUDARuntimeError" in str(error)]
    finally:
        POOL.failing = range(0)
first = torch.ones(8, device="cuda")
names = [name(make) for make in (driver, out_of_memory, driver)]
print(json.dumps([names, torch.empty(40 * MIB, dtype=torch.uint8, device="cuda").numel()]))
"""
    ) == [[["RuntimeError", True], ["OutOfMemoryError", False], ["RuntimeError", True]], 40 << 20]
