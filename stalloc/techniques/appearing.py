"""The models and optimizers of a program that was not written for it, as they appear.

Contract: a model is a module with parameters that is called by the program itself, not by another module; models are
numbered in the order of their first call, which is that of every run of the program. Modules are watched until the
first step of an optimizer has ended: until then each call of any module costs a look, later none does. An optimizer is
reported once it is fully made, before it makes a step, and again for each group of parameters that it is given later;
one that is copied or read from a file is not: nobody made it.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from stalloc.techniques.repeated_blocks import Block, find_blocks, held_modules, is_replicated

Call = Callable[..., Any]
"""The call of a module: a function of the module and of the arguments that it is given."""
Appeared = Callable[[int, list[Block], Any], object]
"""Called with the number of a model, its repeated blocks and itself, before its first forward pass; before the second
of one with lazy layers, which have no parameters before."""

_ASKED: list[Callable[[Any], None]] = []
"""The functions that are told of each call of a module before it is made, in the order in which they asked."""


class ModuleCalls:
    """Replaces the call of every module by the one that `make` makes of the original call. Torch's own hooks would make
    each call cost several times as much, and come too late to exchange `forward`."""

    def __init__(self, make: Callable[[Call], Call]) -> None:
        from torch.nn import Module

        self._kind, self._call = Module, Module.__call__
        self._own = functools.wraps(self._call)(make(self._call))
        Module.__call__ = self._own

    def remove(self) -> None:
        """Put back what was there, unless the program has put another one in its place since."""
        if self._kind.__call__ is self._own:
            self._kind.__call__ = self._call


def when_models_appear(appeared: Appeared) -> None:
    """Call `appeared` for each model of the program, in time for its own `forward` to be exchanged. Of several, the one
    that asked first is called first, so what a later one puts around a `forward` has what the earlier one made of it
    inside. torch is imported by now."""
    known: weakref.WeakSet[Any] = weakref.WeakSet()
    unfinished: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose layers get their shapes in their first call
    num_models = 0

    def about_to_call(module: Any) -> None:
        nonlocal num_models
        if module in unfinished and not _is_unfinished(module):
            unfinished.discard(module)
            known.difference_update(held_modules(module))
        if module in known:
            return
        if _is_unfinished(module):
            unfinished.add(module)
            known.update(held_modules(module))
            return
        blocks = [block for block in find_blocks(module) if block.module not in known and not is_replicated(module)]
        known.update(held_modules(module))
        if any(True for _ in module.parameters()):
            num_models += 1
            appeared(num_models - 1, blocks, module)

    _ASKED.append(about_to_call)
    if len(_ASKED) == 1:
        _watch()


def _is_unfinished(model: Any) -> bool:
    """Whether a model has parameters or buffers that the first call of their layer will make."""
    from torch.nn.parameter import is_lazy

    return any(is_lazy(one) for held in (model.parameters(), model.buffers()) for one in held)


def _watch() -> None:
    """Tell those who asked of each call, until the first step of an optimizer has ended."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def make(call: Call) -> Call:
        def look_and_call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():  # torch.compile looks into calls too
                for about_to_call in _ASKED:
                    about_to_call(module)
            return call(module, *args, **kwargs)

        return look_and_call

    watching = ModuleCalls(make)  # as a model's hooks are called after its forward has been looked up

    def stop(*_: Any) -> None:
        _ASKED.clear()
        watching.remove()  # later, where somebody else watches in front of this

    register_optimizer_step_post_hook(stop)  # stays, as it must not go while hooks are called


def when_optimizers_are_made(made: Callable[[Any], None]) -> None:
    """Call `made` for each optimizer from here on, and for each group that it gets later; torch is imported by now."""
    from torch.optim import Optimizer

    known: weakref.WeakSet[Any] = weakref.WeakSet()
    make, add = Optimizer.__init__, Optimizer.add_param_group

    @functools.wraps(make)
    def make_and_tell(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        known.add(self)
        made(self)

    @functools.wraps(add)
    def add_and_tell(self: Any, *args: Any, **kwargs: Any) -> None:
        add(self, *args, **kwargs)
        if self in known:
            made(self)

    Optimizer.__init__, Optimizer.add_param_group = make_and_tell, add_and_tell
