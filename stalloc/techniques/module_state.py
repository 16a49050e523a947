"""What a forward pass depends on besides tensors: attributes, what it is given, the generators of Python and NumPy.

Contract: `as_before` puts the state of a moment back while its block runs and what was there when it ends, so that a
block that counts its calls or draws a number sees the same again and leaves nothing behind. A list or a dictionary that
grows cannot be put back and is an error.
"""

import contextlib
import copy
import functools
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from stalloc.errors import RecomputeError
from stalloc.techniques import held_state
from stalloc.techniques.function_state import FunctionState, put
from stalloc.techniques.held_state import HeldState, is_generator

_SHARED = (str, bytes, bool, int, float, complex, type, ModuleType)
_GROWING = (list, dict, set)
_MAX_DEPTH = 3  # of containers in containers


_State = tuple[Any, dict[str, Any], dict[str, Any]]
"""An object, one of its dictionaries, and what that contained."""


class ModuleState:
    """The present attributes of a module, of modules below it and of objects that they hold, and the generators."""

    def __init__(self, block: str, module: Any) -> None:
        self._block = block
        self._states = _states(module)
        self._functions = FunctionState(module)
        common = _of_every_module()
        attributes = (value for _, target, _ in self._states for name, value in target.items() if name not in common)
        self._held = HeldState([*attributes, *self._functions.values()])
        self._random = random.getstate()
        self._numpy = _numpy_state()

    def sizes(self) -> list[tuple[str, int]]:
        """How many entries each container of the modules, and of the functions that they call, has now."""
        own = [
            (f"{type(owner).__name__}.{name}", size)
            for owner, target, _ in self._states
            for name, size in _sizes(target).items()
        ]
        return own + self._functions.sizes()

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """This state in force for the block. Raises RecomputeError if a container of the module grows or shrinks."""
        now = [(owner, target, dict(target)) for owner, target, _ in self._states]
        generators = random.getstate(), _numpy_state()
        sizes = [_sizes(target) for _, target, _ in self._states]
        outside = self._functions.sizes()
        variables, held = self._functions.swap(), self._held.swap()
        _put(self._states)
        _set_generators(self._random, self._numpy)
        try:
            yield
        finally:
            # here, since a run ends with an exception as soon as all that backward needs is there
            _put(now)
            put(variables)
            held_state.put(held)
            _set_generators(*generators)
            if not isinstance(sys.exception(), RecomputeError):
                self._check_outside(outside)
            for (owner, target, _), before in zip(now, sizes, strict=True):
                self._check_sizes(owner, target, before)

    def _check_outside(self, before: list[tuple[str, int]]) -> None:
        changed = [name for (name, size), (_, now) in zip(before, self._functions.sizes(), strict=False) if size != now]
        if changed:
            raise RecomputeError(
                f"{self._block} cannot be computed twice: its forward pass changes {changed[0]}, a variable outside of "
                "it. Leave this block as it is."
            )

    def _check_sizes(self, owner: Any, attributes: dict[str, Any], before: dict[str, int]) -> None:
        changed = [name for name, size in _sizes(attributes).items() if before.get(name, size) != size]
        if changed:
            raise RecomputeError(
                f"{self._block} cannot be computed twice: its forward pass changes {type(owner).__name__}."
                f"{changed[0]}. Leave this block as it is."
            )


def _states(module: Any) -> list[_State]:
    found: list[_State] = []
    known: set[int] = set()
    for one in module.modules():
        own = (vars(one), one._buffers, one._parameters)  # functional_call exchanges parameters for one call
        found += [(one, target, dict(target)) for target in own]
        for value in (vars(one)[name] for name in vars(one).keys() - _of_every_module()):
            if _is_plain_object(value) and id(value) not in known:
                known.add(id(value))
                found.append((value, vars(value), dict(vars(value))))
    return found


@functools.cache
def _of_every_module() -> frozenset[str]:
    """The names of attributes that torch gives to every module."""
    return frozenset(vars(sys.modules["torch"].nn.Module()))


def _put(states: list[_State]) -> None:
    for _, target, wanted in states:
        for name in [name for name in target if name not in wanted]:
            del target[name]
        for name, value in wanted.items():
            if target.get(name, target) is not value:
                target[name] = value


def as_it_is_now(value: Any, depth: int = _MAX_DEPTH + 1) -> Any:
    """A copy of an object of the program's that changes of the object do not reach; tensors and modules are shared.

    What cannot be copied, and what lies deeper than a few objects, is shared too.
    """
    if depth == 0 or value is None or isinstance(value, _SHARED):
        return value
    if is_generator(value):
        return copy.deepcopy(value)
    if type(value) in (list, tuple, set):
        return type(value)(as_it_is_now(one, depth - 1) for one in value)
    if type(value) is dict:
        return {key: as_it_is_now(one, depth - 1) for key, one in value.items()}
    if not _is_plain_object(value):
        return value
    try:
        copied = copy.copy(value)
        if vars(copied) is not vars(value):
            vars(copied).update({name: as_it_is_now(one, depth - 1) for name, one in vars(value).items()})
    except Exception:  # the program's own ways to copy may do anything
        return value
    return copied


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an object of a class of the program's, whose attributes may change."""
    if isinstance(value, _SHARED) or callable(value) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    torch = sys.modules["torch"]
    return not isinstance(value, torch.Tensor | torch.Generator | torch.device | torch.dtype)


def _sizes(attributes: dict[str, Any]) -> dict[str, int]:
    return {
        name: _size(value, _MAX_DEPTH) if value else 0  # most are empty
        for name, value in attributes.items()
        if isinstance(value, _GROWING)
    }


def _size(value: Any, depth: int) -> int:
    if depth == 0:
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return len(value) + sum(_size(one, depth - 1) for one in inner if isinstance(one, _GROWING))


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _set_generators(of_python: Any, of_numpy: Any) -> None:
    if random.getstate() != of_python:
        random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
