"""What is recorded while a plan is in force: all memory that is held is in the record, the arena's too."""

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cupy_installed")

_PROGRAM = """
import json, sys
import numpy as np
import stalloc
from stalloc.device import VirtualGPU
from stalloc.integrations import Settings
RUNTIME = stalloc.install(
    device="virtual", gpu=VirtualGPU(total_bytes=1 << 30),
    settings=Settings(arena=sys.argv[1], keep_recording=True, plan_wait_seconds=1e6, planning_share=float("inf")),
)
import cupy as cp
MIB = 1 << 20
kept = [cp.cuda.alloc(5 * MIB + 512 * i) for i in range(3)]
def step(sizes):
    held = [cp.cuda.alloc(size) for size in sizes]
    del held
    stalloc.step()
for _ in range(8):
    step([(3 + 2 * i) * MIB + 512 for i in range(6)])
phase = RUNTIME.controllers[0].status.phase.name
if sys.argv[2] == "another":
    for _ in range(10):
        step([(20 - 2 * i) * MIB for i in range(7)])
elif sys.argv[2] == "given back":
    stalloc.uninstall()
    cp.get_default_memory_pool().free_all_blocks()
STATE = RUNTIME.controllers[0].state
(trace,) = RUNTIME.recorded()
reserved, live = trace.reserved_bytes(), trace.live_bytes(trace.size)[1:]
print(json.dumps([
    phase, bool((live <= reserved).all()), int(reserved[-1]) == STATE.record.statistics.reserved_bytes,
    int(trace.segment_size.sum()) == STATE.record.statistics.reserved_bytes,
    int(reserved.max()) == RUNTIME.reports()[0].run_reserved_peak_bytes,
]))
"""


_FULL = """
import json
import stalloc
from stalloc.device import VirtualGPU
from stalloc.integrations import Settings
RUNTIME = stalloc.install(
    device="virtual", gpu=VirtualGPU(total_bytes=64 << 20), settings=Settings(plan=False, keep_recording=True)
)
import cupy as cp
MIB, STATE = 1 << 20, RUNTIME.controllers[0].state
def holds():
    (trace,) = RUNTIME.recorded()
    reserved, live = trace.reserved_bytes(), trace.live_bytes(trace.size)[1:]
    held = STATE.record.statistics.reserved_bytes
    return bool((live <= reserved).all()) and int(reserved[-1]) == int(trace.segment_size.sum()) == held
rest = cp.cuda.runtime.memGetInfo()[0] // (2 * MIB) * 2 - 14
filler = cp.cuda.alloc(rest * MIB)
blocks = [cp.cuda.alloc(size * MIB) for size in (3, 2, 3, 2, 3)]
blocks[1] = blocks[3] = None
joined = cp.cuda.alloc(4 * MIB)  # one page is free, and a part of each of three others
found = [holds()]
joined = None
RUNTIME.controllers[0].memory.release_unused()
found.append(holds())
blocks.clear()
RUNTIME.controllers[0].memory.release_unused()
print(json.dumps([*found, holds(), STATE.record.statistics.num_ooms]))
"""


def test_what_is_left_over_in_pages_is_recorded_where_it_is_used(run_checks: Any) -> None:
    assert run_checks(_FULL) == [True, True, True, 0]


@pytest.mark.parametrize("arena", ["pages", "pool"])
@pytest.mark.parametrize("then", ["same", "another", "given back"])
def test_what_is_reserved_is_recorded_whoever_holds_it(run_checks: Any, arena: str, then: str) -> None:
    phase, live_is_inside, ends_as_held, segments_are_held, peak_is_seen = run_checks(_PROGRAM, arena, then)
    assert phase == "PLANNED"
    assert live_is_inside
    assert ends_as_held
    assert segments_are_held
    assert peak_is_seen
