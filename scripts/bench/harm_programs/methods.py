"""Training as other methods do it, each with a rhythm of its own: python methods.py NAME [STEPS]."""

import random

import torch
from models import ConvNet, Transformer, images, new_training, tokens, train_step, update
from steps import each_step, end_of_step, program, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel


@program(60)
def accumulation_changes(num_steps: int) -> None:
    """A step is one, two or four micro-batches, more of them as training goes on."""
    model, optimizer = new_training()
    for step in each_step(num_steps):
        for _ in range(1 << min(2, 3 * step // num_steps)):
            batch = tokens()
            model(batch, batch).backward()
        update(optimizer)


@program(60)
def experts_by_data(num_steps: int) -> None:
    """Each of four experts gets as many tokens as a router sends it, another number in every step."""
    rng = random.Random(3)
    experts = nn.ModuleList(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4))
    experts.cuda()
    optimizer = torch.optim.AdamW(experts.parameters(), lr=1e-4)
    for step in range(num_steps):
        x = torch.empty(8192, 512, device="cuda")
        cuts = sorted(rng.randrange(1, 8192) for _ in range(3))
        parts = x.split([b - a for a, b in zip([0, *cuts], [*cuts, 8192], strict=True)])
        torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)]).square().mean().backward()
        update(optimizer)
        end_of_step(str(step))


@program(60)
def generation_between(num_steps: int) -> None:
    """Every eighth step texts are made with keys and values kept, a layer's tensors longer by one at each token."""
    model, optimizer = new_training()
    for step in each_step(num_steps):
        train_step(model, optimizer, tokens())
        if step % 8 == 7:
            kept: list[Tensor] = [torch.empty(16, 64, 512, device="cuda") for _ in range(8)]
            with torch.no_grad():
                for _ in range(32):
                    kept = [torch.cat((one, one[:, -1:]), 1) for one in kept]


@program(80)
def actor_and_critic(num_steps: int) -> None:
    """Batches come from a cycle of states on the GPU; the critic learns in each step, the actor in every third."""
    actor, critic = (
        nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 256)).cuda()
        for _ in range(2)
    )
    target = AveragedModel(critic)
    optimizers = [torch.optim.Adam(one.parameters()) for one in (actor, critic)]
    cycle: list[Tensor] = []
    for step in each_step(num_steps):
        cycle = [*cycle[-15:], torch.empty(2048, 256, device="cuda")]
        batch = torch.cat(random.Random(step).choices(cycle, k=4))
        with torch.no_grad():
            wanted = target(actor(batch))
        F.mse_loss(critic(batch), wanted).backward()
        update(optimizers[1])
        if step % 3 == 2:
            critic(actor(batch)).mean().backward()
            for one in optimizers:
                update(one)
            target.update_parameters(critic)


@program(60)
def backward_raises(num_steps: int) -> None:
    """Every sixth backward pass ends in an error, in the middle, and the step is left out."""

    def fail(_: Tensor) -> None:
        raise RuntimeError("gradients that are refused")

    def refuse(_module: nn.Module, _given: tuple[Tensor], made: Tensor) -> None:
        made.register_hook(fail)

    model, optimizer = new_training()
    for step in each_step(num_steps):
        batch = tokens()
        refused = model.blocks[1].register_forward_hook(refuse) if step % 6 == 5 else None
        try:
            model(batch, batch).backward()
            optimizer.step()
        except RuntimeError:
            assert refused is not None
            refused.remove()
        optimizer.zero_grad()


@program(60)
def second_order(num_steps: int) -> None:
    """A penalty on gradients in every other step, and curvature along one direction in every tenth."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.Softplus(), nn.Linear(2048, 2048), nn.Softplus(), nn.Linear(2048, 1))
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    for step in each_step(num_steps):
        x = torch.empty(4096, 512, device="cuda", requires_grad=True)
        value = model(x).sum()
        if step % 2:
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            value = value + slope.square().sum()
        if step % 10 == 9:
            slopes = torch.autograd.grad(value, parameters[0], create_graph=True)
            torch.autograd.grad(slopes[0].sum(), parameters[0], retain_graph=True)
        value.backward()
        update(optimizer)


@program(60)
def gradients_by_sample(num_steps: int) -> None:
    """Gradients of each sample for themselves (torch.func), clipped, of batches of two sizes."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
    parameters = {name: one.detach() for name, one in model.named_parameters()}

    def loss(given: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (sample,)).square().mean()

    by_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    for step in each_step(num_steps):
        found = by_sample(parameters, torch.empty(64 if step % 4 else 96, 256, device="cuda"))
        for name, one in found.items():
            norm = one.flatten(1).norm(dim=1).clamp(min=1)
            parameters[name] = parameters[name] - 1e-3 * (one / norm.view(-1, *[1] * (one.dim() - 1))).mean(0)


@program(60)
def resized_progressively(num_steps: int) -> None:
    """Images grow in three stages, and a stage that begins thaws one more part of the model."""
    model = ConvNet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in each_step(num_steps):
        stage = 3 * step // num_steps
        for number, part in enumerate(model.stages):
            part.requires_grad_(number >= 12 - 6 * stage)
        F.cross_entropy(model(images(32, (64, 96, 128)[stage])), torch.zeros(32, dtype=torch.long).cuda()).backward()
        update(optimizer)


@program(60)
def recomputed_at_times(num_steps: int) -> None:
    """Blocks are recomputed in backward while batches are large, which changes every twelve steps."""
    model, optimizer = new_training()
    for step in each_step(num_steps):
        model.recompute = step // 12 % 2 == 1
        train_step(model, optimizer, tokens(16 if model.recompute else 8))


@program(60)
def averaged_weights(num_steps: int) -> None:
    """From half-way on weights are averaged every fifth step; every tenth a larger batch is judged by the average."""
    model, optimizer = new_training()
    averaged: AveragedModel | None = None
    for step in each_step(num_steps):
        train_step(model, optimizer, tokens())
        if step == num_steps // 2:
            averaged = AveragedModel(model)
        if averaged is not None and step % 5 == 4:
            averaged.update_parameters(model)
        if step % 10 == 9:
            with torch.no_grad():
                (averaged or model)(tokens(24))


@program(60)
def distilled(num_steps: int) -> None:
    """A teacher without gradients, a student, and a teacher that is exchanged every twenty steps."""
    teacher, (student, optimizer) = Transformer(384).cuda(), new_training()
    for step in each_step(num_steps):
        batch = tokens()
        with torch.no_grad():
            wanted = teacher(batch).softmax(-1)
        F.kl_div(student(batch).log_softmax(-1), wanted, reduction="batchmean").backward()
        update(optimizer)
        if step % 20 == 19:
            teacher = Transformer(384 + 64 * (step // 20 % 2)).cuda()


if __name__ == "__main__":
    run()
