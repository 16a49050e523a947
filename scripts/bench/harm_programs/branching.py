"""Steps that begin alike and part where the data says so: python branching.py NAME [STEPS]."""

import copy
import gc
import random

import torch
from models import ConvNet, Transformer, images, new_training, tokens, train_step, update
from steps import each_step, end_of_step, program, run
from torch import Tensor, nn
from torch.nn import functional as F


@program(60)
def adaptive_solver(num_steps: int) -> None:
    """A differential equation whose solver takes four to eleven evaluations, as the error asks."""
    rng = random.Random(4)
    slope = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512)).cuda()
    optimizer = torch.optim.Adam(slope.parameters())
    for _ in each_step(num_steps):
        state = torch.empty(2048, 512, device="cuda")
        for _ in range(rng.randrange(4, 12)):
            first = slope(state)
            second = slope(state + 0.5 * first)
            state = state + (first + 2 * second + slope(state + 0.5 * second)) / 4
        state.square().mean().backward()
        update(optimizer)


@program(60)
def early_exits(num_steps: int) -> None:
    """Two, four or eight blocks are computed, and every second one has a loss."""
    rng = random.Random(4)
    model, optimizer = new_training(num_blocks=8)
    for _ in each_step(num_steps):
        batch = tokens()
        x, losses = model.embedding(batch), []
        for index, block in enumerate(model.blocks[: rng.choice([2, 4, 8])]):
            x = block(x)
            if index % 2:
                losses.append(F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), batch.flatten()))
        sum(losses, torch.zeros((), device="cuda")).backward()
        update(optimizer)


@program(64)
def lazy_penalty(num_steps: int) -> None:
    """A generative network whose every fourth step has a penalty on gradients, with an averaged copy."""
    maker = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 3 * 64 * 64)).cuda()
    teller, averaged = ConvNet(num_classes=1).cuda(), copy.deepcopy(maker)
    for_maker, for_teller = torch.optim.Adam(maker.parameters()), torch.optim.Adam(teller.parameters())

    def made() -> Tensor:
        return maker(torch.empty(32, 128, device="cuda")).view(-1, 3, 64, 64)

    for step in each_step(num_steps):
        truth = images(32, 64)
        (F.softplus(teller(made().detach())).mean() + F.softplus(-teller(truth)).mean()).backward()
        update(for_teller)
        if step % 4 == 0:
            truth.requires_grad_(True)
            (slope,) = torch.autograd.grad(teller(truth).sum(), truth, create_graph=True)
            slope.square().sum().backward()
            update(for_teller)
        F.softplus(-teller(made())).mean().backward()
        update(for_maker)
        for_teller.zero_grad()
        with torch.no_grad():
            for average, parameter in zip(averaged.parameters(), maker.parameters(), strict=True):
                average.lerp_(parameter, 0.001)


@program(60)
def adversarial(num_steps: int) -> None:
    """Three gradient steps on the images, in every fifth step seven, then one on the weights."""
    model = ConvNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    labels = torch.zeros(32, dtype=torch.long, device="cuda")
    kept: list[Tensor] = []
    for step in each_step(num_steps):
        batch = images()
        change = torch.zeros_like(batch, requires_grad=True)
        for _ in range(3 if step % 5 else 7):
            (slope,) = torch.autograd.grad(F.cross_entropy(model(batch + change), labels), change)
            change = (change + 0.1 * slope.sign()).clamp(-0.3, 0.3).detach().requires_grad_(True)
        F.cross_entropy(model((batch + change).detach()), labels).backward()
        update(optimizer)
        if step % 20 == 10:
            kept[:] = batch.clone(), change.detach().clone()


@program(64)
def folds(num_steps: int) -> None:
    """Four folds with a model each; every fourth step it is evaluated, and its weights kept as the best."""
    kept: list[dict[str, Tensor]] = []
    for _ in range(4):
        model, optimizer = new_training()
        best: dict[str, Tensor] = {}
        for step in range(num_steps // 4):
            train_step(model, optimizer, tokens())
            if step % 4 == 3:
                with torch.no_grad():
                    for num in (16, 16, 5):
                        batch = tokens(num)
                        model(batch, batch)
                best = copy.deepcopy(model.state_dict())
            end_of_step()
        kept.append({name: value.cpu() for name, value in best.items()})
        del model, optimizer, best
        gc.collect()
        torch.cuda.empty_cache()


@program(64)
def feedback(num_steps: int) -> None:
    """Texts are made token by token and judged by two frozen models; then four steps learn from them."""
    policy, optimizer = new_training()
    reference = copy.deepcopy(policy).requires_grad_(False)
    judge = Transformer(num_blocks=2).cuda().requires_grad_(False)
    rng = random.Random(3)

    def chosen(model: nn.Module, texts: Tensor) -> Tensor:
        return F.log_softmax(model(texts), -1).gather(-1, texts[..., None])

    for _ in range(num_steps // 4):
        texts = tokens(8, 32)
        with torch.no_grad():
            for _ in range(rng.choice([16, 24, 32])):
                texts = torch.cat([texts, policy(texts)[:, -1:].argmax(-1)], 1)
            before, usual, reward = chosen(policy, texts), chosen(reference, texts), judge(texts).mean(-1)[..., None]
        for first in (0, 4, 0, 4):
            rows = slice(first, first + 4)
            now = chosen(policy, texts[rows])
            (((now - before[rows]).exp() * reward[rows]).mean() + (now - usual[rows]).mean()).backward()
            update(optimizer)
            end_of_step()


@program(60)
def imagined(num_steps: int) -> None:
    """A model of a world is trained on what was seen; an actor learns from 5, 10 or 15 steps that it imagines."""
    rng = random.Random(1)
    encoder, cell, value = ConvNet(num_classes=512).cuda(), nn.GRUCell(512, 512).cuda(), nn.Linear(512, 64).cuda()
    actor = nn.Sequential(nn.Linear(512, 512), nn.ELU(), nn.Linear(512, 8)).cuda()
    of_world = torch.optim.Adam([*encoder.parameters(), *cell.parameters(), *value.parameters()])
    of_actor = torch.optim.Adam(actor.parameters())
    for _ in each_step(num_steps):
        state, states = torch.zeros(8, 512, device="cuda"), []
        for _ in range(8):
            state = cell(encoder(images(8, 64)), state)
            states.append(state)
        value(torch.stack(states)).square().mean().backward()
        update(of_world)
        state = torch.stack(states).detach().flatten(0, 1)
        reward = torch.zeros((), device="cuda")
        for _ in range(rng.choice([5, 10, 15])):
            state = cell(actor(state).softmax(-1).repeat(1, 64), state)
            reward = reward + value(state).mean()
        (-reward).backward()
        update(of_actor)
        of_world.zero_grad()


@program(60)
def several_tasks(num_steps: int) -> None:
    """A trunk with a head for each of three tasks; a batch is of one of them, at random, and of its length."""
    rng = random.Random(5)
    model, optimizer = new_training()
    model.add_module("head", nn.Identity())
    heads = nn.ModuleList(nn.Linear(256, classes) for classes in (2, 1000, 8192)).cuda()
    of_heads = torch.optim.AdamW(heads.parameters())
    for _ in each_step(num_steps):
        task = rng.randrange(3)
        features = model(tokens(8, (128, 256, 192)[task]))
        heads[task](features).logsumexp(-1).mean().backward()
        update(optimizer, of_heads)


if __name__ == "__main__":
    run()
