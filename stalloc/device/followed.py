"""Functions of torch that give small integers and booleans their true values on the virtual GPU.

Contract: after `follow_values(torch, library)` every function named below runs on the virtual GPU as before, with the
same requests and frees in the same order; where its result is a small tensor of integers or booleans, it also runs on
the host, and `Values` keeps what comes out. Reads (`item`, `tolist`, `bool`, `cpu`, sizes that depend on data) then
give that.

Functions are replaced in `torch` and `torch.Tensor`, not in the dispatcher: other arguments cost one look at their
type, and nothing changes which operators a program calls.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from stalloc.device.values import MAX_ELEMENTS, Values

_NOTHING = object()  # no argument
_UNARY = ("__invert__", "__neg__")
_FUNCTIONS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "isin"),
    *("logical_and", "logical_or", "logical_xor", "logical_not"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
    *("add", "sub", "mul", "div", "floor_divide", "remainder", "neg", "abs", "clamp", "minimum", "maximum", "pow"),
    *("all", "any", "sum", "prod", "max", "min", "amax", "amin", "argmax", "argmin", "count_nonzero"),
    *("cumsum", "cumprod", "diff", "bincount", "searchsorted", "sort", "argsort", "topk"),
    *("cat", "concat", "stack", "clone", "flip", "roll", "where", "index_select", "gather", "take", "tril", "triu"),
    *("masked_fill", "masked_select", "nonzero", "unique", "unique_consecutive", "repeat_interleave"),
)  # of `torch`, and methods of a tensor where there is one
_METHODS = (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__and__", "__or__", "__xor__", "__invert__", "__iand__", "__ior__", "__rand__", "__ror__"),
    *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__"),
    *("__floordiv__", "__mod__", "__neg__", "__getitem__", "__setitem__"),
    *("add_", "sub_", "mul_", "bitwise_and_", "bitwise_or_", "logical_and_", "logical_or_", "clamp_"),
    *("fill_", "zero_", "masked_fill_", "index_fill_", "scatter", "scatter_", "scatter_add_", "index_put_"),
    *("contiguous", "repeat", "long", "int", "bool", "short", "type"),
)
_MAKERS = ("tensor", "as_tensor", "arange", "full", "ones", "zeros", "eye", "full_like", "ones_like", "zeros_like")
_NEW = ("new_ones", "new_zeros", "new_full", "new_tensor")
_LARGEST = ("one_hot", "bincount")
_COUNTED = ("unique", "unique_consecutive", "repeat_interleave", *_LARGEST)
"""Functions that read how long their result is; some, the largest number."""


def _followed(values: Values, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    kinds, counted = values.kinds, name in _COUNTED

    # Arguments have names, since Python lets go of them in this order, as it does without this function between; a
    # tuple lets go of its last one first, and the program would free its temporary tensors in another order.
    @functools.wraps(function)
    def follow(a: Any = _NOTHING, b: Any = _NOTHING, c: Any = _NOTHING, *more: Any, **named: Any) -> Any:
        kind = getattr(a[0] if type(a) in (list, tuple) and a else a, "dtype", None)
        if kind not in kinds:
            if c is not _NOTHING:  # most tensors are data, and pass on
                return function(a, b, c, *more, **named)
            if b is not _NOTHING:
                return function(a, b, **named)
            return function(a, **named) if a is not _NOTHING else function(**named)
        args = tuple(one for one in (a, b, c, *more) if one is not _NOTHING)
        try:
            return run(args, named)
        finally:
            del args

    # most calls are of these, and of data: they are spared what others need
    @functools.wraps(function)
    def follow_operator(a: Any, b: Any) -> Any:
        return function(a, b) if a.dtype not in kinds else follow(a, b)

    @functools.wraps(function)
    def follow_unary(a: Any) -> Any:
        return function(a) if a.dtype not in kinds else follow(a)

    def run(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not values.is_followed(args[0][0] if isinstance(args[0], (list, tuple)) else args[0]):
            return function(*args, **named)
        computed = values.compute(function, args, named)
        if not counted or computed is None:
            result = function(*args, **named)
        else:
            values.expect(_length(computed[0]) if name not in _LARGEST else computed[0].shape[-1] - 1)
            try:
                result = function(*args, **named)
            finally:
                values.expect_nothing()
        values.learn(result, computed)
        return result

    if name in _UNARY:
        return follow_unary
    return follow_operator if name.startswith("__") else follow


def _length(computed: Any) -> int:
    one = computed[0] if isinstance(computed, (list, tuple)) else computed
    return one.shape[0] if one is not None and one.dim() else 0


def _made(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if values.is_followed(result) and result.numel() <= MAX_ELEMENTS:
            values.learn(result, values.compute(function, args, kwargs, makes=True))
        return result

    return make


def _setter(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def change(self: Any, index: Any, value: Any) -> None:
        if values.is_followed(self):
            computed = values.compute(function, (self, index, value), {})
            function(self, index, value)
            values.learn(self, None if computed is None else (self, computed[1]))
        else:
            function(self, index, value)

    return change


def _reader(values: Values, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    decides = name in ("__bool__", "__int__", "__index__", "is_nonzero")

    @functools.wraps(function)
    def read(self: Any) -> Any:
        if not self.is_cuda or (self.dtype not in values.kinds and not decides):
            return function(self)
        result = function(self)  # its requests, its waiting, and its errors
        host = values.read(self)
        if host is None:
            return result
        with values.unseen():
            return function(host)

    return read


def _mover(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    """`to` and its kin: a copy to the host is a read, a copy on the GPU has the same elements."""

    same, kinds = _original_to(values), values.kinds

    @functools.wraps(function)
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs) if kwargs else function(self, *args)
        if result is self or self.dtype not in kinds or type(result) not in values.plain:
            return result
        if result.is_cuda and result.dtype in values.kinds and result.numel() <= MAX_ELEMENTS:
            values.learn(result, values.compute(same, (self, result.dtype), {}))
        elif self.is_cuda and not result.is_cuda:
            host = values.read(self)
            if host is not None:
                result.copy_(host)
        return result

    return move


def _original_to(values: Values) -> Callable[..., Any]:
    return values.torch._C.TensorBase.to if hasattr(values.torch._C, "TensorBase") else values.torch._C._TensorBase.to


def _copier(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def copy(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, source, *args, **kwargs)
        if values.is_followed(self):
            computed = values.compute(function, (self, source), {})
            values.learn(self, None if computed is None else (self, computed[1]))
        elif not self.is_cuda and values.is_followed(source):
            host = values.read(source)
            if host is not None:
                function(self, host)
        return result

    return copy


def _reader_of_lengths(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    """`ctc_loss`, which copies its lengths to the host before it begins."""

    @functools.wraps(function)
    def lose(log_probs: Any, targets: Any, *args: Any, **kwargs: Any) -> Any:
        if targets.dtype == values.torch.int64:  # with others it may be cuDNN's, which does not
            args = tuple(_on_host(values, one) for one in args)
            kwargs = {name: _on_host(values, one) for name, one in kwargs.items()}
        return function(log_probs, targets, *args, **kwargs)

    return lose


def _on_host(values: Values, value: Any) -> Any:
    """A tensor of numbers as PyTorch would copy it to the host without a request, where it is known."""
    if not values.is_followed(value) or value.dtype != values.torch.int64:
        return value
    host = values.read(value)
    return value if host is None else host


def _sampler(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    """`multinomial`, which before torch 2.3 reads whether its probabilities are in order."""

    @functools.wraps(function)
    def sample(*args: Any, **kwargs: Any) -> Any:
        values.expect(0)
        try:
            return function(*args, **kwargs)
        finally:
            values.expect_nothing()

    return sample


def _count_nonzero_on_read(values: Values, torch: Any) -> None:
    """`nonzero`, which indexing by masks calls inside, forward and backward, reads the true count."""
    operator = torch.ops.aten.nonzero.default
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def original(tensor: Any) -> Any:
        if hasattr(operator, "redispatch"):
            return operator.redispatch(torch._C._dispatch_keys(tensor) & below, tensor)
        key = torch._C.DispatchKey.CUDA if tensor.is_cuda else torch._C.DispatchKey.CPU  # before torch 2.2
        return operator._op_dk(key, tensor)

    def nonzero(tensor: Any) -> Any:
        if not values.is_followed(tensor):
            return original(tensor)
        computed = values.compute(operator, (tensor,), {})
        if computed is not None:
            values.expect(computed[0].shape[0])
        try:
            result = original(tensor)
        finally:
            values.expect_nothing()
        values.learn(result, computed)
        return result

    library = torch.library.Library("aten", "IMPL")
    library.impl("nonzero", nonzero, "BackendSelect")
    values.library_of_operators = library  # type: ignore[attr-defined]


def follow_values(torch: Any, library: ctypes.CDLL) -> Values:
    """Replace the functions named above in `torch`; once, at the end of its import."""
    from torch.jit._builtins import _get_builtin_table
    from torch.utils._device import _device_constructors

    _device_constructors()  # keeps the functions that a default device is for, as the dispatcher names them
    scripted = _get_builtin_table()  # by which torch.jit.script knows torch's own functions
    values = Values(torch, library)
    tensor = torch.Tensor

    def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        function = getattr(owner, name, None)
        if function is not None:
            made = make(function)
            made.__module__ = torch.__name__ if owner is tensor else owner.__name__  # by these it is pickled
            made.__qualname__ = f"Tensor.{name}" if owner is tensor else name
            setattr(owner, name, made)
            if id(function) in scripted:
                scripted[id(made)] = scripted[id(function)]

    for name in _FUNCTIONS:
        for owner in (torch, tensor):
            replace(owner, name, functools.partial(_followed, values, name))
    replace(torch.nn.functional, "one_hot", functools.partial(_followed, values, "one_hot"))
    for name in _METHODS:
        if name == "__setitem__":
            replace(tensor, name, functools.partial(_setter, values))
        elif name != "type":
            replace(tensor, name, functools.partial(_followed, values, name))
    for name in _MAKERS:
        replace(torch, name, functools.partial(_made, values))
    for name in _NEW:
        replace(tensor, name, functools.partial(_made, values))
    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "is_nonzero"):
        replace(tensor, name, functools.partial(_reader, values, name))
    for name in ("to", "cuda", "cpu", "type", "type_as"):
        replace(tensor, name, functools.partial(_mover, values))
    replace(tensor, "copy_", functools.partial(_copier, values))
    replace(torch, "ctc_loss", functools.partial(_reader_of_lengths, values))
    for owner in (torch, tensor):
        replace(owner, "multinomial", functools.partial(_sampler, values))
    _count_nonzero_on_read(values, torch)
    return values


def leave_uncompiled(dynamo: Any) -> None:
    """Keep torch.compile out of these functions: a compiled program calls them as it calls PyTorch's own."""
    rules: Any = getattr(dynamo, "trace_rules", None)
    if not hasattr(rules, "add"):
        rules = dynamo.skipfiles  # before torch 2.3
    for module in (__name__, Values.__module__):
        rules.add(module)
