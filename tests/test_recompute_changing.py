"""Recomputation of blocks that change what they hold: averages, statistics, counts, weights that hooks exchange and
autocast casts once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_programs import told_by_file

pytestmark = pytest.mark.usefixtures("cuda_torch")

CHANGING = Path(__file__).parent / "programs" / "changing_blocks.py"
EQUAL = (
    "codebook", "codebook_data", "observer", "undeclared", "branching", "frozen", "cumulative", "no_statistics",
    "images", "spectral_norm_hook", "weight_norm_hook",
    "observer_twice", "undeclared_twice", "branching_twice", "spectral_norm_hook_twice",
)  # fmt: skip
FEW = EQUAL[::3]  #: those that always run


@pytest.fixture(scope="module")
def changing() -> dict[str, Any]:
    """Blocks that change what they hold, each with random choices of what is kept, without and with autocast."""
    found: dict[str, Any] = told_by_file(CHANGING, 3, *FEW, "changed_inputs")
    return found


@pytest.mark.slow
def test_so_it_is_in_every_block() -> None:
    told = told_by_file(CHANGING, 3, *EQUAL)
    assert {case: told[case] for case in EQUAL} == {case: {"equal": 6, "differs": 0, "raised": []} for case in EQUAL}


@pytest.mark.parametrize("case", FEW)
def test_what_a_block_reads_and_then_changes_is_read_again_as_it_was(changing: dict[str, Any], case: str) -> None:
    assert changing[case] == {"equal": 6, "differs": 0, "raised": []}


@pytest.mark.parametrize("case", ["backward", "backward of two calls", "all steps"])
def test_casts_of_weights_that_outlive_a_forward_pass_change_nothing(changing: dict[str, Any], case: str) -> None:
    assert changing["autocast"][case] == ["equal"] * 3


def test_a_block_that_changes_what_it_is_given_is_refused_in_a_sentence(changing: dict[str, Any]) -> None:
    told = changing["changed_inputs"]
    assert (told["equal"], told["differs"]) == (0, 0)
    assert all("aten.mul_.Tensor changes in place what the block was given" in one for one in told["raised"])


NORMALIZED = """
import json
from stalloc import device
device.activate("virtual")
import stalloc, torch
from torch import nn
class Block(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.norm.train(not frozen)
    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))
found = []
for frozen in (False, True):
    held = []
    for recompute in (False, True):
        model = nn.Sequential(*(Block(frozen) for _ in range(8))).cuda()
        if recompute:
            stalloc.checkpoint(model)
        x = torch.randn(8, 16, 64, 64, device="cuda")
        begin = torch.cuda.memory_allocated()
        loss = model(x)
        held.append((torch.cuda.memory_allocated() - begin) / x.nbytes)
        loss.sum().backward()
    found.append(held)
print(json.dumps(found))
"""


def test_nothing_is_kept_of_normalizations(run_checks: Callable[..., Any]) -> None:
    """In sizes of the input, held after the forward pass of eight blocks: what they hand on, and nothing beside it."""
    for as_it_is, recomputed in run_checks(NORMALIZED):
        assert as_it_is > 20
        assert recomputed < 8.1
