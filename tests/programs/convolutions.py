"""Convolutions of every kind, made on the virtual GPU and recorded: prints what FLOPs each of their calls counts."""

import json
import sys

from stalloc import device
from stalloc.device.known_gpus import DEFAULT_GPU

device.activate("virtual", DEFAULT_GPU)

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from stalloc.cost.call_work import work_of, work_of_call  # noqa: E402


class Counted(TorchDispatchMode):
    """Notes what the convolutions of a program count."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if "conv" in func._schema.name:
            self.flops.append(work_of(func, args, kwargs or {}, results).flops)
        return results


def counted(dims, batch, inputs, outputs, size, kernel, wants, inference=False, **options):
    """FLOPs of the forward pass, and of the gradients of input and weights that are wanted."""
    transposed = options.pop("transposed", False)
    groups = options.get("groups", 1)
    channels = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    tensor = torch.empty(batch, inputs, *size, device="cuda", requires_grad=wants[0] and not inference)
    weight = torch.empty(*channels, *kernel, device="cuda", requires_grad=wants[1] and not inference)
    convolve = getattr(torch.nn.functional, f"conv{'_transpose' * transposed}{dims}d")
    with Counted() as mode, torch.inference_mode(inference):
        made = convolve(tensor, weight, **options)
        if not inference and any(wants):
            made.sum().backward()
    return [mode.flops[0], sum(mode.flops[1:])]


told = json.loads(sys.argv[1])
print(json.dumps([[counted(**case) for case in told["made"]], [work_of_call(call).flops for call in told["recorded"]]]))
