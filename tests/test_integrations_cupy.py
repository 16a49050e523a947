"""CuPy under stalloc on the virtual GPU: no byte is lost, errors are CuPy's own, loops are found and planned."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs.cupy_prologue import PROLOGUE
from properties import variants
from warm_programs import run_file

pytestmark = pytest.mark.usefixtures("cupy_installed")

PROGRAMS = Path(__file__).parent / "programs"


def patterns(operations: int, seed: int, arena: str = "pool") -> dict[str, Any]:
    """Run cupy_patterns.py and return what it says."""
    done = run_file(PROGRAMS / "cupy_patterns.py", operations, seed, arena)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning" not in done.stderr
    print(done.stdout, done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def check_patterns(result: dict[str, Any], operations: int) -> None:
    """Everything happened that was to happen, and nothing is left."""
    assert result["operations"] >= operations
    assert result["while_observing"] == "observing"
    assert result["planned"] == "running on the plan"
    assert result["dropped"] == "serving from the heap"
    for part in ("alone", "in_threads"):
        assert min(result[part].values()) > 0, "the plan served some, and others found no place in it"
    left = ("allocated_bytes", "requested_bytes", "num_live", "num_unknown_frees", "num_ooms", "arena_live", "reserved")
    assert {name: result[name] for name in (*left, "device_used")} == dict.fromkeys((*left, "device_used"), 0)


@variants("arena, operations", [("pages", 30_000), ("pool", 30_000)])
def test_every_byte_is_kept_observed_planned_dropped_and_uninstalled(arena: str, operations: int) -> None:
    check_patterns(patterns(operations, 20, arena), operations)


@pytest.mark.slow
def test_every_byte_is_kept_for_long() -> None:
    check_patterns(patterns(500_000, 0), 500_000)


def test_out_of_memory_is_cupys_error_with_our_words_and_the_program_goes_on(run_checks: Any) -> None:
    result = run_checks(
        PROLOGUE
        + """
texts, held = [], [cp.zeros(100 * MIB, dtype=cp.uint8) for _ in range(8)]
for size in (400 * MIB, 1 << 40, 1 << 50, (1 << 62) + 5, (1 << 63) - 1):
    try:
        cp.empty(size, dtype=cp.uint8)
    except cp.cuda.memory.OutOfMemoryError as error:
        texts.append(str(error))
intact = all(not array.any() for array in held)
del held[3:]
again = cp.empty(600 * MIB, dtype=cp.uint8)
print(json.dumps([texts, intact, again.nbytes, STATE.record.statistics.num_ooms, STATE.record.total.num_live,
    STATE.record.total.allocated_bytes]))
"""
    )
    texts, intact, again, ooms, live, allocated = result
    assert len(texts) == ooms == 5
    for text, size in zip(texts, (400 << 20, 1 << 40, 1 << 50, (1 << 62) + 5, (1 << 63) - 1), strict=True):
        assert "stalloc: out of memory on device 0" in text
        assert f"({size} bytes)" in text
    assert "Allocated " in texts[0]
    assert intact
    assert again == 600 << 20
    assert live == 4
    assert allocated == 900 << 20


def test_streams_do_not_share_memory_and_devices_have_their_own(run_checks: Any) -> None:
    result = run_checks(
        PROLOGUE
        + """
first, second = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
with first:
    a = cp.empty(3 * MIB, dtype=cp.uint8)
    address = a.data.ptr
    del a
with second:
    b = cp.empty(3 * MIB, dtype=cp.uint8)
with first:
    c = cp.empty(3 * MIB, dtype=cp.uint8)
with cp.cuda.Device(1):
    d = cp.empty(5 * MIB, dtype=cp.uint8)
other = RUNTIME.controllers[1].state
held = [STATE.record.total.allocated_bytes, other.record.total.allocated_bytes, d.device.id]
del d
print(json.dumps([b.data.ptr != address, c.data.ptr == address, held,
    other.record.total.allocated_bytes, len(RUNTIME.reports())]))
"""
    )
    assert result == [True, True, [6 << 20, 5 << 20, 1], 0, 2]


def test_default_streams_of_threads_do_not_share_memory(run_checks: Any) -> None:
    """They have one handle, but nothing orders the work of one thread after another's."""
    shared, reused = run_checks(
        PROLOGUE
        + """
import threading
places, ready, done = {}, threading.Semaphore(0), threading.Event()

def work(name):
    try:
        with cp.cuda.Stream.ptds:
            block = cp.empty(3 << 20, cp.uint8)
            places[name] = [block.data.ptr]
            del block
            places[name].append(cp.empty(3 << 20, cp.uint8).data.ptr)
    finally:
        ready.release()
    done.wait(60)  # a thread that is gone leaves its number to the next

threads = []
for name in "ab":
    threads.append(threading.Thread(target=work, args=name))
    threads[-1].start()
    ready.acquire(timeout=60)
done.set()
[thread.join() for thread in threads]
print(json.dumps([set(places["a"]) == set(places["b"]), [places[name][0] == places[name][1] for name in "ab"]]))
"""
    )
    assert shared is False
    assert reused == [True, True]


def test_errors_under_way_survive_an_allocation_that_needs_a_segment(run_checks: Any) -> None:
    """Finalisers, generators that are closed and handlers allocate while another error is set."""
    result = run_checks(
        PROLOGUE
        + """
sizes = iter(range(2 * MIB, 900 * MIB, 3 * MIB))
new = lambda: cp.empty(next(sizes), dtype=cp.uint8)
seen = []
class Final:
    def __del__(self):
        seen.append(new().nbytes > 0)
def generator():
    try:
        yield 1
    finally:
        seen.append(new().nbytes > 0)
def outer():
    final, running = Final(), generator()
    next(running)
    try:
        raise KeyError("mine")
    except KeyError:
        seen.append(new().nbytes > 0)
        raise
for _ in range(3):
    try:
        outer()
    except KeyError as error:
        seen.append(repr(error))
    gc.collect()
print(json.dumps(seen))
"""
    )
    assert result.count("KeyError('mine')") == 3
    assert result.count(True) == 9


def test_the_end_of_the_interpreter_is_quiet_though_arrays_live_and_more_are_made(run_fresh: Any) -> None:
    """Threads and planners that are at work: tests/test_runtime_endings.py."""
    done = run_fresh(
        PROLOGUE
        + """
import atexit
class Late:
    def __del__(self):
        cp.empty(30 * MIB, dtype=cp.uint8)
sys.keep, sys.late = [cp.empty(i * MIB, dtype=cp.uint8) for i in range(1, 9)], Late()
atexit.register(lambda: cp.empty(40 * MIB, dtype=cp.uint8))
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_of_fork_ends_in_peace(run_fresh: Any) -> None:
    done = run_fresh(
        PROLOGUE
        + """
import multiprocessing, threading
held = [cp.empty(i * MIB, dtype=cp.uint8) for i in range(1, 5)]
busy, stop = [], False
def work():
    while not stop:
        cp.empty(600, dtype=cp.uint8)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
context = multiprocessing.get_context("fork")
codes = []
for _ in range(5):
    child = context.Process(target=lambda: sum(range(1000)))
    child.start()
    child.join(20)
    codes.append(child.exitcode)
    if child.exitcode is None:
        child.kill()
stop = True
for thread in threads:
    thread.join()
print(codes)
"""
    )
    assert done.stdout.strip() == "[0, 0, 0, 0, 0]", done.stderr


def test_uninstall_gives_cupy_its_pool_back_and_keeps_arrays(run_checks: Any) -> None:
    result = run_checks(
        PROLOGUE
        + """
pool = cp.get_default_memory_pool()
old = cp.full(4 * MIB, 7, dtype=cp.uint8)
import numpy as np
old.set(np.full(4 * MIB, 7, np.uint8))
stalloc.uninstall()
stalloc.uninstall()
new = cp.empty(8 * MIB, dtype=cp.uint8)
used = pool.used_bytes()
same = bool((old.get() == 7).all())
live = STATE.record.total.num_live
del old
CONTROLLER.memory.release_unused()
print(json.dumps([used, same, live, STATE.record.total.num_live, STATE.record.statistics.reserved_bytes]))
"""
    )
    assert result == [8 << 20, True, 1, 0, 0]
