"""Training with side streams, threads, captured graphs and several GPUs: python streams.py NAME [STEPS]."""

import queue
import random
import threading

import torch
from models import Transformer, new_training, tokens, train_step, update
from steps import each_step, end_of_step, program, run
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset[torch.Tensor]):
    def __init__(self, num: int) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256,), index % 100)


@program(50)
def pinned_loader(num_steps: int) -> None:
    """A DataLoader with two workers and pinned memory; the next batch is copied on a stream of its own."""
    model, optimizer = new_training()
    loader = DataLoader(Texts(8 * (num_steps + 1)), batch_size=8, num_workers=2, pin_memory=True)
    copying, ready = torch.cuda.Stream(), None
    for host in loader:
        with torch.cuda.stream(copying):
            batch = host.cuda(non_blocking=True)
        if ready is not None:
            torch.cuda.current_stream().wait_stream(copying)
            ready.record_stream(torch.cuda.current_stream())
            train_step(model, optimizer, ready)
            end_of_step()
        ready = batch


@program(60)
def large_prefetch(num_steps: int) -> None:
    """Batches of images of 24 MiB are copied on a side stream two steps ahead."""
    layers = [torch.nn.Conv2d(3, 32, 3, 2), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, 2), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    copying = torch.cuda.Stream()
    ahead: list[torch.Tensor] = []
    for _ in range(num_steps):
        with torch.cuda.stream(copying):
            ahead.append(torch.empty(42, 3, 224, 224).cuda(non_blocking=True))
        if len(ahead) < 3:
            continue
        torch.cuda.current_stream().wait_stream(copying)
        batch = ahead.pop(0)
        batch.record_stream(torch.cuda.current_stream())
        net(batch).mean().backward()
        update(optimizer)
        end_of_step()


@program(50)
def weights_streamed(num_steps: int) -> None:
    """Blocks are kept on the host; each is copied to the GPU on a side stream while the one before it runs."""
    host = [torch.empty(12, 1024, 1024) for _ in range(6)]
    copying = torch.cuda.Stream()
    for _ in each_step(num_steps):
        x = torch.empty(8, 512, 1024, device="cuda")
        with torch.cuda.stream(copying):
            ready = host[0].cuda(non_blocking=True)
        for block in [*host[1:], None]:
            torch.cuda.current_stream().wait_stream(copying)
            weights = ready
            weights.record_stream(torch.cuda.current_stream())
            if block is not None:
                with torch.cuda.stream(copying):
                    ready = block.cuda(non_blocking=True)
            for weight in weights:
                x = torch.relu(x @ weight)


@program(60)
def captured_step(num_steps: int) -> None:
    """The step is captured in a CUDA graph; every tenth step an evaluation runs outside it."""
    model = Transformer().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    batch, side = tokens(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train_step(model, optimizer, batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(batch, batch).backward()
        optimizer.step()
    for step in each_step(num_steps):
        batch.copy_(tokens())
        graph.replay()
        if step % 10 == 9:
            with torch.no_grad():
                model(tokens(4, 128))


def _train_in_threads(num_steps: int, devices: list[str], lengths: list[int]) -> None:
    """A model and a thread for each device; steps of the first end a step."""
    models = [Transformer().to(device) for device in devices]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]

    def train(i: int) -> None:
        torch.cuda.set_device(devices[i])
        for _ in range(num_steps):
            train_step(models[i], optimizers[i], tokens(8, lengths[i], devices[i]))
            if i == 0:
                end_of_step("equal")

    threads = [threading.Thread(target=train, args=(i,)) for i in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@program(40)
def two_threads(num_steps: int) -> None:
    """Two threads train a model each on one GPU."""
    _train_in_threads(num_steps, ["cuda:0", "cuda:0"], [256, 192])


@program(40)
def two_gpus(num_steps: int) -> None:
    """Two threads train a model each on a GPU of their own."""
    _train_in_threads(num_steps, ["cuda:0", "cuda:1"], [320, 256])


@program(50)
def busy_neighbour(num_steps: int) -> None:
    """Whenever a block of the model begins, another thread allocates up to 16 MiB, and keeps its last four."""
    model, optimizer = new_training()
    asked: queue.Queue[bool] = queue.Queue()
    done: queue.Queue[torch.OutOfMemoryError | None] = queue.Queue()

    def allocate() -> None:
        rng = random.Random(5)
        kept: list[torch.Tensor] = []
        while asked.get():
            try:
                kept.append(torch.empty(rng.randrange(1 << 10, 4 << 20), device="cuda"))
            except torch.OutOfMemoryError as error:
                done.put(error)
                return
            del kept[:-4]
            done.put(None)

    def ask(*_: object) -> None:
        asked.put(True)
        error = done.get()
        if error is not None:
            raise error

    thread = threading.Thread(target=allocate, daemon=True)  # it does not outlive a program that runs out of memory
    thread.start()
    for block in model.blocks:
        block.register_forward_pre_hook(ask)
    for _ in each_step(num_steps):
        train_step(model, optimizer, tokens())
    asked.put(False)
    thread.join()


@program(40)
def data_parallel(num_steps: int) -> None:
    """One process, two GPUs: DataParallel copies the model for each step."""
    model = Transformer().cuda()
    both = torch.nn.DataParallel(model, device_ids=[0, 1])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in each_step(num_steps):
        batch = tokens(16)
        both(batch, batch).mean().backward()
        update(optimizer)


if __name__ == "__main__":
    run()
