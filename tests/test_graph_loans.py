"""Memory of CUDA graphs that is lent between replays: nobody's bytes are another's, and who is late hears of it."""

from pathlib import Path
from typing import Any

import pytest
from programs.torch_checks import PROLOGUE
from test_order import told

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

GRAPHS = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
from programs.replayed_addresses import captured, lent_replays, wrong_reads
from stalloc.core.constants import PRIVATE_KINDS
from stalloc.core.snapshot import segments
def pages():
    return torch.cuda.memory_reserved() >> 21
def is_lent(tensor):
    of_graphs = [one for one in segments(STATE) if one.kind >= PRIVATE_KINDS]
    return any(one.address <= tensor.data_ptr() < one.address + one.size_bytes for one in of_graphs)
def step(last=MIB):
    first = new(4 * MIB)
    second = new(3 * MIB)
    del first
    third = new(8 * MIB)
    return new(last)
def capture(pool=None, last=MIB):
    step(last)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = step(last)
    return graph, output
def refusal(action):
    try:
        action()
    except RuntimeError as error:
        assert isinstance(error, stalloc.GraphMemoryError)
        return str(error)
    return ""
"""


def run(run_checks: Any, program: str) -> Any:
    return run_checks(PROLOGUE + GRAPHS + program)


RANDOM = """
works, inputs = captured(torch, {order}, seed=3)
history, num_lent = lent_replays(torch, stalloc, works, {count}, seed=6)
reads, wrong = wrong_reads(works, inputs, history)
output = next(one for one in works[1:] if one.kept)
place = output.kept[-1]
planted = history + [("replay", works.index(output)), ("made", place.data_ptr(), 512), ("gone", place.data_ptr(), 512)]
show(num_lent, reads, wrong, wrong_reads(works, inputs, planted + [("kept",)])[1])
"""


@pytest.mark.parametrize(
    ("order", "count"),
    [
        ((1, 2, 4, 8, 16, 24), 1000),
        pytest.param((24, 16, 8, 4, 2, 1), 10_000, marks=pytest.mark.slow),
        pytest.param((8, 64, 1, 16, 2, 48, 4, 32), 10_000, marks=pytest.mark.slow),
    ],
)
def test_replays_and_loans_in_random_order_read_what_they_wrote_themselves(
    run_checks: Any, order: Any, count: int
) -> None:
    num_lent, reads, wrong, faulty = run(run_checks, RANDOM.format(order=list(order), count=count))
    assert num_lent > count
    assert reads > 10 * count
    assert wrong == 0
    assert faulty > 0, "the simulator finds a loan in the place of an output"


def test_fifty_ways_to_hold_on_to_a_loan_are_refused_with_the_line_and_lose_nothing(run_checks: Any) -> None:
    refused, left = run(
        run_checks,
        """
import random
graph, output = capture()
other, _ = capture(pool=graph.pool())
stream = torch.cuda.Stream()
refused, before = 0, STATE.record.total.num_live
def lend(draw):
    with stalloc.borrow_graph_memory():
        return new(draw.randrange(1, 7 * MIB))  # the loan
def violate(draw, graph):
    how, held = draw.randrange(5), lend(draw)
    if how == 0:
        return held
    if how == 1:
        return held[-1:]  # a view keeps all of it
    if how == 2:
        with stalloc.borrow_graph_memory(), stalloc.borrow_graph_memory():
            return [held, new(100)]
    if how == 3:
        held.record_stream(stream)
        return held
    thread = threading.Thread(target=lambda: kept.append(lend(draw)))
    del held
    thread.start()
    thread.join()
    return kept.pop()
kept = []
for seed in range(50):
    draw = random.Random(seed)
    chosen = draw.choice((graph, other))
    held = violate(draw, chosen)
    text = refusal(draw.choice((chosen.replay, lambda: capture(pool=graph.pool()))))
    refused += "MiB allocated at <string>:" in text and "Nothing was " in text
    while torch.cuda.current_stream().cuda_stream:  # where a capture was refused
        torch.cuda.set_stream(torch.cuda.default_stream())
    del held
    chosen.replay()
show(refused, STATE.record.total.num_live - before)
""",
    )
    assert refused == 50
    assert left == 0


def test_what_is_lent_takes_no_memory_and_only_the_thread_and_stream_that_ask_get_it(run_checks: Any) -> None:
    lent, taken, beside, too_large, clear, after = run(
        run_checks,
        """
graph, output = capture()
graph.replay()
side = torch.cuda.Stream()
def on_side():
    with torch.cuda.stream(side):
        return new(3 * MIB)
def in_thread():
    made = []
    thread = threading.Thread(target=lambda: made.append(new(3 * MIB)))
    thread.start()
    thread.join()
    return made[0]
before = pages()
with stalloc.borrow_graph_memory():
    made = [new(5 * MIB), new(2 * MIB), new(MIB), new(8)]
    lent, taken = [is_lent(one) for one in made], pages() - before
    del made
    beside = is_lent(on_side()), is_lent(in_thread())
    too_large = is_lent(new(64 * MIB))
    tensors = [new(MIB) for _ in range(20)]
    clear = all(one.data_ptr() != output.data_ptr() for one in tensors)
    del tensors
show(lent, taken, beside, too_large, clear, is_lent(new(MIB)))
""",
    )
    assert lent == [True] * 4
    assert taken == 0
    assert beside == [False, False]
    assert not too_large
    assert clear, "what lives in the pool stays what it is"
    assert not after


def test_graphs_that_others_may_launch_lend_nothing(run_checks: Any) -> None:
    assert run(
        run_checks,
        """
import cupy
def lends():
    with stalloc.borrow_graph_memory():
        return is_lent(new(5 * MIB))
found = []
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    stream.begin_capture()
    array = cupy.empty(9 * MIB, cupy.uint8)
    del array
    of_cupy = stream.end_capture()
found.append(lends())
graph, output = capture()
found.append(lends())
del graph, output
kept = torch.cuda.CUDAGraph(keep_graph=True)
with torch.cuda.graph(kept):
    step()
found.append(lends())
kept.raw_cuda_graph()
found.append(lends())
show(found)
""",
    ) == [[False, True, True, False]]


@pytest.mark.parametrize("program", ["streams", "shared", "threads", "capture"])
def test_streams_are_in_order_whoever_borrows(program: str) -> None:
    found, num_lent = told("lent_in_order.py", program)
    assert found == []
    assert num_lent > 0


def test_poison_finds_who_writes_to_a_loan_that_is_over(run_program: Any) -> None:
    done = run_program(
        """
import ctypes
import stalloc
from stalloc.device import VirtualGPU
stalloc.install(device="virtual", gpu=VirtualGPU(total_bytes=1 << 30, copy_limit_bytes=None))
import torch
def new(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    new(8 << 20)
    output = new(1000)
for fault in (False, True):
    graph.replay()
    with stalloc.borrow_graph_memory():
        loan = new(5000)
        assert bytes((ctypes.c_char * 5000).from_address(loan.data_ptr())) == b"\\xff" * 5000
        address = loan.data_ptr()
        del loan
    if fault:
        ctypes.memset(address + 7, 1, 3)
    graph.replay()
    try:
        stalloc.step()
        print("fine")
    except stalloc.CorruptionError as error:
        print(error)
""",
        STALLOC_POISON="1",
    )
    fine, text = done.stdout.splitlines()
    assert fine == "fine"
    assert "3 bytes were written" in text
    assert "5,000 bytes" in text
    assert "when a CUDA graph that had lent it was to be replayed" in text
    assert done.returncode == 1


def test_without_stalloc_nothing_is_lent_and_nothing_refused(run_program: Any) -> None:
    done = run_program("import stalloc\nwith stalloc.borrow_graph_memory():\n    print('fine')")
    assert done.stdout == "fine\n", done.stderr
