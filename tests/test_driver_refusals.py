"""What the driver refuses is told by call and status, and memory comes another way: blocks where it gives no pages."""

import pytest
from properties import variants

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

TRAIN = """
import ctypes, json
from stalloc import device
from stalloc.device import virtual
device.activate("virtual", device.VirtualGPU(num_devices=2))
import torch
import stalloc
runtime = stalloc.install(device="virtual")
kept = torch.full((300_000,), 3, dtype=torch.int32, device="cuda")
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(12):
    extra = [torch.empty(step << 20, device="cuda") for _ in range(2)]
    model(torch.zeros(256, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    del extra
torch.cuda.empty_cache()
report = stalloc.statistics()[0]
print(json.dumps([report.note, report.plans_made, kept.sum().item(), virtual.statistics()["maps"]]))
"""
SENTENCE = "stalloc: memory of device 0 comes in blocks"
NO_PAGES = {
    "cuMemSetAccess:801": "not by pages: cuMemSetAccess says 801 (CUDA_ERROR_NOT_SUPPORTED).",
    "cuMemAddressReserve:1": "not by pages: cuMemAddressReserve says 1 (CUDA_ERROR_INVALID_VALUE).",
    "cuMemMap:999": "not by pages: cuMemMap says 999 (CUDA_ERROR_UNKNOWN).",
    "cuMemCreate:800": "not by pages: cuMemCreate says 800 (CUDA_ERROR_NOT_PERMITTED).",
    "cuMemCreate:2": "from here on, without a plan: cuMemCreate says 2 (CUDA_ERROR_OUT_OF_MEMORY) where ",
    "cuMemCreate:2@30+": "from here on, without a plan: cuMemCreate says 2 (CUDA_ERROR_OUT_OF_MEMORY) where ",
    "cuMemCreate:999@30": "from here on, without a plan: cuMemCreate says 999 (CUDA_ERROR_UNKNOWN).",
    "cuMemMap:304@60+": "from here on, without a plan: cuMemMap says 304 (CUDA_ERROR_OPERATING_SYSTEM).",
    "cuMemUnmap:999@4+": "from here on, without a plan: cuMemUnmap says 999 (CUDA_ERROR_UNKNOWN).",
    "cuMemSetAccess:801@9+": "from here on, without a plan: cuMemSetAccess says 801 (CUDA_ERROR_NOT_SUPPORTED).",
}


@variants("fault", NO_PAGES, always=3)
def test_where_pages_are_refused_blocks_serve_and_one_sentence_says_why(run_program, fault):
    done = run_program(TRAIN, STALLOC_VIRTUAL_FAULTS=fault)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("stalloc:")]
    assert len(said) == 1, done.stderr
    assert said[0].startswith(SENTENCE)
    assert NO_PAGES[fault] in said[0]
    assert "Free:" not in done.stderr


@variants("fault", ["cuMemCreate:2@30", "rdma:refused", "export:refused", "peer0:refused", "peer1:refused"])
def test_what_pages_do_without_costs_neither_them_nor_the_plan(run_program, fault):
    done = run_program(TRAIN, STALLOC_VIRTUAL_FAULTS=fault)
    assert done.returncode == 0, done.stderr
    assert "stalloc:" not in done.stderr
    assert '["", 1, ' in done.stdout


def test_a_device_that_is_full_is_still_out_of_memory(run_program):
    full = TRAIN.replace("num_devices=2", "total_bytes=40 << 20")
    done = run_program(full, STALLOC_VIRTUAL_FAULTS="peer1:refused")
    assert "CUDA out of memory." in done.stderr.splitlines()[-1]


USES = """
import ctypes, json
from stalloc import device
from stalloc.device import virtual
device.activate("virtual", device.VirtualGPU(num_devices=3))
import cupy
import stalloc
stalloc.install(device="virtual")
driver = ctypes.CDLL("libcuda.so.1")
def users(block):
    flags = ctypes.c_ulonglong()
    found = []
    for number in range(3):
        location = (ctypes.c_int * 2)(1, number)
        assert driver.cuMemGetAccess(ctypes.byref(flags), location, ctypes.c_uint64(block.data.ptr)) == 0
        found += [number] * (flags.value == 3)
    return found
with cupy.cuda.Device(0):
    first = cupy.empty(5 << 20, dtype=cupy.uint8)
found = [users(first)]
with cupy.cuda.Device(2):
    other = cupy.empty(3 << 20, dtype=cupy.uint8)
with cupy.cuda.Device(0):
    second = cupy.empty(50 << 20, dtype=cupy.uint8)
found += [users(first), users(second), users(other)]
"""


def test_another_device_may_use_memory_once_both_are_used(run_checks):
    found = run_checks(USES + "print(json.dumps(found))")
    assert found == [[0], [0, 2], [0, 2], [0, 2]]


def test_a_peer_that_refuses_costs_one_sentence(run_program):
    done = run_program(USES + "print(json.dumps(found))", STALLOC_VIRTUAL_FAULTS="peer2:refused")
    assert done.stdout.splitlines()[-1] == "[[0], [0], [0], [0, 2]]"
    assert done.stderr.splitlines() == [
        "stalloc: device 2 cannot use memory of device 0 (cuMemSetAccess says 801 (CUDA_ERROR_NOT_SUPPORTED)): where "
        "tensors are copied between them, choose STALLOC_ARENA=pool or --arena pool."
    ]


@pytest.mark.parametrize(("fault", "status"), [("", 0), ("export:refused", 1)], ids=["as a file descriptor", "refused"])
def test_other_processes_may_map_the_memory_where_the_driver_lets_them(run_checks, fault, status):
    found = run_checks(
        USES
        + """
import os
handle, file = ctypes.c_uint64(), ctypes.c_int(-1)
assert driver.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_uint64(first.data.ptr + 100)) == 0
status = driver.cuMemExportToShareableHandle(ctypes.byref(file), handle, 1, ctypes.c_uint64(0))
if status == 0:
    os.close(file.value)
assert driver.cuMemRelease(handle) == 0
print(json.dumps(status))
""",
        STALLOC_VIRTUAL_FAULTS=fault,
    )
    assert found == status
