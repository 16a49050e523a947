"""Long sequences of layers, as of a VGG network, cut into rows that can be recomputed one by one.

Contract: that of `module_rows`; when the program has exchanged a layer since, the sequence does what torch made it to
do.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from stalloc.techniques.module_rows import Row, active_rows

LEAST_UNITS = 4  #: below which nothing is cut; a unit is a layer with weights and what follows it without


class LayerRow(Row):
    """Some layers of a sequence, in a row."""

    def forward(self, input: Any) -> Any:
        """Call the layers one after the other."""
        for layer in self._modules.values():
            input = layer(input)
        return input

    @property
    def siblings(self) -> "list[LayerRow]":
        """All rows of the sequence."""
        return rows_of(self._parent[0])

    @staticmethod
    def run_all(parent: Any, rows: Sequence[Any], /, input: Any) -> Any:
        """The forward pass of the sequence."""
        layers = itertools.chain.from_iterable(row._modules.items() for row in rows)
        if list(layers) != list(parent._modules.items()):
            return type(parent).forward(parent, input)
        for row in rows:
            input = row.forward(input)
        return input


def rows_of(sequence: Any) -> list[LayerRow]:
    """The rows of a module that is a long sequence of layers; none for another module."""
    if active := active_rows(sequence):
        return active
    if getattr(type(sequence), "forward", None) is not nn.Sequential.forward or "forward" in vars(sequence):
        return []
    layers = list(sequence._modules.items())
    cuts = cut_at([has_weights(layer) for _, layer in layers])
    return [LayerRow(sequence, dict(layers[begin:end])) for begin, end in itertools.pairwise(cuts)]


def has_weights(layer: Any) -> bool:
    """Whether a layer has parameters beyond biases and the like."""
    return any(one.ndim > 1 for one in layer.parameters())


def cut_at(begins_unit: Sequence[bool]) -> list[int]:
    """Where to cut things in a row, given which of them begin a unit: the begin of each row, and the end.

    About as many rows as each has units, with which the least is held at once if all are recomputed (Chen et al.
    2016, section 4.1). Nothing where there are too few units.
    """
    starts = [place for place, begins in enumerate(begins_unit) if begins]
    if len(starts) < LEAST_UNITS:
        return []
    return [0, *starts[:: math.ceil(math.sqrt(len(starts)))][1:], len(begins_unit)]
