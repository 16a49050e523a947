"""Only the GPU that a program uses gets a context from stalloc, and another one may be busy, or broken."""

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

BEGIN = """
import json, threading
from stalloc import device
from stalloc.device import virtual
device.activate("virtual", device.VirtualGPU(num_devices=3))
import cupy, torch
import stalloc
stalloc.install(device="virtual")
seen = {"install": virtual.contexts()}
"""

# a program that says its device at each tensor, as if no other were there
TRAIN = """
def train(where, steps=6):
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).to(where)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.zeros(64, 256, device=where)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.empty_cache()
"""


@pytest.mark.parametrize("fault", ["", "device0:busy,device2:999"], ids=["all well", "the others busy or broken"])
def test_training_on_one_gpu_of_three_touches_no_other(run_checks, fault):
    seen = run_checks(
        BEGIN
        + TRAIN
        + """
torch.cuda.set_device(1)
train("cuda")
seen["train"] = virtual.contexts()
cupy.cuda.Device(1).use()
blocks = [cupy.empty(1 << 20, dtype=cupy.uint8) for _ in range(3)]
pool = cupy.get_default_memory_pool()
pool.set_limit(size=1 << 34)
del blocks
pool.free_all_blocks()
assert pool.get_limit() == 1 << 34
seen["CuPy"] = virtual.contexts()
stalloc.uninstall()
seen["uninstall"] = virtual.contexts()
assert stalloc.statistics()[0].plans_made == 1, stalloc.statistics()
print(json.dumps(seen))
""",
        STALLOC_VIRTUAL_FAULTS=fault,
    )
    assert seen == {"install": [], "train": [1], "CuPy": [1], "uninstall": [1]}


def test_a_thread_that_names_its_gpu_touches_no_other(run_checks):
    seen = run_checks(
        BEGIN
        + TRAIN
        + """
thread = threading.Thread(target=train, args=("cuda:1",))
thread.start()
thread.join()
seen["thread"] = virtual.contexts()
train("cuda:1")
side = torch.cuda.Stream(1)
for _ in range(8):  # what another stream uses is asked for at the device that it is on
    block = torch.empty(30_000_000, device="cuda:1")
    block.record_stream(side)
    del block
torch.cuda.empty_cache()
seen["main"] = virtual.contexts()
print(json.dumps(seen))
"""
    )
    assert seen == {"install": [], "thread": [1], "main": [1]}


def test_what_cupy_held_goes_back_once_its_gpu_is_used(run_checks):
    held = run_checks(
        """
import json
from stalloc import device
device.activate("virtual", device.VirtualGPU(num_devices=2))
import cupy
import stalloc
with cupy.cuda.Device(1):
    block = cupy.empty(100 << 20, dtype=cupy.uint8)
    cupy.get_default_memory_pool().set_limit(size=1 << 30)
    del block
stalloc.install(device="virtual")
held = [device.virtual.used_bytes(1)]
with cupy.cuda.Device(1):
    small = cupy.empty(1 << 20, dtype=cupy.uint8)
    held += [device.virtual.used_bytes(1), cupy.get_default_memory_pool().get_limit()]
    try:
        cupy.empty(1 << 30, dtype=cupy.uint8)
    except cupy.cuda.memory.OutOfMemoryError:
        held += ["limited"]
print(json.dumps(held))
"""
    )
    assert held == [100 << 20, 2 << 20, 1 << 30, "limited"]


def test_a_kept_plan_of_a_gpu_that_is_busy_now_is_left_aside(run_checks, tmp_path):
    program = (
        BEGIN.replace('import stalloc\nstalloc.install(device="virtual")\n', "import stalloc\n")
        + TRAIN
        + """
import os, sys
from pathlib import Path
from stalloc.integrations.plan_cache import PlanCache
cache = PlanCache(Path(sys.argv[1]) / "plans" / "kept.plan.npz")
runtime = stalloc.install(device="virtual", known_plans=cache.load())
train("cuda:0")
if not os.environ.get("STALLOC_VIRTUAL_FAULTS"):
    train("cuda:2")
cache.update(runtime)
print(json.dumps([cache.loaded, [(one.device, one.plans_made) for one in stalloc.statistics()]]))
"""
    )
    assert run_checks(program, tmp_path) == [False, [[0, 1], [2, 1]]]
    assert run_checks(program, tmp_path, STALLOC_VIRTUAL_FAULTS="device2:busy") == [True, [[0, 1]]]


@pytest.mark.parametrize("kind", ["disk", "turns"])
def test_threads_that_copy_for_one_gpu_touch_no_other(run_checks, tmp_path, kind):
    seen = run_checks(
        BEGIN
        + """
import sys
from stalloc.techniques import SharedLink
torch.cuda.set_device(1)
layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).cuda()
optimizer = torch.optim.Adam(layers.parameters())
if sys.argv[1] == "disk":
    stalloc.page_optimizer(optimizer, host="800KiB", disk=f"{sys.argv[2]}:16MiB")
    saved = None
else:
    saved = stalloc.offload_activations(0.5, link=SharedLink(sys.argv[2] + "/link"))
import contextlib
for _ in range(4):
    with saved or contextlib.nullcontext():
        loss = layers(torch.zeros(2000, 256, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
names = {thread.name for thread in threading.enumerate()}
assert any(name.startswith("stalloc-") for name in names), names
print(json.dumps(virtual.contexts()))
""",
        kind,
        str(tmp_path),
    )
    assert seen == [1]
