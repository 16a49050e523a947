"""What the virtual driver says of contexts, of hidden devices, and what it is told to refuse."""

import pytest

pytestmark = pytest.mark.usefixtures("cupy_installed")

BEGIN = """
import json, os
from stalloc import device
from stalloc.device import virtual
device.activate("virtual", device.VirtualGPU(num_devices=4))
"""


def test_a_context_is_made_where_the_runtime_makes_one(run_checks):
    found = run_checks(
        BEGIN
        + """
import cupy
seen = [virtual.contexts()]
def note(*_):
    seen.append(virtual.contexts())
runtime = cupy.cuda.runtime
note(runtime.getDeviceCount(), runtime.getDeviceProperties(1), runtime.deviceCanAccessPeer(0, 1))
runtime.setDevice(2); note()
runtime.free(runtime.malloc(1 << 20)); note()
runtime.setDevice(0); note()
print(json.dumps(seen))
"""
    )
    assert found == [[], [], [2], [2], [0, 2]]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("2", [1, [2]]), ("3,1", [2, [3]]), ("7", [4, [0]]), ("-1", [0, []])],
    ids=["one", "in another order", "of a larger machine", "none"],
)
def test_hidden_devices_are_those_that_the_variable_hides_when_cuda_is_first_used(run_checks, visible, expected):
    found = run_checks(
        BEGIN
        + """
import sys
import cupy
os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1]
try:
    num = cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.runtime.malloc(1)
except cupy.cuda.runtime.CUDARuntimeError as error:
    assert error.status == 100, error
    num = 0
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"  # too late
print(json.dumps([num, virtual.contexts()]))
""",
        visible,
    )
    assert found == expected


def test_calls_fail_as_they_are_told_to(run_checks):
    found = run_checks(
        BEGIN
        + """
import cupy
def status(call, *arguments):
    try:
        call(*arguments)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return error.status
    return 0
runtime = cupy.cuda.runtime
found = [status(runtime.malloc, 512) for _ in range(4)]
found += [status(runtime.setDevice, 1), status(runtime.setDevice, 0), status(runtime.deviceSynchronize)]
print(json.dumps(found))
""",
        STALLOC_VIRTUAL_FAULTS="cudaMalloc:2@2,cudaMalloc:999@4+,device1:busy,cudaDeviceSynchronize:700",
    )
    assert found == [0, 2, 0, 999, 46, 0, 700]


@pytest.mark.parametrize("text", ["cuMemCreate", "cuMemCrate:2", "cuMemCreate:two", "device1:busy@0", "device99:busy"])
def test_what_cannot_fail_so_is_refused_with_a_sentence(run_program, text):
    done = run_program(BEGIN, STALLOC_VIRTUAL_FAULTS=text)
    assert done.returncode == 1
    assert f"STALLOC_VIRTUAL_FAULTS has '{text}'" in done.stderr.splitlines()[-1]
