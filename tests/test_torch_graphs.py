"""CUDA graphs under stalloc: their memory is private until they are gone, by hand and by torch.compile."""

from pathlib import Path
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
show(list(out.shape), STATE.record.hot.private_kind, STATE.record.total.num_live)
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


CAPTURES = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch.cuda as cuda
from programs.replayed_addresses import captured, clobbered, random_replays, wrong_reads
def reserved():
    gc.collect()
    cuda.empty_cache()
    return cuda.memory_reserved()
torch.zeros(1, device="cuda")
before = reserved()
"""


@pytest.mark.parametrize("order", [(1, 2, 4, 8, 16, 24), (24, 16, 8, 4, 2, 1), (8, 24, 1, 16, 2, 4)])
def test_what_a_replayed_graph_reads_was_written_by_itself_or_is_an_input(run_checks: Any, order: Any) -> None:
    (reads, wrong), kept_and_written, faulty = run_checks(
        PROLOGUE
        + CAPTURES
        + f"""
works, inputs = captured(torch, {list(order)}, seed=5)
history = random_replays(torch, works, 3000, seed=6)
found, overlaps = wrong_reads(works, inputs, history), clobbered(works)
source, name = inputs[0]
works[0].steps.append((True, source.data_ptr() + 1024, 512, -5))  # a place that is not its own
show(found, overlaps, wrong_reads(works, inputs, history)[1])
"""
    )
    assert reads > 10_000
    assert wrong == 0
    assert kept_and_written == 0
    assert faulty > 0, "the simulator finds a place that is another's"


@pytest.mark.slow
def test_ten_thousand_replays_of_many_graphs(run_checks: Any) -> None:
    found, overlaps = run_checks(
        PROLOGUE
        + CAPTURES
        + """
works, inputs = captured(torch, [1, 2, 4, *range(8, 65, 8)][::-1], seed=9)
history = random_replays(torch, works, 10_000, seed=10)
show(wrong_reads(works, inputs, history), clobbered(works))
"""
    )
    assert found[0] > 100_000
    assert [found[1], overlaps] == [0, 0]


ENGINE = """
def step(size, workspace=0):
    x = new(size * 4000)
    if workspace:
        kept.append(new(workspace))
    for _ in range(3):
        y, z = new(size * 14000), new(size * 14000)
        del y
        x = new(size * 4000)
        del z
    return new(size * 128000)
def capture(sizes, pool=None, workspace=8 * MIB, outputs=None):
    graphs = []
    for size in sizes:
        step(size)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = step(size, 0 if graphs else workspace)
        if outputs is not None:
            outputs.append(output)
        del output
        pool = graph.pool()
        graphs.append(graph)
    return graphs
kept = [new(8 * MIB)]  # the workspace of the default stream
PAGE = 2 * MIB
largest = 256 * (128000 + 4000)
"""


@pytest.mark.parametrize("sizes", ["range(8, 257, 8)", "range(256, 7, -8)", "(64, 256, 8, 128)"])
def test_graphs_in_one_pool_take_what_the_largest_needs_and_their_workspace(run_checks: Any, sizes: str) -> None:
    taken, least = run_checks(
        PROLOGUE
        + CAPTURES
        + ENGINE
        + f"""
graphs = capture({sizes})
show(reserved() - before - 8 * MIB, largest + 8 * MIB)
"""
    )
    assert least <= taken <= least + (2 + 1) * (2 << 20), "whole pages, and one for each number of the random state"


@pytest.mark.parametrize("sizes", ["range(8, 257, 8)", "range(256, 7, -8)", "(64, 256, 8, 128)"])
@pytest.mark.parametrize("leaves_out", [0, 1])
def test_graphs_in_one_pool_lie_beside_the_outputs_that_are_kept_of_others(
    run_checks: Any, sizes: str, leaves_out: int
) -> None:
    taken, outputs, work = run_checks(
        PROLOGUE
        + CAPTURES
        + ENGINE
        + f"""
outputs = []
graphs = capture({sizes}, outputs=outputs, workspace=0)
del outputs[:{leaves_out}]  # which is free, and somewhere between the others
graphs += capture([256], pool=graphs[0].pool(), outputs=outputs, workspace=0)
show(reserved() - before, sum(one.nbytes for one in outputs), 256 * (2 * 14000 + 4000))
"""
    )
    assert outputs <= taken <= outputs + work + 6 * (2 << 20), "beside the ends of what is kept"


def test_a_capture_unlike_its_warm_up_is_served_all_the_same(run_checks: Any) -> None:
    (reads, wrong), overlaps = run_checks(
        PROLOGUE
        + CAPTURES
        + """
import programs.replayed_addresses as replayed
own, calls = replayed.run_step, []
def other(torch, work, inputs, names, size, draw):
    calls.append(size)
    if len(calls) % 2:
        draw.random()  # from here on the warm-up, or the capture, draws other sizes
    return own(torch, work, inputs, names, size, draw)
replayed.run_step = other
works, inputs = captured(torch, [16, 8, 24, 4], seed=7)
history = random_replays(torch, works, 1000, seed=8)
show(wrong_reads(works, inputs, history), clobbered(works))
"""
    )
    assert reads > 1000
    assert [wrong, overlaps] == [0, 0]


def test_separate_pools_are_one_only_where_the_program_says_they_may(run_checks: Any) -> None:
    apart, together, later, back = run_checks(
        PROLOGUE
        + CAPTURES
        + ENGINE
        + """
def added(number):
    begin = reserved()
    graphs.extend(capture([256], workspace=0)[0] for _ in range(number))
    return (reserved() - begin) // PAGE
CONTROLLER.drop_plan()  # an arena would be counted, too
graphs = []
added(1)  # and the numbers of the random state
one = added(1)
apart = added(3) // one
with stalloc.exclusive_graphs(), stalloc.exclusive_graphs():
    together = added(4) // one
later = added(1) // one
first, *rest = graphs[5:9]
for graph in rest:
    graph.reset()
still = reserved()
first.reset()
show(apart, together, later, (still - reserved()) // PAGE // one)
"""
    )
    assert (apart, together, later) == (3, 1, 1)
    assert back == 1, "its memory goes back with the last of its graphs"


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
show(STATE.record.statistics.num_ooms, STATE.record.total.num_live, torch.cuda.memory_reserved())
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
