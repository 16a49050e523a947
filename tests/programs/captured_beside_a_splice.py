"""A graph is captured that asks for more than is left while a splice is unused; prints what was found, as JSON."""

import json
import random

from stalloc import device

device.activate("virtual", device.VirtualGPU(total_bytes=128 << 20))

import torch  # noqa: E402
from cupy.cuda import runtime as runtime_calls  # noqa: E402

import stalloc  # noqa: E402
from stalloc.core.constants import GRANULE  # noqa: E402
from stalloc.core.snapshot import segments  # noqa: E402
from stalloc.device import virtual  # noqa: E402

runtime = stalloc.install()
MIB = 1 << 20
rng, side, live = random.Random(0), torch.cuda.Stream(), []


def num_splices() -> int:
    return sum(one.address % GRANULE != 0 for one in segments(runtime.controllers[0].state))


def new(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


while num_splices() == 0:
    size = int(rng.choice([0.2, 1.3, 3.7, 9.1]) * MIB) // 512 * 512
    while live and sum(one.nbytes for one in live) + size > 120 * MIB:
        live.pop(rng.randrange(len(live)))
    live.append(new(size))
del live[-1]  # which was served from it
before, refused = num_splices(), False
torch.cuda.synchronize()
with torch.cuda.stream(side):
    runtime_calls.streamBeginCapture(side.cuda_stream, 0)
    try:
        new(60 * MIB)
    except torch.OutOfMemoryError:
        refused = True
    runtime_calls.streamEndCapture(side.cuda_stream)
checker = virtual.order_checker()
assert checker is not None
print(json.dumps([before, refused, [one.text for one in checker.found()]]))
