"""A module whose `forward` calls layers of its own one after the other, cut into rows of its statements.

Contract: that of `module_rows`, and of `forward_source`: a row runs the program's own statements at their own lines, in
their order, on the variables that they had. Between rows only variables are handed on that a later statement reads,
each of which was surely set; a layer with parameters belongs to one row. When the program has exchanged a layer since,
the module does what it was made to do.
"""

import inspect
import itertools
import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from stalloc.techniques.forward_source import ForwardSource, Statement, read_forward
from stalloc.techniques.layer_rows import cut_at, has_weights
from stalloc.techniques.module_rows import Row, active_rows


class StatementRow(Row):
    """Some statements of a module's forward pass, and the layers that they call."""

    def __init__(self, parent: nn.Module, layers: dict[str, nn.Module], run: types.FunctionType) -> None:
        super().__init__(parent, layers)
        self.run = run
        self.all: tuple[StatementRow, ...] = ()

    def forward(self, *values: Any) -> Any:
        """Run the statements."""
        return self.run(self._parent[0], *values)

    @property
    def name(self) -> str:
        """The row's name within its module: its first and last layer with weights, which no other row has."""
        names = [name for name, layer in self._modules.items() if layer is not None and has_weights(layer)]
        return "-".join(dict.fromkeys([names[0], names[-1]]))

    @property
    def siblings(self) -> "Sequence[StatementRow]":
        """All rows of the module."""
        return active_rows(self._parent[0]) or self.all

    @staticmethod
    def run_all(parent: Any, rows: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the module."""
        if any(parent._modules.get(name) is not layer for row in rows for name, layer in row._modules.items()):
            return type(parent).forward(parent, *args, **kwargs)
        bound = inspect.signature(type(parent).forward).bind(parent, *args, **kwargs)
        bound.apply_defaults()
        _, *values = bound.arguments.values()
        del bound, args, kwargs
        for row in rows:
            values = row.forward(*values)
        return values


def rows_of_statements(module: Any) -> list[StatementRow]:
    """The rows of a module's own forward pass; none where it cannot be cut, or has too few layers to be worth it."""
    if active := active_rows(module):
        return active
    source = read_forward(module)
    if source is None:
        return []
    children = {name: layer for name, layer in module._modules.items() if layer is not None}
    weighty = {name for name, layer in children.items() if has_weights(layer)}
    needed = _needed(source.statements)
    cuts = cut_at(_begins_unit(source, needed, children, weighty))
    rows = []
    for begin, end in itertools.pairwise(cuts):
        called = set().union(*(one.layers for one in source.statements[begin:end]))
        run = source.part(begin, end, needed[begin] if begin else source.parameters, needed[end])
        rows.append(StatementRow(module, {name: one for name, one in children.items() if name in called}, run))
    for row in rows:
        row.all = tuple(rows)
    return rows


def _needed(statements: Sequence[Statement]) -> list[tuple[str, ...]]:
    """The variables that are read from each statement on; none at the end."""
    needed: set[str] = set()
    found: list[tuple[str, ...]] = [()]
    for one in reversed(statements):
        needed = (needed - one.set_surely) | one.read
        found.append(tuple(sorted(needed)))
    return found[::-1]


def _begins_unit(
    source: ForwardSource, needed: Sequence[tuple[str, ...]], children: dict[str, nn.Module], weighty: set[str]
) -> list[bool]:
    """For each statement, whether it calls a layer with weights and a row can begin with it.

    The first that calls one always counts, as what comes before it is in its row.
    """
    held = {name for name, layer in children.items() if next(layer.parameters(), None) is not None}
    calls = [one.layers & held for one in source.statements]
    known, has_begun, begins = set(source.parameters), False, []
    for place, one in enumerate(source.statements):
        before, after = set().union(*calls[:place]), set().union(*calls[place:])
        is_unit = bool(one.layers & weighty)
        can_part = not before & after and known >= set(needed[place])
        can_part &= not any(earlier.may_return for earlier in source.statements[:place])
        begins.append(is_unit and (can_part or not has_begun))
        has_begun |= is_unit
        known |= one.set_surely
    return begins
