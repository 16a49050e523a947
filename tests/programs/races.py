"""Small programs of several streams; each lacks one synchronisation unless it is told to `wait`.

`python races.py NAME ALLOCATOR` runs one with it, then without it, and prints what the checker of the order of work
found after each, as JSON: the sentences of both, and the lines of the program that lack it.
"""

import inspect
import json
import sys
from collections.abc import Callable

from stalloc import device

device.activate("virtual")

import torch  # noqa: E402

from stalloc import kernels  # noqa: E402
from stalloc.device import virtual  # noqa: E402

NUM = 1 << 20
PROGRAMS: dict[str, Callable[[bool], None]] = {}


def program(function: Callable[[bool], None]) -> Callable[[bool], None]:
    PROGRAMS[function.__name__] = function
    return function


def main_stream() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


@program
def record_stream_left_out(wait: bool) -> None:
    """A tensor is freed while a side stream still reads it, and its memory serves the next one."""
    side = torch.cuda.Stream()
    total = torch.zeros(NUM, device="cuda")
    batch = torch.ones(NUM, device="cuda")
    side.wait_stream(main_stream())
    with torch.cuda.stream(side):
        total.add_(batch)  # there
    if wait:
        batch.record_stream(side)
    del batch
    torch.ones(NUM, device="cuda")  # here


@program
def wait_left_out_before_use(wait: bool) -> None:
    """What a side stream computes is used on the main stream."""
    side, source = torch.cuda.Stream(), torch.ones(NUM, device="cuda")
    side.wait_stream(main_stream())
    with torch.cuda.stream(side):
        doubled = source * 2  # there
    if wait:
        main_stream().wait_stream(side)
    doubled + 1  # here
    main_stream().wait_stream(side)


@program
def event_of_the_wrong_stream(wait: bool) -> None:
    """An event is recorded on the current stream, which is not the one that does the work."""
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    source = torch.ones(NUM, device="cuda")
    side.wait_stream(main_stream())
    with torch.cuda.stream(side):
        source.mul_(2)  # there
    event = torch.cuda.Event()
    event.record(side if wait else main_stream())
    other.wait_event(event)
    with torch.cuda.stream(other):
        source + 1  # here
    torch.cuda.synchronize()


@program
def event_recorded_too_early(wait: bool) -> None:
    """An event is recorded before the work that it should stand for."""
    side, source = torch.cuda.Stream(), torch.ones(NUM, device="cuda")
    early = main_stream().record_event()
    source.mul_(2)  # there
    side.wait_event(main_stream().record_event() if wait else early)
    with torch.cuda.stream(side):
        source + 1  # here
    torch.cuda.synchronize()


@program
def read_on_the_host_too_early(wait: bool) -> None:
    """A copy to the host is read before it has arrived."""
    loss = torch.ones(NUM, device="cuda")
    copied = loss.to("cpu", non_blocking=True)  # there
    if wait:
        main_stream().synchronize()
    copied.sum()  # here
    torch.cuda.synchronize()


@program
def pinned_buffer_used_again(wait: bool) -> None:
    """A pinned buffer is filled with the next batch while the last one is still being copied from it."""
    buffer = torch.zeros(NUM, pin_memory=True)
    there = torch.empty(NUM, device="cuda")
    there.copy_(buffer, non_blocking=True)  # there
    if wait:
        main_stream().synchronize()
    buffer.fill_(1)  # here
    torch.cuda.synchronize()


@program
def another_stream_of_cupy(wait: bool) -> None:
    """CuPy works on a stream of its own on what PyTorch has made."""
    import cupy

    side = cupy.cuda.Stream(non_blocking=True)
    source = torch.ones(NUM, device="cuda")  # there
    array = cupy.asarray(source)
    if wait:
        side.wait_event(cupy.cuda.get_current_stream().record())
    with side:
        array *= 2  # here
    torch.cuda.synchronize()


@program
def input_of_a_graph_overwritten(wait: bool) -> None:
    """The next input is copied into a graph's while the graph still runs on another stream."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    static = torch.zeros(NUM, device="cuda")
    with torch.cuda.graph(graph):
        result = static * 2
    side.wait_stream(main_stream())
    with torch.cuda.stream(side):
        graph.replay()  # there
    if wait:
        main_stream().wait_stream(side)
    static.fill_(1)  # here
    torch.cuda.synchronize()
    del result


@program
def prefetched_without_waiting(wait: bool) -> None:
    """The next batch is copied to the GPU on a side stream, and used as soon as it is there for the host."""
    side, pinned = torch.cuda.Stream(), torch.zeros(NUM, pin_memory=True)
    with torch.cuda.stream(side):
        batch = pinned.to("cuda", non_blocking=True)  # there
    if wait:
        main_stream().wait_stream(side)
        batch.record_stream(main_stream())
    batch.sum()  # here
    torch.cuda.synchronize()


@program
def prefetched_without_record_stream(wait: bool) -> None:
    """A batch that a side stream copied is freed in use, and a later one is copied into its memory."""
    side, pinned = torch.cuda.Stream(), torch.zeros(NUM, pin_memory=True)
    for _ in range(4):
        with torch.cuda.stream(side):
            batch = pinned.to("cuda", non_blocking=True)  # here
        main_stream().wait_stream(side)
        batch.sum()  # there
        if wait:
            batch.record_stream(main_stream())
        del batch
    torch.cuda.synchronize()


@program
def updated_in_place_on_another_stream(wait: bool) -> None:
    """A weight is updated on one stream while another still reads it."""
    side = torch.cuda.Stream()
    weight, data = torch.ones(1024, 1024, device="cuda"), torch.ones(8, 1024, device="cuda")
    data @ weight  # there
    if wait:
        side.wait_stream(main_stream())
    with torch.cuda.stream(side):
        weight.mul_(0.9)  # here
    torch.cuda.synchronize()


@program
def blocks_copied_by_a_kernel(wait: bool) -> None:
    """A kernel of stalloc's copies blocks on one stream while another still writes them."""
    side = torch.cuda.Stream()
    source, target = torch.zeros(NUM, device="cuda"), torch.zeros(NUM, device="cuda")
    side.wait_stream(main_stream())
    source.add_(1)  # there
    if wait:
        side.wait_stream(main_stream())
    with torch.cuda.stream(side):
        kernels.batched_copy([source.data_ptr()], [target.data_ptr()], [4 * NUM])  # here
    torch.cuda.synchronize()


def marked_lines(function: Callable[[bool], None]) -> dict[str, int]:
    lines, first = inspect.getsourcelines(function)
    return {
        mark: first + i for i, line in enumerate(lines) for mark in ("here", "there") if line.endswith(f"# {mark}\n")
    }


def main() -> None:
    name, allocator = sys.argv[1:]
    if allocator == "stalloc":
        import stalloc

        stalloc.install()
    function, checker, told = PROGRAMS[name], virtual.order_checker(), []
    assert checker is not None
    for wait in (True, False):
        torch.cuda.synchronize()
        function(wait)
        told.append([one.text for one in checker.found()])
    print(json.dumps({"waiting": told[0], "not_waiting": told[1], **marked_lines(function)}))


if __name__ == "__main__":
    main()
