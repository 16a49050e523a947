"""The timeline of a program that is running on the virtual GPU: what its work would take on the GPU that it stands for.

Contract: after `begin` every operation of PyTorch takes its stream as long as `operator_seconds` says, copies and
collectives as long as the links of the GPU need for them, and the host LAUNCH_SECONDS for each operation that it asks
for. Kernels of others (CuPy's, Triton's) take no time.
"""

import ctypes
import sys
from typing import Any

from stalloc.cost.gpu_rates import LINK_SHARE, LINK_START, GpuRates, rates_of
from stalloc.cost.host_rates import LAUNCH_SECONDS
from stalloc.device.watched_work import enter_in_every_thread
from stalloc.imports import after_import

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")  # are seen where NCCL is asked for them
_NS = 1e9


def begin(library: ctypes.CDLL, gpu_name: str) -> None:
    """Give work the times of a GPU; `library`: the virtual GPU's, whose work is done when these say so."""
    rates = rates_of(gpu_name)
    links = (rates.link_bytes_per_second, rates.peer_bytes_per_second or rates.link_bytes_per_second)
    library.stalloc_virtual_set_links(
        ctypes.c_double(_NS * LINK_START), *(ctypes.c_double(_NS / (LINK_SHARE * link)) for link in links)
    )
    after_import("torch", lambda: _time_operations(sys.modules["torch"], ctypes.PyDLL(library._name), rates))


def _time_operations(torch: Any, library: ctypes.PyDLL, rates: GpuRates) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from stalloc.cost.call_work import operator_seconds

    host_works, work = library.stalloc_virtual_host_works, library.stalloc_virtual_work
    host_works.argtypes, host_works.restype = (ctypes.c_int64,), None
    work.argtypes, work.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int64), None
    launch_ns = round(_NS * LAUNCH_SECONDS)
    current_stream, plain = torch._C._cuda_getCurrentRawStream, {torch.Tensor, torch.nn.Parameter}
    lazy = torch.nn.parameter.UninitializedTensorMixin
    known: dict[Any, int] = {}  # nanoseconds of calls, by what they were given

    def time_of(func: Any, args: Any, kwargs: Any, result: Any, tensors: list[Any]) -> int:
        key = (
            id(func),  # operators stay, and their own hash is slow
            tuple((one.shape, one.stride() if one.layout is torch.strided else (), one.dtype) for one in tensors),
        )
        if key not in known:
            known[key] = round(_NS * operator_seconds(func, args, kwargs, result, rates))
        return known[key]

    class Timeline(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # nothing is compiled on the virtual GPU, and saying so would import all of torch._dynamo

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(one not in plain for one in types):
                if any(issubclass(one, lazy) for one in types):
                    return func(*args, **kwargs or {})  # it has no shape yet, and nothing is done with it
                return NotImplemented  # the operations that a subclass makes of it come this way again
            kwargs = kwargs or {}
            host_works(launch_ns)
            result = func(*args, **kwargs)
            tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)]
            devices = {one.device for one in tensors if one.dim() or not one.is_cpu}
            if len(devices) != 1 or (device := devices.pop()).type != "cuda" or func.namespace in _COLLECTIVES:
                return result  # nothing on a device, or what goes over a link
            if ns := time_of(func, args, kwargs, result, tensors):
                work(device.index, current_stream(device.index), ns)
            return result

    enter_in_every_thread(Timeline)
