"""Slow paths that fail or are interrupted, wherever it may be: the allocator stays usable and loses nothing."""

import os
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cupy_installed")

LINES = int(os.environ.get("LINES", "20"))  # of the slow path that fail, for each kind of error, with and without marks

_PROLOGUE = """
import ctypes, gc, json, signal, sys, threading, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
import numpy as np
import stalloc
from stalloc.device import VirtualGPU, virtual
from stalloc.runtime import layout, process
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
    if event == "call":
        if code.co_name == "_help" and code.co_filename == process.__file__:
            inside += 1
            return trace
        return trace if inside and code.co_filename.startswith(folder) and code.co_name != "_after" else None
    if code.co_name == "_help" and code.co_filename == process.__file__:
        inside -= event == "return"
        return trace
    if event == "line" and inside:
        lines += 1
        if lines == at:
            raise error
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
                    CONTROLLER.share(held[-1].ptr, streams[0].ptr)
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
    CONTROLLER.help(layout.POLL, 0)
    RUNTIME.rest()
    names = "ALLOCATED", "REQUESTED", "RESERVED", "NUM_LIVE", "NUM_DEFERRED", "ARENA_BYTES", "NUM_LEASES", "LOCK"
    found = {name: STATE[name] for name in names if STATE[name]}
    if virtual.used_bytes() or CONTROLLER._segments:
        found["held"] = [virtual.used_bytes(), len(CONTROLLER._segments)]
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


@pytest.mark.parametrize("raised", ["RuntimeError('made up')", "MemoryError()"])
def test_an_error_at_any_line_of_the_slow_path_loses_nothing(run_checks: Any, raised: str) -> None:
    total, refused, left, planned = run_checks(
        _PROLOGUE
        + _EVERY_LINE
        + f"""
raised = lambda: {raised}
NUM = {LINES}
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
        planned += CONTROLLER.num_plans
print(json.dumps([total, refused, left, planned]))
"""
    )
    assert total > 300, "the slow path is run"
    assert left == []
    assert refused > 0
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
