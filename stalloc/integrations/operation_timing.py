"""Timing the operations of a recorded program on a real GPU, each distinct call by itself.

Contract: a trace is data: only torch's own operations on tensors are called, with sizes, whole numbers and plain words
of the recording, on tensors that are made here; what cannot be called so, or does not fit, is left to the estimates.
"""

import re
import statistics
from collections.abc import Sequence
from typing import Any

from stalloc.cost.calls import CallError, arguments_of, overloads_of

_WORD = re.compile(r"[a-z_]{0,24}")
_WARM, _TIMED, _MOST_SECONDS = 2, 5, 2.0


def measured_nanoseconds(calls: Sequence[list[Any]]) -> list[int]:
    """The nanoseconds that each call takes on the current GPU; 0 where a call could not be timed."""
    return [_time(call) for call in calls]


def _time(call: list[Any]) -> int:
    import torch
    from torch.utils._pytree import tree_leaves

    try:
        operator = _allowed(call)
        given, named = arguments_of(operator, call[2], "cuda")
        for tensor in tree_leaves([*given, *named.values()]):
            if hasattr(tensor, "is_floating_point") and not tensor.is_floating_point():
                tensor.zero_()  # an index is then one that there is
        for _ in range(_WARM):
            operator(*given, **named)
        torch.cuda.synchronize()
        milliseconds = []
        for _ in range(_TIMED):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            operator(*given, **named)
            end.record()
            end.synchronize()
            milliseconds.append(begin.elapsed_time(end))
            if milliseconds[-1] > 1e3 * _MOST_SECONDS:
                break
    except (CallError, RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, AttributeError):
        return 0
    return round(1e6 * statistics.median(milliseconds))


def _allowed(call: list[Any]) -> Any:
    """The operator of a call, if it is one of torch's own that works on the tensors that it is given."""
    import torch

    name, overload, arguments = call
    if not name.startswith("aten::") or not isinstance(arguments, list):
        raise CallError(f"{name} is none of torch's own operations")
    if not any(isinstance(given, dict) for given in arguments):
        raise CallError(f"{name} is given no tensor")
    if any(isinstance(given, str) and not _WORD.fullmatch(given) for given in arguments):
        raise CallError(f"{name} is given a text")
    operator = overloads_of(name, overload, len(arguments))[0]
    full = f"{name}.{overload}" if overload else name
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if not any(has(full, key) for key in ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")):
        raise CallError(f"{name} does not run on GPUs")
    return operator
