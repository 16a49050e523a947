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


_SAVED = """
import io, json, pickle
from stalloc.device import VirtualGPU, virtual
virtual.activate(VirtualGPU(name="Test GPU", total_bytes=8 << 30, compute_capability=(8, 0)))
import torch

norm = torch.nn.BatchNorm1d(64).cuda()
for _ in range(5):
    norm(torch.ones(4, 64, device="cuda"))
places = torch.arange(40, device="cuda") * 3
parts = {"count": norm.num_batches_tracked, "places": places, "numbers": torch.tensor([0.5, 2.0]).cuda() * 3}

def reread(**options):
    file = io.BytesIO()
    torch.save(parts, file, **options)
    return [torch.load(io.BytesIO(file.getvalue()), map_location=place) for place in (None, "cpu", "cuda")]

# what was in the host's memory before must not pass for what was loaded
litter = [torch.full((n,), 77, dtype=torch.uint8).clone() for n in range(1, 64) for _ in range(16)]
del litter
found = [*reread(), *reread(_use_new_zipfile_serialization=False), pickle.loads(pickle.dumps(parts))]
norms = pickle.loads(pickle.dumps(norm))
norms(torch.ones(4, 64, device="cuda"))
print(json.dumps([[one["count"].item(), one["places"][39].item(), one["numbers"].tolist()] for one in found]
                 + [norms.num_batches_tracked.item()]))
"""


def test_small_values_are_in_what_is_saved_and_pickled_and_come_back(run_checks: Any) -> None:
    assert run_checks(_SAVED) == [[5, 117, [1.5, 6.0]]] * 7 + [6]
