"""Trainings as they are, and with gradients that leave in backward: prints what became of each habit as JSON.

Arguments are the names of stacks, without any it is all of them.

On the processor, where everything computes: losses, gradients that the program looks at, parameters and state of four
steps are compared bit by bit. On the virtual GPU, whose copies are real here and whose kernels do nothing, gradients
are what a hook writes, and have to come back as they were.
"""

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

from stalloc import device

device.activate("virtual", device.VirtualGPU(total_bytes=1 << 30, copy_limit_bytes=None))

import torch  # noqa: E402  (the device is in place)
from equality import same  # noqa: E402  (beside this file)
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import stalloc  # noqa: E402
from stalloc.techniques.parameters import own_gradient  # noqa: E402

torch.set_num_threads(1)
WIDTH, STEPS, WORDS = 16, 4, 24
STACKS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "by the processor": {"processor": 1.0},
    "in part by the processor": {"processor": 0.5},
    "beside backward": {"processor": 1.0, "beside_backward": True},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.again, self.unused = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(self.again(torch.tanh(self.again(x))))))  # a parameter used twice


class Model(nn.Module):
    """Four layers between an embedding and a head that share their parameter."""

    def __init__(self, habits: set[str]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.habits = habits

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if "checkpoints" in self.habits else layer(x)
            if "fails" in self.habits and layer is self.layers[1]:
                x.register_hook(self.fail)
        return self.head(x).square().mean()

    def fail(self, gradient: torch.Tensor) -> None:
        if "failing" in self.habits:
            self.habits.remove("failing")
            raise ArithmeticError


HABITS: dict[str, set[str]] = {
    "plain": set(),
    "zeroed in place": {"zeros"},
    "zeroed by the model": {"zeroed by the model"},
    "set to none by hand": {"by hand"},
    "accumulated": {"accumulate"},
    "accumulated and zeroed in place": {"accumulate", "zeros"},
    "accumulated through checkpoints": {"accumulate", "checkpoints"},
    "never zeroed": {"keep"},
    "clipped": {"clip", "accumulate"},
    "clipped sometimes": {"clip sometimes"},
    "scaled": {"scale", "clip", "accumulate"},
    "groups": {"groups"},
    "hooks of its own": {"hooks", "accumulate"},
    "earlier hooks of its own": {"earlier hooks", "accumulate"},
    "gradients held": {"hold", "zeros", "accumulate"},
    "gradients set": {"set"},
    "read by the way": {"log"},
    "penalized": {"penalty"},
    "frozen later": {"freeze"},
    "backward fails": {"fails"},
    "backward fails, and goes on with what it left": {"fails", "keeps what is left"},
    "another optimizer between": {"remade"},
    "skipped": {"skip"},
}


def train(habits: set[str], stack: dict[str, Any] | None) -> Any:
    torch.manual_seed(1)
    model = Model(set(habits))
    parameters = list(model.parameters())
    seen: list[Any] = []
    if "earlier hooks" in habits:
        watch(parameters, seen)
    halves = [{"params": parameters[::2], "lr": 1e-2}, {"params": parameters[1::2], "weight_decay": 0.0}]

    def optimizer_of() -> torch.optim.Optimizer:
        made = torch.optim.AdamW(halves if "groups" in habits else parameters, lr=1e-2, fused=True)
        if stack is not None:
            stalloc.page_optimizer(made, window=20_000, **stack)
        return made

    optimizer = optimizer_of()
    if stack is not None:
        stalloc.stream_layers(model, window=1)
    if "hooks" in habits:
        watch(parameters, seen)
    scaler = torch.amp.GradScaler("cpu", enabled="scale" in habits)
    held: list[Any] = []
    for step in range(STEPS):
        if "freeze" in habits:
            model.layers[2].requires_grad_(step == 2)
        if "fails" in habits and step == 1:
            model.habits.add("failing")
        for _ in range(1 + ("accumulate" in habits)):
            loss = model(torch.randint(WORDS, (3, 5)))
            try:
                scaler.scale(loss).backward(create_graph="penalty" in habits)
            except ArithmeticError:
                if "keeps what is left" not in habits:
                    optimizer.zero_grad()
                    continue
            seen.append(loss.item())
        if "hold" in habits:
            held = held or [one.grad for one in parameters]
            seen += [None if one is None else one.sum().item() for one in held]
        if "set" in habits:
            for one in parameters[::3]:
                one.grad = None if one.grad is None else one.grad * 0.5
        if "log" in habits and step != 2:
            seen.append(model.layers[1].first.weight.grad.norm().item())
            seen.append([one.grad is None for one in parameters])
        if "scale" in habits:
            scaler.unscale_(optimizer)
        if "clip" in habits or ("clip sometimes" in habits and step % 2):
            seen.append(nn.utils.clip_grad_norm_(parameters, 0.1).item())
        if "remade" in habits and step == 1:
            del optimizer
            optimizer = optimizer_of()
        if "skip" not in habits or step != 1:
            scaler.step(optimizer)
            scaler.update()
        if "zeroed by the model" in habits:
            model.zero_grad()
        elif "by hand" in habits:
            for one in parameters:
                one.grad = None
        elif "keep" not in habits:
            optimizer.zero_grad(set_to_none="zeros" not in habits)
    seen += [copy.deepcopy(one).detach() for one in parameters]
    return seen, optimizer.state_dict()["state"]


def watch(parameters: list[Any], seen: list[Any]) -> None:
    """Hooks as people write them: one looks at gradients, one changes them, one takes them away."""

    def look(one: Any) -> None:
        seen.append(one.grad.sum().item())

    def change(one: Any) -> None:
        one.grad.mul_(0.5)

    def take(one: Any) -> None:
        one.grad = None

    for place, one in enumerate(parameters):
        one.register_post_accumulate_grad_hook((look, change, take)[place % 3])


class Plain(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.between = nn.Linear(WIDTH, WIDTH), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.between(torch.relu(self.inner(x)))


def in_microbatches(number: int, between: Callable[[torch.Tensor], torch.Tensor], *, recomputes: bool = False) -> Any:
    """Gradients, a layer at a time and by a loop around the model; parameters of both after three steps."""
    found = []
    for is_streamed in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(*[Plain(between) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if is_streamed:
            if recomputes:
                stalloc.checkpoint(model)
            stalloc.page_optimizer(optimizer, window=20_000)
            stalloc.stream_layers(model, window=1, microbatches=number)
        results = []
        for _ in range(3):
            batch = torch.randn(10, WIDTH)
            parts = (
                [batch] if is_streamed else [batch[10 * at // number : 10 * (at + 1) // number] for at in range(number)]
            )
            made = []
            for part in parts:
                made.append(model(part))
                made[-1].square().sum().backward()
            results += [torch.cat(made), [one.grad.clone() for one in model.parameters()]]
            optimizer.step()
            optimizer.zero_grad()
        found.append((results, [one.detach() for one in model.parameters()]))
    return same(*found)


def microbatches() -> dict[str, Any]:
    told: dict[str, Any] = {}
    for number in (2, 3, 5, 10, 12):
        told[f"{number}"] = in_microbatches(min(number, 10), torch.tanh)
    told["recomputed"] = in_microbatches(5, torch.tanh, recomputes=True)
    for name, between in {
        "random": nn.functional.dropout,
        "other rows": lambda x: x.expand(3, *x.shape),
        "normalized": nn.BatchNorm1d(WIDTH),
    }.items():
        told[name] = outcome(lambda between=between: in_microbatches(5, between))
    told["by none"] = outcome(lambda: stalloc.stream_layers(nn.Sequential(Layer(), Layer()), microbatches=0))
    one = torch.optim.AdamW(Layer().parameters())
    told["beside nothing"] = outcome(lambda: stalloc.page_optimizer(one, beside_backward=True))
    return told


def outcome(do: Callable[[], Any]) -> Any:
    try:
        return do()
    except stalloc.StallocError as error:
        return str(error)


class Written(nn.Module):
    """A layer whose gradients are what a hook writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def on_the_device() -> dict[str, Any]:
    torch.manual_seed(2)
    model = nn.Sequential(*[Written() for _ in range(4)]).cuda()
    weights = [one.inner.weight for one in model]  # type: ignore[union-attr]
    values = [torch.randn(3, 64, 64) for _ in weights]
    passes = [0]
    for weight, value in zip(weights, values, strict=True):
        weight.register_hook(lambda gradient, value=value: gradient.copy_(value[passes[0]]))
    optimizer = torch.optim.AdamW(model.parameters())
    stalloc.page_optimizer(optimizer)
    stalloc.stream_layers(model, window=1)
    found: dict[str, Any] = {"left": [], "came back": [], "device": []}
    for number in range(3):
        passes[0] = number
        model(torch.ones(2, 64, device="cuda")).sum().backward()
    found["left"] = [own_gradient(one) is None for one in model.parameters()]
    summed = [(value[0] + value[1]) + value[2] for value in values]
    gradients = [one.grad for one in weights]
    found["device"] = [str(one.device) for one in gradients]
    found["came back"] = [torch.equal(one.cpu(), value) for one, value in zip(gradients, summed, strict=True)]
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 64, device="cuda")).sum().backward()
    found["stays when it was read"] = all(own_gradient(one) is not None for one in model.parameters())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model(torch.ones(2, 64, device="cuda")).sum().backward()
    found["leaves again"] = all(own_gradient(one) is None for one in model.parameters())
    return found


def main() -> None:
    told: dict[str, Any] = {}
    for name, habits in HABITS.items():
        as_it_is = train(habits, None)
        for stack, options in STACKS.items():
            if sys.argv[1:] and stack not in sys.argv[1:]:
                continue
            found = outcome(lambda habits=habits, options=options: train(habits, options))
            told[f"{name}: {stack}"] = found if isinstance(found, str) else same(as_it_is, found)
    print(json.dumps({"habits": told, "on the device": on_the_device(), "microbatches": microbatches()}))


if __name__ == "__main__":
    main()
