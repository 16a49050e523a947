"""What work takes on the timeline of a virtual H100, in milliseconds by `elapsed_time`, as JSON."""

import json
from collections.abc import Callable

from stalloc import device

device.activate("virtual", device.find_gpu("H100"))

import torch  # noqa: E402

main, side = torch.cuda.current_stream(), torch.cuda.Stream()
on_device, other = (torch.empty(512 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
on_host = torch.empty(512 << 20, dtype=torch.uint8, pin_memory=True)
matrix = torch.empty(8192, 8192, dtype=torch.float16, device="cuda")


def beside(work: Callable[[], object]) -> None:
    with torch.cuda.stream(side):
        work()


def both_to_the_device() -> None:
    beside(lambda: other.copy_(on_host, non_blocking=True))
    on_device.copy_(on_host, non_blocking=True)


def one_each_way() -> None:
    beside(lambda: on_host.copy_(other, non_blocking=True))
    on_device.copy_(on_host, non_blocking=True)


def by_a_graph() -> None:
    graph.replay()


def by_polling() -> None:
    torch.mm(matrix, matrix)
    done = main.record_event()
    while not done.query():
        pass


def taken(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    side.wait_event(begin)
    work()
    main.wait_stream(side)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


torch.mm(matrix, matrix)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(4):
        torch.mm(matrix, matrix)
one = taken(lambda: on_device.copy_(on_host, non_blocking=True))
product = taken(lambda: torch.mm(matrix, matrix))
works = (both_to_the_device, one_each_way, by_a_graph, by_polling)
print(json.dumps({"copy": one, "product": product, **{work.__name__: taken(work) for work in works}}))
