"""CUDA graphs under stalloc: their memory is private until they are gone, by hand and by torch.compile."""

from typing import Any

import pytest
from programs.torch_checks import PROLOGUE

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")


@pytest.mark.slow
def test_graphs_of_torch_compile_are_captured_under_stalloc(run_checks: Any) -> None:
    pytest.importorskip("triton")
    out, capturing, live = run_checks(
        PROLOGUE
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


def test_memory_of_a_cuda_graph_is_private_until_the_graph_is_gone(run_checks: Any) -> None:
    overlaps, shared, kept, back = run_checks(
        PROLOGUE
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
        PROLOGUE
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


def test_a_memory_pool_of_the_program_is_served_as_everything_else_is(run_checks: Any) -> None:
    counts, segments, reserved, replayed, refused = run_checks(
        PROLOGUE
        + """
from torch.cuda import MemPool
pool = MemPool()
counts = [pool.use_count()]
with torch.cuda.use_mem_pool(pool):
    counts.append(pool.use_count())
    kept = new(3 * MIB)
    new(5 * MIB)
counts += [pool.use_count(), pool.id != torch.cuda.MemPool(use_on_oom=True).id, isinstance(pool, torch.cuda.MemPool)]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool.id):
    result = kept + 1
graph.replay()
replayed = result.numel()
try:
    torch.cuda.MemPool(torch.cuda.memory._get_current_allocator().allocator())
    refused = ""
except RuntimeError as error:
    refused = str(error)
segments = pool.snapshot()
del pool, result
graph.reset()
del kept, graph
gc.collect()
torch.cuda.empty_cache()
show(counts, segments, torch.cuda.memory_reserved(), replayed, refused)
"""
    )
    assert counts == [1, 2, 1, True, True]
    assert segments == []
    assert reserved == 0
    assert replayed == 3 << 20
    assert "with an allocator of its own" in refused
