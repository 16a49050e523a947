"""Moving torch's storages on a virtual GPU whose bytes are real: they stay what they are, whatever room there is."""

import importlib.util
from typing import Any

import pytest

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")


# weights and optimizer states live on a virtual GPU whose bytes are real; what its kernels would do, the CPU does
_TRAINING_ON_DEVICE = """
import json, os, sys
import stalloc
from stalloc.device import VirtualGPU
RUNTIME = stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=1 << 30, copy_limit_bytes=None))
CONTROLLER = RUNTIME.controllers[0]
STATE = CONTROLLER.state
import torch
from stalloc import kernels
copy = None if os.environ.get("TRITON_INTERPRET") else kernels.host_copy
def train(moves, steps=8):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(8, 20)).sum().backward()
    optimizer.step()
    def tensors():
        states = [v for state in optimizer.state.values() for v in state.values()]
        return [*model.parameters(), *model.buffers(), *states]
    device = [t.detach().to("cuda") for t in tensors()]
    view = device[0].view(-1)[7:90]
    first, moved, extra = [t.data_ptr() for t in device], 0, []
    for step in range(steps):
        for own, stored in zip(tensors(), device):
            own.detach().copy_(stored)
            stored.copy_(torch.zeros(own.shape).to(own.dtype))  # what is read next step was written by this one
        optimizer.zero_grad()
        model(torch.randn(8, 20)).abs().mean().backward()
        optimizer.step()
        for own, stored in zip(tensors(), device):
            stored.copy_(own.detach())
        activations = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(6)]
        if moves:
            moved += stalloc.adopt(device, copy=copy).num_moved
            kept = activations[::2]
            del activations
            moved += stalloc.compact(device, kept, copy=copy).num_moved
            del kept
        activations = None
        stalloc.step()
    assert torch.equal(view.cpu(), device[0].cpu().view(-1)[7:90])
    places = [t.data_ptr() for t in device]
    return [t.cpu().double().view(-1).tolist() for t in device], moved, sum(a != b for a, b in zip(first, places))
expected, nothing, _ = train(moves=False)
phase = CONTROLLER.status.phase.name
found, moved, elsewhere = train(moves=True)
torch.cuda.empty_cache()
print(json.dumps([found == expected, nothing, moved, elsewhere, phase,
    STATE.record.statistics.num_unknown_frees, STATE.record.total.allocated_bytes]))
"""


@pytest.mark.parametrize("way", ["reference", pytest.param("interpreter", marks=pytest.mark.slow)])
def test_bytes_on_the_device_that_move_every_step_stay_what_they_are(run_checks: Any, way: str) -> None:
    if way == "interpreter" and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {"TRITON_INTERPRET": "1"} if way == "interpreter" else {"STALLOC_POISON": "1"}
    same, nothing, moved, elsewhere, phase, unknown, allocated = run_checks(_TRAINING_ON_DEVICE, **environment)
    assert same
    assert (nothing, unknown, allocated) == (0, 0, 0)
    assert moved >= 8 * 15
    assert elsewhere > 0
    assert phase == "PLANNED"


# a full device whose bytes are real: every tensor is told by what is in it
_FULL_DEVICE = """
import gc, json, os, random, sys
import stalloc
from stalloc.device import VirtualGPU
from stalloc.runtime.runtime_settings import Settings
MIB = 1 << 20
RUNTIME = stalloc.install(
    device="virtual", gpu=VirtualGPU(total_bytes=160 * MIB, copy_limit_bytes=None), settings=Settings(arena="pool")
)
STATE = RUNTIME.controllers[0].state
import numpy as np
import torch
from stalloc import kernels
seed = int(sys.argv[1])
generator = random.Random(seed)
tensors, expected = [], []
while True:
    size = generator.choice([3 * MIB, 5 * MIB + 512 * generator.randrange(1 << 10), 2 * MIB, 1500 * 1024 + 7])
    try:
        tensors.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        break
order = sorted(range(len(tensors)), key=lambda nth: tensors[nth].data_ptr())
kept = [nth for at, nth in enumerate(order) if at % 3 == generator.randrange(3) or at % 7 == 0]
tensors = [tensors[nth] for nth in kept]
for tensor in tensors:
    expected.append(torch.from_numpy(np.random.default_rng(len(expected)).integers(0, 256, len(tensor), np.uint8)))
    tensor.copy_(expected[-1])
torch.cuda.empty_cache()
left = RUNTIME.controllers[0].memory.source.free_bytes()
others = torch.empty(left, dtype=torch.uint8, device="cuda") if left >= 10 * MIB else None
views = [tensor[100:] for tensor in tensors]
def whole():
    return all(torch.equal(t.cpu(), e) and torch.equal(v.cpu(), e[100:]) for t, e, v in zip(tensors, expected, views))
assert whole()
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))])
def test_where_there_is_no_room_for_a_copy_blocks_slide_inside_their_segments(run_checks: Any, seed: int) -> None:
    intact, again, result, live, held, counts = run_checks(
        _FULL_DEVICE
        + """
result = stalloc.compact(tensors, copy=kernels.host_copy)
intact, live, held = whole(), STATE.record.total.allocated_bytes, STATE.record.statistics.reserved_bytes
rest = torch.empty(160 * MIB - held, dtype=torch.uint8, device="cuda")
rest.copy_(torch.full((len(rest),), 7, dtype=torch.uint8))
again, num_tensors = whole(), len(tensors)
del rest, tensor, tensors, views, others
gc.collect()
torch.cuda.empty_cache()
counts = [STATE.record.total.allocated_bytes,
          STATE.record.statistics.reserved_bytes, STATE.record.statistics.num_unknown_frees]
moved = [result.num_moved, result.slid_bytes, result.through_host_bytes, result.reserved_before_bytes]
print(json.dumps([intact, again, [num_tensors, *moved], live, held, counts]))
""",
        str(seed),
    )
    assert intact
    assert again
    num_tensors, num_moved, slid, through_host, before = result
    assert 0 < num_moved <= num_tensors
    assert slid > 0
    assert through_host == 0
    assert held < before
    assert held <= 1.1 * live + 20 * MIB
    assert counts == [0, 0, 0]


def test_blocks_whose_segment_somebody_else_is_served_from_meanwhile_go_through_host_memory(run_checks: Any) -> None:
    intact, result = run_checks(
        _FULL_DEVICE
        + """
intruders = []
def copy(source, target, size):
    if not intruders:  # in a hole of a segment that is to be packed
        intruders.append(torch.empty(1200 * 1024, dtype=torch.uint8, device="cuda"))
    kernels.host_copy(source, target, size)
result = stalloc.compact(tensors, copy=copy)
intruders[0].copy_(torch.zeros(len(intruders[0]), dtype=torch.uint8))
print(json.dumps([whole(), [result.slid_bytes, result.through_host_bytes]]))
""",
        "0",
    )
    assert intact
    slid, through_host = result
    assert slid == 0
    assert through_host > 0
