"""The parameters of optimizers: who updates each by itself, and their gradients where something stands before these.

Contract: only optimizers that were tried are taken as updating each parameter by its own gradient and state alone. A
watcher is told before the program reads or replaces a gradient, in the thread that does so; what torch itself does in a
backward pass is not seen. It costs nothing before the first gradient is watched.
"""

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

_KNOWN = {
    "torch.optim": ("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam",
                    "RMSprop", "Rprop", "SGD"),
    "transformers.optimization": ("Adafactor",),
}  # fmt: skip
_PLAIN = (torch.Tensor, torch.nn.Parameter)

Parameters = list[torch.Tensor]


def parameters_of(optimizer: Any) -> Parameters:
    """The parameters of an optimizer, in the order of its groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def own_step(kind: type) -> Callable[..., Any]:
    """The step of a class of optimizers, without the wrapper that calls its hooks."""
    step: Any = getattr(kind.step, "stalloc_own", kind.step)  # type: ignore[attr-defined]
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def why_not_one_by_one(optimizer: Any) -> str:
    """Why the parameters of an optimizer cannot be updated one by one; empty if they can."""
    kind = type(optimizer)
    found = [getattr(sys.modules.get(module), name, None) for module, names in _KNOWN.items() for name in names]
    if not any(own_step(kind) is own_step(one) for one in found if isinstance(one, type)):
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
        if strange := [type(one).__name__ for one in group["params"] if type(one) not in _PLAIN]:
            return f"{kind.__name__} updates a {strange[0]}, a kind of tensor that was not tried"
    return ""


_own_grad: Any = torch._C.TensorBase.grad
own_gradient: Callable[[torch.Tensor], torch.Tensor | None] = _own_grad.__get__
"""The gradient that torch holds itself, without telling the watcher."""
set_own_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = _own_grad.__set__
"""Give torch another gradient, without telling the watcher."""
_watchers: Any = WeakIdKeyDictionary()  # parameter -> list of who watches its gradient
_thread = threading.local()  # is_zeroing: the thread is in `zero_grad`, whose watchers have been told


class GradientWatcher(Protocol):
    """A technique that moves, or uses up, the gradients of some parameters."""

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter has a gradient that is not its own attribute now."""

    def about_to_read(self, parameter: torch.Tensor) -> None:
        """The program reads it: put it there, or raise an error."""

    def about_to_set(self, parameter: torch.Tensor) -> None:
        """The program puts another in its place, or none."""

    def about_to_zero(self, parameter: torch.Tensor, *, set_to_none: bool) -> None:
        """The program calls `zero_grad`: what is not the parameter's own attribute is zeroed, or dropped, here."""


def watch_gradient(parameter: torch.Tensor, watcher: GradientWatcher) -> None:
    if not isinstance(vars(torch.Tensor).get("grad"), _WatchedGradient):
        torch.Tensor.grad = _WatchedGradient()
        for kind in (torch.optim.Optimizer, torch.nn.Module):
            _let_zero(kind)
    _watchers.setdefault(parameter, []).append(watcher)


def unwatch_gradient(parameter: torch.Tensor, watcher: GradientWatcher) -> None:
    if left := [one for one in _watchers.pop(parameter, ()) if one is not watcher]:
        _watchers[parameter] = left


def has_gradient(parameter: torch.Tensor) -> bool:
    """Whether a program that looked would find a gradient."""
    return own_gradient(parameter) is not None or any(one.holds(parameter) for one in _watchers.get(parameter, ()))


class _WatchedGradient:
    """The property in the place of torch.Tensor.grad."""

    def __get__(self, tensor: torch.Tensor | None, kind: type | None = None) -> Any:
        if tensor is None:
            return _own_grad
        for watcher in () if getattr(_thread, "is_zeroing", False) else _of(tensor):
            watcher.about_to_read(tensor)
        return _own_grad.__get__(tensor)

    def __set__(self, tensor: torch.Tensor, gradient: Any) -> None:
        for watcher in _of(tensor):
            watcher.about_to_set(tensor)
        _own_grad.__set__(tensor, gradient)

    def __delete__(self, tensor: torch.Tensor) -> None:
        self.__set__(tensor, None)


def _of(tensor: torch.Tensor) -> list[GradientWatcher]:
    return list(_watchers.get(tensor, ())) if _watchers else []


def _let_zero(kind: Any) -> None:
    """Let `zero_grad` of optimizers and modules reach gradients wherever they are, without bringing them."""
    own = kind.zero_grad

    @functools.wraps(own)
    def zero_grad(self: Any, set_to_none: bool = True) -> Any:
        is_module = isinstance(self, torch.nn.Module)
        for parameter in (
            self.parameters() if is_module else (one for group in self.param_groups for one in group["params"])
        ):
            for watcher in _of(parameter):
                watcher.about_to_zero(parameter, set_to_none=set_to_none)
        _thread.is_zeroing = True
        try:
            return own(self, set_to_none)
        finally:
            _thread.is_zeroing = False

    kind.zero_grad = zero_grad
