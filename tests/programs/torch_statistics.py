"""What torch.cuda says of its memory at several points of a program: python torch_statistics.py native|stalloc."""

import json
import sys

from stalloc.device import VirtualGPU, activate

GPU = VirtualGPU(name="Test GPU", total_bytes=4 << 30, num_devices=2)
if sys.argv[1] == "stalloc":
    import stalloc

    stalloc.install(device="virtual", gpu=GPU)
else:
    activate("virtual", GPU)
import torch  # noqa: E402  (the device is in place)

KEYS = (
    *(
        f"{what}.{pool}.{figure}"
        for what in ("allocated_bytes", "requested_bytes", "active_bytes", "allocation", "active")
        for pool in ("all", "small_pool", "large_pool")
        for figure in ("current", "peak", "allocated", "freed")
    ),
    "num_ooms",
)
points = []


def look() -> None:
    """Note the figures that do not depend on how memory is reserved."""
    stats = torch.cuda.memory_stats()
    figures = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated(1)]
    points.append([*figures, *(stats[key] for key in KEYS)])
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    assert torch.cuda.max_memory_reserved() >= torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    assert total == GPU.total_bytes
    assert total - free >= torch.cuda.memory_reserved()


torch.manual_seed(0)
first = torch.empty(1000, device="cuda")
look()
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
other = torch.zeros(12345, device="cuda:1", dtype=torch.float16)
for step in range(8):
    if step in (2, 5):
        torch.cuda.reset_peak_memory_stats()
    loss = model(torch.randn(32, 256, device="cuda")).square().mean()
    loss.backward()
    look()
    optimizer.step()
    optimizer.zero_grad()
    look()
del other
# freed while another stream uses it: no longer allocated, but active
side, shared = torch.cuda.Stream(), torch.empty(3 << 20, device="cuda", dtype=torch.uint8)
shared.record_stream(side)
look()
del shared
look()
torch.cuda.reset_accumulated_memory_stats()
look()
torch.cuda.synchronize()
for _ in range(40):  # by the end of these, whoever has to look whether the stream is done has looked
    torch.empty(600, device="cuda")
look()
torch.cuda.reset_peak_memory_stats()
look()
try:
    torch.empty(5 << 30, device="cuda", dtype=torch.uint8)
except torch.OutOfMemoryError:
    look()
torch.cuda.empty_cache()
look()
del model, optimizer, loss, first
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
look()
summary = torch.cuda.memory_summary()
print(json.dumps({"points": points, "summary": "Allocated memory" in summary, "left": torch.cuda.memory_reserved()}))
