"""Work that leaves the checker of the order of work without a call of the driver that says what it reads and writes.

Contract: `watch_torch`, `watch_triton` and `watch_cupy` have each of these checked as accesses of the current stream:

- Operations of PyTorch that reach the dispatcher, in any thread: what one is given before it runs, since it may wait
  for its own work, and new results after it. Operations that give a view access nothing. Copies between the host and
  the device are seen where the driver makes them, as are collectives.
- Kernels of Triton: all tensors among the arguments. Which of them one writes is what PyTorch finds in the compiled
  code, as it does for `torch.compile`; where it cannot tell, all are taken to be written.
- Functions of CuPy that may leave work to a library (cuBLAS, cuSOLVER, cuSPARSE, cuFFT, cuRAND, cuTENSOR, CUB, Thrust):
  they read all of the arrays among their arguments and write all of those that they return; what sorts or shuffles in
  place writes what it is given. A result that is a view of an argument is none. CuPy's own kernels are seen where the
  driver launches them.
- NumPy's arrays of pinned memory, whose elements a copy of the GPU may still read or write: what NumPy does with them,
  and with views of them, is an access by the host; what it computes is plain, as are copies and pickles. What takes
  their address (a memoryview, a file's `readinto`) is not seen.
"""

import ctypes
import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np

from stalloc.device.order_checker import IS_NEW, READS, WRITES, OrderChecker
from stalloc.imports import after_import

_NO_ACCESS = {
    *("record_stream", "set_", "resize_", "detach", "detach_", "lift", "lift_fresh", "alias", "_unsafe_view"),
    *("_reshape_alias", "is_pinned", "is_set_to", "_has_same_storage_numel", "sym_size", "sym_stride", "sym_numel"),
}
_EMPTY = ("empty", "new_empty", "_empty")  # how the names of operations begin that give memory and write nothing
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")
_WORD_BYTES = ctypes.sizeof(ctypes.c_ssize_t)

_CUPY_METHODS = (
    *("__matmul__", "__rmatmul__", "dot", "sum", "prod", "max", "min", "argmax", "argmin"),
    *("cumsum", "cumprod", "sort", "argsort", "partition", "argpartition"),
)
_CUPY_FUNCTIONS = (
    *("dot", "vdot", "inner", "outer", "matmul", "tensordot", "einsum", "convolve", "correlate"),
    *("cumsum", "cumprod", "lexsort", "histogram"),
)
_CUPY_MODULES = ("cupy.linalg", "cupy.fft", "cupyx.lapack", "cupyx.cusparse", "cupyx.scipy.fft", "cupyx.scipy.linalg")
_IN_PLACE = ("sort", "partition", "shuffle", "coosort", "cscsort", "csrsort")
_PINNED = ("empty_pinned", "empty_like_pinned", "zeros_pinned", "zeros_like_pinned")
_PARTS_OF_SPARSE = ("data", "indices", "indptr", "row", "col")

_NUMPY_WRITING = ("copyto", "put", "place", "putmask", "fill_diagonal", "put_along_axis")  # their first argument
_NUMPY_METHODS = {
    READS: (
        *("__array__", "__bool__", "__contains__", "__copy__", "__deepcopy__", "__float__", "__format__", "__index__"),
        *("__int__", "__reduce__", "__reduce_ex__", "all", "any", "argmax", "argmin", "argsort", "astype", "copy"),
        *("cumsum", "dump", "dumps", "flatten", "item", "max", "mean", "min", "nonzero", "prod", "repeat", "round"),
        *("searchsorted", "std", "sum", "take", "tobytes", "tofile", "tolist", "trace", "var"),
    ),
    WRITES: ("byteswap", "fill", "partition", "put", "resize", "sort"),
}


def enter_in_every_thread(mode: Callable[[], Any]) -> None:
    """Enter a dispatch mode of PyTorch in this thread, and a new one in each thread that begins later."""

    def begin_in_thread(*_: Any) -> None:
        sys.setprofile(None)
        mode().__enter__()

    mode().__enter__()
    threading.setprofile(begin_in_thread)


def _extent(item_bytes: int, shape: Sequence[int], strides: Iterable[int]) -> tuple[Any, tuple[int, int, int, int]]:
    """Where items lie, as `touch_strided` takes it, and what has to live as long; strides are in bytes."""
    values = (ctypes.c_ssize_t * (2 * len(shape)))(*shape, *strides)
    begin = ctypes.addressof(values)
    return values, (item_bytes, len(shape), begin, begin + len(shape) * _WORD_BYTES)


def _noting(note: Callable[[Any], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that tells its first argument before."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        note(args[0] if args else None)
        return function(*args, **kwargs)

    return call


# Operations of PyTorch


@dataclass(frozen=True)
class _Rule:
    """How an operation accesses its arguments: (position or None, name, whether it is overwritten)."""

    arguments: tuple[tuple[int | None, str, bool], ...]
    result: int  #: how new results are accessed


def _rule_of(operator: Any) -> _Rule | None:
    schema = operator._schema
    namespace, _, name = schema.name.partition("::")
    returns = schema.returns
    is_view = bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    if is_view or name in _NO_ACCESS or namespace in _COLLECTIVES:
        return None
    if name.startswith(_EMPTY):
        return _Rule((), IS_NEW)
    positions, arguments = 0, []
    for one in schema.arguments:
        position = None if one.kwarg_only else positions
        positions += not one.kwarg_only
        if "Tensor" in str(one.type):
            arguments.append((position, one.name, one.alias_info is not None and one.alias_info.is_write))
    return _Rule(tuple(arguments), IS_NEW | WRITES)


def _tensors(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return [one for one in value if one is not None]
    return () if value is None else (value,)


class Accesses:
    """Accesses of tensors that have memory, as pairs of the tensor and how it is accessed."""

    def __init__(self, torch: Any, checker: "OrderChecker") -> None:
        self._torch, self._checker, self._current_stream = torch, checker, torch._C._cuda_getCurrentRawStream

    def on_device(self, tensors: Iterable[tuple[Any, int]]) -> None:
        """By the current stream of each tensor's device."""
        for tensor, how in tensors:
            device = tensor.get_device()
            _values, extent = _extent_of_tensor(tensor)
            self._checker.touch_strided(device, self._current_stream(device), tensor.data_ptr(), *extent, how)

    def by_host(self, tensors: Iterable[tuple[Any, int]]) -> None:
        """By the host, at once."""
        for tensor, how in tensors:
            _values, extent = _extent_of_tensor(tensor)
            self._checker.touch_by_host(tensor.data_ptr(), *extent, how)

    def split(self, tensors: Iterable[tuple[Any, int]]) -> tuple[list[tuple[Any, int]], list[tuple[Any, int]]]:
        """The tensors that have memory of their own, on a device and on the host, each with how it is used."""
        torch = self._torch
        on_device, on_host, has_storage, strided = [], [], torch._C._has_storage, torch.strided
        own = torch._C._disabled_torch_dispatch_impl  # its own memory; what a mode made (FakeTensor) may have none
        for tensor, how in tensors:
            if getattr(type(tensor), "__torch_dispatch__", None) is not own:
                continue
            if tensor.layout is not strided:
                parts = self.split((part, how) for part in _parts(torch, tensor))
                on_device += parts[0]
                on_host += parts[1]
            elif has_storage(tensor) and tensor.numel():
                if tensor.is_cuda:
                    on_device.append((tensor, how))
                elif tensor.is_cpu:
                    on_host.append((tensor, how))
        return on_device, on_host


def _extent_of_tensor(tensor: Any) -> tuple[Any, tuple[int, int, int, int]]:
    if tensor.is_contiguous():
        return None, (tensor.nbytes, 0, 0, 0)
    item = tensor.element_size()
    return _extent(item, tensor.shape, (stride * item for stride in tensor.stride()))


def _given(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, int]]:
    found = []
    for position, name, is_written in rule.arguments:
        value = args[position] if position is not None and position < len(args) else kwargs.get(name)
        found += [(tensor, WRITES if is_written else READS) for tensor in _tensors(value)]
    return found


def _parts(torch: Any, tensor: Any) -> tuple[Any, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def watch_torch(checker: "OrderChecker") -> None:
    """Watch PyTorch, which has been imported: this thread's operations and those of all threads that begin later."""
    torch: Any = sys.modules["torch"]
    accesses = Accesses(torch, checker)
    _watch_operations(torch, checker, accesses)

    def note_backward(_: Any) -> None:  # its threads run no line of the program: they stand for the one that began it
        checker.places.caller = checker.places.here()

    for name in ("backward", "grad"):
        setattr(torch.autograd, name, _noting(note_backward, getattr(torch.autograd, name)))

    # what the host reads without an operation
    reading = functools.partial(_noting, lambda tensor: accesses.by_host(accesses.split([(tensor, READS)])[1]))
    for name in ("tolist", "__array__", "__reduce_ex__"):  # the last to be saved
        setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))
    numpy, arrays = reading(torch.Tensor.numpy), _watch_arrays(checker)

    @functools.wraps(numpy)
    def watched(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        array = numpy(tensor, *args, **kwargs)
        return arrays(array) if tensor.is_pinned() else array

    torch.Tensor.numpy = watched
    after_import("triton", functools.partial(watch_triton, accesses))


def _watch_operations(torch: Any, checker: "OrderChecker", accesses: Accesses) -> None:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    places, at = checker.places, checker.at
    untouched = torch._C._disabled_torch_dispatch_impl
    rules: dict[int, _Rule | None] = {}

    class Watch(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # nothing is compiled, and two calls of Python around each operation would be dear

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if any(one.__torch_dispatch__ is not untouched for one in types):
                if any(issubclass(one, FakeTensor) for one in types):
                    return func(*args, **kwargs)  # it has no memory, and its mode has its turn only after this one
                return NotImplemented  # the operations that a subclass makes of it come this way again
            name = id(func)  # operators stay, and their own hash is slow
            if name not in rules:
                rules[name] = _rule_of(func)
            rule = rules[name]
            if rule is None:
                return func(*args, **kwargs)
            at(places.here())
            try:
                on_device, on_host = accesses.split(_given(rule, args, kwargs))
                accesses.on_device(on_device)
                checker.makes_all_it_writes(not on_device and rule.result & IS_NEW)
                result = func(*args, **kwargs)
                known = {tensor.data_ptr() for tensor, _ in on_device + on_host}
                made, made_on_host = (
                    [(one, how) for one, how in some if one.data_ptr() not in known]
                    for some in accesses.split((one, rule.result) for one in _tensors(result))
                )
                if on_device or rule.result == IS_NEW or not on_host:  # else the driver copies it there
                    accesses.on_device(made)
                if not on_device and not made:
                    accesses.by_host(on_host + [(one, how & WRITES) for one, how in made_on_host if how & WRITES])
                return result
            finally:
                checker.makes_all_it_writes(False)
                at(0)

    enter_in_every_thread(Watch)


# Kernels of Triton


def watch_triton(accesses: Accesses) -> None:
    function = sys.modules["triton.runtime.jit"].JITFunction
    launch = function.run
    written_by: dict[int, set[str]] = {}  # by the compiled kernel, which stays

    @functools.wraps(launch)
    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = launch(kernel, *args, **kwargs)
        if kwargs.get("warmup") or compiled is None:
            return compiled
        names = kernel.signature.parameters
        given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        tensors = {name: tensor for name, one in given.items() if (tensor := _argument_tensor(one)) is not None}
        if not tensors:
            return compiled
        if id(compiled) not in written_by:
            written_by[id(compiled)] = _written(kernel, given, tensors)
        for how in (READS, WRITES):
            written = written_by[id(compiled)]
            accesses.on_device([(one, how) for name, one in tensors.items() if how == (name in written)])
        return compiled

    function.run = run


def _argument_tensor(argument: Any) -> Any:
    """The tensor of the device that an argument is, or that it describes (a TensorDescriptor, a reinterpreted one)."""
    for one in (argument, getattr(argument, "base", None)):
        if one is not None and getattr(one, "is_cuda", False) and one.numel():
            return one
    return None


def _written(kernel: Any, given: dict[str, Any], tensors: dict[str, Any]) -> set[str]:
    try:
        from torch._higher_order_ops.triton_kernel_wrap import identify_mutated_tensors
    except ImportError:  # before torch 2.3
        return set(tensors)
    takes_descriptors = len(inspect.signature(identify_mutated_tensors).parameters) > 2
    defaults = {name: one.default for name, one in kernel.signature.parameters.items() if name not in given}
    log = logging.getLogger(identify_mutated_tensors.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)  # where it cannot tell it warns, with a traceback
    try:
        return set(identify_mutated_tensors(kernel, given | defaults, *([{}] if takes_descriptors else [])))
    finally:
        log.setLevel(level)


# Functions of CuPy


def watch_cupy(checker: "OrderChecker") -> None:
    cupy = sys.modules["cupy"]
    watched = functools.partial(_watched_by_cupy, checker, cupy)
    arrays = _watch_arrays(checker)

    def watch_module(name: str) -> None:
        module = sys.modules[name]
        for key, function in vars(module).copy().items():
            if isinstance(function, FunctionType) and not key.startswith("_"):
                setattr(module, key, watched(function))

    def watch_pinned() -> None:
        for name in _PINNED:
            setattr(sys.modules["cupyx"], name, pinned(getattr(sys.modules["cupyx"], name)))

    def pinned(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(function)(lambda *args, **kwargs: arrays(function(*args, **kwargs)))

    for owner, names in ((cupy.ndarray, _CUPY_METHODS), (cupy, _CUPY_FUNCTIONS)):
        for name in names:
            setattr(owner, name, watched(getattr(owner, name)))
    for name in _CUPY_MODULES:
        after_import(name, functools.partial(watch_module, name))
    for generator in (cupy.random.RandomState, cupy.random.Generator):
        for name, method in vars(generator).copy().items():
            if callable(method) and not name.startswith("_"):
                setattr(generator, name, watched(method))
    after_import("cupyx", watch_pinned)


def _watched_by_cupy(checker: "OrderChecker", cupy: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def touch(arrays: list[Any], how: int) -> None:
        stream = cupy.cuda.get_current_stream().ptr
        for array in arrays:
            whole = array.flags.forc
            item, shape, strides = (array.nbytes, (), ()) if whole else (array.itemsize, array.shape, array.strides)
            _values, extent = _extent(item, shape, strides)
            checker.touch_strided(array.device.id, stream, array.data.ptr, *extent, how)

    is_in_place = getattr(function, "__name__", "") in _IN_PLACE

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = list(_cupy_arrays(cupy, (*args, *kwargs.values())))
        touch(given, WRITES if is_in_place else READS)
        result = function(*args, **kwargs)
        memory, names = {id(array.data.mem) for array in given}, {id(array) for array in given}
        made = [one for one in _cupy_arrays(cupy, result) if id(one) in names or id(one.data.mem) not in memory]
        touch(made, WRITES)
        return result

    return call


def _cupy_arrays(cupy: Any, value: Any) -> Iterator[Any]:
    """The arrays of a value: itself, those in a list, and those that a sparse matrix is made of."""
    if isinstance(value, cupy.ndarray):
        if value.size:
            yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _cupy_arrays(cupy, one)
    elif hasattr(value, "format") and hasattr(value, "data"):
        for name in _PARTS_OF_SPARSE:
            yield from _cupy_arrays(cupy, getattr(value, name, None))


# NumPy's arrays of pinned memory


class _WatchedArray(np.ndarray):
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
        _touch((args[:1] if function.__name__ in _NUMPY_WRITING else (), kwargs.get("out")), WRITES)
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
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _watched(one)


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


def _watched_method(name: str, how: int) -> Any:
    function = getattr(np.ndarray, name)

    @functools.wraps(function)
    def method(array: _WatchedArray, *args: Any, **kwargs: Any) -> Any:
        _WatchedArray.touch(array, how)
        return function(_plain(array), *_plain(args), **_plain(kwargs))

    return method


def _watch_arrays(checker: "OrderChecker") -> Callable[[np.ndarray], np.ndarray]:
    """A function that gives the watched array of a plain one, in the same memory."""

    def touch(array: np.ndarray, how: int) -> None:
        whole = array.flags.forc
        item, shape, strides = (array.nbytes, (), ()) if whole else (array.itemsize, array.shape, array.strides)
        _values, extent = _extent(item, shape, strides)
        checker.touch_by_host(array.__array_interface__["data"][0], *extent, how)

    _WatchedArray.touch = staticmethod(touch)
    for how, names in _NUMPY_METHODS.items():
        for name in names:
            setattr(_WatchedArray, name, _watched_method(name, how))
    return lambda array: array.view(_WatchedArray)
