"""Calls of operations by what they were called with, so that they can be priced, and made again, later and elsewhere.

A call is a list of JSON: name, overload, arguments in the order of the schema. A tensor is
`{"tensor": [kind of number, sizes, strides]}`, a list of tensors `{"list": [...]}`; whole numbers, truth values, texts
and lists of numbers stand for themselves. Contract: what comes of a call that nobody understands is CallError, whatever
a file made of it.
"""

import functools
from collections.abc import Sequence
from typing import Any

MAX_NUMBERS = 1 << 44  #: in a tensor


class CallError(ValueError):
    """The call is none of an operation of this torch; the text says why."""


def overloads_of(name: str, overload: str, num_arguments: int) -> list[Any]:
    """The operators that a call may be of: the one that is named, else all that take so many arguments."""
    namespace, _, base = name.partition("::")
    packet = _packet(namespace, base)
    if packet is None:
        raise CallError(f"there is no operation {name}")
    names = [overload or "default"] if overload or "default" in packet.overloads() else []
    names += [one for one in packet.overloads() if one not in names]
    found = [getattr(packet, one) for one in names]
    fitting = [one for one in found if len(one._schema.arguments) == num_arguments]
    if overload:
        fitting = [one for one in fitting if one._schema.overload_name == overload] or fitting
    if not fitting:
        raise CallError(f"no {name} takes {num_arguments} arguments")
    return fitting


@functools.cache
def _packet(namespace: str, base: str) -> Any:
    import torch

    try:
        packet = getattr(getattr(torch.ops, namespace), base)
        packet.overloads()
    except (AttributeError, RuntimeError):
        return None
    return packet


def arguments_of(operator: Any, arguments: Sequence[Any], device: str) -> tuple[list[Any], dict[str, Any]]:
    """What to call an operator with; tensors are made on `device`, with whatever lies in its memory."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for one, given in zip(operator._schema.arguments, arguments, strict=True):
        value = _made(given, device)
        if str(one.type).removeprefix("Optional[").startswith(("Device", "Generator")):
            value = device if value is not None and "Device" in str(one.type) else None
        elif value is None:
            value = one.default_value
        if one.kwarg_only:
            named[one.name] = value
        else:
            positional.append(value)
    return positional, named


def _made(given: Any, device: str) -> Any:
    import torch

    if not isinstance(given, dict):
        return given
    if isinstance(given.get("list"), list):
        return [_made(one, device) for one in given["list"]]
    try:
        kind, sizes, strides = given["tensor"]
        dtype = getattr(torch, kind)
        numbers = [int(one) for one in sizes]
        steps = [int(one) for one in strides]
        span = sum((size - 1) * step for size, step in zip(numbers, steps, strict=True) if size > 0)
        if not isinstance(dtype, torch.dtype) or min([0, *numbers, *steps]) < 0 or span > MAX_NUMBERS:
            raise CallError("a tensor of the call is none that there can be")
        return torch.empty_strided(numbers, steps, dtype=dtype, device=device)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CallError("a tensor of the call is none that there can be") from error
