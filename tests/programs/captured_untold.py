"""A graph is captured by the driver's calls alone, as Warp and cuda-python do it, while a program uses several streams.

What the checker of the order of work found, as JSON, whether memory that the graph writes was given to a tensor outside
of it, and how many requests a plan served before and after: `planned` captures a step that a plan serves, `within` the
end of one, and `heap` what none does.
"""

import json
import sys

from stalloc import device

device.activate("virtual", device.VirtualGPU())

import cupy  # noqa: E402
import torch  # noqa: E402

import stalloc  # noqa: E402
from stalloc.device import virtual  # noqa: E402
from stalloc.integrations import Settings  # noqa: E402

PLANNED, WITHIN = sys.argv[1] != "heap", sys.argv[1] == "within"
runtime = stalloc.install(settings=Settings(plan=PLANNED))
side, other = torch.cuda.Stream(), torch.cuda.Stream()
MIB = 1 << 20
Blocks = list[tuple[int, int]]


def blocks(num: int, written: Blocks | None = None) -> None:
    """Write to memory and free it again, all of it on the stream in use."""
    for number in range(num):
        some = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in (3 * MIB, (1 + number % 5) * MIB)]
        if written is not None:
            written += [(one.data_ptr(), len(one)) for one in some]


def share(stream: torch.cuda.Stream) -> list[torch.Tensor]:
    """Blocks of the default stream that a stream uses too."""
    shared = [torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    for one in shared:
        one.record_stream(stream)
    return shared


for _ in range(12):
    with torch.cuda.stream(side):
        blocks(40)
    stalloc.step()
served = runtime.reports()[0].run_hits
shared = share(side) + share(other)
torch.cuda.synchronize()
waiting = share(other)
other.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(other):
    waiting[0].add_(1)
del waiting
written: Blocks = []
if WITHIN:
    with torch.cuda.stream(side):
        blocks(5)
with torch.cuda.stream(side):
    cupy.cuda.runtime.streamBeginCapture(side.cuda_stream, 0)
    blocks(5, written)
    del shared
    blocks(35, written)
    with torch.cuda.stream(other):
        blocks(40)
    graph = cupy.cuda.runtime.streamEndCapture(side.cuda_stream)
with torch.cuda.stream(side):
    outside = [torch.zeros(size * MIB, dtype=torch.uint8, device="cuda") for size in (1, 2, 3, 4, 5, 3, 3)]
overlap = any(one.data_ptr() < at + size and at < one.data_ptr() + len(one) for one in outside for at, size in written)
for _ in range(3):
    with torch.cuda.stream(side):
        blocks(40)
    stalloc.step()
checker = virtual.order_checker()
assert checker is not None
print(json.dumps([[one.text for one in checker.found()], overlap, served, runtime.reports()[0].run_hits - served]))
