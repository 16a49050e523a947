"""What steps ask of the driver: nothing once a plan is followed, and no page is given back to be made again."""

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch", "cupy_installed")

PROGRAM = """
import json
from stalloc import device
from stalloc.device import virtual
device.activate("virtual", device.VirtualGPU(total_bytes=8 << 30))
import torch
import stalloc
stalloc.install(device="virtual")
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
rows, before = [], virtual.statistics()
for step in range(9):
    model(torch.zeros(4096, 1024, device="cuda")).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    now = virtual.statistics()
    planned = stalloc.statistics()[0].plans_made
    rows.append({"planned": planned, "peak": virtual.peak_bytes(), **{name: now[name] - before[name] for name in now}})
    before = now
print(json.dumps(rows))
"""


def test_a_switch_to_a_plan_moves_pages_at_one_wait_and_makes_none(run_checks):
    rows = run_checks(PROGRAM)
    switch = next(number for number, row in enumerate(rows) if row["planned"])
    assert rows[switch]["maps"] > 50  # pages do move there
    assert rows[switch]["device_waits"] <= 2
    assert sum(row["page_creates"] for row in rows[switch:]) <= 2  # as much more as the arena is rounded up
    made = sum(row["page_creates"] for row in rows)
    assert made * (2 << 20) <= rows[-1]["peak"] + (4 << 20)  # none was made again, but for those of the first probe
    calls = ("page_creates", "page_releases", "maps", "unmaps", "access_calls", "device_waits")
    assert [row[name] for row in rows[switch + 2 :] for name in calls] == [0] * 6 * (len(rows) - switch - 2)
