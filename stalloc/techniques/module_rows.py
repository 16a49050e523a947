"""A module whose own forward pass is cut into rows, each of which can be recomputed, or streamed, by itself.

Contract: a row is a module of its own over layers that stay where they are: names, parameters, hooks and state_dict of
the model do not change. While a row has a forward of its own the module that is cut calls its rows; otherwise it does
what it did.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


class Row(nn.Module):
    """A part of what a module's forward pass does, with the layers that it calls. Classes of it say how rows run."""

    def __init__(self, parent: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._parent = (parent,)  # in a tuple, so that it is no child
        self._modules.update(layers)

    @property
    def name(self) -> str:
        """Within the module that is cut: its first and its last layer."""
        names = list(self._modules)
        return f"{names[0]}-{names[-1]}" if len(names) > 1 else names[0]

    @property
    def siblings(self) -> "Sequence[Row]":
        """All rows of the module, this one, or an equal one, among them."""
        raise NotImplementedError

    @staticmethod
    def run_all(parent: Any, rows: "Sequence[Any]", /, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the module, row by row."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "forward":
            parent = self._parent[0]
            rows = [self if row.name == self.name else row for row in self.siblings]
            if active_rows(parent):
                parent.forward.rows = rows
            else:
                parent.forward = _ForwardInRows(parent, rows)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        parent = self._parent[0]
        if name == "forward" and not any("forward" in vars(row) for row in active_rows(parent)):
            del parent.forward


class _ForwardInRows:
    """What takes the place of the module's `forward`."""

    def __init__(self, parent: nn.Module, rows: list[Row]) -> None:
        functools.update_wrapper(self, parent.forward)
        self.parent, self.rows = parent, rows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the module."""
        return self.rows[0].run_all(self.parent, self.rows, *args, **kwargs)

    def __reduce__(self) -> Any:
        """A saved model is as the program made it, and is read without stalloc."""
        return getattr, (self.parent, "forward")

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ForwardInRows":
        """The forward of a copy of the module, which runs rows of that copy."""
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made


def active_rows(module: Any) -> list[Any]:
    """The rows that a module's forward pass goes through now; none if it runs as it was written."""
    forward = vars(module).get("forward")
    return forward.rows if isinstance(forward, _ForwardInRows) and forward.parent is module else []
