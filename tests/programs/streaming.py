"""Models trained as they are and with streamed layers, in the host and on disk: prints what became of each as JSON.

Arguments are the names of the cases, without any it is all of them.

On the processor, where everything computes, and memory that is let go cannot be read: losses, parameters and state of
four steps are compared bit by bit; "raised" is the error that took their place.
"""

import copy
import gc
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalloc import device

device.activate("virtual")

import torch  # noqa: E402  (the device is in place)
from equality import same  # noqa: E402  (beside this file)
from refusals import sentence  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import stalloc  # noqa: E402
from stalloc.techniques.host_store import held_bytes  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_gpt  # noqa: E402

torch.set_num_threads(1)
WIDTH, STEPS = 32, 4
SIZE = train_gpt.ModelSize(
    num_layers=4, num_heads=4, dim=32, hidden_dim=96, vocab_size=64, dtype=torch.float32, tied_head=True
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.gelu(self.first(x)))


class Beside(Layer):
    """Backward computes what lies beside the way of the input after the input has its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(4, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = torch.tanh(self.left) @ self.right
        return super().forward(x) + beside


class Stack(nn.Module):
    """Four layers, called as a case wants it."""

    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x).square().mean()


def straight(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def skipping(model: Any, x: torch.Tensor) -> torch.Tensor:
    one = model.layers[0](x)
    two = model.layers[1](one * 2)
    return model.layers[3](model.layers[2](two) + one) + two


def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    return straight(model, straight(model, x))


def checkpointed(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def with_penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    return straight(model, x) + sum(one.square().sum() for one in model.parameters())


def frozen() -> nn.Module:
    model = Stack(straight)
    for layer in model.layers:
        layer.first.requires_grad_(False)
    return model


def partly_frozen() -> nn.Module:
    model = Stack(straight)
    model.layers[1].requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


def gpt(**options: Any) -> Callable[[], nn.Module]:
    return lambda: train_gpt.Transformer(SIZE, 16, options.get("use_checkpoint", False))


def frozen_at_first() -> nn.Module:
    model = Stack(lambda model, x: straight(model, x.requires_grad_()))
    model.layers = nn.ModuleList([Beside() for _ in range(4)])
    return model.requires_grad_(False)


CASES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "straight": (lambda: Stack(straight), set()),
    "window of two": (lambda: Stack(straight), {"window"}),
    "skipping": (lambda: Stack(skipping), set()),
    "twice": (lambda: Stack(twice), set()),
    "checkpointed": (lambda: Stack(checkpointed), set()),
    "recomputed": (lambda: Stack(straight), {"recompute"}),
    "frozen": (frozen, set()),
    "partly frozen": (partly_frozen, {"window"}),
    "gpt": (gpt(), {"accumulate", "window"}),
    "gpt recomputed": (gpt(), {"recompute", "accumulate"}),
    "gpt with its own checkpoints": (gpt(use_checkpoint=True), {"accumulate"}),
    "autocast": (gpt(), {"autocast"}),
    "evaluated and changed between": (lambda: Stack(straight), {"between"}),
    "two groups": (lambda: Stack(straight), {"groups"}),
    "retained": (lambda: Stack(straight), {"retain"}),
    "twice onto gradients": (lambda: Stack(twice), {"accumulate"}),
    "second order": (lambda: Stack(straight), {"second order"}),
    "penalty": (lambda: Stack(with_penalty), set()),
    "unfrozen later": (frozen_at_first, {"unfreeze"}),
}


def inputs(model: nn.Module) -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, WIDTH),) if isinstance(model, Stack) else tuple(torch.randint(64, (2, 2, 16)))


def between_steps(model: nn.Module, optimizer: Any, found: list[Any]) -> None:
    """What programs do with parameters outside of a pass."""
    model.eval()
    with torch.no_grad():
        found.append(model(torch.ones(2, WIDTH)).item())
        for one in model.parameters():
            one.clamp_(-0.5, 0.5)
    model.train()
    saved = copy.deepcopy(model.state_dict())
    found.append(sum(one.sum().item() for one in saved.values()))
    model.load_state_dict({name: one * 0.99 for name, one in saved.items()})
    twin = copy.deepcopy(model)
    found.append(twin(torch.ones(2, WIDTH)).item())
    for one in model.parameters():  # which autograd does not see
        one.data.mul_(0.98)
        one.data = one.data + 0.001
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def train(make: Callable[[], nn.Module], habits: set[str], *, streamed: bool, folder: str = "") -> Any:
    """`folder`: most layers lie there, since the host has room for buffers and little more."""
    torch.manual_seed(1)
    model = make()
    parameters = list(model.parameters())
    groups = [{"params": [one for one in parameters if (one.dim() > 1) is flat]} for flat in (True, False)]
    optimizer = torch.optim.AdamW(groups if "groups" in habits else parameters, lr=1e-2)
    if "recompute" in habits:
        stalloc.checkpoint(model)
    if streamed:
        stalloc.page_optimizer(optimizer, window=20_000)
        where = {"host": "64KiB", "disk": f"{folder}:2MiB"} if folder else {}
        streaming = stalloc.stream_layers(model, window=2 if "window" in habits else 1, **where)
        assert any(layer.is_on_disk for layer in streaming.layers) == bool(folder)
    losses: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if "unfreeze" in habits and step == 1:
            model.requires_grad_(True)
        for _ in range(1 + ("accumulate" in habits)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in habits):
                loss = model(*inputs(model))
            if "second order" in habits:
                grown = torch.autograd.grad(loss, parameters[0], create_graph=True)
                loss = loss + grown[0].square().sum()
            loss.backward(retain_graph="retain" in habits)
            if "retain" in habits:
                loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if "between" in habits:
            between_steps(model, optimizer, losses)
    return losses, [one.detach() for one in parameters], optimizer.state_dict()["state"]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.gate(x).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, places = (chosen == number).nonzero(as_tuple=True)
            mixed[rows] += shares[rows, places, None] * self.experts[number](x[rows])
        return x + mixed


class Scale(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def cached_experts() -> dict[str, Any]:
    """Tokens through two layers of eight experts, of which five are on the device at once; weights change meanwhile."""
    found: dict[str, Any] = {}
    results = []
    for room in ("", "90KiB"):
        torch.manual_seed(2)
        model = nn.Sequential(Mixture(), Mixture()).requires_grad_(False)
        experts = [one for layer in model for one in layer.experts]  # type: ignore[union-attr]
        before = [one.clone() for one in model.parameters()]
        cache = stalloc.cache_experts(experts, room=room) if room else None
        outputs = []
        with torch.no_grad():
            for step in range(12):
                outputs.append(model(torch.randn(3, WIDTH)))
                for number, one in enumerate(model.parameters()):  # as those do who load new weights
                    if (number + step) % 3 == 0:
                        one.data.copy_(one.data * 0.9)
                    elif (number + step) % 7 == 0:
                        one.data = one.data + 0.01
        results.append((outputs, [one.clone() for one in model.parameters()]))
        if cache is not None:
            found |= {"hits": cache.hits, "misses": cache.misses, "most": cache.most_bytes, "room": cache.room_bytes}
            try:
                model(torch.randn(3, WIDTH))
            except stalloc.StreamError as error:
                found["with gradients"] = str(error)
            cache.undo()
            found["undone"] = same([one.clone() for one in model.parameters()], results[-1][1])
    found["equal"] = same(*results) and not same(before, results[0][1])
    return found | on_the_device()


def on_the_device() -> dict[str, Any]:
    """The same bytes on a device, where weights come as their experts are called."""
    experts = [Scale(512, 512, bias=False, device="cuda") for _ in range(6)]  # of 1 MiB
    cache = stalloc.cache_experts(experts, room="2MiB")
    torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {"away": torch.cuda.memory_allocated()}
    with torch.no_grad():
        for number in (0, 1, 0, 2, 0, 1, 3, 3):
            experts[number](torch.ones(1, 512, device="cuda"))
        found["stayed"] = cache.hits
        with torch.cuda.stream(torch.cuda.Stream()):
            experts[3](torch.ones(1, 512, device="cuda"))
        found["on another stream"] = cache.hits
    found["peak"] = torch.cuda.max_memory_allocated()
    for room, name in (("512KiB", "no room"), ("2MiB", "shared")):
        others = [nn.Linear(512, 512, device="cuda") for _ in range(2)]
        others[1].weight = others[0].weight
        try:
            stalloc.cache_experts(others[: 1 + (name == "shared")], room=room)
        except stalloc.BadInputError as error:
            found[name] = str(error)
    return found


def unfrozen_on_a_device() -> bool:
    """There memory that is let go too early is another device's."""
    model = frozen_at_first().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    stalloc.page_optimizer(optimizer)
    stalloc.stream_layers(model, window=1)
    for step in range(2):
        model.requires_grad_(step == 1)
        model(torch.randn(4, WIDTH, device="cuda")).backward()
        optimizer.step()
    return all(one.grad is not None for name, one in model.named_parameters() if "unused" not in name)


class Detached(Layer):
    """What backward needs of its weights are tensors of their memory that do not hold them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(F.gelu(F.linear(x, self.first.weight.detach())), self.second.weight.data)


def dropped_before_backward(*, streamed: bool) -> Any:
    torch.manual_seed(4)
    model, x = Stack(straight), torch.randn(4, WIDTH, requires_grad=True)
    model.layers = nn.ModuleList([Detached() for _ in range(4)])
    if streamed:
        stalloc.stream_layers(model, window=1)
    loss = model(x)
    del model
    loss.backward()
    return x.grad


def dropped() -> dict[str, list[int]]:
    """Bytes in the host with a model, and when the program has dropped it while nobody looks for cycles."""
    found: dict[str, list[int]] = {}
    gc.collect()
    gc.disable()
    folder = tempfile.mkdtemp()
    for name in ("streaming kept", "never called", "called", "trained", "on disk"):
        before, model = held_bytes(), Stack(straight)
        where = {"host": "64KiB", "disk": f"{folder}:1MiB"} if name == "on disk" else {}
        streaming = stalloc.stream_layers(model, window=2, **where)
        optimizer = torch.optim.AdamW(model.parameters())
        stalloc.page_optimizer(optimizer)
        found[name] = [held_bytes() - before]
        if name in ("called", "trained", "on disk"):
            loss = model(torch.randn(4, WIDTH))
            if name != "called":
                loss.backward()
                optimizer.step()
            del loss
        if name != "streaming kept":
            del streaming
        del model, optimizer
        found[name].append(held_bytes() - before)
    gc.enable()
    found["files"] = [1, len(list(Path(folder).glob("state-*.bin")))]
    shutil.rmtree(folder)
    return found


def loaded() -> str:
    """Why a model is not streamed whose memory cannot be let go: that of parameters as torch.load makes them here."""
    saved, model = io.BytesIO(), Stack(straight)
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    model.load_state_dict(torch.load(saved), assign=True)
    return sentence(lambda: stalloc.stream_layers(model))


def main() -> None:
    told: dict[str, Any] = {}
    for name in sys.argv[1:] or CASES:
        make, habits = CASES[name]
        as_it_is = train(make, habits, streamed=False)
        try:
            told[name] = same(as_it_is, train(make, habits, streamed=True))
            with tempfile.TemporaryDirectory() as folder:
                told[f"{name}, on disk"] = same(as_it_is, train(make, habits, streamed=True, folder=folder))
        except stalloc.StallocError as error:
            told[name] = str(error)
        print(name, told[name], file=sys.stderr, flush=True)
    told["dropped before backward"] = same(*(dropped_before_backward(streamed=it) for it in (False, True)))
    told["dropped"], told["loaded"] = dropped(), loaded()
    told["experts"] = cached_experts()  # which counts what is held
    told["unfrozen on a device"] = unfrozen_on_a_device()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
