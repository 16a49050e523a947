"""Moving torch's storages: values stay, every alias follows, memory comes back, and what may not move does not."""

import importlib.util
from typing import Any

import pytest
from recordings import each, path_of

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
print(json.dumps([dict(result.kept), same, STATE.record.statistics.num_unknown_frees]))
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
counts = [STATE.record.total.allocated_bytes,
          STATE.record.statistics.reserved_bytes, STATE.record.statistics.num_unknown_frees]
print(json.dumps([texts, [unmoved, allocated], counts]))
""",
        MEMORY=str(1 << 30),
    )
    assert "stalloc: out of memory" in texts[0]
    assert "2097152000 bytes cannot be freed in one piece" in texts[1]
    assert "cannot be freed in one piece" in texts[2]
    assert texts[3:5] == ["", ""]
    assert "stalloc: out of memory" in texts[5]
    unmoved, allocated = after
    assert unmoved
    assert 160 * 3 * MIB <= allocated < 160 * 3 * MIB + 16 * MIB
    assert counts == [0, 0, 0]


_BY_ARENA = (
    _PROLOGUE.replace("install(", "install(settings=stalloc.integrations.Settings(arena=sys.argv[1]), ", 1)
    + """
def fill():
    others = []
    try:
        while True:
            others.append(new(3 * MIB))
    except torch.OutOfMemoryError:
        return others
"""
)


@pytest.mark.parametrize("arena", ["pages", "pool"])
def test_what_was_moved_once_may_move_again_though_the_first_of_it_is_gone(run_checks: Any, arena: str) -> None:
    """Moved tensors share one buffer, which goes back to the device with the last of them."""
    moved, reserved, kept = run_checks(
        _BY_ARENA
        + """
blocks = [new(3 * MIB) for _ in range(160)]
del blocks[1::2]
moved = stalloc.compact(blocks).num_moved
blocks = blocks[20:40]
reserved = [torch.cuda.memory_reserved() >> 20]
kept = dict(stalloc.compact(blocks).kept)
reserved.append(torch.cuda.memory_reserved() >> 20)
print(json.dumps([moved, reserved, kept]))
""",
        arena,
    )
    assert moved == 80
    assert reserved[0] >= 240
    assert reserved[1] <= 70
    assert kept == {}


@pytest.mark.parametrize("arena", ["pages", "pool"])
def test_a_buffer_that_holds_what_was_not_named_stays(run_checks: Any, arena: str) -> None:
    """Leaving it would free nothing, so that there might be no room for what is on the way."""
    moved, kept, stays = run_checks(
        _BY_ARENA
        + """
blocks = [new(3 * MIB) for _ in range(160)]
del blocks[1::2]
stalloc.compact(blocks)
others = fill()
before = [t.data_ptr() for t in blocks]
result = stalloc.compact(sorted(blocks, key=lambda t: t.data_ptr())[:70])
print(json.dumps([result.num_moved, dict(result.kept), before == [t.data_ptr() for t in blocks]]))
""",
        arena,
    )
    assert moved == 0
    assert kept == {"its segment holds blocks that may not move": 70}
    assert stays


@pytest.mark.parametrize("arena", ["pages", "pool"])
def test_adopting_on_a_full_device_leaves_what_has_no_room_elsewhere(run_checks: Any, arena: str) -> None:
    moved, kept, stays = run_checks(
        _BY_ARENA
        + """
blocks = [new(3 * MIB) for _ in range(160)]
others = fill()
before = [t.data_ptr() for t in blocks]
result = stalloc.adopt(blocks[::2])
print(json.dumps([result.num_moved, dict(result.kept), before == [t.data_ptr() for t in blocks]]))
""",
        arena,
    )
    assert moved == 0
    assert kept == {"there is no room for it elsewhere": 80}
    assert stays


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
full = [(1 << 30) - STATE.record.total.allocated_bytes <= 4 * MIB, STATE.record.statistics.num_unknown_frees]
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
cap = STATE.record.statistics.reserved_bytes + 8 * MIB
try:
    stalloc.adopt(tensors, cap_bytes=100)
    refused = ""
except BadInputError as error:
    refused = str(error)
torch.cuda.reset_peak_memory_stats()
result = stalloc.adopt(tensors, cap_bytes=cap)
peak = torch.cuda.max_memory_reserved()
print(json.dumps([STATE.record.total.allocated_bytes, STATE.record.statistics.reserved_bytes, peak, cap,
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
@pytest.mark.parametrize("name", each(["fragmented.pickle.gz", "octree_nca_train.pickle.gz"]))
def test_a_recorded_program_completes_on_a_device_hardly_larger_than_its_peak(run_checks: Any, name: str) -> None:
    trace = path_of(name)
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
gpu = VirtualGPU(total_bytes=peak + (4 << 20) >> 21 << 21)
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
print(json.dumps([failed, bool(at == order[-1]), runtime.controllers[0].state.record.statistics.num_unknown_frees]))
"""
    failed, completed, _ = run_checks(program, str(trace), "still")
    assert (failed, completed) == (1, False)
    failed, completed, unknown = run_checks(program, str(trace), "moving")
    assert failed > 0
    assert completed
    assert unknown == 0
