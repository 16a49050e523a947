"""The statements of a module's own `forward`, from its source text: what each reads, sets and calls.

Contract: a text counts only if it compiles to the very code that runs. Nothing is told of a forward pass that is not
plain statements over local variables, or that uses its module otherwise than to call layers and to read tensors,
numbers and texts: such a pass cannot be taken apart without changing what it means.
"""

import __future__

import ast
import functools
import inspect
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_UNFIT = (
    ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Yield, ast.YieldFrom, ast.Await, ast.Global,
    ast.Nonlocal, ast.GeneratorExp, ast.NamedExpr, ast.Delete, ast.Import, ast.ImportFrom, ast.Match,
)  # fmt: skip
"""Syntax that binds names, or looks them up later, in ways that do not work in a part of a function."""
_UNFIT_NAMES = {"super", "locals", "vars", "eval", "exec", "dir"}
_GOING_THROUGH = {"enumerate", "reversed", "zip"}
_FUTURE_FLAGS = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)


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
        """A function of the module and of the variables `takes` that runs some of the statements.

        What comes back is a tuple of the variables `gives`; of the last statements what the forward pass returns.
        """
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


def read_forward(module: Any) -> ForwardSource | None:
    """The forward pass of a torch module, None where it cannot be taken apart."""
    function = type(module).forward
    if type(function) is not types.FunctionType or "forward" in vars(module) or function.__code__.co_freevars:
        return None
    node = _definition(function)
    if node is None or any(isinstance(one, _UNFIT) for statement in node.body for one in ast.walk(statement)):
        return None
    given = [*node.args.posonlyargs, *node.args.args]
    if not given:
        return None
    rest = [node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
    local = set(function.__code__.co_varnames) | set(function.__code__.co_cellvars)
    body = [_statement(one, given[0].arg, local, module) for one in node.body]
    statements = tuple(one for one in body if one is not None)
    if len(statements) != len(body):
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
    """What a statement does; None if it uses its module in another way than the contract above allows."""
    layers = _layers(node, module_name, module)
    names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
    named = {one.id for one in names} | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    if layers is None or named & _UNFIT_NAMES or any(one.startswith("__") for one in named):  # names of its class
        return None
    may_return = any(isinstance(one, ast.Return) for one in ast.walk(node))
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
    """The names that statements in a row may read before they set them."""
    found: set[str] = set()
    for one in reversed(body):
        found = (found - _set_surely(one)) | _read(one)
    return found


def _set_surely(node: Any) -> set[str]:
    """The names that a statement surely sets; none if it is no assignment."""
    if isinstance(node, ast.Assign):
        return set().union(*map(_names, node.targets))
    is_other = isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None
    return _names(node.target) if is_other else set()


def _names(target: Any) -> set[str]:
    """The names that are set where a value goes to a target."""
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Tuple | ast.List):
        return set().union(*map(_names, target.elts))
    return _names(target.value) if isinstance(target, ast.Starred) else set()


def _layers(node: ast.stmt, module_name: str, module: Any) -> frozenset[str] | None:
    """The children that a statement calls, or None."""
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
        elif not (_is_tensor(value) or type(value) in _PLAIN):
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


def _is_tensor(value: Any) -> bool:
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter)
