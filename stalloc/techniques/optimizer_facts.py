"""What an optimizer's class says about updating its parameters one by one.

Contract: only optimizers that were tried are taken as updating each parameter by its own gradient and state
alone; the own step of one is that of its class, without what calls its hooks.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

KNOWN = ("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
         "Rprop", "SGD")  # fmt: skip
KNOWN_ELSEWHERE = {"transformers.optimization": ("Adafactor",)}  #: known optimizers of other libraries, by module
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def own_step(kind: type) -> Callable[..., Any]:
    """The step of a class of optimizers, without the wrapper that calls its hooks."""
    step: Any = getattr(kind.step, "stalloc_own", kind.step)  # type: ignore[attr-defined]
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


def why_not_one_by_one(optimizer: Any) -> str:
    """Why the parameters of an optimizer cannot be updated one by one; empty if they can."""
    kind = type(optimizer)
    if not any(own_step(kind) is own_step(one) for one in _known()):
        return f"{kind.__name__} is not known to update each parameter by its own gradient and state alone"
    for group in optimizer.param_groups:
        for option in ("differentiable", "capturable"):
            if group.get(option):
                return f"{kind.__name__} was made with {option}=True"
        if isinstance(group.get("lr"), torch.Tensor):
            return f"the learning rate of {kind.__name__} is a tensor"
        precision = group.get("eps")
        if isinstance(precision, tuple) and precision[0] is None and len({one.dtype for one in group["params"]}) > 1:
            return f"{kind.__name__} takes the precision of one of its parameters for a whole group, which has several"
        strange = [type(one).__name__ for one in group["params"] if type(one) not in _PLAIN]
        if strange:
            return f"{kind.__name__} updates a {strange[0]}, a kind of tensor that was not tried"
    return ""


def _known() -> Iterator[type]:
    for module, names in {"torch.optim": KNOWN, **KNOWN_ELSEWHERE}.items():
        for name in names:
            found = getattr(sys.modules.get(module), name, None)
            if isinstance(found, type):
                yield found
