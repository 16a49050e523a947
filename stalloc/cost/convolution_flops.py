"""Floating point operations of convolutions, by group: of every kind, and of their gradients.

Contract: a weight is multiplied and added once at each position of the output, or of the input where the convolution
is transposed, padding included; the gradient of the input takes as many operations as the convolution, and so does
that of the weights. (torch.utils.flop_counter counts gradients of weights as if all channels were one group.)
"""

import math
from functools import cache
from typing import Any

import torch

_OTHERS = ("double_backward", "reorder", "quantized::")  #: made of other calls, or copies, or with packed weights


@cache
def is_convolution(operator: Any) -> bool:
    """Whether an operator of PyTorch is a convolution or the gradient of one."""
    schema = getattr(operator, "_schema", None)
    if schema is None or "conv" not in schema.name or any(part in schema.name for part in _OTHERS):
        return False
    names = {one.name for one in schema.arguments}
    return "weight" in names and bool(names & {"input", "self"}) and bool(names & {"padding", "pad"})


def convolution_flops(operator: Any, args: Any, kwargs: Any, results: Any) -> int:
    """The floating point operations of a convolution, given its arguments and results."""
    given = _named(operator, args, kwargs)
    weight, gradient = given["weight"], given.get("grad_output")
    if "tbc" in operator._schema.name:  # weights are (width, channels of the input, channels of the output)
        return int(2 * results.numel() * math.prod(weight.shape[:-1]))
    times = 1 if gradient is None else sum(map(bool, given.get("output_mask", (True, True))[:2]))
    # each has as many channels as the weights have rows
    made = _input(given) if _is_transposed(operator, given) else results if gradient is None else gradient
    return int(2 * times * made.numel() * math.prod(weight.shape[1:]))


def convolution_results(operator: Any, args: Any, kwargs: Any) -> Any:
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
