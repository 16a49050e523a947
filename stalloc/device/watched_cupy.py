"""Calls of libraries by CuPy as the checker of the order of work sees them: by the arrays that CuPy is given and gives.

Contract: after `watch_libraries` the functions of CuPy that may leave work to a library (cuBLAS, cuSOLVER, cuSPARSE,
cuFFT, cuRAND, cuTENSOR, CUB, Thrust) read all of the arrays among their arguments and write all of those that they
return, on the current stream; what sorts or shuffles in place writes what it is given. A result that is a view of an
argument is none. Kernels of CuPy's own are seen where the driver launches them.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

from stalloc.device.order_checker import READS, WRITES
from stalloc.device.watched_arrays import watch_arrays
from stalloc.imports import after_import

if TYPE_CHECKING:
    from stalloc.device.order_checker import OrderChecker

_METHODS = (
    *("__matmul__", "__rmatmul__", "dot", "sum", "prod", "max", "min", "argmax", "argmin"),
    *("cumsum", "cumprod", "sort", "argsort", "partition", "argpartition"),
)
_FUNCTIONS = (
    *("dot", "vdot", "inner", "outer", "matmul", "tensordot", "einsum", "convolve", "correlate"),
    *("cumsum", "cumprod", "lexsort", "histogram"),
)
_MODULES = ("cupy.linalg", "cupy.fft", "cupyx.lapack", "cupyx.cusparse", "cupyx.scipy.fft", "cupyx.scipy.linalg")
_IN_PLACE = ("sort", "partition", "shuffle", "coosort", "cscsort", "csrsort")
_PINNED = ("empty_pinned", "empty_like_pinned", "zeros_pinned", "zeros_like_pinned")
_PARTS_OF_SPARSE = ("data", "indices", "indptr", "row", "col")


def watch_libraries(checker: "OrderChecker") -> None:
    """Watch the functions of CuPy, which has been imported."""
    cupy = sys.modules["cupy"]
    watched = functools.partial(_watched, checker, cupy)
    for name in _METHODS:
        setattr(cupy.ndarray, name, watched(getattr(cupy.ndarray, name)))
    for name in _FUNCTIONS:
        setattr(cupy, name, watched(getattr(cupy, name)))
    for name in _MODULES:
        after_import(name, functools.partial(_watch_all, name, watched))
    for generator in (cupy.random.RandomState, cupy.random.Generator):
        for name, method in vars(generator).copy().items():
            if callable(method) and not name.startswith("_"):
                setattr(generator, name, watched(method))
    after_import("cupyx", functools.partial(_watch_pinned, watch_arrays(checker)))


def _watch_pinned(arrays: Callable[[Any], Any]) -> None:
    """Have NumPy's arrays of pinned memory, which CuPy gives, be watched ones."""
    cupyx = sys.modules["cupyx"]

    def pinned(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(function)(lambda *args, **kwargs: arrays(function(*args, **kwargs)))

    for name in _PINNED:
        setattr(cupyx, name, pinned(getattr(cupyx, name)))


def _watch_all(name: str, watched: Callable[..., Any]) -> None:
    module = sys.modules[name]
    for key, function in vars(module).copy().items():
        if isinstance(function, FunctionType) and not key.startswith("_"):
            setattr(module, key, watched(function))


def _watched(checker: "OrderChecker", cupy: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def touch(arrays: list[Any], how: int) -> None:
        stream = cupy.cuda.get_current_stream().ptr
        for array in arrays:
            num = 0 if array.flags.forc else array.ndim
            item = array.itemsize if num else array.nbytes
            values = (ctypes.c_ssize_t * (2 * num))(*array.shape[:num], *array.strides[:num])
            shape = ctypes.addressof(values)
            strides = shape + num * ctypes.sizeof(ctypes.c_ssize_t)
            checker.touch_strided(array.device.id, stream, array.data.ptr, item, num, shape, strides, how)

    is_in_place = getattr(function, "__name__", "") in _IN_PLACE

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = list(_arrays(cupy, (*args, *kwargs.values())))
        touch(given, WRITES if is_in_place else READS)
        result = function(*args, **kwargs)
        memory, names = {id(array.data.mem) for array in given}, {id(array) for array in given}
        touch([one for one in _arrays(cupy, result) if id(one) in names or id(one.data.mem) not in memory], WRITES)
        return result

    return call


def _arrays(cupy: Any, value: Any) -> Iterator[Any]:
    """The arrays of a value: itself, those in a list, and those that a sparse matrix is made of."""
    if isinstance(value, cupy.ndarray):
        if value.size:
            yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _arrays(cupy, one)
    elif hasattr(value, "format") and hasattr(value, "data"):
        for name in _PARTS_OF_SPARSE:
            yield from _arrays(cupy, getattr(value, name, None))
