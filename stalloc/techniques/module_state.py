"""What a module's forward pass depends on besides tensors: attributes, and the random generators of Python and NumPy.

Contract: `as_before` puts the state of a moment back while its block runs and what was there when it ends, so that a
block that counts its calls or draws a number sees the same again and leaves nothing behind. What changed within a list
or a dictionary cannot be put back and is an error.
"""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from stalloc.errors import RecomputeError

_GROWING = (list, dict, set)
_MAX_DEPTH = 3  # of containers in containers


class ModuleState:
    """The attributes of a module and of those below it, and the generators, as they are now."""

    def __init__(self, block: str, module: Any) -> None:
        self._block = block
        self._attributes = [(one, dict(vars(one)), dict(one._buffers)) for one in module.modules()]
        self._random = random.getstate()
        self._numpy = _numpy_state()

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """This state in force for the block. Raises RecomputeError if a container of the module grows or shrinks."""
        now = [(one, dict(vars(one)), dict(one._buffers)) for one, _, _ in self._attributes]
        generators = random.getstate(), _numpy_state()
        sizes = [_sizes(vars(one)) for one, _, _ in now]
        _put(self._attributes)
        _set_generators(self._random, self._numpy)
        try:
            yield
        finally:
            # here, since a run ends with an exception as soon as all that backward needs is there
            _put(now)
            _set_generators(*generators)
            for (one, _, _), before in zip(now, sizes, strict=True):
                self._check_sizes(one, before)

    def _check_sizes(self, module: Any, before: dict[str, int]) -> None:
        changed = [name for name, size in _sizes(vars(module)).items() if before.get(name, size) != size]
        if changed:
            raise RecomputeError(
                f"{self._block} cannot be computed twice: its forward pass changes {type(module).__name__}."
                f"{changed[0]}. Leave this block as it is."
            )


def _sizes(attributes: dict[str, Any]) -> dict[str, int]:
    return {name: _size(value, _MAX_DEPTH) for name, value in attributes.items() if isinstance(value, _GROWING)}


def _size(value: Any, depth: int) -> int:
    if not isinstance(value, _GROWING) or depth == 0:
        return 0
    return len(value) + sum(_size(one, depth - 1) for one in (value.values() if isinstance(value, dict) else value))


def _put(states: list[tuple[Any, dict[str, Any], dict[str, Any]]]) -> None:
    for module, attributes, buffers in states:
        for target, wanted in ((vars(module), attributes), (module._buffers, buffers)):
            for name in [name for name in target if name not in wanted]:
                del target[name]
            for name, value in wanted.items():
                if target.get(name, target) is not value:
                    target[name] = value


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _set_generators(of_python: Any, of_numpy: Any) -> None:
    if random.getstate() != of_python:
        random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
