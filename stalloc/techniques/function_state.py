"""What functions of the program keep outside of them: in cells of closures, and in global variables of their module.

Contract: plain values (numbers, texts) are put back to what they were at a moment and to what they are now; a container
that grows or shrinks while a block runs is named. Looked at are the functions that a module calls by its own code:
forward passes, functions among its attributes, and what these refer to, a few steps deep; nothing of torch's.
"""

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_PLAIN = (int, float, complex, str, bytes, types.NoneType)
_GROWING = (list, dict, set)
_LIBRARIES = ("torch", "stalloc", "numpy", "builtins")
_MAX_DEPTH = 3
_EMPTY = object()  # a cell without content


@dataclass(frozen=True, eq=False)
class Variable:
    """A cell of a closure, or a global variable."""

    name: str
    holder: Any  #: the cell, or the dictionary of the module

    @property
    def value(self) -> Any:
        """The value that it holds now."""
        if isinstance(self.holder, dict):
            return self.holder.get(self.name, _EMPTY)
        try:
            return self.holder.cell_contents
        except ValueError:
            return _EMPTY

    def put(self, value: Any) -> None:
        """Let it hold a value."""
        if isinstance(self.holder, dict):
            self.holder[self.name] = value
        else:
            self.holder.cell_contents = value


class FunctionState:
    """The variables of a module's functions, as they are now."""

    def __init__(self, module: Any) -> None:
        self._variables = list(_variables_of(module))
        self._plain = [(one, one.value) for one in self._variables if type(one.value) in (*_PLAIN, bool)]

    def swap(self) -> list[tuple[Variable, Any]]:
        """Put the earlier values back; returns the present ones."""
        now = [(one, one.value) for one, _ in self._plain]
        put(self._plain)
        return now

    def values(self) -> list[Any]:
        """The values that they hold now."""
        return [one.value for one in self._variables]

    def sizes(self) -> list[tuple[str, int]]:
        """How many entries each container has."""
        return [(one.name, len(one.value)) for one in self._variables if type(one.value) in _GROWING]


def put(values: list[tuple[Variable, Any]]) -> None:
    """Let variables hold values."""
    for variable, value in values:
        if variable.value is not value:
            variable.put(value)


def _variables_of(module: Any) -> Iterator[Variable]:
    known: set[int] = set()
    for one in module.modules():
        for function in (type(one).forward, *(vars(one).values())):
            yield from _of_function(function, known, _MAX_DEPTH)


def _of_function(function: Any, known: set[int], depth: int) -> Iterator[Variable]:
    function = getattr(function, "__func__", function)
    if type(function) is not types.FunctionType or id(function) in known or depth == 0 or _is_library(function):
        return
    known.add(id(function))
    for variable in _named_by(function):
        yield variable
        yield from _of_function(variable.value, known, depth - 1)


@functools.lru_cache(maxsize=10_000)
def _named_by(function: types.FunctionType) -> tuple[Variable, ...]:
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    own = function.__globals__
    return (
        *(Variable(name, cell) for name, cell in cells),
        *(Variable(name, own) for name in sorted(names & own.keys())),
    )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of those within it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _codes(one)


def _is_library(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in _LIBRARIES
