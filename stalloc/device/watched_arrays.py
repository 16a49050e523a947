"""NumPy's arrays of pinned memory, whose elements a copy of the GPU may still read or write while NumPy uses them.

Contract: `watch_arrays(checker)` gives a function that makes a watched array of a plain one, in the same memory. What
NumPy does with a watched array, and with views of it, is an access by the host; what it computes is plain. Copies and
pickles of a watched array are plain too. What takes its address (a memoryview, a file's `readinto`) is not seen.
"""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from stalloc.device.order_checker import READS, WRITES

if TYPE_CHECKING:
    from stalloc.device.order_checker import OrderChecker

_WRITING = ("copyto", "put", "place", "putmask", "fill_diagonal", "put_along_axis")  # their first argument
_READING_METHODS = (
    *("__array__", "__bool__", "__contains__", "__copy__", "__deepcopy__", "__float__", "__format__", "__index__"),
    *("__int__", "__reduce__", "__reduce_ex__", "all", "any", "argmax", "argmin", "argsort", "astype", "copy"),
    *("cumsum", "dump", "dumps", "flatten", "item", "max", "mean", "min", "nonzero", "prod", "repeat", "round"),
    *("searchsorted", "std", "sum", "take", "tobytes", "tofile", "tolist", "trace", "var"),
)
_WRITING_METHODS = ("byteswap", "fill", "partition", "put", "resize", "sort")


class _WatchedArray(np.ndarray):
    """An array whose uses are accesses by the host."""

    touch: Callable[[np.ndarray, int], None]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        _touch((inputs, tuple(kwargs.values())), READS)
        _touch((inputs[:1], out) if method == "at" else out, WRITES)
        if out:
            kwargs["out"] = _plain(out)
        result = getattr(ufunc, method)(*_plain(inputs), **_plain(kwargs))
        return result if not out else out[0] if len(out) == 1 else out

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        _touch((args, tuple(kwargs.values())), READS)
        _touch((args[:1] if function.__name__ in _WRITING else (), kwargs.get("out")), WRITES)
        result = function(*_plain(args), **_plain(kwargs))
        if isinstance(result, np.ndarray) and any(np.may_share_memory(result, one) for one in _watched((args, kwargs))):
            return result.view(_WatchedArray)
        return result

    def __getitem__(self, key: Any) -> Any:
        _touch_unless_view(self, key, READS)
        return super().__getitem__(_plain(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        _touch(value, READS)
        _touch_unless_view(self, key, WRITES)
        super().__setitem__(_plain(key), _plain(value))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


def _touch_unless_view(array: np.ndarray, key: Any, how: int) -> None:
    """Access the elements that a key names; reading a view of them accesses nothing yet."""
    plain, key = array.view(np.ndarray), _plain(key)
    try:
        part = plain[(*key, ...) if isinstance(key, tuple) else (key, ...)]  # of one element too it is an array
    except IndexError:  # there is an ellipsis already
        part = plain[key]
    if not isinstance(part, np.ndarray) or part.base is None or not np.may_share_memory(part, plain):
        _WatchedArray.touch(array, how)
    elif how == WRITES or (part.ndim == 0 and not isinstance(plain[key], np.ndarray)):
        _WatchedArray.touch(part, how)


def _watched(value: Any) -> Iterator[_WatchedArray]:
    if isinstance(value, _WatchedArray):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _watched(one)
    elif isinstance(value, dict):
        yield from _watched(tuple(value.values()))


def _touch(value: Any, how: int) -> None:
    for one in _watched(value):
        _WatchedArray.touch(one, how)


def _plain(value: Any) -> Any:
    if isinstance(value, _WatchedArray):
        return value.view(np.ndarray)
    if type(value) in (tuple, list):
        return type(value)(_plain(one) for one in value)
    if type(value) is dict:
        return {name: _plain(one) for name, one in value.items()}
    return value


def _method(name: str, how: int) -> Any:
    function = getattr(np.ndarray, name)

    @functools.wraps(function)
    def method(array: _WatchedArray, *args: Any, **kwargs: Any) -> Any:
        _WatchedArray.touch(array, how)
        return function(_plain(array), *_plain(args), **_plain(kwargs))

    return method


def watch_arrays(checker: "OrderChecker") -> Callable[[np.ndarray], np.ndarray]:
    """A function that gives the watched array of a plain one."""

    def touch(array: np.ndarray, how: int) -> None:
        address = array.__array_interface__["data"][0]
        if array.flags.forc:
            checker.touch_by_host(address, array.nbytes, 0, None, None, how)
        else:
            shape, strides = (np.ctypeslib.as_ctypes(np.array(one, np.intp)) for one in (array.shape, array.strides))
            checker.touch_by_host(address, array.itemsize, array.ndim, shape, strides, how)

    _WatchedArray.touch = staticmethod(touch)
    for names, how in ((_READING_METHODS, READS), (_WRITING_METHODS, WRITES)):
        for name in names:
            setattr(_WatchedArray, name, _method(name, how))
    return lambda array: array.view(_WatchedArray)
