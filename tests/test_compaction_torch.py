"""Moving torch's storages: values stay, every alias follows, memory comes back, and what may not move does not."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

_PROLOGUE = """
import gc, json, os, sys
import stalloc
from stalloc.device import VirtualGPU
RUNTIME = stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=int(os.environ.get("MEMORY", 1 << 30))))
CONTROLLER = RUNTIME.controllers[0]
STATE = CONTROLLER.state
import torch
from stalloc import kernels
from stalloc.errors import BadInputError
MIB = 1 << 20
def new(num_bytes, device="cuda"):
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
"""

# parameters after a training on the CPU in which every step everything moves, or nothing ever does
_TRAINING = (
    _PROLOGUE
    + """
def train(how, steps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 20))
    tied = torch.nn.Linear(40, 20)
    tied.weight = model[2].weight
    optimizer = torch.optim.AdamW([*model.parameters(), tied.bias], lr=0.01)
    average = [p.detach().clone() for p in model.parameters()]
    view = model[0].weight.detach().view(-1)[7:90]
    everything = (model, optimizer, average)
    addresses, moved = set(), 0
    for step in range(steps):
        x = torch.randn(8, 20)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = (tied(model[1](model[0](x))) ** 2).mean() + model(x).abs().mean()
        if how == "within":  # what autograd has saved moves between forward and backward
            moved += stalloc.adopt(*everything, gradients=True).num_moved
        loss.backward()
        if how in ("reference", "interpreter"):
            copy = kernels.host_copy if how == "reference" else kernels.batched_copy
            moved += stalloc.adopt(*everything, gradients=True, copy=copy).num_moved
        if how == "flat":
            moved += len(stalloc.contiguous_buffers(list(model.parameters())))
        addresses.add(model[0].weight.data_ptr())
        optimizer.step()
        for mean, p in zip(average, model.parameters()):
            mean.mul_(0.9).add_(p.detach(), alpha=0.1)
    assert torch.equal(view, model[0].weight.detach().view(-1)[7:90])
    assert tied.weight is model[2].weight
    tensors = [*model.state_dict().values(), *average, *(v for s in optimizer.state.values() for v in s.values())]
    return [t.double().reshape(-1).tolist() for t in tensors], len(addresses), moved

results = {}
for how in sys.argv[1:]:
    steps = 3 if how == "interpreter" else 8
    expected, _, nothing = train("never", steps)
    found, addresses, moved = train(how, steps)
    results[how] = [found == expected, addresses > 1, moved >= steps]
print(json.dumps([nothing, results]))
"""
)


@pytest.mark.slow
def test_a_training_that_moves_every_step_ends_with_the_same_parameters(run_checks: Any) -> None:
    ways = ["reference", "within", "flat"]
    if importlib.util.find_spec("triton") is not None:
        ways.append("interpreter")
    nothing, results = run_checks(_TRAINING, *ways, TRITON_INTERPRET="1")
    assert nothing == 0
    assert results == {way: [True, True, True] for way in ways}


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
    STATE.record.num_unknown_frees, STATE.record.total.allocated_bytes]))
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


def test_what_has_escaped_stays_and_says_why(run_checks: Any) -> None:
    kept, same, moved_values = run_checks(
        _PROLOGUE
        + """
import numpy as np
own = torch.arange(100.0)
named = torch.arange(50.0)
shared = torch.arange(30.0).share_memory_()
array = np.arange(20.0)
foreign = torch.from_numpy(array)
tensors = [own, own[3:], named, shared, foreign, torch.empty(3, device="meta"), torch.eye(3).to_sparse()]
before = [t.data_ptr() for t in tensors[:5]]
result = stalloc.adopt(tensors, exclude=[named[2:]])
after = [t.data_ptr() for t in tensors[:5]]
print(json.dumps([dict(result.kept), [a == b for a, b in zip(before, after)], own[3:].tolist()]))
"""
    )
    assert kept == {
        "excluded by the caller": 1,
        "its memory is shared with other processes": 1,
        "its memory belongs to another library": 1,
    }
    assert same == [False, False, True, True, True]
    assert moved_values == [float(number) for number in range(3, 100)]


def test_blocks_of_graphs_and_of_other_streams_stay_on_the_device(run_checks: Any) -> None:
    kept, same, unknown = run_checks(
        _PROLOGUE
        + """
plain = new(3 * MIB)
crossing = new(3 * MIB)
crossing.record_stream(torch.cuda.Stream())
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = new(3 * MIB)
tensors = [plain, crossing, captured]
before = [t.data_ptr() for t in tensors]
result = stalloc.adopt(tensors)
after = [t.data_ptr() for t in tensors]
same = [a == b for a, b in zip(before, after)]
del tensors, plain, crossing, captured, graph
gc.collect()
print(json.dumps([dict(result.kept), same, STATE.record.num_unknown_frees]))
"""
    )
    assert kept == {"another stream or a CUDA graph uses it": 2}
    assert same == [False, True, True]
    assert unknown == 0


def test_compaction_serves_a_block_that_only_fragmentation_refused(run_checks: Any) -> None:
    texts, after, counts = run_checks(
        _PROLOGUE
        + """
blocks = [new(3 * MIB) for _ in range(320)]
del blocks[1::2]
texts, before = [], [t.data_ptr() for t in blocks]
def attempt(function):
    try:
        function()
        texts.append("")
    except (torch.OutOfMemoryError, BadInputError) as error:
        texts.append(str(error))
attempt(lambda: new(460 * MIB))
attempt(lambda: stalloc.compact(blocks, needed_bytes=2000 * MIB))
unmoved = before == [t.data_ptr() for t in blocks]
attempt(lambda: stalloc.compact(blocks, needed_bytes=460 * MIB, exclude=blocks))
from stalloc.compaction import compact_when_full
attempt(compact_when_full(lambda: new(460 * MIB), blocks, needed_bytes=460 * MIB))
attempt(lambda: new(460 * MIB))
attempt(compact_when_full(lambda: new(900 * MIB), blocks))
allocated = STATE.record.total.allocated_bytes
del blocks
gc.collect()
torch.cuda.empty_cache()
counts = [STATE.record.total.allocated_bytes, STATE.record.reserved_bytes, STATE.record.num_unknown_frees]
print(json.dumps([texts, [unmoved, allocated], counts]))
""",
        MEMORY=str(1 << 30),
    )
    assert texts[0].startswith("stalloc: out of memory")
    assert "2097152000 bytes cannot be freed in one piece" in texts[1]
    assert "cannot be freed in one piece" in texts[2]
    assert texts[3:5] == ["", ""]
    assert texts[5].startswith("stalloc: out of memory")
    unmoved, allocated = after
    assert unmoved
    assert 160 * 3 * MIB <= allocated < 160 * 3 * MIB + 16 * MIB
    assert counts == [0, 0, 0]


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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_where_there_is_no_room_for_a_copy_blocks_slide_inside_their_segments(run_checks: Any, seed: int) -> None:
    intact, again, result, live, held, counts = run_checks(
        _FULL_DEVICE
        + """
result = stalloc.compact(tensors, copy=kernels.host_copy)
intact, live, held = whole(), STATE.record.total.allocated_bytes, STATE.record.reserved_bytes
rest = torch.empty(160 * MIB - held, dtype=torch.uint8, device="cuda")
rest.copy_(torch.full((len(rest),), 7, dtype=torch.uint8))
again, num_tensors = whole(), len(tensors)
del rest, tensor, tensors, views, others
gc.collect()
torch.cuda.empty_cache()
counts = [STATE.record.total.allocated_bytes, STATE.record.reserved_bytes, STATE.record.num_unknown_frees]
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


def test_nothing_to_move_an_exact_fit_and_one_byte_more(run_checks: Any) -> None:
    nothing, texts, refused, moved, exact, full = run_checks(
        _PROLOGUE
        + """
import re
nothing = [stalloc.contiguous_buffers([])]
for objects in ((), ([],), (torch.nn.Module(),), (new(0),)):
    nothing += [stalloc.adopt(*objects).num_moved, stalloc.compact(*objects).num_moved]
texts = []
def refuse(*objects, needed_bytes):
    try:
        stalloc.compact(*objects, needed_bytes=needed_bytes)
    except BadInputError as error:
        texts.append(str(error))
refuse(needed_bytes=1)
blocks = [new(3 * MIB) for _ in range(320)]
del blocks[1::2]
before = [t.data_ptr() for t in blocks]
refuse(blocks, needed_bytes=1 << 30)
most = sum(map(int, re.search(r": (\\d+) are free and .* gives (\\d+) more", texts[-1]).groups()))
refuse(blocks, needed_bytes=most + 1)
refused = before == [t.data_ptr() for t in blocks]
moved = stalloc.compact(blocks, needed_bytes=most).num_moved
rest = new(most - 2 * MIB)  # of what was moved a page may be filled in part
full = [(1 << 30) - STATE.record.total.allocated_bytes <= 4 * MIB, STATE.record.num_unknown_frees]
print(json.dumps([nothing, texts, refused, moved, rest.numel() == most - 2 * MIB, full]))
"""
    )
    assert nothing == [[], 0, 0, 0, 0, 0, 0, 0, 0]
    assert "none of the objects has memory on a GPU" in texts[0]
    assert len(texts) == 3
    assert refused
    assert moved == 160
    assert exact
    assert full == [True, 0]


@pytest.mark.slow
def test_adopting_never_exceeds_the_cap_and_packs_what_lives(run_checks: Any) -> None:
    allocated, reserved, peak, cap, moved, host, refused = run_checks(
        _PROLOGUE
        + """
from stalloc.compaction.adopting import adopt
generator = __import__("random").Random(3)
tensors = [new(generator.randrange(1, 24 * MIB)) for _ in range(120)]
tensors = [t for i, t in enumerate(tensors) if i % 3]
torch.cuda.empty_cache()
cap = STATE.record.reserved_bytes + 8 * MIB
try:
    stalloc.adopt(tensors, cap_bytes=100)
    refused = ""
except BadInputError as error:
    refused = str(error)
torch.cuda.reset_peak_memory_stats()
result = stalloc.adopt(tensors, cap_bytes=cap)
peak = torch.cuda.max_memory_reserved()
print(json.dumps([STATE.record.total.allocated_bytes, STATE.record.reserved_bytes, peak, cap,
                  result.num_moved, result.through_host_bytes, refused]))
""",
        MEMORY=str(3 << 30),
    )
    assert "above the cap of 100" in refused
    assert moved == 80
    assert peak <= cap
    assert reserved <= 1.1 * allocated
    assert host > 0


@pytest.mark.slow
def test_a_running_job_is_brought_into_its_plan_with_reserved_at_its_peak(run_checks: Any) -> None:
    phase, allocated_peak, reserved, peak, cap = run_checks(
        _PROLOGUE
        + """
blocks = [torch.nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(24)]
model = torch.nn.Sequential(*blocks)
optimizer = torch.optim.AdamW(model.parameters(), fused=False, foreach=False)
def step():
    optimizer.zero_grad()
    model(torch.empty(512, 2048, device="cuda")).sum().backward()
    optimizer.step()
step()
step()
cap = torch.cuda.max_memory_reserved()
torch.cuda.reset_peak_memory_stats()
stalloc.adopt(model, optimizer, cap_bytes=cap)
peak = torch.cuda.max_memory_reserved()
for _ in range(12):
    step()
gc.collect()
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
for _ in range(4):
    step()
peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
print(json.dumps([CONTROLLER.status.phase.name, *peaks, peak, cap]))
""",
        MEMORY=str(8 << 30),
    )
    assert phase == "PLANNED"
    assert peak <= cap
    assert reserved <= 1.01 * allocated_peak


def test_contiguous_buffers_are_gapless_and_refuse_what_cannot_be(run_checks: Any) -> None:
    found = run_checks(
        _PROLOGUE
        + """
tensors = [torch.full((3,), 1.0), torch.full((2, 2), 2.0), torch.full((5,), 3, dtype=torch.uint8)]
flats = stalloc.contiguous_buffers(tensors)
values = [flat.tolist() for flat in flats]
flats[0][4] = 9
texts = []
whole = torch.arange(10.0)
for wrong in ([whole[:5]], [whole, whole], [torch.ones(4, 4).t()], [torch.empty(0)]):
    try:
        stalloc.contiguous_buffers(wrong)
    except BadInputError as error:
        texts.append(str(error))
print(json.dumps([values, tensors[1].tolist(), texts]))
"""
    )
    values, second, texts = found
    assert values == [[1.0] * 3 + [2.0] * 4, [3] * 5]
    assert second == [[2.0, 9.0], [2.0, 2.0]]
    assert len(texts) == 4


@pytest.mark.slow
def test_a_7b_job_is_adopted_and_planned_on_a_device_one_percent_larger_than_its_peak(run_checks: Any) -> None:
    phases, moved, peaks, most, cap = run_checks(
        _PROLOGUE
        + """
HIDDEN, INNER = 4096, 11008
def linear(rows, columns):
    return torch.nn.Linear(rows, columns, bias=False, dtype=torch.bfloat16, device="cuda")
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.gate, self.down = linear(HIDDEN, INNER), linear(HIDDEN, INNER), linear(INNER, HIDDEN)
    def forward(self, x):
        x = x + self.o(self.q(x) + self.k(x) + self.v(x))
        return x + self.down(torch.relu(self.up(x)) * self.gate(x))
model = torch.nn.Sequential(*[Block() for _ in range(32)], linear(HIDDEN, 32_000))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
def step():
    optimizer.zero_grad()
    model(torch.empty(1024, HIDDEN, dtype=torch.bfloat16, device="cuda")).sum().backward()
    optimizer.step()
from stalloc.device import virtual
cap, moved, phases = int(os.environ["MEMORY"]), [], []
for steps in (2, 8):  # while it is observed, and when it is on its plan
    for _ in range(steps):
        step()
    phases.append(CONTROLLER.status.phase.name)
    moved.append(stalloc.adopt(model, optimizer, cap_bytes=cap).moved_bytes)
for _ in range(2):
    step()
most = [torch.cuda.max_memory_reserved(), virtual.peak_bytes()]
torch.cuda.reset_peak_memory_stats()
for _ in range(4):
    step()
phases.append(CONTROLLER.status.phase.name)
peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
print(json.dumps([phases, moved, peaks, most, cap]))
""",
        MEMORY=str(int(50.36 * (1 << 30))),
    )
    allocated_peak, reserved_peak = peaks
    assert phases == ["OBSERVING", "PLANNED", "PLANNED"]
    assert min(moved) > 36 << 30
    assert cap <= 1.0101 * allocated_peak
    assert max(most) <= cap
    assert reserved_peak <= cap


@pytest.mark.slow
def test_a_recorded_program_completes_on_a_device_hardly_larger_than_its_peak(
    run_checks: Any, shared_traces: Path
) -> None:
    trace = next(shared_traces.rglob("octree_nca_train.pickle.gz"))
    program = """
import json, sys
import numpy as np
import stalloc
from stalloc.device import VirtualGPU
from stalloc.integrations import Settings
from stalloc.trace import load_traces
trace = load_traces(sys.argv[1])[0]
size = trace.aligned_size(512)
begins = np.repeat([0, 1], len(size))
order = np.lexsort((begins, np.concatenate([trace.end, trace.start])))
peak = int(np.cumsum(np.concatenate([-size, size])[order]).max())
gpu = VirtualGPU(total_bytes=int(1.0005 * peak) >> 21 << 21)
runtime = stalloc.install(device="virtual", gpu=gpu, settings=Settings(plan=False, arena="pool"))
import torch
def new(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
live, failed = {}, 0
for at in order.tolist():
    row = at % len(size)
    if not begins[at]:
        live.pop(row, None)
    elif trace.size[row]:
        try:
            live[row] = new(int(trace.size[row]))
        except torch.OutOfMemoryError:
            failed += 1
            if sys.argv[2] == "still":
                break
            stalloc.compact(live)
            live[row] = new(int(trace.size[row]))
print(json.dumps([failed, bool(at == order[-1]), runtime.controllers[0].state.record.num_unknown_frees]))
"""
    failed, completed, _ = run_checks(program, str(trace), "still")
    assert (failed, completed) == (1, False)
    failed, completed, unknown = run_checks(program, str(trace), "moving")
    assert failed > 0
    assert completed
    assert unknown == 0
