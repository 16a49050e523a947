"""Training that goes on from a file which was loaded onto the virtual GPU."""

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch")

_PROGRAM = """
import io, json
from stalloc.device import VirtualGPU, virtual
virtual.activate(VirtualGPU(name="Test GPU", total_bytes=8 << 30, compute_capability=(8, 0)))
import torch

def step(model, optimizer):
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def made():
    model = torch.nn.Linear(64, 64).cuda()
    return model, torch.optim.AdamW(model.parameters(), foreach=False)

model, optimizer = made()
step(model, optimizer)
file = io.BytesIO()
torch.save(optimizer.state_dict(), file)
file.seek(0)
model, optimizer = made()
optimizer.load_state_dict(torch.load(file, map_location="cuda"))
for _ in range(3):
    step(model, optimizer)
print(json.dumps([state["step"].item() for state in optimizer.state.values()]))
"""


def test_an_optimizer_whose_file_is_loaded_onto_the_gpu_counts_its_steps_on(run_checks: Any) -> None:
    """PyTorch divides by what follows from the count."""
    assert run_checks(_PROGRAM) == [4.0, 4.0]
