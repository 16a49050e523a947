"""Seconds of an operation that is being made, on a GPU that is not there: what stalloc.fitting adds up.

Contract: an estimate for telling settings of one program apart, not for saying when a training will be over: see
stalloc.cost.class_seconds. Views cost nothing.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stalloc.cost.call_work import work_of
from stalloc.cost.class_seconds import ERROR, estimate_call
from stalloc.cost.gpu_rates import GpuRates
from stalloc.cost.operation_classes import Shape

__all__ = ["ERROR", "operator_seconds"]


def operator_seconds(operator: Any, args: Any, kwargs: Any, results: Any, rates: GpuRates) -> float:
    """About how long a call takes."""
    work = work_of(operator, args, kwargs, results)
    if not any(work):
        return 0.0
    outputs = [one for one in tree_leaves(results) if isinstance(one, torch.Tensor)]
    inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    shapes = [Shape(one.shape, one.stride() if one.layout == torch.strided else ()) for one in inputs]
    half = (outputs or inputs)[0].dtype in (torch.float16, torch.bfloat16)
    name = str(getattr(operator, "overloadpacket", operator))
    return estimate_call(name, shapes, work.flops, work.read_bytes + work.written_bytes, rates, half=half)[1].seconds
