"""Training and evaluation with batches of several shapes: python lengths.py NAME [STEPS]."""

import random

import torch
from models import ConvNet, images, new_training, tokens, train_step, update
from steps import each_step, program, run
from torch.nn import functional as F


@program(60)
def three_lengths(num_steps: int) -> None:
    """Three lengths in the second half, and now and then a small tensor on a side stream."""
    rng = random.Random(1)
    model, optimizer = new_training()
    side = torch.cuda.Stream()
    for step in each_step(num_steps):
        length = rng.choice([128, 192, 256, 256, 256]) if step > num_steps // 2 else 256
        train_step(model, optimizer, tokens(8, length))
        if step % 7 == 6:
            with torch.cuda.stream(side):
                metric = torch.empty(rng.randrange(1, 1 << 20), device="cuda")
                metric.record_stream(torch.cuda.current_stream())


@program(60)
def random_lengths(num_steps: int) -> None:
    """Every batch has a length of its own, for ever."""
    rng = random.Random(2)
    model, optimizer = new_training()
    for _ in each_step(num_steps):
        train_step(model, optimizer, tokens(8, rng.randrange(64, 320)))


@program(60)
def odd_evaluation(num_steps: int) -> None:
    """Every sixth step an evaluation of four batches of odd lengths follows."""
    rng = random.Random(3)
    model, optimizer = new_training()
    for step in each_step(num_steps):
        train_step(model, optimizer, tokens())
        if step % 6 == 5:
            with torch.no_grad():
                for _ in range(4):
                    batch = tokens(8, rng.randrange(33, 300))
                    model(batch, batch)


@program(60)
def last_batch(num_steps: int) -> None:
    """An epoch has twelve batches, of which the last is smaller."""
    net = ConvNet().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in each_step(num_steps):
        num = 19 if step % 12 == 11 else 64
        loss = F.cross_entropy(net(images(num)), torch.zeros(num, dtype=torch.int64, device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program(60)
def curriculum(num_steps: int) -> None:
    """The length grows from 64 by 32 every tenth step."""
    model, optimizer = new_training()
    for step in each_step(num_steps):
        train_step(model, optimizer, tokens(8, 64 + 32 * (step // 10)))


@program(60)
def buckets(num_steps: int) -> None:
    """Batches of sentences of about one length, padded to 64, 128, 192, 256 or 320, with as many as fit 2,048."""
    rng = random.Random(4)
    model, optimizer = new_training()
    for _ in each_step(num_steps):
        length = rng.choice([64, 128, 192, 256, 320])
        train_step(model, optimizer, tokens(2048 // length, length))


@program(48)
def multi_scale(num_steps: int) -> None:
    """A detector's trick: the size of the images changes every eighth step."""
    rng = random.Random(5)
    net = ConvNet().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    size = 96
    for step in each_step(num_steps):
        if step % 8 == 7:
            size = rng.choice([64, 80, 96, 112])
        loss = F.cross_entropy(net(images(48, size)), torch.zeros(48, dtype=torch.int64, device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program(60)
def labels_of_any_number(num_steps: int) -> None:
    """Every batch of one length has labels of any number, which a side stream copies one step ahead."""
    rng = random.Random(9)
    model, optimizer = new_training()
    side = torch.cuda.Stream()

    def fetch() -> tuple[torch.Tensor, torch.Tensor]:
        side.wait_stream(torch.cuda.current_stream())  # the step that used the memory of the batch before
        with torch.cuda.stream(side):
            labels = torch.empty(rng.randrange(1 << 12, 1 << 19), 4).pin_memory()
            return tokens(8, 192), labels.cuda(non_blocking=True)

    coming = fetch()
    for _ in each_step(num_steps, "step"):
        torch.cuda.current_stream().wait_stream(side)
        batch, labels = coming
        coming = fetch()
        loss = model(batch).logsumexp(-1).mean() + labels.mean()
        loss.backward()
        update(optimizer)


if __name__ == "__main__":
    run()
