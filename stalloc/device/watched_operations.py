"""Operations of PyTorch as the checker of the order of work sees them: what each reads and writes, on which stream.

Contract: after `watch_operations(torch, checker)` each operation that reaches the dispatcher, in any thread, has its
arguments and results checked as accesses of the current stream: what it is given before it runs, since it may wait for
its own work, and new results after it. Operations that give a view access nothing. Copies between the host and the
device are seen where the driver makes them, as are collectives.
"""

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stalloc.device.every_thread import enter_in_every_thread

if TYPE_CHECKING:
    from stalloc.device.order_checker import OrderChecker

_READS, _WRITES, _IS_NEW = 0, 1, 2
_NO_ACCESS = {
    *("record_stream", "set_", "resize_", "detach", "detach_", "lift", "lift_fresh", "alias", "_unsafe_view"),
    *("_reshape_alias", "is_pinned", "is_set_to", "_has_same_storage_numel", "sym_size", "sym_stride", "sym_numel"),
}
_EMPTY = ("empty", "new_empty", "_empty")  # how the names of operations begin that give memory and write nothing
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")
_WORD_BYTES = ctypes.sizeof(ctypes.c_ssize_t)


@dataclass(frozen=True)
class _Rule:
    """How an operation accesses its arguments: (position or None, name, whether it is overwritten)."""

    arguments: tuple[tuple[int | None, str, bool], ...]
    result: int
    """How new results are accessed."""


def _rule_of(operator: Any) -> _Rule | None:
    schema = operator._schema
    namespace, _, name = schema.name.partition("::")
    returns = schema.returns
    is_view = bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    if is_view or name in _NO_ACCESS or namespace in _COLLECTIVES:
        return None
    positions, arguments = 0, []
    for one in schema.arguments:
        position = None if one.kwarg_only else positions
        positions += not one.kwarg_only
        if "Tensor" in str(one.type):
            arguments.append((position, one.name, one.alias_info is not None and one.alias_info.is_write))
    is_empty = name.startswith(_EMPTY)
    return _Rule(tuple(arguments) if not is_empty else (), _IS_NEW if is_empty else _IS_NEW | _WRITES)


def _tensors(value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return [one for one in value if one is not None]
    return (value,)


class _Accesses:
    """The accesses of one operation in one thread."""

    def __init__(self, checker: "OrderChecker", current_stream: Callable[[int], int], strided: Any) -> None:
        self._checker, self._current_stream, self._strided = checker, current_stream, strided

    def on_device(self, tensors: Iterable[tuple[Any, int]]) -> None:
        for tensor, how in tensors:
            if tensor.layout is self._strided and tensor.numel():
                if tensor.is_contiguous():
                    device = tensor.get_device()
                    self._checker.touch(device, self._current_stream(device), tensor.data_ptr(), tensor.nbytes, how)
                else:
                    self._touch_strided(tensor, how)

    def _touch_strided(self, tensor: Any, how: int) -> None:
        device, address = tensor.get_device(), tensor.data_ptr()
        stream = self._current_stream(device)
        item, num = tensor.element_size(), tensor.dim()
        shape, strides = tensor.shape, [stride * item for stride in tensor.stride()]
        values = (ctypes.c_ssize_t * (2 * num))(*shape, *strides)
        begin = ctypes.addressof(values)
        self._checker.touch_strided(device, stream, address, item, num, begin, begin + num * _WORD_BYTES, how)

    def by_host(self, tensors: Iterable[tuple[Any, int]]) -> None:
        for tensor, how in tensors:
            if tensor.layout is self._strided and tensor.numel() and tensor.is_contiguous():
                self._checker.touch_by_host(tensor.data_ptr(), tensor.nbytes, how)


def _given(rule: _Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, int]]:
    found = []
    for position, name, is_written in rule.arguments:
        value = args[position] if position is not None and position < len(args) else kwargs.get(name)
        found += [(tensor, _WRITES if is_written else _READS) for tensor in _tensors(value)]
    return found


def _split(torch: Any, tensors: Iterable[tuple[Any, int]]) -> tuple[list[tuple[Any, int]], list[tuple[Any, int]]]:
    """The tensors that have memory of their own, on a device and on the host, each with how it is used."""
    on_device, on_host, has_storage = [], [], torch._C._has_storage
    own = torch._C._disabled_torch_dispatch_impl  # a tensor's own memory; what a mode made (FakeTensor) may have none
    for tensor, how in tensors:
        if getattr(type(tensor), "__torch_dispatch__", None) is own and has_storage(tensor):
            if tensor.is_cuda:
                on_device.append((tensor, how))
            elif tensor.is_cpu:
                on_host.append((tensor, how))
    return on_device, on_host


def watch_operations(torch: Any, checker: "OrderChecker") -> None:
    """Watch this thread's operations and those of all threads that begin later."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    accesses = _Accesses(checker, torch._C._cuda_getCurrentRawStream, torch.strided)
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
                on_device, on_host = _split(torch, _given(rule, args, kwargs))
                accesses.on_device(on_device)
                checker.makes_all_it_writes(not on_device and rule.result & _IS_NEW)
                result = func(*args, **kwargs)
                known = {tensor.data_ptr() for tensor, _ in on_device + on_host}
                made, made_on_host = (
                    [(one, how) for one, how in some if one.data_ptr() not in known]
                    for some in _split(torch, [(one, rule.result) for one in _tensors(result)])
                )
                if on_device or rule.result == _IS_NEW or not on_host:  # else the driver copies it there
                    accesses.on_device(made)
                if not on_device and not made:
                    accesses.by_host(on_host + [(one, how & _WRITES) for one, how in made_on_host if how & _WRITES])
                return result
            finally:
                checker.makes_all_it_writes(False)
                at(0)

    enter_in_every_thread(Watch)
    _note_backward(torch, checker)
    _watch_host_reads(torch, accesses)


def _note_backward(torch: Any, checker: "OrderChecker") -> None:
    """The threads of a backward pass run no line of the program: they stand for the one that began it."""

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            checker.places.caller = checker.places.here()
            return function(*args, **kwargs)

        return run

    for name in ("backward", "grad"):
        setattr(torch.autograd, name, noting(getattr(torch.autograd, name)))


def _watch_host_reads(torch: Any, accesses: _Accesses) -> None:
    """What the host reads of a tensor without an operation of PyTorch."""

    def reading(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu":
                accesses.by_host([(tensor, _READS)])
            return function(tensor, *args, **kwargs)

        return read

    for name in ("numpy", "tolist", "__array__"):
        setattr(torch.Tensor, name, reading(getattr(torch.Tensor, name)))
