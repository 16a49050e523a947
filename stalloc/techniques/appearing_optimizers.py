"""The optimizers of a program that was not written for them, as they are made.

Contract: an optimizer is reported once it is fully made, before it makes a step, and again for each group of parameters
that it is given later. Optimizers that are copied or read from a file are not reported: nobody made them.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any


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
