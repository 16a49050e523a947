"""Training that takes turns with something else: python phases.py NAME [STEPS]."""

import io
import random

import torch
from models import Transformer, new_training, tokens, train_step, update
from steps import each_step, program, run
from torch import nn
from torch.nn import functional as F


@program(40)
def accumulation(num_steps: int) -> None:
    """Four micro-batches make a step."""
    model, optimizer = new_training()
    for _ in each_step(num_steps):
        for _ in range(4):
            batch = tokens()
            (model(batch, batch) / 4).backward()
        update(optimizer)


@program(60)
def checkpoint_saved(num_steps: int) -> None:
    """Every tenth step model and optimizer are saved."""
    model, optimizer = new_training()
    for step in each_step(num_steps):
        train_step(model, optimizer, tokens())
        if step % 10 == 9:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())


@program(30)
def rollout_and_training(num_steps: int) -> None:
    """Texts are made, token by token, then learned from in two steps; how long they are changes."""
    rng = random.Random(1)
    model, optimizer = new_training()
    for _ in each_step(num_steps):
        text = tokens(8, 64)
        with torch.no_grad():
            for _ in range(rng.choice([12, 16, 24])):
                text = torch.cat((text, model(text)[:, -1:].argmax(-1)), 1)
        for _ in range(2):
            train_step(model, optimizer, F.pad(text, (0, 256 - text.shape[1])))


@program(420)
def training_then_inference(num_steps: int) -> None:
    """Twenty steps of training, then nothing but equal batches without gradients."""
    model, optimizer = new_training()
    for step in each_step(num_steps):
        if step < 20:
            train_step(model, optimizer, tokens())
        else:
            with torch.no_grad():
                model(tokens()).argmax(-1).cpu()


@program(150)
def inference_only(num_steps: int) -> None:
    """No optimizer marks a step."""
    model = Transformer(width=512, num_blocks=6).cuda().eval()
    for _ in each_step(num_steps):
        with torch.no_grad():
            model(tokens()).argmax(-1).cpu()


@program(200)
def inference_of_any_length(num_steps: int) -> None:
    """A server's batches: one to sixteen texts of any length."""
    rng = random.Random(2)
    model = Transformer(width=512, num_blocks=4).cuda().eval()
    for _ in each_step(num_steps):
        with torch.no_grad():
            model(tokens(rng.randrange(1, 17), rng.randrange(16, 300))).argmax(-1).cpu()


@program(60)
def gan(num_steps: int) -> None:
    """Two steps of the one that tells, one of the one that makes; each has an optimizer."""
    maker = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 4096))
    teller = nn.Sequential(nn.Linear(4096, 2048), nn.LeakyReLU(), nn.Linear(2048, 2048), nn.LeakyReLU())
    teller.append(nn.Linear(2048, 1))
    maker, teller = maker.cuda(), teller.cuda()
    for_maker, for_teller = torch.optim.Adam(maker.parameters()), torch.optim.Adam(teller.parameters())
    for _ in each_step(num_steps):
        for _ in range(2):
            with torch.no_grad():
                made = maker(torch.randn(4096, 256, device="cuda"))
            truth = torch.empty(4096, 4096).cuda()
            loss = F.softplus(teller(made)).mean() + F.softplus(-teller(truth)).mean()
            loss.backward()
            update(for_teller)
        F.softplus(-teller(maker(torch.randn(4096, 256, device="cuda")))).mean().backward()
        update(for_maker)
        for_teller.zero_grad()


@program(60)
def validation_each_epoch(num_steps: int) -> None:
    """Ten steps of training, three of validation with a larger batch, and the sum of what they gave."""
    model, optimizer = new_training()
    for step in each_step(num_steps):
        train_step(model, optimizer, tokens())
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                losses = [model(batch, batch) for batch in (tokens(12), tokens(12), tokens(5))]
            torch.stack(losses).mean().item()
            model.train()


@program(40)
def greedy_generation(num_steps: int) -> None:
    """The keys and values of a text grow by a token at a time; each text is 96 tokens more than its prompt."""
    rng = random.Random(3)
    heads, width, num_blocks = 8, 128, 6
    weight = torch.empty(heads * width, 3 * heads * width, dtype=torch.float16, device="cuda")
    for _ in each_step(num_steps):
        num = rng.choice([16, 32])
        with torch.no_grad():
            shape = (num, heads, 128, width)
            cache = [torch.empty(2, *shape, dtype=torch.float16, device="cuda") for _ in range(num_blocks)]
            for _ in range(96):
                x = torch.empty(num, 1, heads * width, dtype=torch.float16, device="cuda")
                for i in range(num_blocks):
                    q, k, v = (x @ weight).view(num, 1, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
                    cache[i] = torch.cat((cache[i], torch.stack((k, v))), 3)
                    x = F.scaled_dot_product_attention(q, *cache[i]).transpose(1, 2).reshape(num, 1, heads * width)


@program(30)
def beam_search(num_steps: int) -> None:
    """Six beams a text: at each token the caches of the beams that stay are gathered anew."""
    heads, width, num_blocks = 8, 64, 4
    rng = random.Random(4)
    for _ in each_step(num_steps):
        beams, length = 6 * 8, rng.choice([64, 96, 160])
        cache = [torch.empty(2, beams, heads, length, width, device="cuda") for _ in range(num_blocks)]
        for _ in range(48):
            chosen = torch.zeros(beams, dtype=torch.int64).cuda()
            for i in range(num_blocks):
                one_more = torch.empty(2, beams, heads, 1, width, device="cuda")
                cache[i] = torch.cat((cache[i], one_more), 3).index_select(1, chosen)


if __name__ == "__main__":
    run()
