"""Training in which something fails and is caught, or memory is given back: python failures.py NAME [STEPS]."""

import random

import torch
from models import new_training, tokens, train_step, update
from steps import each_step, program, run


class BadSample(Exception):
    """A batch that the model refuses."""


@program(60)
def forward_raises(num_steps: int) -> None:
    """The forward of every fifth step raises in one of the blocks; the step is skipped."""
    rng = random.Random(1)
    model, optimizer = new_training()
    bad_block = None

    def check(module: torch.nn.Module, *_: object) -> None:
        if module is bad_block:
            raise BadSample

    for block in model.blocks:
        block.register_forward_hook(check)
    for step in each_step(num_steps):
        bad_block = rng.choice(list(model.blocks)) if step % 5 == 4 else None
        try:
            train_step(model, optimizer, tokens())
        except BadSample:
            optimizer.zero_grad()


@program(50)
def out_of_memory_retry(num_steps: int) -> None:
    """Every tenth batch asks for more than any GPU has, which is caught; it is done in halves."""
    model, optimizer = new_training()
    for step in each_step(num_steps):
        batch = tokens()
        try:
            if step % 10 == 9:
                logits = model(batch)
                torch.empty(1 << 44, dtype=torch.uint8, device="cuda").copy_(logits)
            train_step(model, optimizer, batch)
        except torch.OutOfMemoryError:
            logits = None
            torch.cuda.empty_cache()
            for half in batch.chunk(2):
                (model(half, half) / 2).backward()
            update(optimizer)


@program(40)
def empty_cache(num_steps: int) -> None:
    """The cache is emptied after every step, as advice on the web has it."""
    model, optimizer = new_training()
    for _ in each_step(num_steps):
        train_step(model, optimizer, tokens())
        torch.cuda.empty_cache()


@program(60)
def bad_gradients(num_steps: int) -> None:
    """Every seventh step is dropped after its backward, as when gradients are not finite."""
    model, optimizer = new_training()
    for step in each_step(num_steps):
        batch = tokens()
        model(batch, batch).backward()
        if step % 7 != 6:
            optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    run()
