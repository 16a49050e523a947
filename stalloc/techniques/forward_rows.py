"""A module whose own forward pass is cut into rows, each of which can be recomputed, or streamed, by itself: a long
sequence of layers, as of a VGG network, or a `forward` that calls layers of its own one after the other.

Contract: a row is a module of its own over layers that stay where they are: names, parameters, hooks and state_dict of
the model do not change. While a row has a forward of its own the module that is cut calls its rows; otherwise, and when
the program has exchanged a layer since, it does what it was made to do. Rows of statements run the program's own, at
their lines and in their order; between rows only variables are handed on that a later one reads, each of which was
surely set; a layer with parameters belongs to one row. Nothing is cut whose text does not compile to the very code that
runs, that is not plain statements over local variables, or that uses its module otherwise than to call layers and to
read tensors, numbers and texts.
"""

import __future__

import ast
import copy
import functools
import inspect
import itertools
import math
import types
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_UNFIT = (
    ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Yield, ast.YieldFrom, ast.Await, ast.Global,
    ast.Nonlocal, ast.GeneratorExp, ast.NamedExpr, ast.Delete, ast.Import, ast.ImportFrom, ast.Match,
)  # fmt: skip
"""Syntax that binds names, or looks them up later, in ways that do not work in a part of a function."""
_UNFIT_NAMES = {"super", "locals", "vars", "eval", "exec", "dir"}
_GOING_THROUGH = {"enumerate", "reversed", "zip"}
_FUTURE_FLAGS = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_READABLE = (torch.Tensor, nn.Parameter, bool, int, float, complex, str, bytes, types.NoneType)
_LEAST_UNITS = 4  # below which nothing is cut; a unit is a layer with weights and what follows it without


class ExchangedForward:
    """What takes the place of a module's `forward`. A copy of the module has its own; a saved model is as the program
    made it, and is read without stalloc."""

    def __init__(self, module: Any) -> None:
        functools.update_wrapper(self, module.forward)  # type: ignore[arg-type]
        self._module = module
        self._instance_forward = vars(module).get("forward")

    @property
    def original(self) -> Any:
        return self._instance_forward or type(self._module).forward.__get__(self._module)

    def undo(self) -> None:
        """Put the module's own forward back."""
        if vars(self._module).get("forward") is not self:
            return
        if self._instance_forward is None:
            del self._module.forward
        else:
            self._module.forward = self._instance_forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made

    def __reduce__(self) -> Any:
        return getattr, (self._module, "forward")


class Row(nn.Module):
    """A part of what a module's forward pass does, with the layers that it calls. Classes of it say how rows run."""

    def __init__(self, parent: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._parent = (parent,)  # in a tuple, so that it is no child
        self._modules.update(layers)
        self.all: Sequence[Row] = ()  # of the module

    @property
    def name(self) -> str:
        """Within the module that is cut: its first and its last layer."""
        return "-".join(dict.fromkeys([next(iter(self._modules)), next(reversed(self._modules))]))

    @property
    def siblings(self) -> "Sequence[Row]":
        """All rows of the module, this one, or an equal one, among them."""
        return _active_rows(self._parent[0]) or self.all

    @staticmethod
    def run_all(parent: Any, rows: "Sequence[Any]", /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "forward":
            parent = self._parent[0]
            rows = [self if row.name == self.name else row for row in self.siblings]
            if _active_rows(parent):
                parent.forward.rows = rows
            else:
                parent.forward = _ForwardInRows(parent, rows)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        parent = self._parent[0]
        if name == "forward" and not any("forward" in vars(row) for row in _active_rows(parent)):
            del parent.forward


class _ForwardInRows(ExchangedForward):
    def __init__(self, module: nn.Module, rows: list[Row]) -> None:
        super().__init__(module)
        self.rows = rows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rows[0].run_all(self._module, self.rows, *args, **kwargs)


def _active_rows(module: Any) -> list[Any]:
    """The rows that a module's forward pass goes through now; none if it runs as it was written."""
    forward = vars(module).get("forward")
    return forward.rows if isinstance(forward, _ForwardInRows) and forward._module is module else []


class LayerRow(Row):
    """Some layers of a sequence, in a row."""

    def forward(self, input: Any) -> Any:
        for layer in self._modules.values():
            input = layer(input)
        return input

    @staticmethod
    def run_all(parent: Any, rows: Sequence[Any], /, input: Any) -> Any:
        layers = itertools.chain.from_iterable(row._modules.items() for row in rows)
        if list(layers) != list(parent._modules.items()):
            return type(parent).forward(parent, input)
        for row in rows:
            input = row.forward(input)
        return input


def rows_of(sequence: Any) -> list[LayerRow]:
    if active := _active_rows(sequence):
        return active
    if getattr(type(sequence), "forward", None) is not nn.Sequential.forward or "forward" in vars(sequence):
        return []
    layers = list(sequence._modules.items())
    cuts = _cut_at([_has_weights(layer) for _, layer in layers])
    rows = [LayerRow(sequence, dict(layers[begin:end])) for begin, end in itertools.pairwise(cuts)]
    for row in rows:
        row.all = tuple(rows)
    return rows


def _has_weights(layer: Any) -> bool:
    """Whether a layer has parameters beyond biases and the like."""
    return any(one.ndim > 1 for one in layer.parameters())


def _cut_at(begins_unit: Sequence[bool]) -> list[int]:
    """Where to cut things in a row, given which of them begin a unit: the begin of each row, and the end. About as many
    rows as each has units, with which the least is held at once if all are recomputed (Chen et al. 2016, section 4.1).
    Nothing where there are too few units."""
    starts = [place for place, begins in enumerate(begins_unit) if begins]
    if len(starts) < _LEAST_UNITS:
        return []
    return [0, *starts[:: math.ceil(math.sqrt(len(starts)))][1:], len(begins_unit)]


class StatementRow(Row):
    """Some statements of a module's forward pass, and the layers that they call."""

    def __init__(self, parent: nn.Module, layers: dict[str, nn.Module], run: types.FunctionType) -> None:
        super().__init__(parent, layers)
        self.run = run

    def forward(self, *values: Any) -> Any:
        return self.run(self._parent[0], *values)

    @property
    def name(self) -> str:
        """The row's name within its module: its first and last layer with weights, which no other row has."""
        names = [name for name, layer in self._modules.items() if layer is not None and _has_weights(layer)]
        return "-".join(dict.fromkeys([names[0], names[-1]]))

    @staticmethod
    def run_all(parent: Any, rows: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
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
    if active := _active_rows(module):
        return active
    if (source := _read_forward(module)) is None:
        return []
    children = {name: layer for name, layer in module._modules.items() if layer is not None}
    needed: list[frozenset[str]] = [frozenset()]  # variables, from each statement on
    for one in reversed(source.statements):
        needed.insert(0, needed[0] - one.set_surely | one.read)
    cuts = _cut_at(_begins_unit(source, needed, children))
    rows = []
    for begin, end in itertools.pairwise(cuts):
        called = set().union(*(one.layers for one in source.statements[begin:end]))
        takes = sorted(needed[begin]) if begin else source.parameters
        run = source.part(begin, end, takes, sorted(needed[end]))
        rows.append(StatementRow(module, {name: one for name, one in children.items() if name in called}, run))
    for row in rows:
        row.all = tuple(rows)
    return rows


@dataclass(frozen=True)
class Statement:
    """One statement of a forward pass, at its outermost level."""

    node: ast.stmt
    read: frozenset[str]  #: local variables
    set_surely: frozenset[str]  #: local variables that it sets whatever happens
    layers: frozenset[str]  #: children of the module that it calls
    may_return: bool


@dataclass(frozen=True)
class ForwardSource:
    """A forward pass in statements."""

    function: types.FunctionType
    module_name: str  #: what it calls its module; usually `self`
    parameters: tuple[str, ...]  #: the others
    statements: tuple[Statement, ...]

    def part(self, begin: int, end: int, takes: Sequence[str], gives: Sequence[str]) -> types.FunctionType:
        """A function of the module and of the variables `takes` that runs some of the statements. What comes back is a
        tuple of the variables `gives`; of the last statements what the forward pass returns."""
        body = [one.node for one in self.statements[begin:end]]
        if end < len(self.statements):
            told = ast.Tuple([ast.Name(name, ast.Load()) for name in gives], ast.Load())
            body.append(ast.copy_location(ast.Return(told), body[-1]))
        names = [ast.arg(name) for name in (self.module_name, *takes)]
        arguments = ast.arguments(posonlyargs=[], args=names, kwonlyargs=[], kw_defaults=[], defaults=[])
        made = ast.copy_location(ast.FunctionDef(self.function.__name__, arguments, body, []), body[0])
        name, flags = self.function.__code__.co_filename, self.function.__code__.co_flags & _FUTURE_FLAGS
        module = compile(ast.fix_missing_locations(ast.Module([made], [])), name, "exec", flags, dont_inherit=True)
        code = next(one for one in module.co_consts if isinstance(one, types.CodeType))
        return types.FunctionType(code, self.function.__globals__, self.function.__name__)


def _begins_unit(source: ForwardSource, needed: Sequence[Set[str]], children: dict[str, nn.Module]) -> list[bool]:
    """For each statement, whether it calls a layer with weights and a row can begin with it. The first that calls one
    always counts, as what comes before it is in its row."""
    held = {name for name, layer in children.items() if next(layer.parameters(), None) is not None}
    weighty = {name for name, layer in children.items() if _has_weights(layer)}
    calls = [one.layers & held for one in source.statements]
    known, has_begun, begins = set(source.parameters), False, []
    for place, one in enumerate(source.statements):
        before, after = set().union(*calls[:place]), set().union(*calls[place:])
        is_unit = bool(one.layers & weighty)
        can_part = not before & after and known >= needed[place]
        can_part &= not any(earlier.may_return for earlier in source.statements[:place])
        begins.append(is_unit and (can_part or not has_begun))
        has_begun |= is_unit
        known |= one.set_surely
    return begins


def _read_forward(module: Any) -> ForwardSource | None:
    function = type(module).forward
    if type(function) is not types.FunctionType or "forward" in vars(module) or function.__code__.co_freevars:
        return None
    node = _definition(function)
    if node is None or any(isinstance(one, _UNFIT) for statement in node.body for one in ast.walk(statement)):
        return None
    given, rest = [*node.args.posonlyargs, *node.args.args], [node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
    if not given:
        return None
    local = set(function.__code__.co_varnames) | set(function.__code__.co_cellvars)
    statements = tuple(found for one in node.body if (found := _statement(one, given[0].arg, local, module)))
    if len(statements) != len(node.body):
        return None
    parameters = tuple(one.arg for one in [*given[1:], *rest] if one is not None)
    return ForwardSource(function, given[0].arg, parameters, statements)


def _definition(function: types.FunctionType) -> ast.FunctionDef | None:
    """The text of a function as a tree, if that is what runs."""
    try:
        lines, _ = inspect.findsource(function)
    except (OSError, TypeError):
        return None
    tree, codes = _parsed("".join(lines), function.__code__.co_filename)
    if tree is None or function.__code__ not in codes:
        return None
    first = function.__code__.co_firstlineno
    found = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.lineno == first]
    return found[0] if len(found) == 1 and not found[0].decorator_list else None


@functools.lru_cache(maxsize=100)
def _parsed(text: str, name: str) -> tuple[ast.Module | None, frozenset[types.CodeType]]:
    """A file as a tree, and the code of all functions in it: how one is compiled depends on what is around it."""
    try:
        tree = ast.parse(text)
        rest = [compile(tree, name, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return None, frozenset()
    found = set()
    while rest:
        found.add(code := rest.pop())
        rest += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return tree, frozenset(found)


def _statement(node: ast.stmt, module_name: str, local: set[str], module: Any) -> Statement | None:
    layers = _layers(node, module_name, module)
    nodes = list(ast.walk(node))
    named = {one.id for one in nodes if isinstance(one, ast.Name)}
    named |= {one.attr for one in nodes if isinstance(one, ast.Attribute)}
    if layers is None or named & _UNFIT_NAMES or any(one.startswith("__") for one in named):  # names of its class
        return None
    may_return = any(isinstance(one, ast.Return) for one in nodes)
    read = frozenset(_read(node)) & local - {module_name}
    return Statement(node, read, frozenset(_set_surely(node)) & local, layers, may_return)


def _read(node: Any) -> set[str]:
    """The names that a piece of a program may read before it sets them."""
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    if isinstance(node, ast.For):
        return _read(node.iter) | (_read_by(node.body) - _names(node.target)) | _read_by(node.orelse)
    if isinstance(node, ast.If | ast.While):
        return _read(node.test) | _read_by(node.body) | _read_by(node.orelse)
    if isinstance(node, ast.With):
        held = set().union(*(_names(one.optional_vars) for one in node.items if one.optional_vars is not None))
        return set().union(*map(_read, node.items)) | (_read_by(node.body) - held)
    inner = set().union(*map(_read, ast.iter_child_nodes(node)))
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
        own = set().union(*(_names(one.target) for one in node.generators))
        return _read(node.generators[0].iter) | (inner - own)
    return inner | (_names(node.target) if isinstance(node, ast.AugAssign) else set())


def _read_by(body: Sequence[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for one in reversed(body):
        found = (found - _set_surely(one)) | _read(one)
    return found


def _set_surely(node: Any) -> set[str]:
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) or node.value is None:
        return set()
    return set().union(*map(_names, node.targets if isinstance(node, ast.Assign) else [node.target]))


def _names(target: Any) -> set[str]:
    return {one.id for one in ast.walk(target) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _layers(node: ast.stmt, module_name: str, module: Any) -> frozenset[str] | None:
    holder = {id(child): one for one in ast.walk(node) for child in ast.iter_child_nodes(one)}
    found = set()
    for one in ast.walk(node):
        if not isinstance(one, ast.Name) or one.id != module_name:
            continue
        user = holder[id(one)]
        if not isinstance(user, ast.Attribute) or not isinstance(user.ctx, ast.Load):
            return None
        value = getattr(module, user.attr, module)
        if user.attr in module._modules and value is not None:
            if not _is_called(user, holder):
                return None
            found.add(user.attr)
        elif type(value) not in _READABLE:
            return None
    return frozenset(found)


def _is_called(node: ast.AST, holder: dict[int, ast.AST]) -> bool:
    """Whether a layer or a part of it is only called, or iterated over, so that nothing holds it afterwards."""
    user = holder[id(node)]
    while isinstance(user, ast.Attribute | ast.Subscript) and user.value is node:
        node, user = user, holder[id(user)]
    while isinstance(user, ast.Call) and isinstance(user.func, ast.Name) and user.func.id in _GOING_THROUGH:
        node, user = user, holder[id(user)]
    if isinstance(user, ast.Call):
        return user.func is node
    return isinstance(user, ast.For | ast.comprehension) and user.iter is node
