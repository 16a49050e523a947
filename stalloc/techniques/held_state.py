"""Numbers in containers and states of random generators that a block can reach, put back while it runs again.

Contract: of lists and dictionaries, also within each other, the numbers and texts are put back to what they were at a
moment, and all that they hold to what it is now; of generators of Python's and NumPy's own classes the state. Nothing
of the program is kept alive for it but the holders themselves.
"""

import collections
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

PLAIN = (int, float, complex, str, bytes, bool, type(None))
_CONTAINERS = (dict, list, collections.deque, collections.OrderedDict, collections.Counter, collections.defaultdict)
_MOST_ENTRIES, _MAX_DEPTH = 10_000, 3

_State = tuple[Any, Any]
"""What holds something, and what of it is to be put back: the entries of a container, the state of a generator."""


class HeldState:
    """What is held as of now in some values, of attributes and variables, and in containers among them."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._states = [(one, _plain_entries(one) if _is_container(one) else _state(one)) for one in _holders(values)]

    def swap(self) -> list[_State]:
        """Put back what was; what there is now comes back, for `put`."""
        now = [(one, dict(_entries(one)) if _is_container(one) else _state(one)) for one, _ in self._states]
        put(self._states)
        return now


def put(states: Iterable[_State]) -> None:
    """Let each hold what it held."""
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


def _holders(values: Iterable[Any]) -> Iterator[Any]:
    known: set[int] = set()
    rest = [(value, _MAX_DEPTH) for value in values]
    while rest:
        value, depth = rest.pop()
        if type(value) in PLAIN or id(value) in known:
            continue
        is_container = _is_container(value)
        if is_container or is_generator(value):
            known.add(id(value))
            yield value
        if depth and (is_container or type(value) is tuple):
            rest += [(one, depth - 1) for _, one in _entries(value)]


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS and len(value) <= _MOST_ENTRIES


def _entries(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _plain_entries(container: Any) -> dict[Any, Any]:
    return {key: value for key, value in _entries(container) if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(type(one) in PLAIN for one in value))


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
