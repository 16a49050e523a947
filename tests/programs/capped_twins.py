"""Programs on the processor as they are and with evictions forced on them: prints what became of each as JSON.

Arguments are names of cases, without any it is all of them. Whether something goes, and how much, is drawn at each call
of a module and each gradient; memory that is let go of cannot be read. Losses, gradients and parameters of all steps
are compared bit by bit; a text is the error that took their place.
"""

import dataclasses
import json
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from stalloc import device

device.activate("virtual")

import torch  # noqa: E402  (the device is in place)
from capped_programs import SMALL, Program  # noqa: E402  (beside this file)
from equality import same  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from stalloc.cost.gpu_rates import rates_of  # noqa: E402
from stalloc.techniques.cap_policies import policy_named  # noqa: E402
from stalloc.techniques.evictable import EvictableMemory, LateCheckpoint, drop_blocks_of_models  # noqa: E402
from stalloc.techniques.host_store import HostStore  # noqa: E402
from stalloc.techniques.idle_memory import IdleMemory  # noqa: E402

torch.set_num_threads(1)
CPU, ALL = torch.device("cpu"), 1 << 40
WIDTH, ROWS, STEPS = 64, 512, 4
Run = Callable[["Net", torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.relu, self.dropout = nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.second(self.relu(self.norm(self.first(x)))))


class Counting(Block):
    """Remembers what it was given: what cannot be done twice."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        return super().forward(x * len(self.sizes))


class InPlace(Block):
    """Changes what it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


class Recursive(nn.Module):
    """A block that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        x = self.norm(self.layer(x).tanh()) + x
        return self(x, depth - 1) if depth else x


class Checkpointed(Block):
    """Has a checkpoint inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda y: self.first(y).tanh().exp(), x, use_reentrant=False)
        return self.dropout(self.second(x))


class Hooked(Block):
    """Has hooks inside that must not be called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.first.register_forward_hook(self._scaled)

    def _scaled(self, _: nn.Module, __: object, result: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return result * (1 + 0.1 * self.calls)


def sequence() -> nn.Module:
    """Thirty layers in a row."""
    return nn.Sequential(
        *[one for _ in range(10) for one in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.1))]
    )


class Net(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module], run: Run) -> None:
        super().__init__()
        self.layers, self.run = nn.ModuleList([kind() for _ in range(3)]), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def straight(net: Net, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = layer(x * 1.5)
    return x.square().mean()


def in_checkpoint(net: Net, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = checkpoint(layer, x * 1.5, use_reentrant=False)
    return x.square().mean()


def with_autocast(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return straight(net, x).float()


def shared(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.layers[0](net.layers[1](net.layers[0](x))).square().mean()


def stopped(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Layers are called by a generator that nobody asks for the last."""

    def after_each() -> Iterator[torch.Tensor]:
        here = x
        for layer in net.layers:
            here = layer(here)
            yield here

    found = after_each()
    return (next(found) * next(found)).mean()


def in_threads(net: Net, x: torch.Tensor) -> torch.Tensor:
    is_enabled = torch.is_grad_enabled()

    def call(layer: nn.Module) -> torch.Tensor:
        with torch.set_grad_enabled(is_enabled):
            return layer(x)

    with ThreadPoolExecutor(3) as pool:
        return torch.stack(list(pool.map(call, net.layers))).square().mean()


def changed_in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.layers[0](x).exp()
    loss = net.layers[1](x).mean() + x.sin().mean()
    x.mul_(2)
    return loss


def once(net: Net, loss: torch.Tensor) -> None:
    loss.backward()


def twice(net: Net, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def of_gradients(net: Net, loss: torch.Tensor) -> None:
    """A penalty on gradients: backward through backward."""
    found = torch.autograd.grad(loss, list(net.layers[0].parameters()), create_graph=True)
    (loss + sum(one.square().sum() for one in found)).backward()


CASES: dict[str, tuple[Callable[[], nn.Module], Run, Callable[[Net, torch.Tensor], None]]] = {
    "blocks": (Block, straight, once),
    "autocast": (Block, with_autocast, once),
    "counting": (Counting, straight, once),
    "given in place": (InPlace, straight, once),
    "recursive": (Recursive, straight, once),
    "checkpoint inside": (Checkpointed, straight, once),
    "in a checkpoint": (Block, in_checkpoint, once),
    "hooked": (Hooked, straight, once),
    "sequence": (sequence, straight, once),
    "shared": (Block, shared, once),
    "stopped generator": (Block, stopped, once),
    "threads": (Recursive, in_threads, once),
    "retained": (Block, straight, twice),
    "double backward": (Recursive, straight, of_gradients),
    "changed in place": (Block, changed_in_place, once),
}
PROGRAMS = ("language", "mixture", "tree", "generation")


def steps_of_net(name: str) -> list[Any]:
    kind, run, backward = CASES[name]
    torch.manual_seed(1)
    net = Net(kind, run)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    found: list[Any] = []
    for number in range(STEPS):
        if number == 2:  # evaluation in between, and a step that fails half way
            net.eval()
            with torch.no_grad():
                found.append(net(torch.randn(ROWS, WIDTH)))
            net.train()
            try:
                net(torch.randn(ROWS, WIDTH + 1))
            except RuntimeError:
                optimizer.zero_grad()
        loss = net(torch.randn(ROWS + 32 * number, WIDTH))
        backward(net, loss)
        found += [loss.detach(), *(one.grad.clone() for one in net.parameters() if one.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(one.detach().clone() for one in net.state_dict().values())]


def steps_of_program(name: str) -> list[Any]:
    size = dataclasses.replace(SMALL, length=20) if name == "tree" else SMALL  # evictions for each node
    program = Program(name, size, "cpu")
    found: list[Any] = []
    program.optimizer.register_step_pre_hook(
        lambda *_: found.extend(one.grad.clone() for one in program.model.parameters() if one.grad is not None)
    )
    found += [program.step() for _ in range(3)]
    return found + [one.detach().clone() for one in program.model.parameters()]


def run(name: str) -> list[Any] | str:
    try:
        return steps_of_program(name) if name in PROGRAMS else steps_of_net(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def forced(name: str, *, drops: bool, host_bytes: int | None) -> tuple[list[Any] | str, EvictableMemory]:
    """The same with what is drawn evicted; with `drops` blocks rather run again than move."""
    rates = dataclasses.replace(rates_of("H100"), link_bytes_per_second=1e3 if drops else 1e18)
    memory, draw = EvictableMemory(HostStore(host_bytes), rates, policy_named("random"), "cpu"), random.Random(2)

    def evict(*_: Any) -> None:
        if draw.random() < 0.3:
            memory.evict(CPU, draw.choice((1, 1 << 20, ALL)))

    drop_blocks_of_models(LateCheckpoint(memory))
    idle = IdleMemory(memory)
    memory.more = idle.evict
    hooks = [torch.nn.modules.module.register_module_forward_pre_hook(evict)]
    known: set[int] = set()

    def watch(module: nn.Module, *_: Any) -> None:
        for one in module.parameters():
            if id(one) not in known and one.requires_grad:
                known.add(id(one))
                one.register_post_accumulate_grad_hook(evict)

    hooks.append(torch.nn.modules.module.register_module_forward_pre_hook(watch))
    try:
        with memory:
            return run(name), memory
    finally:
        idle.end()
        for hook in hooks:
            hook.remove()


def equal(one: list[Any] | str, other: list[Any] | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return False
    return len(one) == len(other) and all(map(same, one, other))


if __name__ == "__main__":
    told = {}
    for name in sys.argv[1:] or [*PROGRAMS, *CASES]:
        plain = run(name)
        told[name] = {"as_it_is": plain if isinstance(plain, str) else ""}
        for how, drops, host in (("dropped", True, 0), ("both", True, None), ("moved", False, None)):
            found, memory = forced(name, drops=drops, host_bytes=host)
            told[name][how] = {
                "equal": equal(plain, found),
                "error": found if isinstance(found, str) else "",
                **dataclasses.asdict(memory.evicted),
            }
    print(json.dumps(told))
