"""The optimizer's step in the backward pass: each parameter is updated as its gradient is whole, which then goes.

Contract: what a parameter becomes is what the optimizer's own code makes of the same gradient, state and options, so
the same to the last bit. The program's own call of the step updates what is left, and calls hooks and schedulers once.
Whoever needs a gradient or the old parameters between the backward pass and that call (clipping, scaling, accumulation,
another forward pass, a changed learning rate) gets a GradientError before anything wrong comes of it.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from stalloc.errors import GradientError
from stalloc.techniques.appearing_optimizers import when_optimizers_are_made
from stalloc.techniques.optimizer_facts import own_step, why_not_one_by_one

_ADVICE = "Let the optimizer's step stay after the backward pass."
_owners: dict[int, "weakref.ref[StepInBackward]"] = {}  # by the id of a parameter that is updated before its step
_own_grad: Any = torch._C.TensorBase.grad


class StepInBackward:
    """One optimizer. Invariant: between its steps `_updated` holds the parameters whose step has been made."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._updated: dict[int, torch.Tensor] = {}
        self._options: list[dict[str, Any]] = []  # of each group, when the first was updated
        self._group_of: dict[int, dict[str, Any]] = {}  # by the id of a parameter
        self._hooked: Any = WeakIdKeyDictionary()  # parameters that are updated early
        self._lock = threading.Lock()  # backward passes of the processor and of the device have a thread each
        self._hooks = [
            optimizer.register_step_pre_hook(self._about_to_step),
            optimizer.register_step_post_hook(self._stepped),
        ]
        self.watch(optimizer)

    def watch(self, optimizer: Any) -> None:
        """Update its parameters early, those that it has got since included."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.is_leaf and parameter not in self._hooked:
                    self._hooked[parameter] = True
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient_there))

    def undo(self) -> None:
        """Leave the step where the program calls it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _gradient_there(self, parameter: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        with self._lock:
            if id(parameter) in self._updated:
                raise GradientError(f"gradients are accumulated over several backward passes. {_ADVICE}")
            gradient = parameter.grad
            if gradient is None or gradient.requires_grad:
                raise GradientError(f"gradients are differentiated once more. {_ADVICE}")
            if not self._updated:
                self._options = [_options(group) for group in optimizer.param_groups]
                self._group_of = {id(one): group for group in optimizer.param_groups for one in group["params"]}
            self._update(optimizer, parameter)
            parameter.grad = None
            self._updated[id(parameter)] = parameter
            _owners[id(parameter)] = weakref.ref(self)

    def _update(self, optimizer: Any, parameter: torch.Tensor) -> None:
        groups, group = optimizer.param_groups, self._group_of[id(parameter)]
        members = group["params"]
        try:
            optimizer.param_groups, group["params"] = [group], [parameter]
            own_step(type(optimizer))(optimizer)
        finally:
            optimizer.param_groups, group["params"] = groups, members

    def _about_to_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if len(args) > 1 or kwargs.get("closure") is not None or (args and callable(args[-1])):
            raise GradientError(f"the optimizer's step computes gradients itself, by a closure. {_ADVICE}")
        if self._updated and self._options != [_options(group) for group in optimizer.param_groups]:
            raise GradientError(
                f"options of the optimizer are changed between the backward pass and its step. {_ADVICE}"
            )
        self._forget()

    def _stepped(self, *_: Any) -> None:
        self._forget()

    def _forget(self) -> None:
        for key in self._updated:
            _owners.pop(key, None)
        self._updated.clear()


def step_in_backward(say: Callable[[str], None]) -> None:
    """Update the parameters of every optimizer of this program in its backward pass, from the optimizer's making on.

    Those that mix parameters are left as they are, which `say` is told.
    """
    _guard()
    known: weakref.WeakKeyDictionary[Any, StepInBackward | None] = weakref.WeakKeyDictionary()

    def made(optimizer: Any) -> None:
        if optimizer not in known:
            reason = why_not_one_by_one(optimizer)
            if reason:
                say(f"{reason}: its step stays after the backward pass.")
            known[optimizer] = None if reason else StepInBackward(optimizer)
        early = known[optimizer]
        if early is not None:
            early.watch(optimizer)

    when_optimizers_are_made(made)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _guard() -> None:
    """Let nobody read a gradient that was there, or the parameters that it has changed, before the program's step."""
    if not isinstance(vars(torch.Tensor).get("grad"), _GuardedGradient):
        torch.Tensor.grad = _GuardedGradient()
        register_module_forward_pre_hook(_about_to_call)


def _about_to_call(module: Any, _: Any) -> None:
    if not _owners or torch._C._current_graph_task_id() != -1:  # what backward recomputes is not updated yet
        return
    if any(id(parameter) in _owners for parameter in module.parameters(recurse=False)):
        raise GradientError(
            f"a forward pass ({type(module).__name__}) comes between the backward pass and the optimizer's step. "
            f"{_ADVICE}"
        )


class _GuardedGradient:
    """In the place of torch.Tensor.grad."""

    def __get__(self, tensor: torch.Tensor | None, kind: type | None = None) -> Any:
        if tensor is None:
            return _own_grad
        gradient = _own_grad.__get__(tensor)
        if gradient is None and _owners and id(tensor) in _owners:
            _refuse()
        return gradient

    def __set__(self, tensor: torch.Tensor, gradient: Any) -> None:
        if _owners and id(tensor) in _owners:
            _refuse()
        _own_grad.__set__(tensor, gradient)

    def __delete__(self, tensor: torch.Tensor) -> None:
        _own_grad.__delete__(tensor)


def _refuse() -> None:
    raise GradientError(f"a gradient is read or set between the backward pass and the optimizer's step. {_ADVICE}")
