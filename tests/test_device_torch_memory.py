"""PyTorch's memory on the virtual GPU: segments that grow, peaks, several devices, and what the host is spared."""

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch")

_PROLOGUE = """
import json
from stalloc.device import VirtualGPU, virtual
virtual.activate(VirtualGPU(name="Test GPU", total_bytes=8 << 30, compute_capability=(8, 6), num_devices=2))
import torch
"""

_EXPANDABLE = (
    _PROLOGUE
    + """
GIB = 1 << 30
def held():
    return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]]

x = torch.empty(GIB, dtype=torch.uint8, device="cuda")
first = held()
y = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
del x, y
z = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")  # no segment of 3 GiB was asked for: two grew together
second = held()
try:
    torch.empty(6 * GIB, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    second.append("out of memory")
del z
torch.cuda.empty_cache()
print(json.dumps([first, second, held()]))
"""
)


def test_expandable_segments_grow_in_place(run_checks):
    first, second, last = run_checks(
        _EXPANDABLE, PYTORCH_ALLOC_CONF="expandable_segments:True", PYTORCH_CUDA_ALLOC_CONF=None
    )
    slack_bytes = 64 << 20  # segments grow by pages of 20 MiB
    assert first[0] == 1 << 30
    assert first[0] <= first[1] < first[0] + slack_bytes
    assert first[1] + first[2] == 8 << 30
    assert second[0] == 3 << 30
    assert second[0] <= second[1] < second[0] + slack_bytes
    assert second[3] == "out of memory"
    assert last == [0, 0, 8 << 30]


_MANY_SEGMENTS = (
    _PROLOGUE.replace("8 << 30", "PLENTY").replace("json\n", "json\nfrom stalloc.device.known_gpus import PLENTY\n")
    + """
kept = []
for _ in range(12):
    with torch.cuda.stream(torch.cuda.Stream()):
        kept += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1024, 30 << 20)]
print(json.dumps(torch.cuda.memory_allocated()))
"""
)


def test_every_stream_has_expandable_segments_on_a_device_with_plenty_of_memory(run_checks):
    """Each takes more addresses than the device has memory."""
    conf = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": None}
    assert run_checks(_MANY_SEGMENTS, **conf) == 12 * (1024 + (30 << 20))


_PEAKS = (
    _PROLOGUE
    + """
MIB = 1 << 20
def peak():
    return [virtual.peak_bytes(0) // MIB, virtual.used_bytes(0) // MIB]

x = torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
y = torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")
del y
torch.cuda.empty_cache()
seen = [peak()]
virtual.restart_peak(0)
seen.append(peak())
z = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
seen += [peak(), virtual.peak_bytes(1), [virtual.statistics()[name] > 0 for name in ("maps", "unmaps")]]
print(json.dumps(seen))
"""
)


@pytest.mark.parametrize("expandable", [False, True])
def test_the_peak_is_what_the_driver_gave_and_can_begin_anew(run_checks, expandable):
    conf = f"expandable_segments:{expandable}"
    whole, restarted, later, other, mapped = run_checks(_PEAKS, PYTORCH_ALLOC_CONF=conf, PYTORCH_CUDA_ALLOC_CONF=None)
    assert whole == [800, 300]
    assert restarted == [300, 300]
    assert later == [400, 400]
    assert other == 0
    assert mapped == [expandable, expandable]


_LARGE = """
import json, resource
from stalloc.device import find_gpu, virtual
virtual.activate(find_gpu("H100"))
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
blocks = [torch.randn(5 << 30, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
copied = blocks[0].clone()
print(json.dumps([torch.cuda.memory_allocated(), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10]))
"""


def test_a_full_gpu_leaves_host_memory_untouched(run_checks):
    allocated_bytes, grown_bytes = run_checks(_LARGE)
    assert allocated_bytes == 7 * (10 << 30)
    assert grown_bytes < 200 << 20


def test_visible_devices_of_real_gpus_are_ignored(run_checks):
    program = _PROLOGUE + "print(json.dumps([torch.cuda.is_available(), torch.cuda.device_count()]))"
    assert run_checks(program, CUDA_VISIBLE_DEVICES="") == [True, 2]


_PINNED = """
import json, resource, torch
pinned = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True)
pinned[7], pinned[-1] = 1, 1
device = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pinned.copy_(device, non_blocking=True)
torch.cuda.synchronize()
more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"more": more << 10, "values": [int(pinned[7]), int(pinned[1 << 28]), int(pinned[-1])]}))
"""


def test_zeros_copied_to_pinned_memory_take_no_memory_of_the_host(run_checks):
    found = run_checks("from stalloc import device\ndevice.activate('virtual')\n" + _PINNED)
    assert found["values"] == [0, 0, 0]
    assert found["more"] < 64 << 20
