"""Kernels of Triton as the checker of the order of work sees them: which of their tensors each reads and writes.

Contract: after `watch_kernels` each launch of a kernel accesses all of the tensors among its arguments, on the current
stream. Which of them it writes is what PyTorch finds in the compiled code, as it does for `torch.compile`; where it
cannot tell, all are taken to be written.
"""

import functools
import inspect
import logging
import sys
from typing import TYPE_CHECKING, Any

from stalloc.device.order_checker import READS, WRITES

if TYPE_CHECKING:
    from stalloc.device.order_checker import OrderChecker
    from stalloc.device.watched_operations import Accesses


def watch_kernels(checker: "OrderChecker", accesses: "Accesses") -> None:
    """Watch the kernels that are launched from now on; Triton has been imported."""
    function = sys.modules["triton.runtime.jit"].JITFunction
    launch = function.run
    written_by: dict[int, set[str]] = {}  # by the compiled kernel, which stays

    @functools.wraps(launch)
    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = launch(kernel, *args, **kwargs)
        if kwargs.get("warmup") or compiled is None:
            return compiled
        names = kernel.signature.parameters
        given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        tensors = {name: tensor for name, one in given.items() if (tensor := _tensor(one)) is not None}
        if not tensors:
            return compiled
        if id(compiled) not in written_by:
            written_by[id(compiled)] = _written(kernel, given, tensors)
        for how in (READS, WRITES):
            written = written_by[id(compiled)]
            accesses.on_device([(one, how) for name, one in tensors.items() if how == (name in written)])
        return compiled

    function.run = run


def _tensor(argument: Any) -> Any:
    """The tensor of the device that an argument is, or that it describes (a TensorDescriptor, a reinterpreted one)."""
    for one in (argument, getattr(argument, "base", None)):
        if one is not None and getattr(one, "is_cuda", False) and one.numel():
            return one
    return None


def _written(kernel: Any, given: dict[str, Any], tensors: dict[str, Any]) -> set[str]:
    try:
        from torch._higher_order_ops.triton_kernel_wrap import identify_mutated_tensors
    except ImportError:  # before torch 2.3
        return set(tensors)
    takes_descriptors = len(inspect.signature(identify_mutated_tensors).parameters) > 2
    defaults = {name: one.default for name, one in kernel.signature.parameters.items() if name not in given}
    log = logging.getLogger(identify_mutated_tensors.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)  # where it cannot tell it warns, with a traceback
    try:
        return set(identify_mutated_tensors(kernel, given | defaults, *([{}] if takes_descriptors else [])))
    finally:
        log.setLevel(level)
