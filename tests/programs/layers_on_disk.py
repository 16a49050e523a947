"""Layers on a disk that fails, and programs that do at random what programs do: prints what came of each as JSON.

layers_on_disk.py NUM_PROGRAMS
"""

import copy
import json
import random
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streaming import WIDTH, Stack, checkpointed, skipping, straight, twice  # isort: skip  (it puts the device in place)

import torch
from equality import same  # beside this file, as the next
from refusals import sentence

import stalloc
from stalloc.techniques.paged_optimizer import paged_optimizer

OPTIMIZERS: tuple[tuple[Callable[[Any], torch.optim.Optimizer], float], ...] = (  # and what the processor updates
    (lambda p: torch.optim.AdamW(p, lr=1e-2), 0.0),
    (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), 0.0),
    (torch.optim.Adafactor, 0.0),
    (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), 1.0),
    (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), 0.5),
)


def refused_by_the_disk() -> dict[str, Any]:
    """A disk that is full, that gives back other bytes, and that fails in the middle of an update."""
    found: dict[str, Any] = {}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # stands for the end of a disk

    def streamed(where: str, host: str = "32KiB", processor: float = 0.0) -> tuple[Any, Any]:
        model = Stack(straight)
        optimizer = torch.optim.AdamW(model.parameters())
        room: dict[str, Any] = {"host": "160KiB", "disk": f"{folder}/{where}/state:4MiB"}
        stalloc.page_optimizer(optimizer, **({"processor": processor} if processor else room))
        stalloc.stream_layers(model, window=1, host=host, disk=f"{folder}/{where}/layers:4MiB")
        return model, optimizer

    def stepped(model: Any, optimizer: Any) -> None:
        model(torch.ones(4, WIDTH)).backward()
        optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        found["full"] = sentence(lambda: streamed("full"))
        stepped(*streamed("some room", host="64KiB"))  # what has no room stays on the device
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        model, optimizer = streamed("torn")
        found["in use"] = sentence(lambda: stalloc.stream_layers(Stack(straight), disk=f"{folder}/torn/layers:1MiB"))
        for _ in range(2):
            stepped(model, optimizer)
            optimizer.zero_grad()
        stalloc.commit(optimizer, 2)
        wanted = copy.deepcopy([one.detach() for one in model.parameters()]), copy.deepcopy(optimizer.state_dict())
        model(torch.ones(4, WIDTH)).backward()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        found["torn"] = sentence(optimizer.step)
        found["later"] = sentence(lambda: model(torch.ones(4, WIDTH)))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        label, state = stalloc.committed(f"{folder}/torn/state")
        found["committed"] = label == 2 and same(state["state"], wanted[1]["state"])
        now = [one.detach() for one in model.parameters()]
        found["readable"] = all(
            torch.equal(one, before) or 0 < (one - before).abs().max() < 0.01
            for one, before in zip(now, wanted[0], strict=True)
        )
        model, optimizer = streamed("processor", processor=1.0)
        stepped(model, optimizer)
        paging = paged_optimizer(optimizer)
        updated = 0 if paging is None else paging.told()["processor_streamed_bytes"]
        found["by the processor"] = updated == sum(one.nbytes for one in model.parameters())
        before = [one.detach().clone() for one in model.parameters()]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        found["torn by the processor"] = sentence(lambda: stepped(model, optimizer))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        found["readable"] &= all(
            (one - old).abs().max() < 0.01 for one, old in zip(model.parameters(), before, strict=True)
        )
        model, optimizer = streamed("changed")
        (file,) = Path(folder, "changed", "layers").glob("state-*.bin")
        with file.open("r+b") as changed:
            changed.seek(5)
            changed.write(b"changed")
        found["changed"] = sentence(lambda: model(torch.ones(4, WIDTH)))
        return {name: one.replace(folder, "FOLDER") if isinstance(one, str) else one for name, one in found.items()}


def change(how: int, model: Any, parameter: Any, chance: random.Random) -> None:
    """One of the ways in which programs change parameters between passes."""
    if how == 0:
        parameter.data.mul_(0.9)
    elif how == 1:
        parameter.data = parameter.data * 0.95
    elif how == 2:
        with torch.no_grad():
            parameter.clamp_(-0.3, 0.3)
    elif how == 3:
        model.load_state_dict({name: one * 0.99 for name, one in copy.deepcopy(model.state_dict()).items()})
    elif how == 4:
        parameter.detach().numpy()[...] *= 0.97
    else:
        parameter.data.view(-1)[chance.randrange(parameter.numel())] = 0.5


def at_random(seed: int, folder: str = "") -> Any:
    """What a program of 30 passes, steps, looks and changes saw, and left."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model = Stack((straight, skipping, twice, checkpointed)[seed % 4])
    parameters = list(model.parameters())
    make, processor = chance.choice(OPTIMIZERS)
    optimizer = make(parameters)
    window, host = chance.choice((1, 2, 3)), chance.choice(("32KiB", "64KiB", "96KiB"))
    if folder:
        stalloc.page_optimizer(optimizer, window=20_000, processor=processor)
        stalloc.stream_layers(model, window=window, host=host, disk=f"{folder}:4MiB")
    seen: list[float] = []
    for _ in range(30):
        parameter, act = chance.choice(parameters), chance.randrange(12)
        if act < 4:
            loss = model(torch.randn(4, WIDTH))
            loss.backward()
            seen.append(loss.item())
            if chance.random() < 0.8:
                optimizer.step()
            optimizer.zero_grad()
        elif act == 4:
            with torch.no_grad():
                seen.append(model(torch.randn(2, WIDTH)).item())
        elif act == 5:
            seen.append(parameter.detach().sum().item())
        else:
            change(act - 6, model, parameter, chance)
    return seen, [one.detach().clone() for one in parameters], optimizer.state_dict()["state"]


def main() -> None:
    differ = []
    for seed in range(int(sys.argv[1])):
        with tempfile.TemporaryDirectory() as folder:
            if not same(at_random(seed), at_random(seed, folder)):
                differ.append(seed)
    print(json.dumps({"differ": differ, "refused": refused_by_the_disk()}))


if __name__ == "__main__":
    main()
