"""Blocks that change what they hold and read it before, after or in between, trained as they are and recomputed.

Prints what became of each as JSON, as `recomputation.py` does.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import recomputation
import torch
from recomputation import WIDTH, Layer, Stack, compared, stack, twice_before
from torch import nn
from torch.nn import functional as F

import stalloc


class Codebook(nn.Module):
    """Vectors that follow the inputs that are next to them, as in a VQ-VAE: read, and then averaged in place."""

    def __init__(self, *, through_data: bool) -> None:
        super().__init__()
        self.through_data = through_data
        for name, value in (("vectors", torch.randn(8, 2 * WIDTH)), ("sums", torch.randn(8, 2 * WIDTH))):
            self.register_buffer(name, value)
        self.register_buffer("counts", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distances = x.square().sum(1, keepdim=True) - 2 * x @ self.vectors.t() + self.vectors.square().sum(1)
        nearest = distances.argmin(1)
        chosen = F.one_hot(nearest, 8).type(x.dtype)
        quantized = F.embedding(nearest, self.vectors)
        with torch.no_grad():
            counts, sums, vectors = self.counts, self.sums, self.vectors
            if self.through_data:
                counts, sums, vectors = counts.data, sums.data, vectors.data
            counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            sums.mul_(0.9).add_(chosen.t() @ x, alpha=0.1)
            vectors.copy_(sums / (counts.unsqueeze(1) + 1e-5))
        return x + (quantized - x).detach() + (x - quantized.detach()).square() * 0.1


def observed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """An observer of quantization: a range that is read, raised, and read again."""
    narrow = x / (1 + layer.level)
    layer.level.copy_(torch.maximum(layer.level * 0.95, x.detach().abs().max()))
    return narrow * (1 + layer.level) * 0.5 + torch.tanh(x / (1 + layer.level))


def undeclared(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Running statistics that are read before and after they change, which autograd does not count."""
    norm = layer.parts["norm"]
    before = x - norm.running_mean
    return norm(before) + (x - norm.running_mean) / (norm.running_var + 1)


def branching(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What is computed depends on a count that is read before and after it changes."""
    y = torch.tanh(x) if layer.level.item() % 2 else torch.sigmoid(x)
    layer.level.add_(1)
    return y * (1 if layer.level.item() % 2 else 2)


def frozen(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.parts["norm"].eval()
    return layer.parts["norm"](x)


def input_changed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """A block that changes in place what it was given, which it has read before."""
    y = x.sign() * 0.1 + x
    x.mul_(0.5)
    return y + x


class Changing(Stack):
    """Each layer changes the results of the one before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x * 1)
        return x.square().mean()


class ChangingLayer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(input_changed(self, x))


def changing() -> Any:
    return Changing([ChangingLayer(lambda layer, x: x) for _ in range(3)]), lambda: (torch.randn(8, WIDTH),)


def hooked(function: Callable[[nn.Module], nn.Module]) -> Any:
    """Layers of torch's older way to exchange a weight, by a hook."""

    def make() -> Any:
        layers = [Layer(lambda layer, x: x) for _ in range(3)]
        for layer in layers:
            function(layer.first)
        return Stack(list(layers)), lambda: (torch.randn(8, WIDTH),)

    return make


def norms(**options: Any) -> Any:
    return stack(lambda layer, x: layer.parts["norm"](x), lambda: {"norm": nn.BatchNorm1d(2 * WIDTH, **options)})


def images() -> Any:
    def middle(layer: Any, x: torch.Tensor) -> torch.Tensor:
        image = x.view(2, 4, 4, 2 * WIDTH // 4)
        return layer.parts["norm"](image).view_as(x)

    return stack(middle, lambda: {"norm": nn.InstanceNorm2d(4, affine=True, track_running_stats=True)})


recomputation.CASES = {
    "codebook": stack(lambda layer, x: layer.parts["book"](x), lambda: {"book": Codebook(through_data=False)}),
    "codebook_data": stack(lambda layer, x: layer.parts["book"](x), lambda: {"book": Codebook(through_data=True)}),
    "observer": stack(observed),
    "observer_twice": twice_before(stack(observed)),
    "undeclared": stack(undeclared, lambda: {"norm": nn.BatchNorm1d(2 * WIDTH)}),
    "undeclared_twice": twice_before(stack(undeclared, lambda: {"norm": nn.BatchNorm1d(2 * WIDTH)})),
    "branching": stack(branching),
    "branching_twice": twice_before(stack(branching)),
    "frozen": stack(frozen, lambda: {"norm": nn.BatchNorm1d(2 * WIDTH)}),
    "cumulative": norms(momentum=None),
    "no_statistics": norms(track_running_stats=False),
    "images": images(),
    "changed_inputs": changing,
    "spectral_norm_hook": hooked(nn.utils.spectral_norm),
    "spectral_norm_hook_twice": twice_before(hooked(nn.utils.spectral_norm)),
    "weight_norm_hook": hooked(nn.utils.weight_norm),
}


def train_in_autocast(make: Any, keep: list[Any] | None, *, whole: bool) -> list[torch.Tensor]:
    """Losses and gradients where backward, or all steps, lie in one autocast: casts of weights outlive their pass."""
    torch.manual_seed(2)
    model, batch = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if keep is not None:
        stalloc.checkpoint(model, keep=keep)
    found = []
    with torch.autocast("cpu", torch.bfloat16, enabled=whole):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*batch())
                optimizer.zero_grad()
                loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters())]
            optimizer.step()
    return found


def in_autocast(make: Any, *, whole: bool) -> list[str]:
    """What becomes of a model with three choices of what is kept."""
    told = []
    expected = train_in_autocast(make, None, whole=whole)
    for keep in ([], ["addmm"], ["_to_copy"]):
        try:
            now = train_in_autocast(make, keep, whole=whole)
            told.append("equal" if all(map(torch.equal, expected, now)) else "differs")
        except stalloc.StallocError as error:
            told.append(str(error))
    return told


if __name__ == "__main__":
    plain = stack(lambda layer, x: x)
    cases = {case: compared(case, int(sys.argv[1]) or 2) for case in sys.argv[2:] or recomputation.CASES}
    autocast = {
        "backward": in_autocast(plain, whole=False),
        "backward of two calls": in_autocast(twice_before(plain), whole=False),
        "all steps": in_autocast(plain, whole=True),
    }
    print(json.dumps({**cases, "autocast": autocast}))
