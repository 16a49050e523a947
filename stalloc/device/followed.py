"""Functions of torch that give small integers and booleans their true values on the virtual GPU.

Contract: after `follow_values(torch, library)` every function named below runs on the virtual GPU as before, with the
same requests and frees in the same order; where its result is a small tensor of integers or booleans, it also runs on
the host, and `Values` keeps what comes out. Reads give that; a read of what is not known is counted with its line. So
it is for few floating-point numbers that are made of known ones; others count as zero, and what a comparison makes of
them is doubtful.

Others stand for numbers that are drawn, and for places that a kernel would have chosen, so that what they choose is
about as large as on a real GPU; none counts as known. Drawn numbers are as many, as far apart and as different. Chosen
places lie in between, and differ from each other: the first one, which zeros would give, is often a token that ends a
text or pads it, and nothing chooses an expert twice.

Functions are replaced in `torch` and `torch.Tensor`, not in the dispatcher: other arguments cost one look at their
type, and nothing changes which operators a program calls.
"""

import contextlib
import ctypes
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

from stalloc.device.values import LONGEST_NUMBER, MAX_ELEMENTS, MAX_NUMBERS, Values

Function = Callable[..., Any]

_NOTHING = object()  # no argument
_CONVERSIONS = ("long", "int", "bool", "short", "float", "double", "half", "bfloat16")
_UNARY = ("__invert__", "__neg__", "__abs__", *_CONVERSIONS)
_FUNCTIONS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "isin"),
    *("logical_and", "logical_or", "logical_xor", "logical_not"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
    *("add", "sub", "mul", "div", "floor_divide", "remainder", "neg", "abs", "clamp", "minimum", "maximum", "pow"),
    *("all", "any", "_is_any_true", "sum", "prod", "max", "min", "amax", "amin", "argmax", "argmin"),
    *("count_nonzero", "cumsum", "cumprod", "cummax", "cummin", "diff", "bincount", "searchsorted", "bucketize"),
    *("sort", "argsort", "topk", "sign", "fmod", "bitwise_left_shift", "bitwise_right_shift", "outer"),
    *("cat", "concat", "stack", "hstack", "vstack", "tile", "clone", "flip", "roll", "where", "index_select", "gather"),
    *("take", "take_along_dim", "tril", "triu", "diag", "index_add", "index_copy", "scatter_add", "scatter_reduce"),
    *("masked_fill", "masked_scatter", "masked_select", "nonzero", "unique", "unique_consecutive"),
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
_READING = ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "__complex__", "is_nonzero")
_NEW = ("new_ones", "new_zeros", "new_full", "new_tensor")
_FIRST = ("input", "tensors", "condition")
"""Names under which the first argument of a function may be given."""
_LARGEST = ("one_hot", "bincount")
_ALONG = {"unique": 4, "unique_consecutive": 3}
"""Functions whose result may be cut along one dimension, and which argument that is."""
_COUNTED = (*_ALONG, *_LARGEST)
"""Functions that read how long their result is; some, the largest number."""


def _followed(values: Values, name: str, function: Function) -> Function:
    kinds, judges, most = values.kinds, name.strip("_") in _JUDGING, MAX_ELEMENTS
    passes, run = not judges, _runner(values, name, function)

    # Arguments have names, since Python lets go of them in this order, as it does without this function between; a
    # tuple lets go of its last one first, and the program would free its temporary tensors in another order.
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
    def follow_operator(a: Any, b: Any) -> Any:
        if a.requires_grad or a.numel() > most or not (a.dtype in kinds or values.keeps(a) or values.keeps(b)):
            return function(a, b)
        return follow(a, b)

    def follow_judgement(a: Any, b: Any) -> Any:
        return function(a, b) if a.numel() > most else follow(a, b)

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


def _runner(values: Values, name: str, function: Function) -> Function:
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


def _repeater(values: Values, name: str, function: Function) -> Function:
    """`repeat_interleave`, which reads how often all is repeated, where its result's length is not given."""
    follow = _followed(values, name, function)

    def repeat(*args: Any, **named: Any) -> Any:
        first: Any = args[0] if args else named.get("input")
        repeats: Any = args[1] if len(args) > 1 else named.get("repeats", first)
        if not values.is_followed(repeats) or named.get("output_size") is not None:
            return follow(*args, **named)
        total = values.compute(values.base.sum, (repeats,), {})
        values.decide(repeats, total)
        num = 0 if total is None else max(0, int(total[0]))
        if repeats.numel() == 1 and first is not None and first is not repeats:  # all are repeated alike
            dim = args[2] if len(args) > 2 else named.get("dim")
            num *= first.numel() if dim is None else first.size(dim)
        computed = values.compute(function, args, named) if values.is_followed(first) else None
        with values.expecting(num):
            result = function(*args, **named)
        values.learn(result, computed)
        return result

    return repeat


def _made(values: Values, name: str, function: Function) -> Function:
    fills = name.startswith(("ones", "zeros"))  # with floating-point numbers these are sums and states to be

    def make(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # pytest shows the program's line
        result = function(*args, **kwargs)
        if values.can_keep(result) and (result.dtype in values.kinds or not fills):
            values.learn(result, values.compute(function, args, kwargs, makes=True))
        return result

    return make


def _changing_each(values: Values, name: str, function: Function) -> Function:
    def change(tensors: Any, *more: Any, **named: Any) -> Any:
        function(tensors, *more, **named)
        return tensors

    def follow(tensors: Any, *more: Any, **named: Any) -> Any:
        if not values.keeps(tensors):
            return function(tensors, *more, **named)
        computed = values.compute(change, (tensors, *more), named)
        result = function(tensors, *more, **named)
        values.learn(tensors, computed)
        return result

    return follow


def _setter(values: Values, name: str, function: Function) -> Function:
    def change(self: Any, index: Any, value: Any) -> None:
        if values.is_followed(self):
            computed = values.compute(function, (self, index, value), {})
            function(self, index, value)
            values.learn(self, None if computed is None else (self, computed[1]))
        else:
            function(self, index, value)

    return change


def _reader(values: Values, name: str, function: Function) -> Function:
    decides = name in ("__bool__", "__int__", "__index__", "is_nonzero")

    def read(self: Any) -> Any:
        result = function(self)  # its requests, its waiting, and its errors
        if not self.is_cuda:
            return result
        host = values.read(self) if decides or self.dtype in values.kinds else values.read_data(self)
        if host is None:
            return result
        with values.unseen():
            return function(host)

    return read


def _mover(values: Values, name: str, function: Function) -> Function:
    """`to` and its kin: a copy to the host is a read, a copy on the GPU has the same elements."""
    kinds, plain, most = values.kinds, values.plain, MAX_NUMBERS

    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs) if kwargs else function(self, *args)
        if result is self or type(self) not in plain or type(result) not in plain:
            return result
        if self.requires_grad or (self.numel() > most and self.dtype not in kinds):
            return result
        if result.is_cuda:
            if values.can_keep(result) and not values.learn_copy(result, self):
                values.learn(result, values.compute(values.base.to, (self, result.dtype), {}))
        elif self.is_cuda:
            host = values.read(self) if self.dtype in kinds else values.read_data(self)
            if host is not None:
                with values.torch.no_grad(), values.unseen():  # the copy by the driver wrote it, for whoever watches
                    result.copy_(host)
        return result

    return move


def copier(values: Values, name: str, function: Function) -> Function:
    def copy(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, source, *args, **kwargs)
        if values.is_followed(self) or values.knows(self):
            if not values.learn_copy(self, source):
                values.overwrite(self)
                computed = values.compute(function, (self, source), {})
                values.learn(self, None if computed is None else (self, computed[1]))
        elif not self.is_cuda and values.is_followed(source):
            host = values.read(source)
            if host is not None:
                with values.unseen():
                    function(self, host)
        return result

    return copy


def _storage_copier(values: Values, name: str, function: Function) -> Function:
    """A storage's `copy_`: `torch.load` fills the GPU's with it, among others step counts, and `torch.save` reads."""

    def copy(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, source, *args, **kwargs)
        if self.device.type == "cuda" and source.device.type == "cpu" and 0 < self.nbytes() <= LONGEST_NUMBER:
            torch = values.torch
            with values.unseen():
                there, here = (torch.empty(0, dtype=torch.uint8, device=one.device).set_(one) for one in (self, source))
                values.learn_copy(there, here)
            values.knows_numbers = values.keeps_numbers = True
        elif self.device.type == "cpu" and source.device.type == "cuda":
            host = values.stored(source)
            if host is not None and host.nbytes() == self.nbytes():
                with values.unseen():
                    function(self, host)
        return result

    return copy


def _storage_filler(values: Values, name: str, function: Function) -> Function:
    """A storage's `_set_from_file`: unpickling moves a storage to the GPU while it is empty, and fills it then."""

    def fill(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        if self.device.type == "cuda":
            with values.unseen():
                values.learn_filled(values.torch.empty(0, dtype=values.torch.uint8, device=self.device).set_(self))
        return result

    return fill


def _storage_writer(values: Values, name: str, function: Function) -> Function:
    """A storage's `_write_file`, with which pickling reads the GPU's."""

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_known = self.device.type == "cuda" and values.stored(self) is not None
        return function(self.cpu() if is_known else self, *args, **kwargs)

    return write


def _judge(values: Values, name: str, function: Function) -> Function:
    """`equal` and its kin, which read one answer about two tensors."""

    def compare(a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
        result = function(a, b, *args, **kwargs)
        if not values.is_small(a):
            return result
        computed = values.compute(function, (a, b, *args), kwargs)
        values.decide(a, computed)
        return result if computed is None else computed[0]

    return compare


def _coalescer(values: Values, name: str, function: Function) -> Function:
    """`coalesce` of a sparse tensor, which reads how many different places it has."""

    def coalesce(self: Any) -> Any:
        if not self.is_cuda or self.is_coalesced():
            return function(self)
        indices = self._indices()
        computed = values.compute(values.torch.unique, (indices,), {"dim": 1})
        values.decide(indices, computed)
        with values.expecting(0 if computed is None else computed[0].shape[1]):
            result = function(self)
        values.learn(result._indices(), computed)
        return result

    return coalesce


def _reader_of_lengths(values: Values, name: str, function: Function) -> Function:
    """`ctc_loss`, which reads its lengths on the host before it begins.

    They are handed on as numbers: PyTorch's own reading is left out while a dispatch mode is active, and fails for
    lengths on the host.
    """

    def lose(log_probs: Any, targets: Any, *args: Any, **kwargs: Any) -> Any:
        if targets.dtype == values.torch.int64:  # with others it may be cuDNN's, which does not
            args = tuple(_on_host(values, one) for one in args)
            kwargs = {name: _on_host(values, one) for name, one in kwargs.items()}
        return function(log_probs, targets, *args, **kwargs)

    return lose


def _on_host(values: Values, value: Any) -> Any:
    """A tensor of numbers as PyTorch would read it on the host without a request, where it is known."""
    if type(value) is not values.torch.Tensor or value.dtype != values.torch.int64:
        return value
    host = value if value.is_cpu else values.read(value) if values.is_followed(value) else None
    return value if host is None else host.tolist()


def _checker(values: Values, name: str, function: Function) -> Function:
    """What reads a number to see that its arguments are in order, as they are: `segment_reduce` the shortest length,
    `multinomial` before torch 2.3 how many rows are zero, `eig` whether all is finite, then what did not converge."""

    def check(*args: Any, **kwargs: Any) -> Any:
        with values.expecting(1 if name == "segment_reduce" else 0):
            return function(*args, **kwargs)

    return check


def _asserter(values: Values, name: str, function: Function) -> Function:
    """`_is_all_true`, with which distributions check their arguments: what is doubtful is as it should be.

    A standard deviation that a kernel would have computed reads as zero, and on a GPU it is not.
    """
    follow = _followed(values, name, function)

    def check(tensor: Any) -> Any:
        result = follow(tensor)
        if result.is_cuda and (known := values.known(result)) is not None and not known.certain:
            with values.unseen():
                values.host(result, known).fill_(True)
        return result

    return check


def _scale_updater(values: Values, name: str, function: Function) -> Function:
    """The end of a step of GradScaler: no kernel computed an infinity, so the scale is that of a step without one."""

    def update(scale: Any, tracker: Any, found_inf: Any, *factors: Any) -> Any:
        if not values.knows(scale):
            return function(scale, tracker, found_inf, *factors)
        none = found_inf if values.knows(found_inf) else found_inf.new_zeros((), device="cpu")
        computed = values.compute(function, (scale, tracker, none, *factors), {})
        result = function(scale, tracker, found_inf, *factors)
        for changed in (scale, tracker):
            values.learn(changed, None if computed is None else (changed, computed[1]))
        return result

    return update


def _count_nonzero_on_read(values: Values, torch: Any) -> None:
    """`nonzero`, which indexing by masks calls inside, forward and backward, reads the true count."""
    operator = torch.ops.aten.nonzero.default
    go_on = below(torch)

    def nonzero(tensor: Any) -> Any:
        if not tensor.is_cuda:
            return go_on(operator, tensor)
        computed = values.compute(operator, (tensor,), {})
        values.decide(tensor, computed)
        with values.expecting(0 if computed is None else computed[0].shape[0]):
            result = go_on(operator, tensor)
        values.learn(result, computed)
        return result

    library = torch.library.Library("aten", "IMPL")
    library.impl("nonzero", nonzero, "BackendSelect")
    values.library_of_operators = library  # type: ignore[attr-defined]


_AMONG = 0.382  # of the places: no simple fraction, as beam search has several vocabularies in a row


def _drawer(values: Values, name: str, function: Function) -> Function:
    generator = values.torch.Generator()  # the host's numbers are the program's own

    def draw(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if type(result) in values.plain and values.is_small(result) and not result.requires_grad:
            computed = values.compute(function, args, kwargs | {"generator": generator}, makes=True)
            values.learn_drawn(result, None if computed is None else computed[0])
        return result

    return draw


def _chooser(values: Values, name: str, function: Function) -> Function:
    """What chooses places by scores: `argmax` and `max` along a dimension, `multinomial` and `topk` of the last one."""
    arange, several = values.torch.arange, name in ("multinomial", "topk")

    def stand_in(scores: Any, result: Any) -> None:
        chosen = result[1] if isinstance(result, tuple) else result
        if type(chosen) not in values.plain or not values.is_followed(chosen) or not 0 < chosen.numel() <= MAX_ELEMENTS:
            return
        if scores.dtype in values.kinds or values.keeps(scores):
            return  # the function was followed
        if several and chosen.shape[:-1] != scores.shape[:-1]:
            return
        num_places = scores.shape[-1] if several else scores.numel() // chosen.numel()
        with contextlib.suppress(NotImplementedError), values.unseen():  # under vmap a tensor has no memory
            first = int(_AMONG * num_places)
            picks = arange(first, first + (chosen.shape[-1] if several else 1), device="cpu") % num_places
            values.learn_drawn(chosen, (picks if several else picks[0]).expand(chosen.shape).contiguous())

    def choose(a: Any = None, *more: Any, **named: Any) -> Any:
        if a is None:
            result = function(**named)
            stand_in(named["input"], result)
        else:
            result = function(a, *more, **named)
            stand_in(a, result)
        return result

    return choose


def below(torch: Any) -> Function:
    """A function that calls (operator, first argument, a tensor, others …) below BackendSelect."""
    later = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def call(operator: Any, first: Any, *args: Any) -> Any:
        if hasattr(operator, "redispatch"):
            return operator.redispatch(torch._C._dispatch_keys(first) & later, first, *args)
        key = torch._C.DispatchKey.CUDA if first.is_cuda else torch._C.DispatchKey.CPU  # before torch 2.3
        return operator._op_dk(key, first, *args)

    return call


def follow_values(torch: Any, library: ctypes.CDLL) -> Values:
    """Replace the functions named above in `torch`; once, at the end of its import."""
    from torch.jit._builtins import _get_builtin_table
    from torch.utils._device import _device_constructors

    _device_constructors()  # keeps the functions that a default device is for, as the dispatcher names them
    scripted = _get_builtin_table()  # by which torch.jit.script knows torch's own functions
    lazy: list[Any] = torch.nn.parameter.UninitializedTensorMixin._allowed_methods  # of parameters without a shape yet
    values, tensor = Values(torch, library), torch.Tensor

    def replace(owner: Any, name: str, make: Callable[[Values, str, Function], Function]) -> None:
        function = getattr(owner, name, None)
        if function is not None:
            made = functools.update_wrapper(make(values, name, function), function)
            made.__module__ = torch.__name__ if owner is tensor else owner.__name__  # by these it is pickled
            made.__qualname__ = f"Tensor.{name}" if owner is tensor else name
            setattr(owner, name, made)
            if id(function) in scripted:
                scripted[id(made)] = scripted[id(function)]
            if function in lazy:
                lazy.append(made)

    for name in ("one_hot", "pad"):
        for owner in (torch.nn.functional, torch._C._nn):
            if not inspect.isfunction(getattr(owner, name, None)):  # a function of Python calls the other
                replace(owner, name, _followed)
    for owners, make, names in (
        ((torch, tensor), _followed, _FUNCTIONS),
        ((tensor,), _followed, _METHODS),
        ((torch,), _changing_each, _CHANGING_EACH),
        ((tensor,), _setter, ("__setitem__",)),
        ((torch,), _drawer, _DRAWN),
        ((torch,), _made, _MAKERS),
        ((tensor,), _made, _NEW),
        ((tensor,), _reader, _READING),
        ((torch, tensor), _judge, ("equal", "allclose")),
        ((tensor,), _mover, ("to", "cuda", "cpu", "type", "type_as", "__deepcopy__")),
        ((tensor,), _coalescer, ("coalesce",)),
        ((tensor,), copier, ("copy_",)),
        ((torch.UntypedStorage,), _storage_copier, ("copy_",)),
        ((torch.UntypedStorage,), _storage_filler, ("_set_from_file",)),
        ((torch.UntypedStorage,), _storage_writer, ("_write_file",)),
        ((torch,), _reader_of_lengths, ("ctc_loss",)),
        ((torch, tensor), _repeater, ("repeat_interleave",)),
        ((torch,), _asserter, ("_is_all_true",)),
        ((torch,), _scale_updater, ("_amp_update_scale_",)),
        ((torch,), _checker, ("segment_reduce",)),
        ((torch, tensor), _checker, ("multinomial",)),
        ((torch.linalg,), _checker, ("eig", "eigvals")),
        ((torch, tensor), _chooser, ("argmax", "max", "multinomial", "topk")),
    ):
        for owner, name in itertools.product(owners, names):
            replace(owner, name, make)
    _count_nonzero_on_read(values, torch)
    return values


def leave_uncompiled(dynamo: Any) -> None:
    """Keep torch.compile out of what is called in the place of PyTorch's own functions, and around its operations."""
    rules: Any = getattr(dynamo, "trace_rules", None)
    if not hasattr(rules, "add"):
        rules = dynamo.skipfiles  # before torch 2.3
    rules.add(__package__)  # all at once: it puts its rules together anew each time
