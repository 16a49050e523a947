"""Eight layers whose results a side stream copies to the host, while the host waits for each layer to be computed.

`python offloaded_layers.py COMPLETION DEPTH`: prints how many results are held at once. Each has 32 MiB, and takes the
longer to compute the larger DEPTH is.
"""

import sys

from stalloc import device

device.activate("virtual", device.find_gpu("H100"))

import torch  # noqa: E402

from stalloc.device import virtual  # noqa: E402

virtual.complete(sys.argv[1])
SIZE, depth = 4096, int(sys.argv[2])
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
left, right = (torch.empty(shape, dtype=torch.float16, device="cuda") for shape in ((SIZE, depth), (depth, SIZE)))
host = torch.empty(SIZE, SIZE, dtype=torch.float16, pin_memory=True)
torch.mm(left, right)  # which makes the work space of cuBLAS
before = torch.cuda.memory_stats()["active_bytes.all.current"]
torch.cuda.reset_peak_memory_stats()
for _ in range(8):
    result = torch.mm(left, right)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        host.copy_(result, non_blocking=True)
    result.record_stream(side)
    del result
    main.synchronize()
print((torch.cuda.memory_stats()["active_bytes.all.peak"] - before) // (2 * SIZE * SIZE))
