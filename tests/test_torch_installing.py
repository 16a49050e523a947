"""When stalloc can begin to serve torch, and when it ends: early, late, for a while, once more."""

from typing import Any

import pytest
from programs.torch_checks import PROLOGUE

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")


def test_installing_after_cuda_was_used_is_one_sentence(run_program: Any) -> None:
    done = run_program("""
from stalloc.device import activate
activate("virtual")
import torch
torch.empty(10, device="cuda")
import stalloc
try:
    stalloc.install(device="virtual")
except stalloc.SetupError as error:
    print(str(error))
print(torch.empty(10, device="cuda").numel())
""")
    sentence, works = done.stdout.splitlines()
    assert "torch has used CUDA before stalloc was installed" in sentence
    assert works == "10"
    assert done.stderr == ""


def test_installing_after_torch_was_imported_but_not_used_serves_it(run_checks: Any) -> None:
    assert run_checks("""
import json
from stalloc.device import activate
activate("virtual")
import importlib.util
assert importlib.util.find_spec("torch")
import torch
import stalloc
runtime = stalloc.install(device="virtual")
x = torch.empty(1 << 20, device="cuda")
print(json.dumps([runtime.controllers[0].state.record.total.num_live, torch.cuda.memory_allocated()]))
""") == [1, 4 << 20]


def test_asking_whether_torch_is_there_does_not_keep_it_from_being_served(run_checks: Any) -> None:
    """Libraries look for torch with find_spec long before a program imports it."""
    assert run_checks("""
import importlib.util, json
import stalloc
runtime = stalloc.install(device="virtual")
assert importlib.util.find_spec("torch") and importlib.util.find_spec("torch")
import torch
x = torch.empty(1 << 20, device="cuda")
print(json.dumps([runtime.controllers[0].state.record.total.num_live, torch.cuda.memory_allocated()]))
""") == [1, 4 << 20]


def test_installing_late_names_what_holds_the_memory_and_offers_a_pool(run_checks: Any) -> None:
    text, addresses, figures, replayed, end = run_checks("""
import gc, json
from stalloc.device import activate, virtual
activate("virtual")
import torch
model = torch.nn.Linear(10, 10).cuda()
import stalloc
try:
    stalloc.install(device="virtual")
    text = ""
except stalloc.SetupError as error:
    text = str(error)
pool = stalloc.mem_pool()
assert stalloc.mem_pool is stalloc.integrations.mem_pool
before = virtual.used_bytes()
torch.cuda.memory._record_memory_history(context=None)
with torch.cuda.use_mem_pool(pool):
    x = torch.ones(30 << 20, dtype=torch.uint8, device="cuda")
    y = x * 2
inside = {s["address"]: s["total_size"] for s in pool.snapshot()}
addresses = any(a <= x.data_ptr() < a + size for a, size in inside.items())
figures = [sum(inside.values()) == virtual.used_bytes() - before,
           torch.cuda.memory_allocated() >= 60 << 20, len(torch.cuda.memory._snapshot()["device_traces"][0]) > 2]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    z = x + 1
graph.replay()
replayed = z.numel()
del x, y, z, graph, pool
gc.collect()
torch.cuda.empty_cache()
print(json.dumps([text, addresses, figures, replayed, virtual.used_bytes() - before]))
""")
    assert "torch has used CUDA before stalloc was installed (model of the program holds it)" in text
    assert "stalloc.mem_pool()" in text
    assert addresses
    assert figures == [True, True, True]
    assert replayed == 30 << 20
    assert end == 0


def test_a_pool_beside_stalloc_is_refused_in_one_sentence(run_checks: Any) -> None:
    assert run_checks(
        PROLOGUE
        + """
try:
    stalloc.mem_pool()
except stalloc.SetupError as error:
    show(str(error).startswith("memory pools need torch's own allocator"))
"""
    ) == [True]


@pytest.mark.slow
def test_scopes_limit_planning_and_serve_torch_for_good(run_checks: Any) -> None:
    counts, phases, cupy_pool = run_checks("""
import json
from stalloc.device import VirtualGPU, activate
activate("virtual", VirtualGPU(total_bytes=1 << 30))
import torch, cupy as cp, stalloc
def work(steps):
    parameter = torch.ones(1 << 18, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([parameter])
    for _ in range(steps):
        (parameter * 2).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
phases, counts = [], []
for _ in range(2):
    with stalloc.scope(device="virtual") as runtime:
        with stalloc.scope(device="virtual") as inner:
            assert inner is runtime
        work(12)
        state = runtime.controllers[0].state
        a = cp.zeros(1000)
        phases.append(runtime.controllers[0].status.phase.value)
    b = c = None
    live = state.record.total.num_live
    b, c = cp.zeros(1000), torch.ones(1000, device="cuda")
    counts.append(state.record.total.num_live - live)
    work(3)
    phases.append(runtime.controllers[0].status.phase.value)
print(json.dumps([counts, phases, cp.get_default_memory_pool().used_bytes() > 0]))
""")
    assert counts == [1, 1], "outside, torch is still served, CuPy is not"
    assert phases == ["running on the plan", "serving from the heap"] * 2
    assert cupy_pool


def test_install_after_uninstall_serves_and_plans_again(run_checks: Any) -> None:
    assert run_checks(
        PROLOGUE
        + """
import cupy as cp
parameter = torch.ones(1 << 18, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([parameter])
def work():
    for _ in range(12):
        (parameter * 2).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return CONTROLLER.status.phase.value
phases = [work()]
stalloc.uninstall()
live = STATE.record.total.num_live
outside = cp.zeros(1000)
served = [STATE.record.total.num_live - live]
phases.append(work())
assert stalloc.install(device="virtual") is RUNTIME
inside = cp.zeros(1000)
served.append(STATE.record.total.num_live - live)
phases.append(work())
show(phases, served, STATE.record.statistics.num_unknown_frees)
"""
    ) == [["running on the plan", "serving from the heap", "running on the plan"], [0, 1], 0]
