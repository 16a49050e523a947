"""Small programs of several streams; each lacks one synchronisation unless it is told to `wait`.

`python races.py NAME ALLOCATOR` runs one with it, then without it, and prints what the checker of the order of work
found after each, as JSON: the sentences of both, and the lines of the program that lack it.
"""

import inspect
import io
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

from stalloc import device

device.activate("virtual")

import torch  # noqa: E402

from stalloc import kernels  # noqa: E402
from stalloc.device import virtual  # noqa: E402

NUM = 1 << 20
PROGRAMS: dict[str, Callable[[bool], None]] = {}
MARKED: dict[str, Callable[[Any], Any]] = {}  #: what else of a program has marked lines


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


@program
def copied_rows_read_too_early(wait: bool) -> None:
    """Every second column of a copy to the host is read before it has arrived."""
    copied = torch.ones(1024, 1024, device="cuda").to("cpu", non_blocking=True)  # there
    if wait:
        main_stream().synchronize()
    copied[:, ::2].numpy()  # here
    torch.cuda.synchronize()


@program
def saved_too_early(wait: bool) -> None:
    """A state that is copied to the host without waiting is saved at once."""
    weight = torch.ones(NUM, device="cuda")
    state = {"weight": weight.to("cpu", non_blocking=True)}  # there
    if wait:
        torch.cuda.synchronize()
    torch.save(state, io.BytesIO())  # here
    torch.cuda.synchronize()


@program
def view_of_numpy_read_too_early(wait: bool) -> None:
    """NumPy reads a pinned buffer by a view that it has had since before the copy."""
    buffer = torch.empty(NUM, pin_memory=True)
    view = buffer.numpy().reshape(1024, -1)
    buffer.copy_(torch.ones(NUM, device="cuda"), non_blocking=True)  # there
    if wait:
        torch.cuda.synchronize()
    view[:, 1].sum()  # here
    torch.cuda.synchronize()


@program
def buffer_filled_again_by_numpy(wait: bool) -> None:
    """NumPy writes the next batch to a pinned buffer while the last one is still being copied from it."""
    buffer, there = torch.zeros(NUM, pin_memory=True), torch.empty(NUM, device="cuda")
    there.copy_(buffer, non_blocking=True)  # there
    if wait:
        torch.cuda.synchronize()
    buffer.numpy()[: NUM // 2] = 1  # here
    torch.cuda.synchronize()


@program
def array_of_cupy_read_too_early(wait: bool) -> None:
    """CuPy copies to a pinned array of NumPy's, which is read at once."""
    import cupy
    import cupyx

    side, source, array = cupy.cuda.Stream(non_blocking=True), cupy.ones(NUM), cupyx.empty_pinned(NUM)
    cupy.cuda.Device().synchronize()
    source.get(stream=side, out=array, blocking=False)  # there
    if wait:
        side.synchronize()
    array += 1  # here
    torch.cuda.synchronize()


@program
def registered_buffer_read_too_early(wait: bool) -> None:
    """Memory of the program's own, which it has registered, is read before a copy to it has arrived."""
    weight, own = torch.ones(NUM, device="cuda"), torch.empty(NUM)
    own.fill_(0)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(own.data_ptr(), own.nbytes, 0))
    own.copy_(weight, non_blocking=True)  # there
    if wait:
        torch.cuda.synchronize()
    own.sum()  # here
    torch.cuda.synchronize()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(own.data_ptr()))


@program
def values_of_a_sparse_matrix(wait: bool) -> None:
    """The values of a sparse matrix are changed on one stream, and multiplied on another."""
    side, data = torch.cuda.Stream(), torch.ones(100, 8, device="cuda")
    rows, columns = torch.arange(101, device="cuda"), torch.arange(100, device="cuda")
    matrix = torch.sparse_csr_tensor(rows, columns, torch.ones(100, device="cuda"), (100, 100))
    side.wait_stream(main_stream())
    with torch.cuda.stream(side):
        torch.sparse.mm(matrix, data)  # new memory for this stream may be waited for, which orders all
    main_stream().wait_stream(side)
    matrix.values().mul_(2)  # there
    if wait:
        side.wait_stream(main_stream())
    with torch.cuda.stream(side):
        torch.sparse.mm(matrix, data)  # here
    torch.cuda.synchronize()


@program
def sent_before_it_is_computed(wait: bool) -> None:
    """A rank sends on a stream of its own what another stream still computes."""
    import cupy
    from cupy.cuda import nccl

    side = torch.cuda.Stream()
    communicator = nccl.NcclCommunicator(2, nccl.get_unique_id(), 0)
    source = torch.ones(NUM, device="cuda")  # there
    if wait:
        side.wait_stream(main_stream())
    communicator.send(source.data_ptr(), NUM, nccl.NCCL_FLOAT32, 1, side.cuda_stream)  # here
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()


@program
def kernel_of_triton(wait: bool) -> None:
    """What a kernel of Triton writes on a side stream is used on the main stream."""
    from triton_kernels import add

    side, one, other = torch.cuda.Stream(), torch.ones(NUM, device="cuda"), torch.ones(NUM, device="cuda")
    total = torch.empty(NUM, device="cuda")
    side.wait_stream(main_stream())
    with torch.cuda.stream(side):
        add[(NUM // 1024,)](one, other, total, NUM, BLOCK=1024)  # there
    if wait:
        main_stream().wait_stream(side)
    one + other, total * 2  # here
    torch.cuda.synchronize()


@program
def branch_of_a_graph_not_joined_in_time(wait: bool) -> None:
    """While a graph is captured, a stream uses what another one computes, which it waits for only later."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    weight, other = torch.ones(NUM, device="cuda"), torch.ones(NUM, device="cuda")
    with torch.cuda.graph(graph):
        side.wait_stream(main_stream())
        with torch.cuda.stream(side):
            weight.mul_(2)  # there
        if wait:
            main_stream().wait_stream(side)
        other.add_(weight)  # here
        main_stream().wait_stream(side)
    graph.replay()
    torch.cuda.synchronize()


def of_cupy(name: str, call: Callable[[Any], Any]) -> None:
    """A program that uses what CuPy computes on a side stream."""

    def run(wait: bool) -> None:
        import cupy

        side = cupy.cuda.Stream(non_blocking=True)
        source = cupy.ones((512, 512), dtype="f4")
        side.wait_event(cupy.cuda.get_current_stream().record())
        with side:
            call(source + 1)
        source + 1  # new memory for a stream may be waited for, which orders all
        cupy.cuda.Device().synchronize()
        with side:
            result = call(source)
        if wait:
            cupy.cuda.get_current_stream().wait_event(side.record())
        (source if result is None else result) + 1  # here
        torch.cuda.synchronize()

    PROGRAMS[name] = run
    MARKED[name] = call


def random_numbers(source: Any) -> Any:
    return sys.modules["cupy"].random.standard_normal(source.shape, source.dtype)  # there


def kernel_of_a_template(source: Any) -> None:
    import cupy

    code = "template<typename T> __global__ void fill(const T* from, T* into) {}"
    module = cupy.RawModule(code=f"{code}\n{code.replace('fill', 'refill')}", name_expressions=["refill<float>"])
    module.get_function("refill<float>")((1,), (1,), (source, source))  # there


def kernel_in_python(source: Any) -> None:
    from cupyx import jit

    def kernel(into: Any, value: Any) -> None:
        into[0] = value

    with warnings.catch_warnings(action="ignore"):  # it is experimental
        jit.rawkernel()(kernel)((1,), (1,), (source.ravel(), 2))  # there


of_cupy("product_by_cupy", lambda source: source @ source)  # there
of_cupy("solution_by_cupy", lambda source: sys.modules["cupy"].linalg.solve(source, source))  # there
of_cupy("transform_by_cupy", lambda source: sys.modules["cupy"].fft.fft(source))  # there
of_cupy("random_numbers_by_cupy", random_numbers)
of_cupy("total_by_cupy", lambda source: source.sum())  # there
of_cupy("sorted_by_cupy", lambda source: source.sort())  # there
of_cupy("kernel_of_a_template", kernel_of_a_template)
of_cupy("kernel_in_python", kernel_in_python)


def marked_lines(*functions: Callable[..., Any]) -> dict[str, int]:
    marked = {}
    for function in functions:
        lines, first = inspect.getsourcelines(function)
        for number, line in enumerate(lines, first):
            marked |= {mark: number for mark in ("here", "there") if line.endswith(f"# {mark}\n")}
    return marked


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
    print(
        json.dumps({"waiting": told[0], "not_waiting": told[1], **marked_lines(function, MARKED.get(name, function))})
    )


if __name__ == "__main__":
    main()
