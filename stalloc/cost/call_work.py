"""What a call computes and moves: floating point operations, bytes read, bytes written; and how long it takes.

FLOPs are by the formulas of torch.utils.flop_counter, those of convolutions and their gradients by ours: a weight is
multiplied and added once at each position of the output, or of the input where the convolution is transposed, padding
included; the gradient of the input takes as many operations as the convolution, and so does that of the weights.
(torch.utils.flop_counter counts gradients of weights as if all channels were one group.) An operation that neither
knows has none. Bytes are those of the tensors that are read and made or changed, each once, whatever stays in caches. A
view moves nothing. Times are for telling settings of one program apart, not for saying when a training will be over:
see stalloc.cost.class_seconds.
"""

import itertools
import logging
import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stalloc.cost.calls import CallError, arguments_of, overloads_of
from stalloc.cost.class_seconds import estimate_call
from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.operation_classes import Shape
from stalloc.trace.sources.profiled_operations import Work

_OTHERS = ("double_backward", "reorder", "quantized::")  #: made of other calls, or copies, or with packed weights


@cache
def _is_convolution(operator: Any) -> bool:
    schema = getattr(operator, "_schema", None)
    if schema is None or "conv" not in schema.name or any(part in schema.name for part in _OTHERS):
        return False
    names = {one.name for one in schema.arguments}
    return "weight" in names and bool(names & {"input", "self"}) and bool(names & {"padding", "pad"})


def _convolution_flops(operator: Any, args: Any, kwargs: Any, results: Any) -> int:
    given = _named(operator, args, kwargs)
    weight, gradient = given["weight"], given.get("grad_output")
    if "tbc" in operator._schema.name:  # weights are (width, channels of the input, channels of the output)
        return int(2 * results.numel() * math.prod(weight.shape[:-1]))
    times = 1 if gradient is None else sum(map(bool, given.get("output_mask", (True, True))[:2]))
    # each has as many channels as the weights have rows
    made = _input(given) if _is_transposed(operator, given) else results if gradient is None else gradient
    return int(2 * times * made.numel() * math.prod(weight.shape[1:]))


def _convolution_results(operator: Any, args: Any, kwargs: Any) -> Any:
    """What a convolution makes of tensors without memory, also one of a library (cuDNN) that cannot be asked."""
    given = _named(operator, args, kwargs)
    weight, bias = given["weight"], given.get("bias")
    if "tbc" in operator._schema.name:
        places, batch, _ = given["self"].shape
        return weight.new_empty(places + 2 * given["pad"] - weight.shape[0] + 1, batch, weight.shape[2])
    if given.get("grad_output") is not None:
        wanted = given.get("output_mask", (True, True, True))
        like = (_input(given), weight, weight[:, 0])
        return [torch.empty_like(one) if is_wanted else None for one, is_wanted in zip(like, wanted, strict=False)]
    stride, padding, dilation, more = (
        given.get(name) or [default] * (weight.dim() - 2)
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0))
    )
    transposed, groups = _is_transposed(operator, given), given.get("groups", 1)
    if "depthwise" in operator._schema.name:
        groups = _input(given).shape[1]
    convolve = torch.ops.aten.convolution.default
    return convolve(_input(given), weight, bias, stride, padding, dilation, transposed, more, groups)


def _input(given: dict[str, Any]) -> Any:
    return given.get("input", given.get("self"))


def _is_transposed(operator: Any, given: dict[str, Any]) -> bool:
    return bool(given.get("transposed", "transpose" in operator._schema.name))


def _named(operator: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = (one.name for one in operator._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


_MAKES_ONLY = ("empty", "new_empty")  #: what lies in the memory stays there
_OVERWRITE = ("copy_", "fill_", "zero_", "_foreach_copy_")  #: what is changed is not looked at


def work_of_call(call: list[Any]) -> Work:
    """The work of a recorded call, which is made on tensors without memory, so that its results are known."""
    name, overload, arguments = call
    for operator in overloads_of(name, overload, len(arguments)):
        try:
            given, named = arguments_of(operator, arguments, "meta")
            results = _made_of(operator, given, named)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError, IndexError, AttributeError):
            continue
        return work_of(operator, given, named, results)
    raise CallError(f"{name} was not understood")


def _made_of(operator: Any, args: Any, kwargs: Any) -> Any:
    try:
        return operator(*args, **kwargs)
    except NotImplementedError:  # its shapes cannot be asked for
        if _is_convolution(operator):
            return _convolution_results(operator, args, kwargs)
        raise


def work_or_nothing(call: list[Any]) -> Work:
    """The work of a recorded call; one that cannot be made again counts as reading the tensors that it was given."""
    try:
        return work_of_call(call)
    except CallError:
        read = 0
        for one in tree_leaves(call[2], is_leaf=lambda value: isinstance(value, dict) and "tensor" in value):
            if isinstance(one, dict):
                kind, sizes, strides = one["tensor"]
                read += _bytes(sizes, strides, getattr(torch, kind).itemsize)
        return Work(0, read, 0)


def work_of(operator: Any, args: Any, kwargs: Any, results: Any) -> Work:
    """The work of a call, given its arguments and results: FLOPs, bytes read and bytes written."""
    schema = getattr(operator, "_schema", None)
    given = _by_argument(schema, args, kwargs)
    written = [one for value, is_written in given if is_written for one in _tensors(value)]
    read = [one for value, _ in given for one in _tensors(value)]
    changed = {id(one) for one in written}
    made = [one for one in _tensors(results) if id(one) not in changed]
    if not written and (not made or _are_views(schema, made, read)):
        return Work(0, 0, 0)
    name = str(getattr(operator, "overloadpacket", operator)).rpartition(".")[2]
    if name.startswith(_MAKES_ONLY):
        return Work(0, 0, 0)
    flops = _flops(operator, args, kwargs, results)
    first_read = [one for one in read if id(one) not in changed or name not in _OVERWRITE]
    if name in ("embedding", "index_select", "index", "gather"):  # rows of a table, not the table
        largest = max(first_read, key=lambda one: one.numel())
        first_read = [one for one in first_read if one is not largest] + made
    return Work(flops, sum(map(tensor_bytes, first_read)), sum(map(tensor_bytes, itertools.chain(made, written))))


@cache
def _formulas() -> dict[Any, Any]:
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # it warns where there is no Triton
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _flops(operator: Any, args: Any, kwargs: Any, results: Any) -> int:
    if _is_convolution(operator):
        return _convolution_flops(operator, args, kwargs, results)
    formula = _formulas().get(getattr(operator, "overloadpacket", None))
    if formula is None:
        return 0
    for given in (args, _with_equal_heads(args)):
        try:
            return int(formula(*given, **kwargs, out_val=results))
        except (AssertionError, TypeError, ValueError, IndexError, RuntimeError):  # shapes that the formula lacks
            continue
    return 0


def _with_equal_heads(args: Any) -> list[Any]:
    """The arguments of attention whose queries share keys and values, as if each had its own."""
    heads = max((one.shape[1] for one in _tensors(args) if one.dim() == 4), default=0)
    return [
        one[:, :1].expand(-1, heads, -1, -1) if isinstance(one, torch.Tensor) and one.dim() == 4 else one
        for one in args
    ]


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that differ in their address."""
    return _bytes(tensor.shape, tensor.stride() if tensor.layout == torch.strided else (), tensor.element_size())


def _bytes(sizes: Iterable[int], strides: Iterable[int], element_bytes: int) -> int:
    total = element_bytes
    for size, stride in itertools.zip_longest(sizes, strides, fillvalue=1):
        total *= size if stride else min(size, 1)
    return total


def _by_argument(schema: Any, args: Any, kwargs: Any) -> list[tuple[Any, bool]]:
    """Each argument, and whether the call changes it."""
    if schema is None:
        return [(args, False), (kwargs, False)]
    named = {one.name: one.alias_info is not None and one.alias_info.is_write for one in schema.arguments}
    return [*zip(args, named.values(), strict=False)] + [
        (value, named.get(name, False)) for name, value in kwargs.items()
    ]


def _are_views(schema: Any, made: list[torch.Tensor], read: list[torch.Tensor]) -> bool:
    if any(one.layout != torch.strided for one in (*made, *read)):
        return False
    if schema is not None and not any(one.is_meta for one in made):
        return {one.untyped_storage()._cdata for one in made} <= {one.untyped_storage()._cdata for one in read}
    return schema is not None and any(one.alias_info is not None for one in schema.returns)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def operator_seconds(operator: Any, args: Any, kwargs: Any, results: Any, rates: GpuRates) -> float:
    """About how long a call takes."""
    work = work_of(operator, args, kwargs, results)
    if not any(work):
        return 0.0
    outputs, inputs = _tensors(results), _tensors((args, kwargs))
    shapes = [Shape(one.shape, one.stride() if one.layout == torch.strided else ()) for one in inputs]
    half = (outputs or inputs)[0].dtype in (torch.float16, torch.bfloat16)
    name = str(getattr(operator, "overloadpacket", operator))
    return estimate_call(name, shapes, work.flops, work.read_bytes + work.written_bytes, rates, half=half)[1].seconds
