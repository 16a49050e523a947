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
    side.wait_stream(torch.cuda.current_stream())
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
    q, r = torch.linalg.qr(a.expand(8, 16, 16))
    shapes = [list(s.shape), list(torch.linalg.solve(a, a).shape), list(torch.fft.rfft2(a).shape), list(u.shape)]
    return [*shapes, list(q.shape), list(torch.linalg.eig(a @ a)[0].shape), list(torch.linalg.eigvals(a @ a).shape)]

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
    assert results["algebra"] == [[16], [16, 16], [16, 9], [16, 16], [8, 16, 16], [16], [16]]
