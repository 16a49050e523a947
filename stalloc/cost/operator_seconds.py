"""Seconds of one operation on a GPU, from its floating point operations and the bytes that it reads and writes.

Contract: an estimate for telling settings of one program apart, not for saying when a training will be over: the larger
of FLOPs and bytes at a fixed share of what the data sheet promises, and never less than what starting a kernel takes.
FLOPs are those of torch.utils.flop_counter; an operation that it does not know has none. Views cost nothing.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from stalloc.cost.gpu_rates import GpuRates

SHARE_OF_FLOPS, SHARE_OF_BANDWIDTH = 0.6, 0.7  #: of the data sheet's, that programs reach
KERNEL_SECONDS = 4e-6  #: an operation takes at least this long
ERROR = (
    f"a roofline at {100 * SHARE_OF_FLOPS:.0f} % of peak FLOP/s and {100 * SHARE_OF_BANDWIDTH:.0f} % of bandwidth, "
    "not calibrated"
)
"""How the estimate is made, for whoever is shown one."""


def operator_seconds(operator: Any, args: Any, kwargs: Any, results: Any, rates: GpuRates) -> float:
    """About how long a call takes."""
    outputs, inputs = _tensors(results), _tensors((args, kwargs))
    schema = getattr(operator, "_schema", None)
    changes = schema is not None and schema.is_mutable
    if not outputs or (not changes and _storages(outputs) <= _storages(inputs)):
        return 0.0
    touched = sum(one.numel() * one.element_size() for one in (*inputs, *outputs))
    flops = _flops(operator, args, kwargs, results)
    peak = rates.half_flops if outputs[0].dtype in (torch.float16, torch.bfloat16) else rates.single_flops
    return max(flops / (SHARE_OF_FLOPS * peak), touched / (SHARE_OF_BANDWIDTH * rates.bytes_per_second), KERNEL_SECONDS)


def _flops(operator: Any, args: Any, kwargs: Any, results: Any) -> float:
    """0 where torch has no formula, or its formula does not know this way to call the operator."""
    formula = flop_registry.get(getattr(operator, "overloadpacket", None))
    if formula is None:
        return 0.0
    if "attention" in str(operator):
        args = _ungrouped(args)
    try:
        return float(formula(*args, **kwargs, out_val=results))
    except Exception:  # an estimate is no reason to end a program
        return 0.0


def _ungrouped(args: Any) -> Any:
    """Queries, keys and values with as many heads each, which the formulas ask for."""
    heads = max((one.shape[1] for one in args if isinstance(one, torch.Tensor) and one.dim() == 4), default=0)
    return [
        one.new_empty((one.shape[0], heads, *one.shape[2:]), device="meta")
        if isinstance(one, torch.Tensor) and one.dim() == 4 and one.shape[1] < heads
        else one
        for one in args
    ]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def _storages(tensors: list[torch.Tensor]) -> set[int]:
    return {one.untyped_storage()._cdata for one in tensors if one.layout == torch.strided}
