"""Functions of torch that give small integers and booleans their true values on the virtual GPU.

Contract: after `follow_values(torch, library)` every function named below runs on the virtual GPU as before, with the
same requests and frees in the same order; where its result is a small tensor of integers or booleans, it also runs on
the host, and `Values` keeps what comes out. Reads (`value_reads`) then give that. So it is for few floating-point
numbers that are made of known ones; others count as zero, and what a comparison makes of them is doubtful.

Functions are replaced in `torch` and `torch.Tensor`, not in the dispatcher: other arguments cost one look at their
type, and nothing changes which operators a program calls.
"""

import ctypes
import functools
import inspect
from collections.abc import Callable
from typing import Any

from stalloc.device.drawn import chooser, drawer
from stalloc.device.value_reads import (
    checker,
    coalescer,
    copier,
    count_nonzero_on_read,
    judge,
    mover,
    reader,
    reader_of_lengths,
    scale_updater,
    storage_copier,
)
from stalloc.device.values import MAX_ELEMENTS, Values

_NOTHING = object()  # no argument
_CONVERSIONS = ("long", "int", "bool", "short", "float", "double", "half", "bfloat16")
_UNARY = ("__invert__", "__neg__", "__abs__", *_CONVERSIONS)
_FUNCTIONS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "isin"),
    *("logical_and", "logical_or", "logical_xor", "logical_not"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
    *("add", "sub", "mul", "div", "floor_divide", "remainder", "neg", "abs", "clamp", "minimum", "maximum", "pow"),
    *("all", "any", "_is_all_true", "_is_any_true", "sum", "prod", "max", "min", "amax", "amin", "argmax", "argmin"),
    *("count_nonzero", "cumsum", "cumprod", "cummax", "cummin", "diff", "bincount", "searchsorted", "bucketize"),
    *("sort", "argsort", "topk", "sign", "fmod", "bitwise_left_shift", "bitwise_right_shift", "outer"),
    *("cat", "concat", "stack", "hstack", "vstack", "tile", "clone", "flip", "roll", "where", "index_select", "gather"),
    *("take", "take_along_dim", "tril", "triu", "diag", "index_add", "index_copy", "scatter_add", "scatter_reduce"),
    *("masked_fill", "masked_scatter", "masked_select", "nonzero", "unique", "unique_consecutive", "repeat_interleave"),
    *("isfinite", "isnan", "isinf", "isposinf", "isneginf", "isclose"),
    *("floor", "ceil", "round", "trunc"),
)  # of `torch`, and methods of a tensor where there is one
_JUDGING = {
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not"),
    *("isfinite", "isnan", "isinf", "isposinf", "isneginf", "isclose"),
}  # of floating-point numbers too, that make booleans
_METHODS = (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__and__", "__or__", "__xor__", "__invert__", "__iand__", "__ior__", "__rand__", "__ror__"),
    *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__"),
    *("__xor__", "__rxor__", "__ixor__", "__lshift__", "__rshift__", "__pow__", "__abs__"),
    *("__floordiv__", "__rfloordiv__", "__ifloordiv__", "__mod__", "__neg__", "__getitem__"),
    *("__truediv__", "__rtruediv__", "__rdiv__", "__itruediv__"),
    *("add_", "sub_", "mul_", "div_", "bitwise_and_", "bitwise_or_", "logical_and_", "logical_or_", "clamp_"),
    *("fill_", "zero_", "masked_fill_", "index_fill_", "scatter", "scatter_", "scatter_add_", "index_put_"),
    *("index_add_", "index_copy_", "scatter_reduce_", "masked_scatter_", "contiguous", "repeat"),
    *_CONVERSIONS,
)
_OVERWRITING = ("fill_", "zero_")
_CHANGING_EACH = ("_foreach_add_", "_foreach_mul_")
"""Functions of `torch` with which optimizers count steps on the GPU, if their state was loaded there from a file."""
_MAKERS = (
    *("tensor", "as_tensor", "arange", "full", "ones", "zeros", "eye", "full_like", "ones_like", "zeros_like"),
    *("tril_indices", "triu_indices", "linspace"),
)
_DRAWN = ("rand", "rand_like", "randint", "randint_like", "randperm")
_NEW = ("new_ones", "new_zeros", "new_full", "new_tensor")
_FIRST = ("input", "tensors", "condition")
"""Names under which the first argument of a function may be given."""
_LARGEST = ("one_hot", "bincount")
_ALONG = {"unique": 4, "unique_consecutive": 3}
"""Functions whose result may be cut along one dimension, and which argument that is."""
_COUNTED = (*_ALONG, "repeat_interleave", *_LARGEST)
"""Functions that read how long their result is; some, the largest number."""


def _followed(values: Values, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    kinds, judges, most = values.kinds, name.strip("_") in _JUDGING, MAX_ELEMENTS
    passes, run = not judges, _runner(values, name, function)

    # Arguments have names, since Python lets go of them in this order, as it does without this function between; a
    # tuple lets go of its last one first, and the program would free its temporary tensors in another order.
    @functools.wraps(function)
    def follow(a: Any = _NOTHING, b: Any = _NOTHING, c: Any = _NOTHING, *more: Any, **named: Any) -> Any:
        if a is _NOTHING:  # its name is how the program gives it
            return run(tuple(named.pop(key) for key in _FIRST if key in named), named)
        first = a[0] if type(a) in (list, tuple) and a else a
        is_data = passes and (
            getattr(first, "requires_grad", False)
            or not (
                getattr(first, "dtype", None) in kinds
                or (values.keeps_numbers and (values.keeps(first) or values.keeps(b)))
            )
        )
        del first  # or it would outlive the others
        if is_data:
            if c is not _NOTHING:  # most tensors are data, and pass on
                return function(a, b, c, *more, **named)
            if b is not _NOTHING:
                return function(a, b, **named)
            return function(a, **named)
        args = tuple(one for one in (a, b, c, *more) if one is not _NOTHING)
        try:
            return run(args, named)
        finally:
            del args

    # most calls are of these, and of data, the quickest sign of which is a gradient: they are spared what others need
    @functools.wraps(function)
    def follow_operator(a: Any, b: Any) -> Any:
        if a.requires_grad or a.numel() > most or not (a.dtype in kinds or values.keeps(a) or values.keeps(b)):
            return function(a, b)
        return follow(a, b)

    @functools.wraps(function)
    def follow_judgement(a: Any, b: Any) -> Any:
        return function(a, b) if a.numel() > most else follow(a, b)

    @functools.wraps(function)
    def follow_unary(a: Any, **named: Any) -> Any:
        # the size last, which a buffer of a lazy module does not have
        if a.requires_grad or not (a.dtype in kinds or values.keeps(a)) or a.numel() > most:
            return function(a, **named) if named else function(a)
        return follow(a, **named)

    if name in _UNARY:
        return follow_unary
    if name.startswith("__"):
        return follow_judgement if judges else follow_operator
    return follow


def _runner(values: Values, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What calls the function and computes its result on the host too, where the first argument is one to follow."""
    counted, judges, overwrites = name in _COUNTED, name.strip("_") in _JUDGING, name in _OVERWRITING

    def run(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        first = (args[0][0] if isinstance(args[0], (list, tuple)) else args[0]) if args else None
        if not getattr(first, "is_cuda", False):
            return function(*args, **named)
        if not values.is_followed(first) and not (values.is_small(first) if judges else values.is_of_kept(args)):
            return function(*args, **named)
        if overwrites or (name == "scatter_" and _is_permuted(values, first, args)):
            values.overwrite(first)
        computed = values.compute(function, args, named)
        if not counted:
            result = function(*args, **named)
        else:
            if name not in _LARGEST or len(args) + len(named) == 1:
                values.decide(first, computed)
            with values.expecting(0 if computed is None else _count(name, computed[0], args, named)):
                result = function(*args, **named)
        values.learn(result, computed)
        return result

    return run


def _is_permuted(values: Values, tensor: Any, args: tuple[Any, ...]) -> bool:
    """Whether `tensor.scatter_(0, order, source)` writes each element once, as it does to turn an order round."""
    if len(args) < 3 or tensor.dim() != 1 or not values.is_followed(args[2]) or args[2].shape != tensor.shape:
        return False
    order = values.known(args[2])
    return order is not None and order.certain and len(set(values.host(args[2], order).tolist())) == len(tensor)


def _count(name: str, computed: Any, args: tuple[Any, ...], named: dict[str, Any]) -> int:
    """The number that a function reads from the GPU to know how large its result is."""
    one = computed[0] if isinstance(computed, (list, tuple)) else computed
    if name in _LARGEST:
        return one.shape[-1] - 1
    along = named.get("dim", args[_ALONG[name]] if name in _ALONG and len(args) > _ALONG[name] else None)
    return one.shape[along or 0]


def _made(values: Values, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    fills = name.startswith(("ones", "zeros"))  # with floating-point numbers these are sums and states to be

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # pytest shows the program's line
        result = function(*args, **kwargs)
        if values.can_keep(result) and (result.dtype in values.kinds or not fills):
            values.learn(result, values.compute(function, args, kwargs, makes=True))
        return result

    return make


def _changing_each(values: Values, function: Callable[..., Any]) -> Callable[..., Any]:
    def change(tensors: Any, *more: Any, **named: Any) -> Any:
        function(tensors, *more, **named)
        return tensors

    @functools.wraps(function)
    def follow(tensors: Any, *more: Any, **named: Any) -> Any:
        if not values.keeps(tensors):
            return function(tensors, *more, **named)
        computed = values.compute(change, (tensors, *more), named)
        result = function(tensors, *more, **named)
        values.learn(tensors, computed)
        return result

    return follow


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


def follow_values(torch: Any, library: ctypes.CDLL) -> Values:
    """Replace the functions named above in `torch`; once, at the end of its import."""
    from torch.jit._builtins import _get_builtin_table
    from torch.utils._device import _device_constructors

    _device_constructors()  # keeps the functions that a default device is for, as the dispatcher names them
    scripted = _get_builtin_table()  # by which torch.jit.script knows torch's own functions
    lazy: list[Any] = torch.nn.parameter.UninitializedTensorMixin._allowed_methods  # of parameters without a shape yet
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
            if function in lazy:
                lazy.append(made)

    for name in _FUNCTIONS:
        for owner in (torch, tensor):
            replace(owner, name, functools.partial(_followed, values, name))
    for name in ("one_hot", "pad"):
        for owner in (torch.nn.functional, torch._C._nn):
            if not inspect.isfunction(getattr(owner, name, None)):  # a function of Python calls the other
                replace(owner, name, functools.partial(_followed, values, name))
    for name in _METHODS:
        replace(tensor, name, functools.partial(_followed, values, name))
    for name in _CHANGING_EACH:
        replace(torch, name, functools.partial(_changing_each, values))
    replace(tensor, "__setitem__", functools.partial(_setter, values))
    for name in _DRAWN:
        replace(torch, name, functools.partial(drawer, values))
    for owner, names in ((torch, _MAKERS), (tensor, _NEW)):
        for name in names:
            replace(owner, name, functools.partial(_made, values, name))
    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "__complex__", "is_nonzero"):
        replace(tensor, name, functools.partial(reader, values, name))
    for name in ("equal", "allclose"):
        for owner in (torch, tensor):
            replace(owner, name, functools.partial(judge, values))
    for name in ("to", "cuda", "cpu", "type", "type_as", "__deepcopy__"):
        replace(tensor, name, functools.partial(mover, values))
    replace(tensor, "coalesce", functools.partial(coalescer, values))
    replace(tensor, "copy_", functools.partial(copier, values))
    replace(torch.UntypedStorage, "copy_", functools.partial(storage_copier, values))
    replace(torch, "ctc_loss", functools.partial(reader_of_lengths, values))
    replace(torch, "segment_reduce", functools.partial(checker, values, 1))
    replace(torch, "_amp_update_scale_", functools.partial(scale_updater, values))
    for owner in (torch, tensor):
        replace(owner, "multinomial", functools.partial(checker, values, 0))
        for name in ("argmax", "max", "multinomial", "topk"):
            replace(owner, name, functools.partial(chooser, values))
    count_nonzero_on_read(values, torch)
    return values


def leave_uncompiled(dynamo: Any) -> None:
    """Keep torch.compile out of what is called in the place of PyTorch's own functions, and around its operations."""
    rules: Any = getattr(dynamo, "trace_rules", None)
    if not hasattr(rules, "add"):
        rules = dynamo.skipfiles  # before torch 2.3
    rules.add(__package__)  # all at once: it puts its rules together anew each time
