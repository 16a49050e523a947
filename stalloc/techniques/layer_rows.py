"""Long sequences of single layers, as of a VGG network, cut into rows that can be computed again one by one.

Contract: a row is a module of its own over layers that stay where they are: names, parameters, hooks and state_dict of
the model do not change. While a row has a forward of its own the sequence calls its rows; otherwise, or when the
program has exchanged a layer since, it does what torch made it to do.
"""

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

LEAST_UNITS = 4  #: below which a sequence is not cut; a unit is a layer with weights and what follows it without


class LayerRow(nn.Sequential):
    """Some layers of a sequence, in a row."""

    def __init__(self, parent: nn.Sequential, names: Sequence[str]) -> None:
        super().__init__()
        self._parent = (parent,)  # in a tuple, so that it is no child
        self._modules.update({name: parent._modules[name] for name in names})

    @property
    def name(self) -> str:
        """Within the sequence: its first and its last layer."""
        names = list(self._modules)
        return f"{names[0]}-{names[-1]}"

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "forward":
            parent = self._parent[0]
            rows = [self if row.name == self.name else row for row in rows_of(parent)]
            if isinstance(vars(parent).get("forward"), _ForwardInRows):
                parent.forward.rows = rows
            else:
                parent.forward = _ForwardInRows(parent, rows)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        parent = self._parent[0]
        if name == "forward" and not any("forward" in vars(row) for row in rows_of(parent)):
            del parent.forward


class _ForwardInRows:
    """What takes the place of the sequence's `forward`."""

    def __init__(self, parent: nn.Sequential, rows: list[LayerRow]) -> None:
        functools.update_wrapper(self, parent.forward)
        self.parent, self.rows = parent, rows

    def __call__(self, input: Any) -> Any:
        """The forward pass of the sequence."""
        layers = itertools.chain.from_iterable(row._modules.items() for row in self.rows)
        if list(layers) != list(self.parent._modules.items()):
            return type(self.parent).forward(self.parent, input)
        for row in self.rows:
            input = row.forward(input)
        return input

    def __reduce__(self) -> Any:
        """A saved model is as the program made it, and is read without stalloc."""
        return getattr, (self.parent, "forward")

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ForwardInRows":
        """Of a copy of the sequence, rows of that copy."""
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made


def rows_of(sequence: Any) -> list[LayerRow]:
    """The rows of a module that is a long sequence of single layers; none of another.

    About as many as a row has units, with which the least is held at once if all are computed again (Chen et al. 2016,
    section 4.1).
    """
    forward = vars(sequence).get("forward")
    if isinstance(forward, _ForwardInRows) and forward.parent is sequence:
        return forward.rows
    if getattr(type(sequence), "forward", None) is not nn.Sequential.forward or forward is not None:
        return []
    layers = list(sequence._modules.items())
    if any(next(layer.children(), None) is not None for _, layer in layers):
        return []
    starts = [place for place, (_, layer) in enumerate(layers) if any(one.ndim > 1 for one in layer.parameters())]
    if len(starts) < LEAST_UNITS:
        return []
    cuts = [0, *starts[:: math.ceil(math.sqrt(len(starts)))][1:], len(layers)]
    names = [name for name, _ in layers]
    return [LayerRow(sequence, names[begin:end]) for begin, end in itertools.pairwise(cuts)]
