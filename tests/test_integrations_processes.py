"""Forked children, many devices, ranks of one job: each ends well, and ranks that are alike plan once."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from stalloc.integrations.ranks import digest, fits
from stalloc.lifespans.repeating_schedule import fold
from stalloc.planner import plan_schedule
from stalloc.trace.recorder import from_recorded

_PROLOGUE = """
import json, multiprocessing, os, sys, threading
import stalloc
from stalloc.device import VirtualGPU
RUNTIME = stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=1 << 30, num_devices=2, copy_limit_bytes=None))
CONTROLLER = RUNTIME.controllers[0]
import cupy as cp
MIB = 1 << 20
"""


@pytest.mark.usefixtures("cupy_installed")
def test_a_forked_child_can_use_memory_and_leaves_the_parent_as_it_is(run_checks: Any) -> None:
    codes, phases, live, still = run_checks(
        _PROLOGUE
        + """
held = [cp.full(1000 + 99 * i, i, dtype=cp.uint8) for i in range(20)]
def steps(count):
    for _ in range(count):
        arrays = [cp.empty(MIB // 4 + 512 * i, dtype=cp.uint8) for i in range(12)]
        del arrays
        stalloc.step()
def child():
    state = CONTROLLER.state
    before = state.record.total.allocated_bytes
    arrays = [cp.empty(i * MIB // 4 + 600, dtype=cp.uint8) for i in range(30)]
    addresses = sorted((a.data.ptr, a.data.ptr + a.nbytes) for a in [*arrays, *held])
    assert all(end <= begin for (_, end), (begin, _) in zip(addresses, addresses[1:]))
    arrays.clear()
    steps(20)
    assert state.record.total.allocated_bytes == before, state.record.total.allocated_bytes
    held.clear()
codes, phases = [], []
context = multiprocessing.get_context("fork")
for round in range(3):
    phases.append(CONTROLLER.status.phase.value)
    process = context.Process(target=child)
    process.start()
    process.join(60)
    codes.append(process.exitcode)
    if process.exitcode is None:
        process.kill()
    steps(10)
live = CONTROLLER.state.record.total.num_live
phases.append(CONTROLLER.status.phase.value)
print(json.dumps([codes, phases, live, CONTROLLER.state.record.statistics.num_unknown_frees]))
"""
    )
    assert codes == [0, 0, 0]
    assert phases[-1] == "running on the plan"
    assert live == 20
    assert still == 0


@pytest.mark.usefixtures("cupy_installed")
def test_many_devices_are_planned_each_for_itself(run_checks: Any) -> None:
    phases, sizes = run_checks(
        _PROLOGUE
        + """
for step in range(20):
    for device in range(2):
        with cp.cuda.Device(device):
            arrays = [cp.empty((device + 1) * MIB // 4 + 512 * i, dtype=cp.uint8) for i in range(12)]
            del arrays
    stalloc.step()
reports = stalloc.statistics()
print(json.dumps([[report.phase for report in reports], [report.plan_peak_bytes for report in reports]]))
"""
    )
    assert phases == ["running on the plan"] * 2
    assert sizes[1] > 1.5 * sizes[0]


_RANK = """
import dataclasses, json, os, sys
import stalloc
RUNTIME = stalloc.install(device="virtual")
import torch
import torch.distributed as dist
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
torch.manual_seed(0)
width = int(sys.argv[1])
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(12):
    model(torch.ones(64, width, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
print(json.dumps(dataclasses.asdict(stalloc.statistics()[0])))
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(widths: list[int]) -> list[dict[str, Any]]:
    """One process a rank; their reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(len(widths))}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(width)],
            env={**common, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, width in enumerate(widths)
    ]
    answers = [process.communicate(timeout=280) for process in ranks]
    assert [process.returncode for process in ranks] == [0] * len(ranks), answers
    return [json.loads(output.splitlines()[-1]) for output, _ in answers]


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_ranks_that_are_alike_plan_once() -> None:
    reports = run_ranks([256, 256])
    assert [report["phase"] for report in reports] == ["running on the plan"] * 2
    assert [report["hit_rate"] for report in reports] == [1.0, 1.0]
    assert sorted("by another rank" in report["plan_method"] for report in reports) == [False, True]
    assert reports[0]["plan_peak_bytes"] == reports[1]["plan_peak_bytes"]


@pytest.mark.slow
@pytest.mark.usefixtures("cuda_torch", "cupy_installed")
def test_ranks_that_differ_plan_for_themselves() -> None:
    reports = run_ranks([256, 320])
    assert [report["phase"] for report in reports] == ["running on the plan"] * 2
    assert [report["hit_rate"] for report in reports] == [1.0, 1.0]
    assert not any("by another rank" in report["plan_method"] for report in reports)
    assert reports[0]["plan_peak_bytes"] < reports[1]["plan_peak_bytes"]


def schedule_of(sizes: list[int]) -> Any:
    """The schedule of ten steps that allocate these sizes and free them in the same order."""
    rows = []
    for _ in range(10):
        rows += [(0, 4096 * (i + 1) << 20, size) for i, size in enumerate(sizes)]
        rows += [(2, 4096 * (i + 1) << 20, size) for i, size in enumerate(sizes)]
    action, address, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    zero = np.zeros(len(rows), np.int64)
    schedule = fold(from_recorded(0, action, address, size, zero, zero, [], [0]))
    assert schedule is not None
    return schedule


def test_a_plan_fits_only_the_schedule_that_it_was_made_for() -> None:
    sizes = [1 << 20, 3 << 20, 1 << 19, 5 << 20, 6 << 20]
    one, other = schedule_of(sizes), schedule_of([*sizes[:-1], 1 << 18])
    assert digest(one) == digest(schedule_of(sizes)) != digest(other)
    plan = plan_schedule(one)
    assert fits(plan, one)
    assert not fits(plan, other)
