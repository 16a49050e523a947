"""Numbers in containers, objects and arrays, and states of random generators, put back while a block runs again.

Contract: of lists, dictionaries and objects of classes that are neither Python's nor torch's, also within each other,
the numbers and texts are put back to what they were at a moment, and all that they hold to what it is now; of sets of
numbers and texts, small arrays of NumPy and generators of Python's and NumPy's classes the whole. Nothing of the
program is kept alive for it but the holders themselves.
"""

import collections
import random
import sys
from collections.abc import Iterable
from typing import Any

PLAIN = (int, float, complex, str, bytes, bool, type(None))
_CONTAINERS = (dict, list, collections.deque, collections.OrderedDict, collections.Counter, collections.defaultdict)
_MOST_ENTRIES, _MOST_HOLDERS, _MAX_DEPTH = 10_000, 1_000, 3
_MOST_ARRAY_BYTES = 1 << 16
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "stalloc"}

_State = tuple[Any, Any]
"""A holder, and what is put back into it: the entries of a container, or the state of a generator."""


class HeldState:
    """What the values of some attributes and variables hold at this moment, containers among them included."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._states = [(one, _plain_entries(one) if _is_container(one) else _state(one)) for one in _holders(values)]

    def swap(self) -> list[_State]:
        """Put back what was held; returns what is held now, for `put`."""
        now = [(one, dict(_entries(one)) if _is_container(one) else _state(one)) for one, _ in self._states]
        put(self._states)
        return now


def put(states: Iterable[_State]) -> None:
    """Let each holder have what it held."""
    for holder, state in states:
        if not _is_container(holder):
            _set_state(holder, state)
            continue
        now = dict(_entries(holder))
        for key, value in state.items():
            if key in now and now[key] is not value:
                holder[key] = value


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator of Python or NumPy, one of the program's own."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    drawn = getattr(sys.modules.get("numpy"), "random", None)
    return drawn is not None and isinstance(value, drawn.Generator | drawn.RandomState)


def _holders(values: Iterable[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    rest = [(value, _MAX_DEPTH) for value in values]
    while rest and len(found) < _MOST_HOLDERS:
        value, depth = rest.pop()
        if type(value) in PLAIN:
            continue
        if _is_object(value):
            value = vars(value)
        if id(value) in found:
            continue
        is_container = _is_container(value)
        if is_container or type(value) is set or is_generator(value) or _is_array(value):
            found[id(value)] = value
        if depth and (is_container or type(value) is tuple):
            rest += [(one, depth - 1) for _, one in _entries(value)]
    return list(found.values())


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS and len(value) <= _MOST_ENTRIES


def _is_object(value: Any) -> bool:
    """Whether a value is an object with attributes, of a class of the program's or of a package."""
    if type(value).__module__.partition(".")[0] in _LIBRARIES or callable(value):
        return False
    return type(getattr(value, "__dict__", None)) is dict and not isinstance(value, sys.modules["torch"].Tensor)


def _is_array(value: Any) -> bool:
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    if array is None or type(value) is not array or value.dtype.kind not in "biufc":
        return False
    return bool(value.nbytes <= _MOST_ARRAY_BYTES and value.flags.writeable)


def _entries(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _plain_entries(container: Any) -> dict[Any, Any]:
    return {key: value for key, value in _entries(container) if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(type(one) in PLAIN for one in value))


def _state(holder: Any) -> Any:
    """The whole state of a holder that is no container."""
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
