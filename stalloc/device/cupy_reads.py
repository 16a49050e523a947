"""How a CuPy program on the virtual GPU reads what no kernel computed: counted, with the line that read it.

Contract: reads give what they gave, and make the requests that they made. A truth value, an integer, or elements of
integers and booleans that are not just what the program uploaded itself are a decision: it is counted, and reads what
the user assumes for that line where something is assumed. Printing an array is no decision. What CuPy reads itself to
know how large a result is (`nonzero`, masks, `unique`) comes this way too.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

from stalloc.device.deciding_lines import Decisions

_DECIDING = ("__bool__", "__int__", "__index__")
_READING = (*_DECIDING, "__float__", "item", "tolist", "get")
_SHOWING = ("__repr__", "__str__", "__format__")
_NUMBER_BYTES = 16  # a copy so short may be of another number that was at this address before
_MOST_BYTES = 1 << 20  # larger copies are not made


class _Reads:
    """The reads of one process; only the outermost call counts, as they are made of each other."""

    def __init__(self, library: ctypes.CDLL, decisions: Decisions) -> None:
        self._library, self._decisions, self._is_inside = library, decisions, False

    def shown(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def show(array: Any, *args: Any) -> Any:
            return self._within(function, array, args, {})

        return show

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        decides = name in _DECIDING

        @functools.wraps(function)
        def read(array: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(array, *args, **kwargs)
            result = self._within(function, array, args, kwargs)
            if decides or array.dtype.kind in "biu":
                assumed = None if self._was_uploaded(array) else self._decisions.take()
            else:
                assumed = self._decisions.take_number() if array.size == 1 else None
            return result if assumed is None else _like(result, assumed)

        return read

    def _within(self, function: Callable[..., Any], array: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self._is_inside = self._is_inside, True
        try:
            return function(array, *args, **kwargs)
        finally:
            self._is_inside = before

    def _was_uploaded(self, array: Any) -> bool:
        num_bytes = int(array.nbytes)
        if num_bytes == 0:
            return True
        if not _NUMBER_BYTES < num_bytes <= _MOST_BYTES or not array.flags.forc:
            return False
        there = ctypes.create_string_buffer(num_bytes)
        pointer = ctypes.c_void_p(array.data.ptr)
        return bool(self._library.stalloc_virtual_copied(pointer, ctypes.c_size_t(num_bytes), there))


def _like(result: Any, number: float) -> Any:
    if isinstance(result, (bool, int, float)):
        return type(result)(number)
    if hasattr(result, "fill"):
        result.fill(number)
    return result


def count_reads(cupy: Any, library: ctypes.CDLL) -> Decisions:
    """Count the decisions that a program takes on CuPy's arrays from now on."""
    folder = os.path.dirname(cupy.__file__)
    parts = (os.path.join(os.path.dirname(folder), name) for name in ("cupyx", "cupy_backends"))
    reads = _Reads(library, decisions := Decisions((folder, *parts, os.path.dirname(__file__))))
    for name in (*_READING, *_SHOWING):
        function = getattr(cupy.ndarray, name, None)
        if function is not None:
            made = reads.shown(function) if name in _SHOWING else reads.counted(name, function)
            setattr(cupy.ndarray, name, made)
    return decisions
