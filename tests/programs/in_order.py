"""What programs do that is in order though it looks as if it were not; what the checker found, as JSON."""

import json
import pickle
import sys
import warnings
from collections.abc import Iterable, Iterator

from stalloc import device

device.activate("virtual", device.VirtualGPU(num_devices=2))

import cupy  # noqa: E402
import numpy  # noqa: E402
import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from triton_kernels import add  # noqa: E402

import stalloc  # noqa: E402
from stalloc.device import virtual  # noqa: E402

if sys.argv[1] == "stalloc":
    stalloc.install()
main, side = torch.cuda.current_stream(), torch.cuda.Stream()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


def reads_by_the_host() -> None:
    numbers, pinned = torch.arange(10, device="cuda"), torch.empty(10, dtype=torch.long, pin_memory=True)
    pinned.copy_(numbers, non_blocking=True)
    main.record_event().synchronize()
    assert pinned.tolist() == list(range(10))
    array = pinned.numpy()
    array += 1
    assert array[array > 9].tolist() == pinned[-1:].tolist() == [10]
    assert type(array.copy()) is type(pickle.loads(pickle.dumps(array))) is numpy.ndarray
    half = torch.zeros(20, dtype=torch.long, pin_memory=True)
    half[:10].copy_(numbers, non_blocking=True)
    half[10:].numpy()[:] = 1  # the other part
    later = (numbers + 1).to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    later.numpy().sum()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        found = numbers[numbers > 4].nonzero()
    main.wait_stream(side)
    found.sum().item()


def what_the_host_has_waited_for() -> None:
    there = torch.ones(1000, 1000).cuda()  # a copy from memory that is not pinned is over
    ones(1000).sum().item()
    with torch.cuda.stream(side):
        there.mul_(2)
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    with torch.cuda.stream(side):
        there.add_(1)
        event.record()
    while not event.query():
        pass
    there.mul_(2)


def side_by_side() -> None:
    halves, read = torch.zeros(512, 1024, device="cuda"), ones(1000, 1000)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        halves[:, :512].add_(1)
        product = read @ read
    halves[:, 512:].add_(1)
    read.view(-1).sum()
    main.wait_stream(side)
    del read, halves
    ones(1000, 1000).add_(product)


def prefetched(batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[torch.Tensor]:
    for data, _ in batches:
        with torch.cuda.stream(side):
            batch = data.to("cuda", non_blocking=True)
        main.wait_stream(side)
        batch.record_stream(main)
        yield batch


def trains() -> None:
    model = torch.nn.Linear(100, 100).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    torch.cuda.synchronize()
    for batch in prefetched(DataLoader(TensorDataset(torch.randn(64, 100), torch.arange(64)), 8, pin_memory=True)):
        with torch.autocast("cuda"):
            loss = model(batch).sum()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def two_devices() -> None:
    here = ones(1000)
    there = here.to("cuda:1")
    there.add_(1)
    here.copy_(there)
    here.add_(1)
    torch.empty(1000, device="cuda:1").copy_(here, non_blocking=True).mul_(2)


def graphs() -> None:
    layer, sample = torch.nn.Linear(32, 32).cuda(), torch.randn(4, 32, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(layer, (sample,))
    for _ in range(3):
        graphed(torch.randn(4, 32, device="cuda", requires_grad=True)).sum().backward()
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        sample.detach().add_(1)
    again.replay()
    with torch.cuda.stream(side):
        again.replay()  # a graph runs once at a time
    main.wait_stream(side)


def streams_of_cupy() -> None:
    array, blocking = cupy.asarray(ones(100, 100)), cupy.cuda.Stream()
    with blocking:  # which the legacy default stream waits for
        array += 1
    total = array + 1
    kernel = cupy.RawKernel('extern "C" __global__ void kernel(const float* a, float* b) {}', "kernel")
    kernel((1,), (1,), (array, total))
    side.wait_stream(main)
    with cupy.cuda.ExternalStream(side.cuda_stream):
        total[:, ::2] *= 2
    main.wait_stream(side)
    cupy.concatenate([total[:50], array[50:]]).sum(axis=1).get()


def functions_of_the_host() -> None:
    pinned, seen = torch.empty(1000, pin_memory=True), []
    pinned.copy_(ones(1000), non_blocking=True)
    cupy.cuda.Stream.from_external(main).launch_host_func(lambda _: seen.append(pinned.sum()), None)
    assert len(seen) == 1


def two_readers() -> None:
    one, other, total = ones(1 << 12), ones(1 << 12), ones(1 << 12)
    reading = cupy.cuda.Stream(non_blocking=True)
    array, diagonal = cupy.asarray(one).reshape(64, 64), cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    add[(1,)](one, other, total, 1 << 12, BLOCK=1 << 12)
    with reading:
        product = array @ array
    with diagonal:
        cupy.einsum("ii->i", array).sum()
    one + other + 1
    del product


def tensors_without_memory() -> None:
    with FakeTensorMode(), warnings.catch_warnings(action="error"):  # as DTensor asks for shapes
        made = torch.empty(8, 4, device="cuda")
        product = (made @ made.detach().t()).contiguous()
    assert isinstance(product, FakeTensor)
    assert product.shape == (8, 8)


for program in (
    *(reads_by_the_host, what_the_host_has_waited_for, side_by_side, trains, two_devices, graphs, streams_of_cupy),
    *(functions_of_the_host, two_readers, tensors_without_memory),
):
    torch.cuda.synchronize()
    program()
checker = virtual.order_checker()
assert checker is not None
print(json.dumps([one.text for one in checker.found()]))
