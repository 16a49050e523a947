"""PyTorch on the virtual GPU: programs run unchanged, sizes are exact, values are zeros."""

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch")

# Each check runs on its own and reports its result, so that one failure does not hide the others.
_PROLOGUE = """
import json, sys
from stalloc.device import VirtualGPU, virtual
virtual.activate(VirtualGPU(name="Test GPU", total_bytes=8 << 30, compute_capability=(8, 6), num_devices=2))
import torch
import torch.nn.functional as F

RESULTS = {}
def check(function):
    try:
        RESULTS[function.__name__] = function()
    except Exception as error:
        RESULTS[function.__name__] = f"{type(error).__name__}: {error}"
"""

_CHECKS = (
    _PROLOGUE
    + """
@check
def identity():
    p = torch.cuda.get_device_properties(1)
    return [p.name, p.total_memory, torch.cuda.get_device_capability(), torch.cuda.device_count()]

@check
def accounts():
    before = torch.cuda.mem_get_info()
    x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    held = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info(0)[0],
            torch.cuda.mem_get_info(1)[0]]
    del x
    freed = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    return [list(before), held, freed, torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]]

@check
def out_of_memory():
    keep = torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        text = str(error)
    del keep
    torch.cuda.empty_cache()
    again = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    return ["8.00 GiB" in text, "3.00 GiB is free" in text, again.numel()]

@check
def training():
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    allocated = []
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.mse_loss(model(torch.randn(32, 256, device="cuda")), torch.zeros(32, 256, device="cuda"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        allocated.append(torch.cuda.memory_allocated())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return [loss.item(), len(set(allocated[1:])), allocated[-1] >= 3 * weights]

@check
def checkpointing():
    from torch.utils.checkpoint import checkpoint
    layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)).cuda()
    peaks = []
    for recompute in (False, True):
        torch.cuda.reset_peak_memory_stats()
        x = torch.randn(4096, 1024, device="cuda", requires_grad=True)
        y = x
        for layer in layers:
            block = torch.nn.Sequential(layer, torch.nn.GELU(), torch.nn.Softmax(-1))
            y = checkpoint(block, y, use_reentrant=False) if recompute else block(y)
        y.sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        del x, y
    return peaks[1] < peaks[0]

@check
def attention():
    q = torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    out.sum().backward()
    return [list(out.shape), list(q.grad.shape)]

@check
def convolution():
    x = torch.randn(2, 3, 32, 32, device="cuda")
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.MaxPool2d(2)).cuda()
    net(x).sum().backward()
    return list(net(x).shape)

@check
def streams_and_events():
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream):
        x = torch.empty(1 << 20, device="cuda")
        end.record()
    x.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_event(end)
    end.synchronize()
    torch.cuda.synchronize()
    return [end.query(), start.elapsed_time(end) >= 0]

@check
def graphs():
    x = torch.randn(64, 64, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x @ x
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = [torch.cuda.is_current_stream_capturing()]
        fork = torch.cuda.Event(); fork.record()
        with torch.cuda.stream(side):
            side.wait_event(fork)
            inside.append(torch.cuda.is_current_stream_capturing())
            y = x @ x
        torch.cuda.current_stream().wait_stream(side)
    graph.replay()
    return [inside, torch.cuda.is_current_stream_capturing(), list(y.shape)]

@check
def history():
    torch.cuda.memory._record_memory_history(max_entries=1000)
    x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda"); address = x.data_ptr(); del x
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [e["action"] for e in events if e["addr"] == address and e["action"] in ("alloc", "free_completed")]

@check
def values():
    device = torch.arange(5.0).cuda()
    grown = torch.rand(1000, device="cuda") + 1
    return [device.tolist(), grown.sum().item(), grown.nonzero().shape[0], torch.ones(4).pin_memory().is_pinned()]

@check
def algebra():
    a = torch.randn(16, 16, device="cuda")
    u, s, v = torch.linalg.svd(a)
    return [list(s.shape), list(torch.linalg.solve(a, a).shape), list(torch.fft.rfft2(a).shape), list(u.shape)]

print(json.dumps(RESULTS))
"""
)


@pytest.fixture(scope="module")
def results(run_checks):
    return run_checks(_CHECKS)


def test_shows_the_chosen_gpu(results):
    assert results["identity"] == ["Test GPU", 8 << 30, [8, 6], 2]


def test_caching_allocator_and_driver_agree_on_what_is_held(results):
    before, held, freed, reserved, free = results["accounts"]
    assert before == [8 << 30, 8 << 30]
    allocated_bytes, reserved_bytes, free_here, free_there = held
    assert allocated_bytes == 100 << 20
    assert reserved_bytes >= allocated_bytes
    assert free_here == (8 << 30) - reserved_bytes
    assert free_there == 8 << 30
    assert (freed, reserved, free) == (0, 0, 8 << 30)


def test_out_of_memory_comes_at_the_chosen_size_and_is_survived(results):
    assert results["out_of_memory"] == [True, True, 4 << 30]


def test_training_step_reaches_a_steady_state(results):
    loss, num_levels, holds_weights_and_moments = results["training"]
    assert loss == 0.0
    assert num_levels == 1
    assert holds_weights_and_moments


def test_checkpointing_lowers_the_peak(results):
    assert results["checkpointing"] is True


def test_attention_and_its_backward_have_the_right_shapes(results):
    assert results["attention"] == [[2, 8, 128, 64], [2, 8, 128, 64]]


def test_convolutions_run(results):
    assert results["convolution"] == [2, 8, 15, 15]


def test_streams_and_events_complete(results):
    assert results["streams_and_events"] == [True, True]


def test_graph_capture_follows_events_to_other_streams(results):
    assert results["graphs"] == [[True, True], False, [64, 64]]


def test_memory_history_records_an_allocation_and_its_free(results):
    assert results["history"] == ["alloc", "free_completed"]


def test_copied_values_come_back_and_computed_ones_are_zero(results):
    assert results["values"] == [[0.0, 1.0, 2.0, 3.0, 4.0], 0.0, 0, True]


def test_linear_algebra_has_the_right_shapes(results):
    assert results["algebra"] == [[16], [16, 16], [16, 9], [16, 16]]


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
from stalloc.device import virtual
virtual.activate(virtual.find_gpu("H100"))
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
