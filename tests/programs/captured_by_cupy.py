"""A graph is captured where pages would move for what it asks for: by CuPy's streams, or untold to anybody (`raw`).

What the checker of the order of work found, as JSON, and whether an array outside got memory that the graph writes to.
"""

import json
import sys
from typing import Any

from stalloc import device

RAW = sys.argv[1] == "raw"
device.activate("virtual", device.VirtualGPU(total_bytes=(400 if RAW else 330) << 20))

import cupy  # noqa: E402

import stalloc  # noqa: E402
from stalloc.device import virtual  # noqa: E402

stalloc.install()
SIZE = 33_000_000


def fill(size: int) -> Any:
    array = cupy.empty(size, dtype=cupy.uint8)
    array.data.memset_async(1, size)
    return array


live = [fill(30_000_000) for _ in range(3)]
for _ in range(6):
    for _ in range(3):
        held = [fill(size) for size in (20_000_000, 9_000_000, 70_000_000)]
    del held
    stalloc.step()
cupy.cuda.Device().synchronize()
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    if RAW:
        cupy.cuda.runtime.streamBeginCapture(stream.ptr, 0)
    else:
        stream.begin_capture()
    inside = [fill(SIZE) for _ in range(2)]
    written = [array.data.ptr for array in inside]
    del inside
    graph = cupy.cuda.runtime.streamEndCapture(stream.ptr) if RAW else stream.end_capture()
with stream:
    outside = [fill(SIZE) for _ in range(2)]
checker = virtual.order_checker()
assert checker is not None
overlap = any(abs(array.data.ptr - at) < SIZE for array in outside for at in written)
print(json.dumps([[one.text for one in checker.found()], overlap]))
