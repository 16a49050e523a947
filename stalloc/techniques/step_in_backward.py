"""The optimizer's step in the backward pass: each parameter is updated as its gradient is whole, which then goes.

Contract: what a parameter becomes is what the optimizer's own code makes of the same gradient, state and options, so
the same to the last bit. The program's own call of the step updates what is left, and calls hooks and schedulers once.
Whoever needs a gradient or the old parameters between the backward pass and that call (clipping, scaling, accumulation,
another forward pass, a changed learning rate) gets a GradientError before anything wrong comes of it.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from stalloc.errors import GradientError
from stalloc.techniques.appearing import when_optimizers_are_made
from stalloc.techniques.parameters import (
    own_gradient,
    own_step,
    parameters_of,
    set_own_gradient,
    unwatch_gradient,
    watch_gradient,
    why_not_one_by_one,
)
from stalloc.techniques.streamed_layers import device_of, put_gradient

_ADVICE = "Let the optimizer's step stay after the backward pass."
_READ = f"a gradient is read or set between the backward pass and the optimizer's step. {_ADVICE}"
_READ_LATER = f"a gradient is read after the optimizer's step. {_ADVICE}"
_early: Any = WeakIdKeyDictionary()  # the parameters that are updated before their step


class StepInBackward:
    """One optimizer's step in backward. Invariant: between its steps `_updated` has the parameters updated so far."""

    def __init__(
        self,
        optimizer: Any,
        update: Callable[[Any, torch.Tensor], bool] | None = None,
        concerns: Callable[[torch.Tensor], bool] = lambda _: True,
    ) -> None:
        """`update` updates a parameter and takes its gradient, or says that it is left to the step, as are all that
        this does not concern."""
        _guard()
        self._update, self._concerns = update or self._update_here, concerns
        self._optimizer = weakref.ref(optimizer)
        self._updated: Any = WeakIdKeyDictionary()
        self._used: Any = WeakIdKeyDictionary()  # parameters whose gradient is not zeroed yet after the step
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
        """Update its parameters early, including those that were added to it since."""
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad and parameter.is_leaf and parameter not in self._hooked:
                self._hooked[parameter] = True
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient_there))

    def undo(self) -> None:
        """Make the step where the program calls it again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _gradient_there(self, parameter: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or not self._concerns(parameter):
            return
        with self._lock:
            if parameter in self._updated:
                raise GradientError(f"gradients are accumulated over several backward passes. {_ADVICE}")
            if parameter in self._used:
                raise GradientError(f"gradients are accumulated over several steps of the optimizer. {_ADVICE}")
            gradient = own_gradient(parameter)
            if gradient is None:  # somebody who heard of it first has taken it
                return
            if gradient.requires_grad:
                raise GradientError(f"gradients are differentiated once more. {_ADVICE}")
            if not self._updated:
                self._options = [_options(group) for group in optimizer.param_groups]
                self._group_of = {id(one): group for group in optimizer.param_groups for one in group["params"]}
            if self._update(optimizer, parameter):
                self._updated[parameter] = _early[parameter] = True
                watch_gradient(parameter, self)

    def _update_here(self, optimizer: Any, parameter: torch.Tensor) -> bool:
        groups, group = optimizer.param_groups, self._group_of[id(parameter)]
        members = group["params"]
        try:
            optimizer.param_groups, group["params"] = [group], [parameter]
            own_step(type(optimizer))(optimizer)
        finally:
            optimizer.param_groups, group["params"] = groups, members
        set_own_gradient(parameter, None)
        return True

    def _about_to_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if len(args) > 1 or kwargs.get("closure") is not None or (args and callable(args[-1])):
            raise GradientError(f"the optimizer's step computes gradients itself, by a closure. {_ADVICE}")
        if self._updated and self._options != [_options(group) for group in optimizer.param_groups]:
            raise GradientError(
                f"options of the optimizer are changed between the backward pass and its step. {_ADVICE}"
            )
        for parameter in list(self._updated):
            _early.pop(parameter, None)
            unwatch_gradient(parameter, self)

    def _stepped(self, *_: Any) -> None:
        for parameter in list(self._updated):
            self._used[parameter] = True
            watch_gradient(parameter, self)
        self._updated.clear()

    def holds(self, parameter: torch.Tensor) -> bool:
        """As in `GradientWatcher`: it is used up."""
        return False

    def about_to_read(self, parameter: torch.Tensor) -> None:
        if own_gradient(parameter) is None:
            raise GradientError(_READ if parameter not in self._used else _READ_LATER)

    def about_to_set(self, parameter: torch.Tensor) -> None:
        if parameter not in self._used:
            raise GradientError(_READ)
        self._zeroed(parameter)

    def about_to_zero(self, parameter: torch.Tensor, *, set_to_none: bool) -> None:
        if parameter not in self._used:
            self.about_to_read(parameter)
            return
        self._zeroed(parameter)
        if not set_to_none and own_gradient(parameter) is None:
            put_gradient(parameter, torch.zeros_like(parameter, device=device_of(parameter)))

    def _zeroed(self, parameter: torch.Tensor) -> None:
        del self._used[parameter]
        unwatch_gradient(parameter, self)


def step_in_backward(say: Callable[[str], None]) -> None:
    """Update the parameters of every optimizer of this program in its backward pass, from the optimizer's making on.
    Those that mix parameters are left as they are, which `say` is told."""
    known: weakref.WeakKeyDictionary[Any, StepInBackward | None] = weakref.WeakKeyDictionary()

    def made(optimizer: Any) -> None:
        if optimizer not in known:
            if reason := why_not_one_by_one(optimizer):
                say(f"{reason}: its step stays after the backward pass.")
            known[optimizer] = None if reason else StepInBackward(optimizer)
        if (early := known[optimizer]) is not None:
            early.watch(optimizer)

    when_optimizers_are_made(made)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


@functools.cache
def _guard() -> None:
    """Keep the program from using parameters that backward has updated before the program's step."""

    def about_to_call(module: Any, _: Any) -> None:
        if not _early or torch._C._current_graph_task_id() != -1:  # what backward recomputes is not updated yet
            return
        if any(parameter in _early for parameter in module.parameters(recurse=False)):
            name = type(module).__name__
            raise GradientError(
                f"a forward pass ({name}) comes between the backward pass and the optimizer's step. {_ADVICE}"
            )

    register_module_forward_pre_hook(about_to_call)
