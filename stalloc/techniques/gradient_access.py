"""The gradients of parameters, where something stands between a program and them.

Contract: a watcher is told before the program reads or replaces a gradient, in the thread that does so; what torch
itself does in a backward pass is not seen. It costs nothing before the first gradient is watched.
"""

import functools
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

_own_grad: Any = torch._C.TensorBase.grad
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
    """Tell `watcher` of one parameter from here on."""
    if not isinstance(vars(torch.Tensor).get("grad"), _WatchedGradient):
        torch.Tensor.grad = _WatchedGradient()
        for kind in (torch.optim.Optimizer, torch.nn.Module):
            _let_zero(kind)
    _watchers.setdefault(parameter, []).append(watcher)


def unwatch_gradient(parameter: torch.Tensor, watcher: GradientWatcher) -> None:
    """Stop telling the watcher of a parameter."""
    left = [one for one in _watchers.get(parameter, ()) if one is not watcher]
    if left:
        _watchers[parameter] = left
    else:
        _watchers.pop(parameter, None)


def own_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that torch holds itself, without telling the watcher."""
    found: torch.Tensor | None = _own_grad.__get__(parameter)
    return found


def set_own_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Give torch another gradient, without telling the watcher."""
    _own_grad.__set__(parameter, gradient)


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
        for watcher in _of(tensor):
            watcher.about_to_set(tensor)
        _own_grad.__delete__(tensor)


def _of(tensor: torch.Tensor) -> list[GradientWatcher]:
    found: list[GradientWatcher] = list(_watchers.get(tensor, ())) if _watchers else []
    return found


def _let_zero(kind: Any) -> None:
    """Let `zero_grad` of optimizers and modules reach gradients wherever they are, without bringing them."""
    own = kind.zero_grad

    @functools.wraps(own)
    def zero_grad(self: Any, set_to_none: bool = True) -> Any:
        for parameter in _parameters(self):
            for watcher in _of(parameter):
                watcher.about_to_zero(parameter, set_to_none=set_to_none)
        _thread.is_zeroing = True
        try:
            return own(self, set_to_none)
        finally:
            _thread.is_zeroing = False

    kind.zero_grad = zero_grad


def _parameters(owner: Any) -> Iterable[torch.Tensor]:
    if isinstance(owner, torch.nn.Module):
        return owner.parameters()
    return (one for group in owner.param_groups for one in group["params"])
