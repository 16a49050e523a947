"""Models of many habits, trained as they are and recomputed: prints what became of each as JSON.

Each case makes a model and the input of one step. Losses and gradients of three steps are compared bit by bit with the
unmodified model's; "raised" is the error that took their place.
"""

import copy
import io
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stalloc import device

os.environ["STALLOC_CUT_FORWARD"] = "1"
device.activate("virtual")

import numpy as np  # noqa: E402
import torch  # noqa: E402  (the device is in place)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import stalloc  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_gpt  # noqa: E402

torch.set_num_threads(1)
WIDTH = 16
STEPS = 3
SIZE = train_gpt.ModelSize(
    num_layers=3, num_heads=4, dim=32, hidden_dim=96, vocab_size=64, dtype=torch.float32, tied_head=True
)


class Layer(nn.Module):
    """Two linear layers around whatever a case puts between."""

    def __init__(self, middle: Callable[[Any, torch.Tensor], torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.middle, self.calls, self.seen = middle, 0, []
        self.parts = nn.ModuleDict(parts)
        self.register_buffer("level", torch.zeros(()))
        self.own = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.middle(self, F.gelu(self.first(x))))


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stack(middle: Callable[[Any, torch.Tensor], torch.Tensor], make: Callable[[], dict[str, nn.Module]] = dict) -> Any:
    return lambda: (Stack([Layer(middle, **make()) for _ in range(3)]), lambda: (torch.randn(8, WIDTH),))


def gpt(*, drop: bool) -> Any:
    class Dropping(train_gpt.Block):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(F.dropout(x, 0.1), cos, sin), 0.2)

    def make() -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, ...]]]:
        usual = train_gpt.Block
        train_gpt.Block = Dropping if drop else usual
        model = train_gpt.Transformer(SIZE, 16, False)
        train_gpt.Block = usual
        return model, lambda: tuple(torch.randint(64, (2, 2, 16)))

    return make


def counted(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.calls += 1
    return x * layer.calls


def drawn(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x * random.random() * float(np.random.rand()) if random.random() < 0.7 else x


def levelled(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.level.mul_(0.9).add_(x.detach().mean())
    return x * (1 + layer.level.detach())


def scratch(layer: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x)
    z = y * 3
    z.add_(1).mul_(y)
    return z.clamp_(max=2)


def made_inside(layer: Any, x: torch.Tensor) -> torch.Tensor:
    scale = torch.tensor([0.5])
    scale.add_(1)
    return x * scale


def own_generator(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape, generator=layer.own)


def remembered(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.seen.append(float(x.detach().sum()))
    return x * len(layer.seen)


def tallied(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Numbers in containers of the layer, which keep their size."""
    layer.tally = getattr(layer, "tally", None) or {"calls": 0, "of": [0, 0.0], "last": (1, 2)}
    layer.tally["calls"] += 1
    layer.tally["of"][1] += 0.5
    layer.tally["last"] = (layer.tally["calls"], 3)
    assert layer.tally["calls"] == layer.tally["of"][1] * 2 <= STEPS
    return x * layer.tally["calls"] * layer.tally["of"][1] * layer.tally["last"][0]


TALLY = {"calls": 0}


def tallied_outside(layer: Any, x: torch.Tensor) -> torch.Tensor:
    TALLY["calls"] += 1
    return x * (TALLY["calls"] % 7)


def own_drawn(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Random numbers from generators of the layer's own, of Python and NumPy."""
    layer.draw = getattr(layer, "draw", None) or (random.Random(1), np.random.default_rng(2), np.random.RandomState(3))
    return x * layer.draw[0].random() * float(layer.draw[1].random()) * float(layer.draw[2].rand())


DRAW = random.Random(4), np.random.default_rng(5)
DRAWN = random.Random(6)


def drawn_outside(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x * DRAW[0].random() * float(DRAW[1].random()) * DRAWN.random()


class Meter:
    def __init__(self) -> None:
        self.calls = 0


def metered(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.meter = getattr(layer, "meter", None) or Meter()
    layer.meter.calls += 1
    return x * layer.meter.calls


class Gauge:
    """An object in an object, with what keeps its size."""

    def __init__(self) -> None:
        self.meter, self.array, self.last = Meter(), np.zeros(2), {1}

    def count(self) -> float:
        self.meter.calls += 1
        self.array[1] += 0.5
        largest = max(self.last)
        self.last.discard(largest)
        self.last.add(largest + 1)
        return self.meter.calls * float(self.array[1]) * largest


class Gauges:
    def __init__(self) -> None:
        self.gauge = Gauge()


def gauged(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.gauges = getattr(layer, "gauges", None) or Gauges()
    return x * layer.gauges.gauge.count()


GAUGES = Gauges()


def gauged_outside(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x * GAUGES.gauge.count()


def wandering(layer: Any, x: torch.Tensor) -> torch.Tensor:
    wandering.turn = getattr(wandering, "turn", 0) + 1  # type: ignore[attr-defined]
    return torch.tanh(x) if wandering.turn % 2 else torch.sigmoid(x)  # type: ignore[attr-defined]


def spectral() -> Any:
    def make() -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, ...]]]:
        layers = [Layer(lambda layer, x: x) for _ in range(3)]
        for layer in layers:
            nn.utils.parametrizations.spectral_norm(layer.first)
        return Stack(list(layers)), lambda: (torch.randn(8, WIDTH),)

    return make


class Twice(nn.Module):
    """A model that is called twice before backward, as contrastive training does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) + 2 * self.model(x.flip(0) * 0.5)


def twice_before(make: Any) -> Any:
    def made() -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, ...]]]:
        model, batch = make()
        return Twice(model), batch

    return made


def in_closure() -> Any:
    """A number that only Python computes, kept in a closure, and one in a global variable."""
    count = 0

    def middle(layer: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        global TOTAL
        count += 1
        TOTAL += 1
        return x * (1 + count + TOTAL / 3)

    return middle


TOTAL = 0


def closed_over() -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, ...]]]:
    global TOTAL
    TOTAL = 0
    return Stack([Layer(in_closure()) for _ in range(3)]), lambda: (torch.randn(8, WIDTH),)


LOG: list[float] = []


def logged(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Grows a list outside of the model."""
    LOG.append(1.0)
    return x * 2


class Memory:
    """What layers hand on beside their results, as a cache of keys and values is."""

    def __init__(self) -> None:
        self.seen: dict[str, list[torch.Tensor]] = {"inputs": []}
        self.count = 0


class Remembering(Layer):
    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:  # type: ignore[override]
        memory.seen["inputs"].append(x.detach())
        memory.count += 1
        return super().forward(x * len(memory.seen["inputs"]) * memory.count)


class HandingOn(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = Memory()
        for layer in self.layers:
            x = layer(x, memory=memory)
        assert memory.count == len(self.layers) == len(memory.seen["inputs"])
        return x.square().mean()


def handing_on() -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, ...]]]:
    return HandingOn([Remembering(lambda layer, x: x) for _ in range(3)]), lambda: (torch.randn(8, WIDTH),)


class LaterChanges(Stack):
    """What autograd does not save is changed between forward and backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        with torch.no_grad():
            self.layers[0].first.bias.add_(0.1)
        return loss


def changed_later() -> tuple[nn.Module, Callable[[], tuple[torch.Tensor, ...]]]:
    return LaterChanges([Layer(lambda layer, x: x) for _ in range(3)]), lambda: (torch.randn(8, WIDTH),)


def checkpointed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(lambda y: F.dropout(torch.tanh(y), 0.3) * y, x, use_reentrant=False)


def mixed_batch_norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(layer.parts["norm"](F.dropout(x, 0.2)), 0.3)


def weight_changed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        layer.second.bias.add_(0.1)
    return x


class Looped(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers] * 3:
            x = layer(x)
        return x.square().mean()


def called_again() -> Any:
    """Layers that one forward pass calls several times."""
    layers = [Layer(lambda layer, x: F.dropout(counted(layer, x), 0.2)) for _ in range(2)]
    return Looped(layers), lambda: (torch.randn(8, WIDTH),)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def sequence() -> Any:
    """Single layers one after the other, some of which change what the one before has made."""
    units = [(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)) for _ in range(6)]
    layers = [*(layer for unit in units for layer in unit), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1), Mean())
    return model, lambda: (torch.randn(8, WIDTH),)


def unlike() -> Any:
    """Modules of several classes, none of which is there twice."""

    class Gated(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.sigmoid(x)

    class Dropping(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(x), 0.2)

    class Halved(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * 0.5)

    layers = [kind(lambda layer, x: x) for kind in (Layer, Gated, Dropping, Halved)]
    return nn.Sequential(*layers, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1), Mean()), lambda: (torch.randn(8, WIDTH),)


class Statements(nn.Module):
    """Layers that are attributes, called one after the other with what lies between."""

    SCALE = 0.5

    def __init__(self) -> None:
        super().__init__()
        for number in range(6):
            setattr(self, f"layer{number}", nn.Linear(WIDTH, WIDTH))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.rest = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, *more: torch.Tensor, times: int = 2, **named: float) -> torch.Tensor:
        """Skips that lie on each other, loops, branches, and changes in place."""
        start = x
        x = F.relu(self.layer0(x) + self.shift, inplace=True)
        skips = [x, start]
        first, (second, *others) = self.layer1(x), skips
        for number in range(times):
            x = self.drop(x) * (number + 1)
        x += first
        if self.training:
            x = F.dropout(x, 0.1)
        self.seen.add_(1)
        x = self.norm(self.layer2(x)) + sum([one.mean() for one in others])
        skips.append(x)
        x = self.layer3(x) * self.SCALE * self.seen.detach()
        for layer in self.rest:
            x = torch.tanh(layer(x))
        x = self.layer4(x).add_(second) + skips.pop() * named.get("factor", 1.0)
        if more:
            return x.mean()
        x = self.layer5(x) * float(torch.rand(()))
        return x.square().mean()


class Elsewhere(Stack):
    """Layers that compute with other weights than their own, as in the inner loop of MAML."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            weights = {name: one * 0.5 for name, one in layer.named_parameters()}
            x = torch.func.functional_call(layer, weights, (x,))
        return x.square().mean()


class Mapped(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.vmap(layer)(x)
        return x.square().mean()


def mapped() -> Any:
    """Layers that are called in a transform, which run as they are."""
    return Mapped([Layer(lambda layer, x: x) for _ in range(3)]), lambda: (torch.randn(8, WIDTH),)


def other_weights() -> Any:
    return Elsewhere([Layer(lambda layer, x: x) for _ in range(3)]), lambda: (torch.randn(8, WIDTH),)


def scripted() -> Any:
    """Layers that call a TorchScript function, which has derivatives of its own from its second call on."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x + y
        return z * 0.5 * (1.0 + torch.tanh(0.8 * z * (1 + 0.04 * z * z)))

    called = torch.jit.script(function)
    return stack(lambda layer, x: called(x, layer.first.bias))()


def statements() -> Any:
    """A forward pass that is cut into rows of its statements."""
    return Statements(), lambda: (torch.randn(8, WIDTH),)


CASES: dict[str, Any] = {
    "gpt": gpt(drop=False),
    "dropout": gpt(drop=True),
    "batch_norm": stack(lambda layer, x: layer.parts["norm"](x), lambda: {"norm": nn.BatchNorm1d(2 * WIDTH)}),
    "relu_in_place": stack(lambda layer, x: F.relu_(x * 2)),
    "dropouts": stack(lambda layer, x: F.dropout(F.relu(F.dropout(x, 0.3)) * 2, 0.4, inplace=True)),
    "alpha_dropout": stack(lambda layer, x: F.alpha_dropout(x, 0.3, training=True)),
    "attribute": stack(counted),
    "closure": closed_over,
    "grows_a_global": stack(logged),
    "python_random": stack(drawn),
    "buffer": stack(levelled),
    "in_place": stack(scratch),
    "made_inside": stack(made_inside),
    "own_generator": stack(own_generator),
    "grows_a_list": stack(remembered),
    "another_way": stack(wandering),
    "changes_a_weight": stack(weight_changed),
    "spectral_norm": spectral(),
    "spectral_norm_twice": twice_before(spectral()),
    "batch_norm_twice": twice_before(stack(mixed_batch_norm, lambda: {"norm": nn.BatchNorm1d(2 * WIDTH)})),
    "buffer_twice": twice_before(stack(levelled)),
    "checkpoint_inside": stack(checkpointed),
    "weight_changes_later": changed_later,
    "hands_on": handing_on,
    "object": stack(metered),
    "sequence": sequence,
    "called_again": called_again,
    "unlike": unlike,
    "statements": statements,
    "other_weights": other_weights,
    "mapped": mapped,
    "scripted": scripted,
    "tally": stack(tallied),
    "tally_outside": stack(tallied_outside),
    "gauge": stack(gauged),
    "gauge_outside": stack(gauged_outside),
    "own_random": stack(own_drawn),
    "random_outside": stack(drawn_outside),
}


def train(case: str, keep: list[Any] | None, *, autocast: bool) -> Any:
    """Losses, gradients and buffers of three steps, or the error."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    wandering.turn = 0  # type: ignore[attr-defined]
    TALLY["calls"] = 0
    GAUGES.gauge = Gauge()
    for generator in (DRAW[0], DRAWN):
        generator.seed(4)
    DRAW[1].bit_generator.state = np.random.default_rng(5).bit_generator.state
    model, batch = CASES[case]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if keep is not None:
        stalloc.checkpoint(model, keep=keep)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(*batch())
        loss.backward()
        found += [loss.detach().clone(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
        optimizer.step()
    state = [model.state_dict()[name].clone() for name in model.state_dict()]
    return found + state, random.random(), float(np.random.rand()), float(torch.rand(()))


def equal(one: Any, other: Any) -> bool:
    same = all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    return same and len(one[0]) > STEPS and one[1:] == other[1:]


def compared(case: str, num_choices: int) -> dict[str, Any]:
    """How often a case came out equal and was refused, over random choices of what is kept, autocast on and off."""
    chosen = random.Random(case)
    counts: dict[str, Any] = {"equal": 0, "differs": 0, "raised": []}
    for autocast in (False, True):
        expected = train(case, None, autocast=autocast)
        assert equal(expected, train(case, None, autocast=autocast)), "the program itself does not repeat"
        for number in range(num_choices):
            keep = [] if number == 0 else chosen.sample(range(80), chosen.randrange(1, 60))
            try:
                result = "equal" if equal(expected, train(case, keep, autocast=autocast)) else "differs"
                counts[result] += 1
            except stalloc.StallocError as error:
                counts["raised"].append(str(error))
    return counts


def copies(case: str) -> dict[str, Any]:
    """What becomes of names, state, copies and saved models."""
    torch.manual_seed(3)
    model, batch = CASES[case]()
    names, inputs = list(model.state_dict()), batch()
    done = stalloc.checkpoint(model)
    same_names = list(model.state_dict()) == names
    other = copy.deepcopy(model)
    with torch.no_grad():
        for one in other.parameters():
            one.zero_()
    model(*inputs).backward()
    moved = sum(one.grad is not None for one in other.parameters())
    other(*inputs).backward()
    own = sum(one.grad is not None for one in other.parameters())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    losses = []
    for one in (read, model):
        torch.manual_seed(4)
        losses.append(one(*inputs))
    same_loss = torch.equal(*losses)
    wrapped = sum(type(vars(block).get("forward")).__module__.startswith("stalloc") for block in read.modules())
    done.undo()
    left = sum("forward" in vars(block) for block in model.modules())
    return {
        "same_names": same_names, "blocks": list(done.names), "moved": moved, "own": own,
        "same_loss": same_loss, "wrapped": wrapped, "left": left,
    }  # fmt: skip


def noisy(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


def noisy_after_all(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Draws random numbers into what outlives the layer, and others after it."""
    layer.level.uniform_()
    return noisy(layer, x)


def twice() -> dict[str, Any]:
    """Backward called twice on one forward pass: what was kept is recomputed, or it is an error."""
    found = {}
    kept = {"nothing": [], "products": ["addmm"], "drawn": ["rand_like"], "cannot_be_drawn": ["rand_like"]}
    middles = {"drawn": noisy, "cannot_be_drawn": noisy_after_all}
    for name, keep in kept.items():
        model, batch = stack(middles.get(name, lambda layer, x: x))()
        stalloc.checkpoint(model, keep=keep)
        loss = model(*batch())
        loss.backward(retain_graph=True)
        first = [one.grad.clone() for one in model.parameters()]
        try:
            loss.backward()
            doubled = zip(first, model.parameters(), strict=True)
            found[name] = str(all(torch.equal(2 * one, other.grad) for one, other in doubled))
        except stalloc.StallocError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    results: dict[str, Any] = {}
    if sys.argv[1] == "0":
        cut = {"rows": copies("sequence"), "parts": copies("statements")}
        results = {"copies": copies("gpt"), **cut, "twice": twice()}
    for case in sys.argv[2:] or CASES:
        results[case] = compared(case, int(sys.argv[1]) or 2)
    print(json.dumps(results))
