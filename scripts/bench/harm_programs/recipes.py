"""Training as users write it: python recipes.py NAME [STEPS]."""

import random

import torch
from models import Transformer, new_training, tokens, train_step, update
from steps import each_step, end_of_step, program, run
from torch import Tensor, nn
from torch.nn import functional as F


@program(60)
def recomputing_toggled(num_steps: int) -> None:
    """Activations are kept in ten steps and recomputed in the next ten."""
    model, optimizer = new_training()
    for step in each_step(num_steps):
        model.recompute = step // 10 % 2 == 1
        train_step(model, optimizer, tokens())


@program(60)
def feature_hooks(num_steps: int) -> None:
    """Distances between features that hooks keep in a dictionary until the next step overwrites them."""
    model, optimizer = new_training()
    features: dict[int, Tensor] = {}
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _module, _inputs, output, i=i: features.__setitem__(i, output))
    for step in each_step(num_steps):
        batch = tokens()
        loss = model(batch, batch)
        if step % 3 == 2:
            loss = loss + sum(F.mse_loss(features[i], features[i + 1].detach()) for i in range(3))
        loss.backward()
        update(optimizer)
        if step % 20 == 19:
            torch.stack([feature.std() for feature in features.values()]).cpu()


@program(60)
def offloaded_by_hand(num_steps: int) -> None:
    """A large second model is on the GPU only while it judges, every sixth step; the optimizer's state then is not."""
    model, optimizer = new_training()
    judge = Transformer(width=512, num_blocks=6).requires_grad_(False)
    for step in each_step(num_steps):
        train_step(model, optimizer, tokens())
        if step % 6 == 5:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if torch.is_tensor(value) and value.is_cuda:
                        state[name] = value.to("cpu")
            judge.to("cuda")
            with torch.no_grad():
                batch = tokens(16)
                judge(batch, batch).item()
            judge.to("cpu")
            for state in optimizer.state.values():
                for name, value in state.items():
                    if torch.is_tensor(value) and name != "step":
                        state[name] = value.to("cuda")


@program(60)
def ragged_accumulation(num_steps: int) -> None:
    """Four micro-batches a step; an epoch's last step has three, of which the last is short."""
    model, optimizer = new_training()
    done = 0
    while done < num_steps:
        sizes = [8] * 22 + [3]
        for i, num in enumerate(sizes):
            batch = tokens(num)
            (model(batch, batch) / 4).backward()
            if i % 4 == 3 or i + 1 == len(sizes):
                update(optimizer)
                end_of_step()
                done += 1


@program(120)
def refilled_buffer(num_steps: int) -> None:
    """An autoencoder learns from a buffer that a language model refills, whenever it is half empty."""
    rng = random.Random(93)
    model = Transformer(width=512).cuda().requires_grad_(False)
    encoder, decoder = nn.Linear(512, 8192).cuda(), nn.Linear(8192, 512).cuda()
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    buffer = torch.empty(0, 512, device="cuda")
    for _ in each_step(num_steps):
        if len(buffer) < 12_000:
            parts = [buffer]
            with torch.no_grad():
                while sum(map(len, parts)) < 30_000:
                    x = model.embedding(tokens(16, rng.randrange(64, 256)))
                    for block in model.blocks[:3]:
                        x = block(x)
                    parts.append(x.flatten(0, 1))
            buffer = torch.cat(parts)
            buffer = buffer[torch.randperm(len(buffer)).cuda()]
        batch, buffer = buffer[:2048], buffer[2048:]
        codes = encoder(batch).relu()
        (F.mse_loss(decoder(codes), batch) + codes.mean()).backward()
        update(optimizer)


if __name__ == "__main__":
    run()
