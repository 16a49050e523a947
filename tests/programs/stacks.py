"""Optimizers of torch under every stack of recomputation, paging and streaming: prints what came of each as JSON.

A small GPT on the processor, with accumulation, clipping and a scheduler: losses, parameters and state of three steps
are compared bit by bit with those of the program as it is.
"""

import json
from collections.abc import Callable
from typing import Any

import streaming  # beside this file; it puts the device in place
import torch
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
          "recompute page stream ahead")  # fmt: skip


def train(make: Callable[[Any], torch.optim.Optimizer], stack: str) -> Any:
    torch.manual_seed(1)
    model = streaming.gpt()()
    optimizer = make(list(model.parameters()))
    if "recompute" in stack:
        stalloc.checkpoint(model)
    if "page" in stack:
        stalloc.page_optimizer(optimizer, window=20_000)
    if "stream" in stack:
        stalloc.stream_layers(model, window=2 if "ahead" in stack else 1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            loss = model(*torch.randint(64, (2, 2, 16)))
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    return losses, [one.detach() for one in model.parameters()], optimizer.state_dict()["state"]


def main() -> None:
    told = {}
    for name, make in OPTIMIZERS.items():
        as_it_is = train(make, "")
        for stack in STACKS:
            try:
                told[f"{name}: {stack}"] = "equal" if streaming.same(as_it_is, train(make, stack)) else "differs"
            except stalloc.StallocError as error:
                told[f"{name}: {stack}"] = str(error)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
