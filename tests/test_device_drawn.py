"""Random numbers drawn on the virtual GPU: others stand for them, so that what they choose is about as large."""

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch")

_PROGRAM = """
import json
from stalloc.device import VirtualGPU, virtual
virtual.activate(VirtualGPU(name="Test GPU", total_bytes=8 << 30, compute_capability=(8, 0)))
import torch

def of_the_host():
    return torch.manual_seed(0) and torch.rand(3).tolist()

before = of_the_host()
torch.manual_seed(0)
order, masked = torch.randperm(100, device="cuda"), torch.rand(8, 512, device="cuda") < 0.15
kept = len(order[order < 30])
tokens = torch.randn(8, 512, 4, device="cuda")[masked]
different = torch.unique(torch.randint(5, 9, (200,), device="cuda")).tolist()
print(json.dumps({
    "kept": kept, "tokens": len(tokens), "different": different, "host": before == torch.rand(3).tolist(),
    "decisions": len(virtual.findings()["decisions"]),
}))
"""


def test_numbers_drawn_on_the_gpu_choose_about_as_many_as_on_a_real_one(run_checks: Any) -> None:
    found = run_checks(_PROGRAM)
    assert found["kept"] == 30
    assert 0.12 < found["tokens"] / 4096 < 0.18
    assert found["different"] == [5, 6, 7, 8]
    assert found["host"], "the host's own random numbers are those without a GPU"
    assert found["decisions"] == 3, "all of them are named"
