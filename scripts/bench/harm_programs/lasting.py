"""Training in which something is made now and then that lasts: python lasting.py NAME [STEPS]."""

import copy

import torch
from models import new_training, tokens, train_step, update
from steps import each_step, program, run


@program(60)
def snapshots(num_steps: int) -> None:
    """A block's weights are cloned every 15th step and kept."""
    model, optimizer = new_training()
    kept = []
    for step in each_step(num_steps):
        if step % 15 == 14:
            kept.append({name: weight.clone() for name, weight in model.blocks[0].state_dict().items()})
        train_step(model, optimizer, tokens())


@program(50)
def ema_copy(num_steps: int) -> None:
    """At step 15 an averaged copy of the model is made, which follows it from then on."""
    model, optimizer = new_training()
    averaged = None
    for step in each_step(num_steps):
        if step == 15:
            averaged = copy.deepcopy(model).requires_grad_(False)
        train_step(model, optimizer, tokens())
        if averaged is not None:
            with torch.no_grad():
                for mean, weight in zip(averaged.parameters(), model.parameters(), strict=True):
                    mean.lerp_(weight, 0.01)


@program(60)
def best_weights(num_steps: int) -> None:
    """After an evaluation every 15th step the weights are kept as the best so far, in place of those before."""
    model, optimizer = new_training()
    best = None
    for step in each_step(num_steps):
        train_step(model, optimizer, tokens())
        if step % 15 == 14:
            with torch.no_grad():
                model(tokens(4), tokens(4))
            best = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert best is not None or num_steps < 15


@program(60)
def leaking_list(num_steps: int) -> None:
    """A list for the charts keeps every loss, its batch and a small tensor."""
    model, optimizer = new_training()
    history = []
    for _ in each_step(num_steps):
        batch = tokens()
        history.append((train_step(model, optimizer, batch), batch, torch.zeros(64, 1024, device="cuda")))


@program(50)
def hooks_keep_activations(num_steps: int) -> None:
    """Every tenth step a forward hook keeps what each block gave, for a look at it after the step."""
    model, optimizer = new_training()
    wanted, kept = False, {}

    def keep(module: torch.nn.Module, _: object, output: torch.Tensor) -> None:
        if wanted:
            kept[id(module)] = output.detach().clone()

    for block in model.blocks:
        block.register_forward_hook(keep)
    for step in each_step(num_steps):
        wanted = step % 10 == 9
        train_step(model, optimizer, tokens())


@program(120)
def replay_buffer(num_steps: int) -> None:
    """What is learned from is stored on the GPU, up to a limit; each step draws from it."""
    model, optimizer = new_training(num_blocks=2)
    buffer: list[torch.Tensor] = []
    for step in each_step(num_steps):
        buffer.append(torch.empty(64, 4, 84, 84, dtype=torch.uint8, device="cuda"))
        buffer[:] = buffer[-80:]
        drawn = torch.cat([buffer[(step * 7 + i) % len(buffer)][:8] for i in range(8)]).float() / 255
        batch = tokens()
        (model(batch, batch) + drawn.mean()).backward()
        update(optimizer)


@program(50)
def predictions_kept(num_steps: int) -> None:
    """The predictions of a step are kept until the epoch of 12 steps ends and they are joined."""
    model, optimizer = new_training()
    kept: list[torch.Tensor] = []
    for step in each_step(num_steps):
        batch = tokens()
        loss = model(batch, batch)
        kept.append(torch.empty(8, 256, 64, device="cuda"))
        loss.backward()
        update(optimizer)
        if step % 12 == 11:
            torch.cat(kept).mean(0)
            kept.clear()


if __name__ == "__main__":
    run()
