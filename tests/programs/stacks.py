"""Optimizers of torch under stacks of recomputation, activations in the host, paging and streaming.

Prints what came of each as JSON.

A small GPT on the processor, with accumulation, clipping and a scheduler: losses, parameters and state of three steps
are compared bit by bit with those of the program as it is.
"""

import functools
import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import offloading  # beside this file; it puts the device in place
import torch
from equality import same
from torch import nn

import stalloc

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adamax": torch.optim.Adamax,
    "AdamW": torch.optim.AdamW,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}
STACKS = ("page", "recompute page", "page stream", "page stream ahead", "recompute page stream",
          "recompute page stream ahead", "offload", "offload page", "recompute offload page",
          "offload page stream", "recompute offload page stream ahead",
          "recompute disk stream layers ahead")  # fmt: skip
ELSEWHERE = {  # where torch's fused Adam makes the update, so do the processor's updates; disk is for any
    "processor": {"processor": 1.0},
    "processor stream": {"processor": 1.0},
    "recompute half processor stream ahead": {"processor": 0.5, "device": 0.2},
    "disk": {"host": "64KiB", "disk": "1MiB"},
    "recompute disk stream": {"host": "64KiB", "disk": "1MiB"},
    "disk stream layers": {"host": "64KiB", "disk": "1MiB"},
    "recompute disk stream layers ahead": {"host": "64KiB", "disk": "1MiB"},
    "processor disk stream layers": {"processor": 1.0, "host": "1MiB", "disk": "1MiB"},
    "recompute processor disk stream layers ahead": {"processor": 1.0, "host": "1MiB", "disk": "1MiB"},
    "half processor disk stream layers": {"processor": 0.5, "host": "1MiB", "disk": "1MiB"},
}


def train(make: Callable[[Any], torch.optim.Optimizer], stack: str, folder: str = "") -> Any:
    torch.manual_seed(1)
    model = offloading.gpt()()
    optimizer = make(list(model.parameters()))
    if "recompute" in stack:
        stalloc.checkpoint(model)
    where: dict[str, Any] = dict(ELSEWHERE.get(stack, {}))
    if "disk" in where:
        where["disk"] = f"{tempfile.mkdtemp(dir=folder)}/state:{where['disk']}"
    if "page" in stack or where:
        stalloc.page_optimizer(optimizer, window=20_000, **where)
    if "stream" in stack:
        layers = {"host": "40KiB", "disk": where["disk"].replace("/state:", "/layers:")} if "layers" in stack else {}
        stalloc.stream_layers(model, window=2 if "ahead" in stack else 1, **layers)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    offload = stalloc.offload_activations(0.5, window="200KiB", device="cpu") if "offload" in stack else nullcontext()
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            with offload:
                loss = model(*offloading.inputs(model))
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    assert "offload" not in stack or offload.left_bytes
    return losses, [one.detach() for one in model.parameters()], optimizer.state_dict()["state"]


def main() -> None:
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        fused = functools.partial(torch.optim.AdamW, fused=True)
        as_it_is = train(fused, "")
        for stack in ELSEWHERE:
            is_same = same(as_it_is, train(fused, stack, folder))
            told[f"AdamW fused: {stack}"] = "equal" if is_same else "differs"
        for name, make in OPTIMIZERS.items():
            as_it_is = train(make, "")
            for stack in STACKS:
                try:
                    told[f"{name}: {stack}"] = "equal" if same(as_it_is, train(make, stack, folder)) else "differs"
                except stalloc.StallocError as error:
                    told[f"{name}: {stack}"] = str(error)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
