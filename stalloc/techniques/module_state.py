"""What a forward pass depends on besides tensors, put back while a block runs again.

Contract: `as_before` puts the state of a moment back while its block runs and what was there when it ends, so that a
block that counts its calls or draws a number sees the same again and leaves nothing behind. That is attributes of
modules and of objects that they hold; numbers and texts in lists, dictionaries and objects of classes that are neither
Python's nor torch's, also within each other; sets of these, small arrays and generators as a whole; and numbers and
texts in cells and global variables of the functions that a module calls by its own code. A list or a dictionary that
grows cannot be put back and is an error. Nothing of the program is kept alive but the holders themselves.
"""

import collections
import contextlib
import copy
import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stalloc.errors import RecomputeError

_PLAIN = (int, float, complex, str, bytes, bool, types.NoneType)
_SHARED = (str, bytes, bool, int, float, complex, type, types.ModuleType)
_GROWING = (list, dict, set)
_CONTAINERS = (dict, list, collections.deque, collections.OrderedDict, collections.Counter, collections.defaultdict)
_MOST_ENTRIES, _MOST_HOLDERS, _MAX_DEPTH = 10_000, 1_000, 3
_MOST_ARRAY_BYTES = 1 << 16
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "stalloc"}
_WITHOUT_PROGRAM = ("torch", "stalloc", "numpy", "builtins")  # whose functions call none of the program's
_EMPTY = object()  # a cell without content

_Attributes = tuple[Any, dict[str, Any], dict[str, Any]]
"""An object, one of its dictionaries, and what that contained."""
_Held = tuple[Any, Any]
"""A container, set, array or generator, and what is put back into it: the entries of a container, or its state."""


class ModuleState:
    """The present attributes of a module, of modules below it and of objects that they hold, and the generators."""

    def __init__(self, block: str, module: Any) -> None:
        self._block = block
        self._attributes = _attributes(module)
        self._variables: list[_Variable] = []
        known: set[int] = set()
        for each in module.modules():
            for function in (type(each).forward, *vars(each).values()):
                self._variables += _of_function(function, known, _MAX_DEPTH)
        self._values = [(one, one.value) for one in self._variables if type(one.value) in _PLAIN]
        common = _of_every_module()
        own = (value for _, target, _ in self._attributes for name, value in target.items() if name not in common)
        holders = _holders([*own, *(one.value for one in self._variables)])
        self._held = [(one, _state(one, only_plain=True)) for one in holders]
        self._generators = _generators()

    def sizes(self) -> list[dict[Any, int]]:
        """How many entries each container has now: by variable of the functions, then by name for each object."""
        outside = {one: len(one.value) for one in self._variables if type(one.value) in _GROWING}
        return [outside, *(_sizes(target) for _, target, _ in self._attributes)]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """This state in force for the block. Raises RecomputeError if a container of the module grows or shrinks."""
        attributes = [(owner, target, dict(target)) for owner, target, _ in self._attributes]
        values = [(one, one.value) for one, _ in self._values]
        held = [(one, _state(one)) for one, _ in self._held]
        now, sizes = (attributes, values, held, _generators()), self.sizes()
        _put(self._attributes, self._values, self._held, self._generators)
        try:
            yield
        finally:
            # here, since a run ends with an exception as soon as all that backward needs is there
            _put(*now)
            self._check_sizes(sizes, with_variables=not isinstance(sys.exception(), RecomputeError))

    def _check_sizes(self, before: list[dict[Any, int]], *, with_variables: bool) -> None:
        owners = [None, *(owner for owner, *_ in self._attributes)]
        for owner, then, now in zip(owners, before, self.sizes(), strict=True):
            changed = [one for one, size in now.items() if then.get(one, size) != size]
            if changed and (owner is not None or with_variables):
                is_variable = owner is None
                what = f"{changed[0].name}, a variable outside of it" if is_variable else changed[0]
                where = "" if is_variable else f"{type(owner).__name__}."
                raise RecomputeError(
                    f"{self._block} cannot be computed twice: its forward pass changes {where}{what}. Leave this block "
                    "as it is."
                )


def _put(
    attributes: list[_Attributes], values: "list[tuple[_Variable, Any]]", held: list[_Held], generators: tuple[Any, Any]
) -> None:
    for _, target, wanted in attributes:
        for name in [name for name in target if name not in wanted]:
            del target[name]
        for name, value in wanted.items():
            if target.get(name, target) is not value:
                target[name] = value
    for variable, value in values:
        if variable.value is not value:
            variable.put(value)
    for holder, state in held:
        if not _is_container(holder):
            _set_state(holder, state)
            continue
        now = dict(_entries(holder))
        for key, value in state.items():
            if key in now and now[key] is not value:
                holder[key] = value
    of_python, of_numpy = generators
    if random.getstate() != of_python:
        random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def _generators() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


# --- attributes of modules and of their objects


def _attributes(module: Any) -> list[_Attributes]:
    found: list[_Attributes] = []
    known: set[int] = set()
    for one in module.modules():
        own = (vars(one), one._buffers, one._parameters)  # functional_call exchanges parameters for one call
        found += [(one, target, dict(target)) for target in own]
        for value in (vars(one)[name] for name in vars(one).keys() - _of_every_module()):
            if _is_object(value) and id(value) not in known:
                known.add(id(value))
                found.append((value, vars(value), dict(vars(value))))
    return found


@functools.cache
def _of_every_module() -> frozenset[str]:
    return frozenset(vars(sys.modules["torch"].nn.Module()))


def as_it_is_now(value: Any, depth: int = _MAX_DEPTH + 1) -> Any:
    """A copy of an object of the program's that changes of the object do not reach; tensors and modules are shared.
    What cannot be copied, and what lies deeper than a few objects, is shared too."""
    if depth == 0 or value is None or isinstance(value, _SHARED):
        return value
    if _is_generator(value):
        return copy.deepcopy(value)
    if type(value) in (list, tuple, set):
        return type(value)(as_it_is_now(one, depth - 1) for one in value)
    if type(value) is dict:
        return {key: as_it_is_now(one, depth - 1) for key, one in value.items()}
    if not _is_object(value):
        return value
    try:
        copied = copy.copy(value)
        if vars(copied) is not vars(value):
            vars(copied).update({name: as_it_is_now(one, depth - 1) for name, one in vars(value).items()})
    except Exception:  # the program's own ways to copy may do anything
        return value
    return copied


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a class of the program's or of a library's, whose attributes may change."""
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


# --- what these hold


def _holders(values: Iterable[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    rest = [(value, _MAX_DEPTH) for value in values]
    while rest and len(found) < _MOST_HOLDERS:
        value, depth = rest.pop()
        if type(value) in _PLAIN:
            continue
        if type(value).__module__.partition(".")[0] not in _LIBRARIES and _is_object(value):
            value = vars(value)
        if id(value) in found:
            continue
        is_container = _is_container(value)
        if is_container or type(value) is set or _is_generator(value) or _is_array(value):
            found[id(value)] = value
        if depth and (is_container or type(value) is tuple):
            rest += [(one, depth - 1) for _, one in _entries(value)]
    return list(found.values())


def _is_generator(value: Any) -> bool:
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    drawn = getattr(sys.modules.get("numpy"), "random", None)
    return drawn is not None and isinstance(value, drawn.Generator | drawn.RandomState)


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS and len(value) <= _MOST_ENTRIES


def _is_array(value: Any) -> bool:
    if type(value) is not getattr(sys.modules.get("numpy"), "ndarray", _EMPTY):
        return False
    return value.dtype.kind in "biufc" and value.nbytes <= _MOST_ARRAY_BYTES and bool(value.flags.writeable)


def _entries(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(one) in _PLAIN for one in value))


def _state(holder: Any, *, only_plain: bool = False) -> Any:
    """The state of a holder: of a container, the entries, or those that are numbers and texts."""
    if _is_container(holder):
        return {key: value for key, value in _entries(holder) if not only_plain or _is_plain(value)}
    if isinstance(holder, random.Random):
        return holder.getstate()
    if isinstance(holder, set):
        return holder.copy() if len(holder) <= _MOST_ENTRIES and all(map(_is_plain, holder)) else None
    if hasattr(holder, "bit_generator"):
        return holder.bit_generator.state
    return holder.get_state() if hasattr(holder, "get_state") else holder.copy()


def _set_state(holder: Any, state: Any) -> None:
    if isinstance(holder, random.Random):
        holder.setstate(state)
    elif isinstance(holder, set):
        if state is not None and holder != state:
            holder.clear()
            holder.update(state)
    elif hasattr(holder, "bit_generator"):
        holder.bit_generator.state = state
    elif hasattr(holder, "set_state"):
        holder.set_state(state)
    elif not (holder == state).all():
        holder[...] = state


# --- variables of the functions that a module calls


@dataclass(frozen=True, eq=False)
class _Variable:
    """A cell of a closure, or a global variable."""

    name: str
    holder: Any  #: the cell, or the dictionary of the module

    @property
    def value(self) -> Any:
        if isinstance(self.holder, dict):
            return self.holder.get(self.name, _EMPTY)
        try:
            return self.holder.cell_contents
        except ValueError:
            return _EMPTY

    def put(self, value: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[self.name] = value
        else:
            self.holder.cell_contents = value


def _of_function(function: Any, known: set[int], depth: int) -> Iterator[_Variable]:
    function = getattr(function, "__func__", function)
    if type(function) is not types.FunctionType or id(function) in known or depth == 0:
        return
    if str(getattr(function, "__module__", "")).partition(".")[0] in _WITHOUT_PROGRAM:
        return
    known.add(id(function))
    for variable in _named_by(function):
        yield variable
        yield from _of_function(variable.value, known, depth - 1)


@functools.lru_cache(maxsize=10_000)
def _named_by(function: types.FunctionType) -> tuple[_Variable, ...]:
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    own = function.__globals__
    return tuple(_Variable(*one) for one in (*cells, *((name, own) for name in sorted(names & own.keys()))))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _codes(one)
