"""A function of stalloc's in the place of `torch.nn.Module.__call__`, while a part of stalloc needs to see calls.

Torch's own hooks would make each call of a module cost several times as much, and come too late to exchange `forward`.
Contract: a function that the program has put in the same place meanwhile stays.
"""

import functools
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]
"""The call of a module: a function of the module and of the arguments that it is given."""


class ModuleCalls:
    """Replaces the call of every module by the one that `make` makes of the original call."""

    def __init__(self, make: Callable[[Call], Call]) -> None:
        from torch.nn import Module

        self._kind, self._call = Module, Module.__call__
        self._own = functools.wraps(self._call)(make(self._call))
        Module.__call__ = self._own

    def remove(self) -> None:
        """Put back what was there, unless the program has put another one in its place since."""
        if self._kind.__call__ is self._own:
            self._kind.__call__ = self._call
