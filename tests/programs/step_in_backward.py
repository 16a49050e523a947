"""Trainings on the CPU, as they are and with the optimizer's step in the backward pass; prints what became of each."""

import copy
import json

import torch

from stalloc.techniques.applying import apply_settings
from stalloc.techniques.parameters import own_gradient
from stalloc.techniques.technique_settings import TechniqueSettings

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "SGD, plain": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "AdamW, foreach": {"foreach": True},
    "AdamW, fused": {"fused": True},
    "Adamax": {},
    "Adadelta": {},
    "Adagrad": {},
    "Adafactor": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5},
    "Rprop": {},
    "Muon": {},
}


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8),
                               torch.nn.LayerNorm(8))  # fmt: skip


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.children()
    kind = getattr(torch.optim, name.partition(",")[0])
    groups = [
        {"params": list(first.parameters()), "lr": 0.05},
        {"params": [one for part in rest for one in part.parameters()]},
    ]
    for group in groups:
        group["params"] = [one for one in group["params"] if one.requires_grad]
    if name == "Adagrad":  # makes its state when it is made
        return kind(groups, lr=0.01)
    optimizer = kind(groups[:1], lr=0.01, **OPTIMIZERS[name])
    optimizer.add_param_group(groups[1])
    return optimizer


def loss_of(model: torch.nn.Module, step: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    torch.manual_seed(step)
    return (model(torch.randn(4, 8, generator=generator)) ** 2).sum() * scale


def plain(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def zeroed_after(model, optimizer, step):
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def scheduled(model, optimizer, step):
    if step == 0:
        optimizer.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        optimizer.calls = 0
        optimizer.register_step_post_hook(lambda *_: setattr(optimizer, "calls", optimizer.calls + 1))
    plain(model, optimizer, step)
    optimizer.scheduler.step()
    assert optimizer.calls == step + 1


def frozen_later(model, optimizer, step):
    for one in model[0].parameters():
        one.requires_grad_(step != 2)
    plain(model, optimizer, step)


def reloaded(model, optimizer, step):
    plain(model, optimizer, step)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def clipped(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def clipped_later(model, optimizer, step):
    (clipped if step == 3 else plain)(model, optimizer, step)


def scaled(model, optimizer, step):
    if step == 0:
        optimizer.scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    optimizer.scaler.scale(loss_of(model, step)).backward()
    optimizer.scaler.step(optimizer)
    optimizer.scaler.update()


def accumulated(model, optimizer, step):
    optimizer.zero_grad()
    losses = [loss_of(model, 2 * step), loss_of(model, 2 * step + 1)]
    for loss in losses:
        loss.backward()
    optimizer.step()


def accumulated_in_turn(model, optimizer, step):
    optimizer.zero_grad()
    for part in (0, 1):
        loss_of(model, 2 * step + part).backward()
    optimizer.step()


def accumulated_by_hand(model, optimizer, step):
    for _ in (0, 1):
        sum((one**2).sum() for one in model.parameters()).backward()
    optimizer.step()


def logged(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    sum(0.0 if one.grad is None else float(one.grad.sum()) for one in model.parameters())
    optimizer.step()


def logged_later(model, optimizer, step):
    plain(model, optimizer, step)
    sum(0.0 if one.grad is None else float(one.grad.sum()) for one in model.parameters())


def never_zeroed(model, optimizer, step):
    loss_of(model, step).backward()
    optimizer.step()


def replaced(model, optimizer, step):
    loss_of(model, step).backward()
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()


def skipped(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    if step != 2:
        optimizer.step()


def warmed_up(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (step + 1)
    optimizer.step()


def by_closure(model, optimizer, step):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    optimizer.step(closure)


def penalized(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, step).backward(create_graph=True)
    optimizer.step()


LOOPS = {one.__name__: one for one in (
    plain, zeroed_after, scheduled, frozen_later, reloaded, clipped, clipped_later, scaled, accumulated,
    accumulated_in_turn, accumulated_by_hand, logged, logged_later, never_zeroed,
    replaced, skipped, warmed_up, by_closure, penalized,
)}  # fmt: skip


def trained(name: str, loop):
    """Parameters and state after five steps."""
    model = model_of(1)
    for one in model.parameters():
        one.requires_grad_(name != "Muon" or one.dim() == 2)  # it knows matrices alone
    optimizer = optimizer_of(name, model)
    for step in range(5):
        loop(model, optimizer, step)
    state = [value for one in model.parameters() for value in optimizer.state.get(one, {}).values()]
    gradients_left = sum(own_gradient(one) is not None for one in model.parameters())
    return [*model.parameters(), *state], gradients_left


def compared(before, name: str, loop):
    try:
        after, gradients_left = trained(name, loop)
    except RuntimeError as error:  # GradientError, or autograd's own
        return {"refused": str(error)}
    pairs = [(torch.as_tensor(one), torch.as_tensor(other)) for one, other in zip(before, after, strict=True)]
    same = all(torch.equal(one, other) for one, other in pairs)
    return {"equal": same, "gradients_left": gradients_left}


def main() -> None:
    as_is = {name: trained(name, plain)[0] for name in OPTIMIZERS}
    loops = {name: trained("AdamW", loop)[0] for name, loop in LOOPS.items()}
    lbfgs = torch.optim.LBFGS
    said = []
    apply_settings(TechniqueSettings(step_in_backward=True), said.append)
    found = {name: compared(as_is[name], name, plain) for name in OPTIMIZERS}
    found |= {name: compared(loops[name], "AdamW", loop) for name, loop in LOOPS.items()}
    assert said == []
    lbfgs(model_of(1).parameters())
    found["said"] = said
    print(json.dumps(found))


if __name__ == "__main__":
    main()
