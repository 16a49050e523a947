"""torch under stalloc on the virtual GPU: errors, statistics, streams, graphs and threads are as torch's own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PROGRAMS = Path(__file__).parent / "programs"
MIB = 1 << 20

_PROLOGUE = """
import dataclasses, gc, json, os, sys, threading
import stalloc
from stalloc.device import VirtualGPU, virtual
RUNTIME = stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=2 << 30, num_devices=2))
CONTROLLER = RUNTIME.controllers[0]
STATE = CONTROLLER.state
import torch
MIB = 1 << 20
def new(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
def show(*values):
    print(json.dumps(values))
"""


def test_out_of_memory_in_forward_and_backward_is_torchs_error_with_our_words(run_checks: Any) -> None:
    texts, held, again, ooms, unknown = run_checks(
        _PROLOGUE
        + """
texts = []
def attempt(function):
    try:
        function()
    except torch.OutOfMemoryError as error:
        texts.append(str(error))

class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1
    @staticmethod
    def backward(context, gradient):
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        return gradient

weight = torch.ones(1000, device="cuda", requires_grad=True)
for _ in range(3):
    attempt(lambda: new(3 << 30))
    attempt(lambda: Hungry.apply(weight * 2).sum().backward())
    attempt(lambda: new(2**63 - 1))
    attempt(lambda: new(1 << 54))
# what was allocated stays, what could not be is not counted; PyTorch's thread lets go of a failed pass before the next,
# but perhaps after the caller has its error
failed = weight.grad is None
(weight * 2).sum().backward()
learnt = weight.grad.shape[0]
weight.grad = None
held = [torch.cuda.memory_allocated(), failed]
again = [new(1 << 30).numel(), learnt]
show(texts, held, again, STATE.record.num_ooms, STATE.record.num_unknown_frees)
"""
    )
    assert len(texts) == ooms == 12
    assert all(text.startswith("stalloc: out of memory on device 0") for text in texts)
    assert f"({3 << 30} bytes)" in texts[0]
    assert f"({3 << 30} bytes)" in texts[1]
    assert f"({2**63 - 1} bytes)" in texts[2]
    assert held == [4096, True]
    assert again == [1 << 30, 1000]
    assert unknown == 0


def test_what_is_free_but_of_other_sizes_is_given_back_before_an_error(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
for size in (300, 500, 700, 900, 1100, 1300, 1500, 1700):
    del_me = new(size * MIB)
    del del_me
whole = new(1900 * MIB)
show(STATE.record.num_ooms, torch.cuda.memory_reserved() <= 1908 * MIB)
"""
    ) == [0, True]


@pytest.mark.slow
def test_statistics_are_what_the_native_allocator_says() -> None:
    answers = []
    for mode in ("native", "stalloc"):
        command = [sys.executable, str(PROGRAMS / "torch_statistics.py"), mode]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    native, ours = answers
    assert len(native["points"]) == 25
    assert ours["points"] == native["points"]
    assert ours["summary"]
    assert ours["left"] <= 1.25 * native["left"]


@pytest.mark.slow
def test_functions_of_torch_answer_as_with_its_own_allocator() -> None:
    answers = []
    for mode in ("native", "stalloc"):
        command = [sys.executable, str(PROGRAMS / "torch_answers.py"), mode]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    native, ours = answers
    assert len(native) == 12
    for name, answer in native.items():
        assert ours[name] == answer, name


@pytest.mark.slow
def test_graphs_of_torch_compile_are_captured_under_stalloc(run_checks: Any) -> None:
    pytest.importorskip("triton")
    out, capturing, live = run_checks(
        _PROLOGUE
        + """
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).cuda()
compiled = torch.compile(model, mode="reduce-overhead")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    out = compiled(torch.randn(8, 64, device="cuda"))
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
show(list(out.shape), STATE.record.private_kind, STATE.record.total.num_live)
"""
    )
    assert out == [8, 64]
    assert capturing == 0, "no capture is left open"
    assert live > 0


def test_what_is_reserved_is_counted_from_the_first_segment_to_the_last(run_checks: Any) -> None:
    points = run_checks(
        _PROLOGUE
        + """
points = []
def look():
    stats = torch.cuda.memory_stats()
    points.append([[stats[f"{what}.{pool}.{figure}"] for figure in ("current", "peak", "allocated", "freed")]
                   for what in ("reserved_bytes", "segment") for pool in ("all", "small_pool", "large_pool")]
                  + [[stats["inactive_split_bytes.all.current"], stats["inactive_split.all.current"]],
                     [torch.cuda.memory_reserved(), torch.cuda.memory_allocated()]])
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    model(torch.ones(300 * (step + 1 if step > 9 else 1), 1024, device="cuda")).sum().backward()
    look()
    optimizer.step()
    optimizer.zero_grad()
look()
RUNTIME.rest()
del model, optimizer
gc.collect()
torch._C._cuda_clearCublasWorkspaces()
torch.cuda.empty_cache()
look()
torch.cuda.reset_peak_memory_stats()
look()
show(points)
"""
    )[0]
    for point in points:
        for current, peak, allocated, freed in point[:6]:
            assert current == allocated - freed
            assert peak >= current >= 0
        for every, small, large in (point[:3], point[3:6]):
            assert [every[i] for i in (0, 2, 3)] == [small[i] + large[i] for i in (0, 2, 3)]
        assert 0 <= point[6][0] <= point[7][0] - point[7][1]
        assert (point[6][0] > 0) == (point[6][1] > 0)
        assert point[0][0] == point[7][0]
    assert points[0][1][0] > 0, "what is small has segments of its own while steps are watched"
    first_peak = max(point[0][1] for point in points)
    assert points[-2][0][:2] == [0, first_peak]
    assert points[-1][0][:2] == [0, 0]
    assert points[-1][0][2] == points[-1][0][3] >= first_peak


def test_memory_that_another_stream_uses_is_not_handed_out_before_that_is_done(run_checks: Any) -> None:
    deferred, later, freed, unknown = run_checks(
        _PROLOGUE
        + """
side = torch.cuda.Stream()
x = new(3 * MIB)
with torch.cuda.stream(side):
    x.record_stream(side)
address = x.data_ptr()
allocated = torch.cuda.memory_allocated()
del x
deferred = [STATE.record.num_deferred, allocated - torch.cuda.memory_allocated()]
held = [new(3 * MIB) for _ in range(70)]
later = [STATE.record.num_deferred, any(z.data_ptr() == address for z in held)]
# recorded on several streams, or freed and recorded again; foreign memory is left alone
others = [torch.cuda.Stream() for _ in range(3)]
for _ in range(40):
    z = new(2 * MIB)
    for stream in others:
        z.record_stream(stream)
        z.record_stream(stream)
    del z
# freed in a capture, and on a device that is not the current one
with torch.cuda.device(1):
    elsewhere = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda:1")
    elsewhere.record_stream(torch.cuda.Stream())
del elsewhere
z = new(2 * MIB)
z.record_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    del z
    captured = torch.ones(1000, device="cuda") * 2
del captured, graph
gc.collect()
del held
torch.cuda.synchronize()
for _ in range(70):
    new(1 * MIB)
for _ in range(70):
    torch.empty(MIB, dtype=torch.uint8, device="cuda:1")
states = [controller.state for controller in RUNTIME.controllers]
freed = [[state.record.num_deferred, state.record.total.num_live,
    state.record.total.allocated_bytes] for state in states]
show(deferred, later, freed, STATE.record.num_unknown_frees)
"""
    )
    assert deferred == [1, 3 << 20], "freed for the program, as natively, though its memory waits for the other stream"
    assert later == [0, True]
    assert freed == [[0, 0, 0], [0, 0, 0]]
    assert unknown == 0


def test_memory_of_a_cuda_graph_is_private_until_the_graph_is_gone(run_checks: Any) -> None:
    overlaps, shared, kept, back = run_checks(
        _PROLOGUE
        + """
def capture(pool=None):
    graph, addresses = torch.cuda.CUDAGraph(), []
    static = torch.ones(3 * MIB // 4, device="cuda")
    with torch.cuda.graph(graph, pool=pool):
        a = static * 2
        b = a + 1
        addresses += [(t.data_ptr(), t.numel() * 4) for t in (a, b)]
        del a
        c = b * 3
        addresses.append((c.data_ptr(), c.numel() * 4))
    return graph, static, c, addresses

held = [new(i * MIB) for i in (1, 3, 5)]
del held
graph, static, result, addresses = capture()
second = capture(pool=graph.pool())
def overlap(tensors, ranges):
    return sum(t.data_ptr() < a + n and a < t.data_ptr() + t.numel() for t in tensors for a, n in ranges)
del result
others = [new(int(size) * 1000) for size in torch.randint(1, 8000, (150,))]
torch.cuda.empty_cache()
others += [new(3 * MIB) for _ in range(20)]
overlaps = overlap(others, addresses + second[3])
graph.replay()
del others
gc.collect()
reserved = torch.cuda.memory_reserved()
shared = sum(a == b for (a, _), (b, _) in zip(addresses, second[3]))
graph.reset()
torch.cuda.empty_cache()
kept = torch.cuda.memory_reserved() > 0
second[0].reset()
del second, graph, static
gc.collect()
torch.cuda.empty_cache()
show(overlaps, shared, kept, [STATE.record.total.num_live, torch.cuda.memory_reserved()])
"""
    )
    assert overlaps == 0
    assert shared >= 0
    assert kept
    assert back == [0, 0]


def test_thousands_of_graphs_one_after_another(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
torch.cuda.Stream()
for i in range(4200):
    CONTROLLER.captures.begin((1, i))
    x = new(2 * MIB)
    CONTROLLER.captures.end()
    del x
    CONTROLLER.captures.release((1, i))
torch.cuda.empty_cache()
show(STATE.record.num_ooms, STATE.record.total.num_live, torch.cuda.memory_reserved())
"""
    ) == [0, 0, 0]


def test_limits_and_the_cache(run_checks: Any) -> None:
    limited, text, after, cache, tried = run_checks(
        _PROLOGUE
        + """
torch.cuda.set_per_process_memory_fraction(0.25)
try:
    new(600 * MIB)
    limited, text = False, ""
except torch.OutOfMemoryError as error:
    limited, text = True, str(error)
torch.cuda.set_per_process_memory_fraction(1.0)
x = new(600 * MIB)
after = x.numel()
del x
before = torch.cuda.memory_reserved()
torch.cuda.empty_cache()
cache = [before, torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0], virtual.used_bytes()]
torch.backends.cudnn.benchmark = True  # torch asks how much it may try algorithms with
tried = list(torch.nn.Conv2d(3, 8, 3).cuda()(torch.ones(2, 3, 16, 16, device="cuda")).shape)
show(limited, text, after, cache, tried)
"""
    )
    assert limited
    assert "stalloc: out of memory" in text
    assert after == 600 * MIB
    assert cache == [600 * MIB, 0, 2 << 30, 0]
    assert tried == [2, 8, 14, 14]


def test_a_share_of_the_device_in_the_settings_is_kept_however_stalloc_was_installed(run_checks: Any) -> None:
    refused, served = run_checks(
        _PROLOGUE
        + """
try:
    new(1100 * MIB)
except torch.OutOfMemoryError:
    show(True, new(1000 * MIB).numel())
""",
        PYTORCH_CUDA_ALLOC_CONF="per_process_memory_fraction:0.5",
    )
    assert (refused, served) == (True, 1000 * MIB)


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


def test_errors_under_way_survive_an_allocation_that_needs_a_segment(run_checks: Any) -> None:
    seen = run_checks(
        _PROLOGUE
        + """
sizes = iter(range(2 * MIB, 900 * MIB, 3 * MIB))
seen = []
class Final:
    def __del__(self):
        seen.append(new(next(sizes)).numel() > 0)
def generator():
    try:
        yield 1
    finally:
        seen.append(new(next(sizes)).numel() > 0)
def outer():
    final, running = Final(), generator()
    next(running)
    try:
        {}["mine"]
    except KeyError:
        seen.append(new(next(sizes)).numel() > 0)
        raise
class Raises(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1
    @staticmethod
    def backward(context, gradient):
        final = Final()
        new(next(sizes))
        raise ValueError("in backward")
for _ in range(3):
    try:
        outer()
    except KeyError as error:
        seen.append(repr(error))
    x = torch.ones(1000, device="cuda", requires_grad=True)
    try:
        Raises.apply(x).sum().backward()
    except ValueError as error:
        seen.append(str(error))
    gc.collect()
show(seen)
sys.stdout.flush()
os._exit(0)  # torch's own threads may abort at the end after an error in backward, with any allocator
"""
    )[0]
    assert seen.count("KeyError('mine')") == 3
    assert seen.count("in backward") == 3
    assert seen.count(True) == len(seen) - 6 >= 11, "the last finaliser may still be to come"


@pytest.mark.slow
def test_the_end_of_the_interpreter_is_quiet(run_fresh: Any) -> None:
    endings = {
        "live tensors": """
model = torch.nn.Linear(1000, 1000).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    model(torch.ones(10, 1000, device="cuda")).sum().backward()
    optimizer.step()
sys.keep = [model, new(5 * MIB)]
side = torch.cuda.Stream()
sys.keep[1].record_stream(side)
""",
        "a graph": """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x = torch.ones(1000, device="cuda") * 2
sys.keep = [graph, x]
""",
    }
    for name, source in endings.items():
        done = run_fresh(_PROLOGUE + source)
        assert (done.returncode, done.stderr) == (0, ""), name


def test_four_threads_and_autograds_own_allocate_at_once(run_checks: Any) -> None:
    errors, overlaps, counters, left = run_checks(
        _PROLOGUE
        + """
import random
lock, live, errors = threading.Lock(), {}, []
overlaps = 0
def work(seed):
    try:
        global overlaps
        rng, mine = random.Random(seed), []
        weight = torch.ones(64, 3000, device="cuda", requires_grad=True)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream if seed % 2 else torch.cuda.current_stream()):
            for i in range(1500):
                if mine and rng.random() < 0.5:
                    x = mine.pop(rng.randrange(len(mine)))
                    with lock:
                        del live[x.data_ptr()]
                    del x
                else:
                    x = new(int(2 ** rng.uniform(0, 21)))
                    begin, end = x.data_ptr(), x.data_ptr() + x.numel()
                    with lock:
                        overlaps += sum(begin < b and a < end for a, b in live.values())
                        live[begin] = (begin, end)
                    mine.append(x)
                if i % 30 == 0:
                    (weight * weight).sum().backward()
                    weight.grad = None
                if i % 400 == 0:
                    torch.cuda.empty_cache()
            for x in mine:
                del live[x.data_ptr()]
    except BaseException as error:
        errors.append(repr(error))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
gc.collect()
torch.cuda.empty_cache()
counters = [STATE.record.num_unknown_frees, STATE.record.num_ooms, STATE.record.total.num_live,
    STATE.record.total.allocated_bytes]
show(errors, overlaps, counters, torch.cuda.memory_reserved())
"""
    )
    assert errors == []
    assert overlaps == 0
    assert counters == [0, 0, 0, 0]
    assert left == 0


def test_torch_and_cupy_share_one_pool(run_checks: Any) -> None:
    addresses, reused, counts, freed = run_checks(
        _PROLOGUE
        + """
import cupy as cp
x = torch.arange(1000, device="cuda", dtype=torch.float32)
y = cp.from_dlpack(x)
z = torch.from_dlpack(cp.zeros(5 * MIB, dtype=cp.uint8))
addresses = [x.data_ptr() == y.data.ptr, z.numel()]
counts = [torch.cuda.memory_allocated(), STATE.record.total.num_live]
del x
gc.collect()
kept = STATE.record.total.num_live
address = z.data_ptr()
del y, z
gc.collect()
again = new(5 * MIB)
reused = again.data_ptr() == address
del again
a = cp.empty(5 * MIB, dtype=cp.uint8)
reused = [reused, a.data.ptr == address]
del a
show(addresses, reused, [*counts, kept], [STATE.record.total.num_live,
    torch.cuda.memory_allocated(), STATE.record.num_unknown_frees])
"""
    )
    assert addresses == [True, 5 * MIB]
    assert reused == [True, True]
    assert counts == [4096 + 5 * MIB, 2, 2]
    assert freed == [0, 0, 0]


_MODEL = """
import torch.nn.functional as F
torch.manual_seed(0)
layers = [torch.nn.Linear(512, 512, device="cuda") for _ in range(12)]
head = torch.nn.Linear(512, 1000, device="cuda")
def forward(x):
    for layer in layers:
        x = x + F.gelu(layer(x))
    return head(x)
"""


def test_an_inference_loop_without_optimizer_is_planned(run_checks: Any) -> None:
    report = run_checks(
        _PROLOGUE
        + _MODEL
        + """
with torch.no_grad():
    for _ in range(200):
        result = forward(torch.ones(64, 512, device="cuda")).softmax(-1)
show(dataclasses.asdict(stalloc.statistics()[0]))
"""
    )[0]
    assert report["phase"] == "running on the plan", report["note"]
    assert report["hit_rate"] == 1.0
    assert report["plan_peak_bytes"] == report["lower_bound_bytes"]
    assert report["planned_steps"] >= 50


def test_hand_written_sgd_does_not_stay_on_a_wrong_period(run_checks: Any) -> None:
    """Layers and the update of parameters repeat inside a step; none of them is the step."""
    report, allocated = run_checks(
        _PROLOGUE
        + _MODEL
        + """
parameters = [p for layer in [*layers, head] for p in layer.parameters()]
allocated = []
for step in range(150):
    target = torch.zeros(64, dtype=torch.int64, device="cuda")
    F.cross_entropy(forward(torch.ones(64, 512, device="cuda")), target).backward()
    with torch.no_grad():
        for p in parameters:
            p -= 1e-3 * p.grad
            p.grad = None
    allocated.append(torch.cuda.memory_allocated())
show(dataclasses.asdict(stalloc.statistics()[0]), allocated[3:])
"""
    )
    print(report)
    assert len(set(allocated)) == 1
    assert report["phase"] in ("running on the plan", "serving from the heap", "observing")
    if report["phase"] == "running on the plan":
        assert report["hit_rate"] > 0.95, "a plan that is kept fits"
    assert report["unknown_frees"] == report["out_of_memory_errors"] == 0


@pytest.mark.slow
def test_training_with_an_optimizer_goes_on_after_its_shapes_change_for_good(run_checks: Any) -> None:
    first, second = run_checks(
        _PROLOGUE
        + _MODEL
        + """
optimizer = torch.optim.AdamW([p for layer in [*layers, head] for p in layer.parameters()])
def train(batch, steps):
    for _ in range(steps):
        target = torch.zeros(batch, dtype=torch.int64, device="cuda")
        F.cross_entropy(forward(torch.ones(batch, 512, device="cuda")), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dataclasses.asdict(stalloc.statistics()[0])
first = train(64, 10)
second = train(96, 60)
show(first, second)
"""
    )
    assert first["phase"] == "running on the plan"
    assert first["hit_rate"] == 1.0
    assert second["phase"] == "running on the plan"
    assert second["plans_made"] == 2
    assert second["hit_rate"] > 0.99
    assert second["unknown_frees"] == 0


def test_a_snapshot_adds_up_to_the_statistics_on_the_heap_and_on_the_plan(run_checks: Any) -> None:
    points = run_checks(
        _PROLOGUE
        + _MODEL
        + """
side = torch.cuda.Stream()
def look(held):
    torch.cuda.memory_stats()
    segments = torch.cuda.memory_snapshot()
    stats = torch.cuda.memory_stats()
    blocks = [block for segment in segments for block in segment["blocks"]]
    live = {b["address"]: b["requested_size"] for b in blocks if b["state"] == "active_allocated"}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address, "blocks cover their segment"
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
        assert segment["device"] == 0
    return [
        sum(s["total_size"] for s in segments) == torch.cuda.memory_reserved(),
        sum(s["requested_size"] for s in segments) == stats["requested_bytes.all.current"],
        len(live) == stats["allocation.all.current"],
        all(live[t.data_ptr()] == t.untyped_storage().nbytes() for t in held),
        any(s["stream"] == side.cuda_stream for s in segments),
    ]
optimizer = torch.optim.AdamW([p for layer in [*layers, head] for p in layer.parameters()])
with torch.cuda.stream(side):
    other = new(3 * MIB)
points = [look([layers[0].weight, other])]
for step in range(8):
    target = torch.zeros(64, dtype=torch.int64, device="cuda")
    loss = F.cross_entropy(forward(torch.ones(64, 512, device="cuda")), target)
    points.append(look([loss, target, other]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
show(points, CONTROLLER.status.phase.value)
"""
    )
    looks, phase = points
    assert phase == "running on the plan"
    assert looks == [[True] * 5] * 9


def test_the_memory_history_is_recorded_under_stalloc(run_checks: Any) -> None:
    before, names, alive, nbytes, after = run_checks(
        _PROLOGUE
        + """
held = [new(3 * MIB), new(5 * MIB)]
before = len(torch.cuda.memory._snapshot()["device_traces"][0])
torch.cuda.memory._record_memory_history(max_entries=1000)
a, b = new(7 * MIB), new(1000)
del a
gc.collect()
snapshot = torch.cuda.memory._snapshot()
import pickle
pickle.dumps(snapshot)
history = snapshot["device_traces"][0]
names = sorted({event["action"] for event in history})
alive = {event["addr"] for event in history if event["action"] == "alloc"}
for event in history:
    if event["action"] == "free_completed":
        alive.discard(event["addr"])
nbytes = [event["size"] for event in history if event["action"] == "alloc"][-2:]
torch.cuda.memory._record_memory_history(enabled=None)
after = len(torch.cuda.memory._snapshot()["device_traces"][0])
show(before, names, sorted(alive) == [b.data_ptr()], nbytes, after)
"""
    )
    assert before == after == 0
    assert {"alloc", "free_completed", "segment_map"} <= set(names)
    assert alive
    assert nbytes == [7 * MIB, 1000]


def test_the_memory_history_is_recorded_after_a_plan_is_in_force(run_checks: Any) -> None:
    """What was recorded for the plan, marks of steps included, is forgotten by then."""
    phase, sizes = run_checks(
        _PROLOGUE
        + """
def step():
    held = [new(3 * MIB), new(5 * MIB)]
    del held
    stalloc.step()
for _ in range(20):
    step()
phase = stalloc.statistics()[0].phase
torch.cuda.memory._record_memory_history()
step()
history = torch.cuda.memory._snapshot()["device_traces"][0]
show(phase, [event["size"] for event in history if event["action"] == "alloc"])
"""
    )
    assert (phase, sizes) == ("running on the plan", [3 * MIB, 5 * MIB])


def test_every_statistic_that_torch_has_is_there_and_resets_as_its_own(run_checks: Any, run_program: Any) -> None:
    ask = """
x = torch.empty(1000, device="cuda")
y = torch.empty(1 << 20, device="cuda")
del y
stats = torch.cuda.memory_stats()
keys = sorted(stats)
counted = [stats["allocation.all.allocated"], stats["allocation.all.freed"]]
torch.cuda.reset_accumulated_memory_stats()
z = torch.empty(1000, device="cuda")
stats = torch.cuda.memory_stats()
counted += [stats["allocation.all.allocated"], stats["allocation.all.freed"], stats["allocation.all.current"]]
fraction = torch.cuda.get_per_process_memory_fraction()
torch.cuda.set_per_process_memory_fraction(0.5)
fractions = [fraction, torch.cuda.get_per_process_memory_fraction()]
print(json.dumps([keys, counted, fractions]))
"""
    ours = run_checks(_PROLOGUE + ask)
    native = run_checks("import json; from stalloc.device import activate; activate('virtual'); import torch\n" + ask)
    assert ours == native


def test_out_of_memory_on_the_plan_names_what_lives_in_the_arena(run_checks: Any) -> None:
    phase, text = run_checks(
        _PROLOGUE
        + """
optimizer = torch.optim.SGD([torch.ones(10, device="cuda", requires_grad=True)])
text = ""
for step in range(12):
    a = new(400 * MIB)
    b = new(100 * MIB)
    if step == 11:
        try:
            new(1800 * MIB)
        except torch.OutOfMemoryError as error:
            text = str(error)
    del a, b
    optimizer.step()
show(CONTROLLER.status.phase.value, text)
"""
    )
    assert phase == "running on the plan"
    held = "Most is held: 400.00 MiB by one block, 100.00 MiB by one block"
    for part in ("Allocated 500.00 MiB", held, "the plan's arena", "whatever the allocator does", "stalloc dryrun"):
        assert part in text


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
        _PROLOGUE
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
        _PROLOGUE
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
show(phases, served, STATE.record.num_unknown_frees)
"""
    ) == [["running on the plan", "serving from the heap", "running on the plan"], [0, 1], 0]


def test_observers_of_out_of_memory_are_called_and_may_take_a_snapshot(run_checks: Any) -> None:
    seen, error = run_checks(
        _PROLOGUE
        + """
seen = []
def observe(device, wanted, allocated, free):
    segments = torch.cuda.memory._snapshot()["segments"]
    seen.append([device, wanted, allocated, free, sum(s["total_size"] for s in segments)])
torch._C._cuda_attach_out_of_memory_observer(observe)
x = new(512 * MIB)
try:
    new(1700 * MIB)
    error = False
except torch.OutOfMemoryError:
    error = True
show(seen, error)
"""
    )
    assert seen == [[0, 1700 * MIB, 512 * MIB, 1536 * MIB, 512 * MIB]]
    assert error


def test_weights_lie_in_segments_that_hold_nothing_else(run_checks: Any) -> None:
    reserved, allocated, phase = run_checks(
        """
import json
import stalloc
stalloc.install(device="virtual")
import torch
MIB = 1 << 20
def new(size_mib):
    return torch.empty(size_mib * MIB, dtype=torch.uint8, device="cuda")
weights = [torch.nn.Parameter(torch.empty(size * MIB // 4, device="cuda")) for size in (8, 8, 6, 3) * 8]
optimizer = torch.optim.SGD(weights, lr=0.1)
for step in range(12):
    kept = [new(5 + i % 7) for i in range(30)]
    del kept
    optimizer.step()
(report,) = stalloc.statistics()
print(json.dumps([report.reserved_peak_bytes, report.allocated_peak_bytes, report.phase]))
"""
    )
    assert phase == "running on the plan"
    assert reserved <= allocated + 8 * MIB


def test_a_step_of_an_optimizer_is_one_of_its_own_devices(run_checks: Any) -> None:
    assert run_checks(
        _PROLOGUE
        + """
def trained(device, late=False):
    model = torch.nn.Linear(600, 600, device="cpu" if late else device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=False, foreach=False)
    return model.to(device), optimizer
def train(model, optimizer, device):
    model(torch.empty(64, 600, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
first, second = trained("cuda:0"), trained("cuda:1", late=True)
for nth in range(9):
    train(*first, "cuda:0")
    if nth % 3 == 0:
        train(*second, "cuda:1")
show(*[report.steps for report in stalloc.statistics()])
"""
    ) == [9, 3]


def test_optimizers_that_take_turns_are_planned_as_one_cycle(run_checks: Any) -> None:
    """Two steps of one network, one of the other: kinds that displace one another, until the cycle is found."""
    counts = run_checks(
        """
import json, math
import stalloc
from stalloc.device import VirtualGPU
from stalloc.runtime import Settings
settings = Settings(max_effort=math.inf)
RUNTIME = stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=8 << 30), settings=settings)
import torch
from torch import nn
from torch.nn import functional as F
STATE = RUNTIME.controllers[0].state.record
maker = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 4096)).cuda()
teller = nn.Sequential(nn.Linear(4096, 2048), nn.LeakyReLU(), nn.Linear(2048, 1)).cuda()
for_maker, for_teller = torch.optim.Adam(maker.parameters()), torch.optim.Adam(teller.parameters())
def turn():
    for _ in range(2):
        with torch.no_grad():
            made = maker(torch.randn(4096, 256, device="cuda"))
        truth = torch.empty(4096, 4096).cuda()
        (F.softplus(teller(made)).mean() + F.softplus(-teller(truth)).mean()).backward()
        for_teller.step()
        for_teller.zero_grad()
    F.softplus(-teller(maker(torch.randn(4096, 256, device="cuda")))).mean().backward()
    for_maker.step()
    for_maker.zero_grad()
    for_teller.zero_grad()
def five():
    before = STATE.hits, STATE.misses + STATE.conflicts
    for _ in range(5):
        turn()
    return STATE.hits - before[0], STATE.misses + STATE.conflicts - before[1]
for _ in range(60):  # the cycle is planned in the background
    hits, missed = five()
    if hits > 100 and not missed:
        break
print(json.dumps([hits, missed]))
"""
    )
    hits, missed = counts
    assert hits > 100
    assert missed == 0
