"""Training whose model or optimizer changes on the way: python changing.py NAME [STEPS]."""

import copy
import random

import torch
from models import Block, Transformer, new_training, tokens, train_step, update
from steps import each_step, end_of_step, program, run
from torch import Tensor, nn


@program(90)
def growing_model(num_steps: int) -> None:
    """Every 15th step a block is added and the optimizer is made anew."""
    model, optimizer = new_training()
    for step in each_step(num_steps):
        if step % 15 == 14:
            model.blocks.append(Block(256).cuda())
            optimizer = torch.optim.AdamW(model.parameters())
        train_step(model, optimizer, tokens())


@program(60)
def optimizer_swapped(num_steps: int) -> None:
    """A third of the steps with SGD, the others with Adam."""
    model, _ = new_training()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in each_step(num_steps):
        if step == num_steps // 3:
            optimizer = torch.optim.Adam(model.parameters())
        train_step(model, optimizer, tokens())


@program(60)
def frozen_then_thawed(num_steps: int) -> None:
    """The blocks are frozen in the first half: only the head learns."""
    model, optimizer = new_training()
    model.blocks.requires_grad_(False)
    for step in each_step(num_steps):
        if step == num_steps // 2:
            model.blocks.requires_grad_(True)
        train_step(model, optimizer, tokens())


@program(60)
def pruned(num_steps: int) -> None:
    """Every 20th step the feed-forward layers lose a quarter of their width, and the optimizer is made anew."""
    model, optimizer = new_training(width=512)
    for step in each_step(num_steps):
        if step % 20 == 19:
            for block in model.blocks:
                first, last = block.feed[0], block.feed[2]
                narrow = 3 * first.out_features // 4
                first.weight = nn.Parameter(first.weight[:narrow].clone())
                first.bias = nn.Parameter(first.bias[:narrow])
                last.weight = nn.Parameter(last.weight[:, :narrow].clone())
                first.out_features = last.in_features = narrow
            optimizer = torch.optim.AdamW(model.parameters())
        train_step(model, optimizer, tokens())


class Adapter(nn.Module):
    """A frozen linear layer with a trained product of two narrow ones beside it."""

    def __init__(self, inner: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


@program(60)
def adapters(num_steps: int) -> None:
    """Two low-rank adapters in turn, 20 steps each, on one frozen model; what was learned is merged."""
    model = Transformer(width=512).requires_grad_(False).cuda()
    for start in range(0, num_steps, 20):
        for block in model.blocks:
            block.qkv = Adapter(block.qkv).cuda()
        optimizer = torch.optim.AdamW(weight for weight in model.parameters() if weight.requires_grad)
        for _ in range(min(20, num_steps - start)):
            train_step(model, optimizer, tokens())
            end_of_step()
        for block in model.blocks:
            adapter = block.qkv
            with torch.no_grad():
                adapter.inner.weight += adapter.up.weight @ adapter.down.weight
            block.qkv = adapter.inner


@program(60)
def sweep(num_steps: int) -> None:
    """Hyper-parameters are tried: every ten steps a new model of another width and a new optimizer."""
    widths = [256, 320, 256, 384, 192, 256]
    for trial in range(-(-num_steps // 10)):
        model, optimizer = new_training(width=widths[trial % len(widths)])
        for _ in range(min(10, num_steps - 10 * trial)):
            train_step(model, optimizer, tokens())
            end_of_step()


@program(60)
def federated(num_steps: int) -> None:
    """Three clients in turn train a copy of a model for four steps each; then the average becomes the model."""
    model = Transformer().cuda()
    for _ in range(num_steps // 12):
        total: dict[str, Tensor] = {}
        for _ in range(3):
            client = copy.deepcopy(model)
            optimizer = torch.optim.SGD(client.parameters(), 0.1, momentum=0.9)
            for _ in range(4):
                train_step(client, optimizer, tokens())
                end_of_step()
            total = {name: value + total.get(name, 0) for name, value in client.state_dict().items()}
        model.load_state_dict({name: value / 3 for name, value in total.items()})


@program(60)
def blocks_chosen(num_steps: int) -> None:
    """Every fifth step two of eight blocks are chosen at random; they and the head train, with a new optimizer."""
    rng = random.Random(74)
    model = Transformer(width=384, num_blocks=8).cuda().requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.head.parameters())
    for step in each_step(num_steps):
        if step % 5 == 0:
            model.blocks.requires_grad_(False)
            for number in rng.sample(range(8), 2):
                model.blocks[number].requires_grad_(True)
            optimizer = torch.optim.AdamW(weight for weight in model.parameters() if weight.requires_grad)
        train_step(model, optimizer, tokens(6, 192))


@program(80)
def continual(num_steps: int) -> None:
    """Tasks of unequal lengths with a head each; after a task squared gradients and weights are kept for a penalty."""
    rng = random.Random(29)
    model = Transformer(num_blocks=3).cuda()
    kept: list[tuple[list[Tensor], list[Tensor]]] = []
    done = 0
    while done < num_steps:
        model.head = nn.Linear(256, rng.choice([1000, 4096, 8192])).cuda()
        trunk = [weight for name, weight in model.named_parameters() if not name.startswith("head")]
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(min(rng.randrange(8, 22), num_steps - done)):
            loss = model(tokens(8, 192)).logsumexp(-1).mean()
            for importance, before in kept:
                for weight, counts, old in zip(trunk, importance, before, strict=True):
                    loss = loss + (counts * (weight - old).square()).sum()
            loss.backward()
            update(optimizer)
            end_of_step()
            done += 1
        importance = [torch.zeros_like(weight) for weight in trunk]
        for _ in range(rng.randrange(3, 7)):
            slopes = torch.autograd.grad(model(tokens(2, 192)).logsumexp(-1).mean(), trunk)
            for counts, slope in zip(importance, slopes, strict=True):
                counts += slope.square()
        kept = [*kept[-2:], (importance, [weight.detach().clone() for weight in trunk])]


if __name__ == "__main__":
    run()
