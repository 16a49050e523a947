"""Memory of graphs is lent while several streams and threads replay: what the checker of the order of work found.

As JSON, with how many tensors lay in memory of graphs.
"""

import json
import sys
import threading
from typing import Any

from stalloc import device

device.activate("virtual", device.VirtualGPU())

import torch  # noqa: E402

import stalloc  # noqa: E402
from stalloc.core.constants import PRIVATE_KINDS  # noqa: E402
from stalloc.core.snapshot import segments  # noqa: E402
from stalloc.device import virtual  # noqa: E402

runtime = stalloc.install()
MIB = 1 << 20
state = runtime.controllers[0].state
side, other = torch.cuda.Stream(), torch.cuda.Stream()
x = torch.ones(MIB, device="cuda")
lent = 0


def captured() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that writes and reads some MiB of its own, and its output."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        output = ((x * 2) + 1) * 3
    torch.cuda.synchronize()
    return graph, output


def borrow(num: int = 3, then: Any = None) -> None:
    """Write to tensors that may lie in memory of graphs, on the current stream."""
    global lent
    with stalloc.borrow_graph_memory():
        for _ in range(num):
            made = torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda").add_(1)
            of_graphs = [one for one in segments(state) if one.kind >= PRIVATE_KINDS]
            lent += any(one.address <= made.data_ptr() < one.address + one.size_bytes for one in of_graphs)
            if then is not None:
                then(made)
            del made


def streams() -> None:
    """Replays and loans on streams that differ, which only the event of the last replay orders."""
    graph, _ = captured()
    event = torch.cuda.current_stream().record_event()
    for number in range(12):
        replaying, borrowing = (side, other, side)[number % 3], (side, other)[number // 2 % 2]
        replaying.wait_event(event)
        with torch.cuda.stream(replaying):
            graph.replay()
            event = replaying.record_event()
        with torch.cuda.stream(borrowing):
            borrow()
            replaying_inside = number % 4 == 3
            if replaying_inside:
                with stalloc.borrow_graph_memory():
                    side.wait_event(event)
                    with torch.cuda.stream(side):
                        graph.replay()
                        event = side.record_event()
                    borrow()


def shared() -> None:
    """Loans that another stream reads, told by record_stream, whose reads the next replay has to wait for."""

    def read(made: torch.Tensor) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            made.sum()
        made.record_stream(side)
        made.record_stream(torch.cuda.current_stream())

    graph, _ = captured()
    with torch.cuda.stream(other):
        other.wait_stream(torch.cuda.default_stream())
        for _ in range(6):
            graph.replay()
            borrow(3, read)


def threads() -> None:
    """Two threads, each with a graph and a stream of its own, and both borrow, so that one gets nothing."""

    def serve(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            for _ in range(20):
                graph.replay()
                borrow(1)

    graphs = [captured()[0] for _ in range(2)]
    running = [threading.Thread(target=serve, args=one) for one in zip(graphs, (side, other), strict=True)]
    for one in running:
        one.start()
    for one in running:
        one.join()


def capture() -> None:
    """A graph is captured in a pool whose memory was lent, and what it keeps is written to on another stream."""
    graph, _ = captured()
    for _ in range(3):
        with torch.cuda.stream(side):
            graph.replay()
            borrow()
        with torch.cuda.stream(other):
            again = torch.cuda.CUDAGraph()
            again.capture_begin(pool=graph.pool())
            kept = [torch.empty(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
            kept[0].add_(1)
            again.capture_end()
            for one in kept:
                one.zero_()
        torch.cuda.synchronize()


globals()[sys.argv[1]]()
torch.cuda.synchronize()
checker = virtual.order_checker()
assert checker is not None
print(json.dumps([[one.text for one in checker.found()], lent]))
