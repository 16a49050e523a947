"""Training with less usual ways to gradients: python gradients.py NAME [STEPS]."""

import torch
from models import ConvNet, Transformer, images, new_training, tokens, train_step, update
from steps import each_step, program, run
from torch import nn
from torch.nn import functional as F


@program(60)
def mixed_precision(num_steps: int) -> None:
    """float16 with a GradScaler."""
    model, optimizer = new_training(width=384)
    scaler = torch.amp.GradScaler("cuda")
    for _ in each_step(num_steps):
        batch = tokens()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@program(50)
def double_backward(num_steps: int) -> None:
    """A penalty on the gradient with respect to the input: gradients of gradients."""
    teller = ConvNet(num_classes=1).cuda()
    optimizer = torch.optim.Adam(teller.parameters())
    for _ in each_step(num_steps):
        real = images().requires_grad_(True)
        told = teller(real).sum()
        (slope,) = torch.autograd.grad(told, real, create_graph=True)
        (told + slope.square().sum()).backward()
        update(optimizer)


@program(40)
def recomputed(num_steps: int) -> None:
    """Activation checkpointing: the forward of each block runs again in the backward."""
    model, optimizer = new_training(width=384, num_blocks=6, recompute=True)
    for _ in each_step(num_steps):
        train_step(model, optimizer, tokens())


@program(60)
def sparse_embeddings(num_steps: int) -> None:
    """A recommender: large tables with sparse gradients, and a small dense part."""
    tables = nn.ModuleList(nn.Embedding(200_000, 64, sparse=True) for _ in range(6)).cuda()
    dense = nn.Sequential(nn.Linear(384, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()
    for_tables = torch.optim.SGD(tables.parameters(), lr=0.1)
    for_dense = torch.optim.Adam(dense.parameters())
    for _ in each_step(num_steps):
        chosen = torch.randint(0, 200_000, (6, 8192)).cuda()
        seen = torch.cat([table(row) for table, row in zip(tables, chosen, strict=True)], 1)
        dense(seen).mean().backward()
        update(for_tables, for_dense)


@program(40)
def inner_loop(num_steps: int) -> None:
    """Meta-learning: three steps on copies of the weights, then one through all of them."""
    net = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    for _ in each_step(num_steps):
        weights = dict(net.named_parameters())
        x = torch.randn(2048, 1024).cuda()
        for _ in range(3):
            loss = torch.func.functional_call(net, weights, (x,)).square().mean()
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            changed = zip(weights.items(), slopes, strict=True)
            weights = {name: weight - 0.1 * slope for (name, weight), slope in changed}
        torch.func.functional_call(net, weights, (x,)).square().mean().backward()
        update(optimizer)


@program(40)
def recurrent(num_steps: int) -> None:
    """A recurrent cell over 96 moments, truncated after 32: three backwards make a step."""
    cell, head = nn.GRUCell(512, 1024).cuda(), nn.Linear(1024, 512).cuda()
    optimizer = torch.optim.RMSprop([*cell.parameters(), *head.parameters()])
    for _ in each_step(num_steps):
        hidden = torch.zeros(512, 1024, device="cuda")
        for _ in range(3):
            loss = torch.zeros((), device="cuda")
            for _ in range(32):
                hidden = cell(torch.empty(512, 512, device="cuda"), hidden)
                loss = loss + head(hidden).square().mean()
            loss.backward()
            hidden = hidden.detach()
        update(optimizer)


@program(60)
def convolutions(num_steps: int) -> None:
    """A convolutional network, and nothing else."""
    net = ConvNet(num_stages=5).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in each_step(num_steps):
        F.cross_entropy(net(images(48)), torch.zeros(48, dtype=torch.int64, device="cuda")).backward()
        update(optimizer)


@program(60)
def fourier(num_steps: int) -> None:
    """A Fourier neural operator: spectra are weighted and turned back."""
    weights = nn.ParameterList(torch.randn(32, 32, 16, 16, dtype=torch.complex64) for _ in range(4)).cuda()
    mixing = nn.ModuleList(nn.Conv2d(32, 32, 1) for _ in range(4)).cuda()
    optimizer = torch.optim.Adam([*weights, *mixing.parameters()])
    for _ in each_step(num_steps):
        x = torch.empty(24, 32, 64, 64, device="cuda")
        for weight, mix in zip(weights, mixing, strict=True):
            low = torch.einsum("nihw,iohw->nohw", torch.fft.rfft2(x)[..., :16, :16], weight)
            x = F.gelu(torch.fft.irfft2(low, s=(64, 64)) + mix(x))
        x.square().mean().backward()
        update(optimizer)


@program(60)
def stepped_in_hooks(num_steps: int) -> None:
    """Each weight is updated as soon as its gradient is there; later the gradients of two batches are added first."""
    model = Transformer(width=384, num_blocks=6).cuda()
    each = {weight: torch.optim.Adam([weight], foreach=False) for weight in model.parameters()}

    hooks = [weight.register_post_accumulate_grad_hook(lambda weight: update(each[weight])) for weight in each]
    for step in each_step(num_steps):
        if step == num_steps // 3:
            for hook in hooks:
                hook.remove()
        is_added = step >= num_steps // 3
        for _ in range(2 if is_added else 1):
            batch = tokens(6, 192)
            model(batch, batch).backward()
        for weight in each if is_added else ():
            update(each[weight])


if __name__ == "__main__":
    run()
