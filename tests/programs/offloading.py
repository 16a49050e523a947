"""Models trained as they are and with what they save in host memory: prints what became of each as JSON.

Arguments are the names of the cases, without any it is all of them.

On the processor, where everything computes, and memory that is let go cannot be read: losses, gradients and parameters
of three steps are compared bit by bit; a text is the error that took their place. Bytes are those that went to the
host.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalloc import device

device.activate("virtual")

import torch  # noqa: E402  (the device is in place)
from equality import same  # noqa: E402  (beside this file)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import stalloc  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_gpt  # noqa: E402

torch.set_num_threads(1)
ROWS, WIDTH, STEPS = 128, 128, 3  # one activation has 64 KiB
SIZE = train_gpt.ModelSize(
    num_layers=3, num_heads=4, dim=64, hidden_dim=192, vocab_size=64, dtype=torch.float32, tied_head=True
)
Run = Callable[["Net", torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.relu, self.dropout = nn.LayerNorm(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.second(self.relu(self.first(self.norm(x)))))


class Net(nn.Module):
    """Layers, called as a case wants it."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.table = nn.Buffer(torch.linspace(0.5, 1, ROWS * WIDTH).view(ROWS, WIDTH))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x).square().mean()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pair = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *pair, nn.MaxPool2d(2), nn.Dropout2d(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).sigmoid().mean()


class Attentions(nn.Module):
    """Blocks that ask whether they are given one tensor thrice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, x, value=x, need_weights=False)[0]
        return x.square().mean()


def straight(net: Net, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = layer(x)
    return x


def by_checkpoint(*, reentrant: bool) -> Run:
    def run(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in net.layers:
            x = checkpoint(layer, x * 1.0, use_reentrant=reentrant)
        return x

    return run


def on_cpu(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        x = net.layers[0](x)
    return net.layers[2](net.layers[1](x))


def nested_hooks(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.detach().clone(), lambda one: one):
        x = net.layers[0](x)
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one.detach() * 2, lambda one: one / 2):
            x = net.layers[1](x)
    return net.layers[2](x)


def views(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.layers[0](x)
    one, two = x.chunk(2)
    wide = x[:1].expand(ROWS, WIDTH) * x.t() * net.table
    return torch.cat((one.exp() * two.sigmoid(), two.tanh())) * wide.flip(0) + (x[::2].cos() * one).repeat(2, 1)


def waves(net: Net, x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.fft(net.layers[0](x))
    return (spectrum * spectrum.conj()).real.sqrt() * spectrum.imag.abs()


held: list[torch.Tensor] = []


def holding(net: Net, x: torch.Tensor) -> torch.Tensor:
    held[:] = [net.layers[0](x)]
    held.append(net.layers[1](held[0]).exp())
    return net.layers[2](held[1] * held[0])


def in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.layers[0](x)
    y = x.sin()  # of x as it is now
    unused = x.exp()
    x.add_(1)  # before backward, in which the sine needs what x was
    return y + 0 * unused.detach()


def in_place_unneeded(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.layers[0](x)
    dead = x.exp()
    dead.mul_(2)  # nobody asks for gradients of it
    x = x * 1.5
    return x.mul_(net.table).cos()


def gpt(**options: Any) -> Callable[[], nn.Module]:
    return lambda: train_gpt.Transformer(SIZE, 32, options.get("use_checkpoint", False))


def frozen() -> nn.Module:
    net = Net(straight)
    net.layers[1].requires_grad_(False)
    return net


CASES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "straight": (lambda: Net(straight), set()),
    "half": (lambda: Net(straight), {"half"}),
    "window": (lambda: Net(straight), {"window"}),
    "little host": (lambda: Net(straight), {"little host"}),
    "convolutions": (Convolutions, {"accumulate"}),
    "gpt": (gpt(), {"accumulate", "window"}),
    "gpt with its own checkpoints": (gpt(use_checkpoint=True), {"accumulate"}),
    "gpt recomputed": (gpt(), {"recompute", "accumulate"}),
    "gpt recomputed in part": (gpt(), {"recompute mm", "half"}),
    "gpt, everything": (gpt(), {"recompute", "page", "stream", "window", "accumulate"}),
    "gpt paged and streamed": (gpt(), {"page", "stream"}),
    "autocast": (gpt(), {"autocast", "window"}),
    "attention recomputed": (Attentions, {"recompute"}),
    "autocast recomputed": (gpt(), {"autocast", "recompute"}),
    "checkpoint": (lambda: Net(by_checkpoint(reentrant=False)), set()),
    "reentrant checkpoint": (lambda: Net(by_checkpoint(reentrant=True)), set()),
    "save_on_cpu": (lambda: Net(on_cpu), set()),
    "nested hooks": (lambda: Net(nested_hooks), set()),
    "views": (lambda: Net(views), {"window"}),
    "complex": (lambda: Net(waves), set()),
    "held": (lambda: Net(holding), set()),
    "frozen": (frozen, set()),
    "retained": (lambda: Net(straight), {"retain"}),
    "second order": (lambda: Net(straight), {"second order"}),
    "evaluated between": (lambda: Net(straight), {"between", "window"}),
    "changed in place, not needed": (lambda: Net(in_place_unneeded), set()),
    "changed in place": (lambda: Net(in_place), {"half"}),
}


def inputs(model: nn.Module) -> tuple[torch.Tensor, ...]:
    if isinstance(model, Net):
        return (torch.randn(ROWS, WIDTH),)
    if isinstance(model, Convolutions):
        return (torch.randn(4, 3, 32, 32),)
    if isinstance(model, Attentions):
        return (torch.randn(2, ROWS, WIDTH),)
    return tuple(torch.randint(64, (2, 8, 32)))


def offloading(habits: set[str]) -> Any:
    return stalloc.offload_activations(
        0.5 if "half" in habits else 1.0,
        window="200KiB" if "window" in habits else 0,
        host="150KiB" if "little host" in habits else None,
        device="cpu",
    )


def train(make: Callable[[], nn.Module], habits: set[str], context: Any) -> Any:
    torch.manual_seed(1)
    model = make()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([one for one in parameters if one.requires_grad], lr=1e-2)
    if habits & {"recompute", "recompute mm"}:
        stalloc.checkpoint(model, keep=["mm"] if "recompute mm" in habits else [])
    if "page" in habits:
        stalloc.page_optimizer(optimizer, window=20_000)
    if "stream" in habits:
        stalloc.stream_layers(model, window=1)
    found: list[Any] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(1 + ("accumulate" in habits)):
            with context, torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in habits):
                loss = model(*inputs(model))
            if "second order" in habits:
                (grown,) = torch.autograd.grad(loss, parameters[0], create_graph=True)
                loss = loss + grown.square().sum()
            if "between" in habits:
                with context:
                    found.append(model(*inputs(model)).item())  # with a graph that nobody uses
            loss.backward(retain_graph="retain" in habits)
            if "retain" in habits:
                loss.backward()
            found.append(loss.item())
        found += [one.grad.clone() for one in parameters if one.grad is not None]
        optimizer.step()
    return found, [one.detach().clone() for one in parameters]


def raised(run: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return run(), ""
    except RuntimeError as error:
        return None, f"{type(error).__name__}: {error}"


def on_the_device() -> dict[str, Any]:
    """Bytes of the device at the most in each step, with all, half and nothing of what is saved in the host."""
    size, num_layers = 1 << 18, 8

    def peaks(ratio: float, window: int, context: Any = None) -> list[int]:
        x = torch.ones(size, device="cuda", requires_grad=True)
        context = context or stalloc.offload_activations(ratio, window=window)
        found = []
        for _ in range(3):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with context:
                y = x * 2
                for _ in range(num_layers):
                    y = y.sin()
                y = y.sum()
            y.backward()
            found.append(torch.cuda.max_memory_allocated() - before)
            del y
            x.grad = None
        found.append(context.store.peak_bytes if ratio else 0)
        return found

    nothing = stalloc.offload_activations(0.0)
    return {
        "as_is": peaks(0, 0, nothing),
        "all": peaks(1, 0),
        "half": peaks(0.5, 0),
        "window": peaks(1, 4 * size * 2),
    }


def chunked() -> dict[str, Any]:
    """How far the loss of a head in parts is from the whole, and what it takes on the device."""

    def whole(hidden: Any, weight: Any, targets: Any, bias: Any, label_smoothing: float, **_: Any) -> Any:
        return F.cross_entropy(
            F.linear(hidden, weight, bias).float().flatten(0, -2), targets.flatten(), label_smoothing=label_smoothing
        )

    def gradients(loss_of: Any, autocast: bool) -> list[torch.Tensor]:
        torch.manual_seed(2)
        hidden, weight, bias = (torch.randn(*size, requires_grad=True) for size in ((3, 7, 16), (50, 16), (50,)))
        targets = torch.randint(50, (3, 7))
        targets[1, 2:5] = -100
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(hidden, weight, targets, bias=bias, chunks=4, label_smoothing=0.1)
        loss.backward()
        return [loss.detach(), *(one.grad for one in (hidden, weight, bias))]

    far = {}
    for autocast in (False, True):
        pairs = zip(gradients(whole, autocast), gradients(stalloc.chunked_cross_entropy, autocast), strict=True)
        far["autocast" if autocast else "float32"] = max(((a - b).abs() / b.abs().max()).max().item() for a, b in pairs)
    peaks = {}
    for name, loss_of in (("whole", whole), ("chunked", stalloc.chunked_cross_entropy)):
        hidden, weight = (torch.zeros(*size, device="cuda", requires_grad=True) for size in ((1024, 64), (4096, 64)))
        targets = torch.zeros(1024, dtype=torch.int64, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_of(hidden, weight, targets, bias=None, label_smoothing=0.0).backward()
        peaks[name] = torch.cuda.max_memory_allocated() - before
    return {"far": far, "peaks": peaks}


def main() -> None:
    told: dict[str, Any] = {}
    for name in sys.argv[1:] or CASES:
        make, habits = CASES[name]
        as_it_is, reason = raised(lambda make=make, habits=habits: train(make, habits, contextlib.nullcontext()))
        context = offloading(habits)
        found, error = raised(lambda make=make, habits=habits, context=context: train(make, habits, context))
        told[name] = {"equal": not error and same(as_it_is, found), "as_it_is": reason, "error": error,
                      "bytes": context.left_bytes, "host_bytes": context.store.peak_bytes}  # fmt: skip
        print(name, told[name], file=sys.stderr, flush=True)
    print(json.dumps({"cases": told, "device": on_the_device(), "chunked": chunked()}))


if __name__ == "__main__":
    main()
