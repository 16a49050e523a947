"""Recomputation of blocks: what comes out is what the program itself computes, to the last bit, or one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from warm_programs import told_by_file

pytestmark = pytest.mark.usefixtures("cuda_torch")

PROGRAM = Path(__file__).parent / "programs" / "recomputation.py"
EQUAL = (
    "gpt", "dropout", "batch_norm", "relu_in_place", "dropouts", "alpha_dropout", "attribute", "python_random",
    "buffer", "in_place", "made_inside", "own_generator", "changes_a_weight", "checkpoint_inside",
    "hands_on", "object", "closure", "sequence", "unlike", "statements", "other_weights", "mapped",
    "tally", "tally_outside", "gauge", "gauge_outside", "own_random", "random_outside", "spectral_norm",
    "spectral_norm_twice", "batch_norm_twice", "buffer_twice", "called_again",
)  # fmt: skip
REFUSED = {
    "grows_a_list": "its forward pass changes Layer.seen",
    "grows_a_global": "its forward pass changes LOG, a variable outside of it",
    "another_way": "does not do the same when it is recomputed: its operation",
    "scripted": "it calls function, which is TorchScript",
}
SOMETIMES_REFUSED = ("weight_changes_later",)  #: by what is kept, and under autocast


FEW = EQUAL[::3]  #: those that always run


def results(num_choices: int, *cases: str) -> dict[str, Any]:
    found: dict[str, Any] = told_by_file(PROGRAM, num_choices, *cases)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Cases with a few random choices of what is kept."""
    return results(0, *FEW, *REFUSED, *SOMETIMES_REFUSED)


@pytest.mark.parametrize("case", FEW)
def test_losses_gradients_and_buffers_are_those_of_the_program(found: dict[str, Any], case: str) -> None:
    assert found[case] == {"equal": 4, "differs": 0, "raised": []}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_twice_is_refused_in_a_sentence(found: dict[str, Any], case: str) -> None:
    assert found[case]["equal"] == found[case]["differs"] == 0
    assert len(found[case]["raised"]) == 4
    assert all("layers." in told and REFUSED[case] in told for told in found[case]["raised"])
    assert all("Leave this block as it is." in told for told in found[case]["raised"])


@pytest.mark.parametrize("case", SOMETIMES_REFUSED)
def test_what_is_not_refused_is_equal(found: dict[str, Any], case: str) -> None:
    assert found[case]["differs"] == 0
    assert 0 < found[case]["equal"] == 4 - len(found[case]["raised"])


@pytest.mark.slow
def test_many_choices_of_what_is_kept_are_equal_too() -> None:
    expected = {"equal": 12, "differs": 0, "raised": []}
    assert results(6, *EQUAL) == dict.fromkeys(EQUAL, expected)


@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        ("copies", ["blocks.0", "blocks.1", "blocks.2"]),
        ("rows", ["0-8", "9-18", "19-20"]),
        ("parts", ["layer0-layer2", "layer3-rest"]),
    ],
)
def test_names_copies_and_saved_models_are_the_programs_own(
    found: dict[str, Any], case: str, blocks: list[str]
) -> None:
    told = found[case]
    assert told["same_names"]
    assert told["blocks"] == blocks
    assert told["moved"] == 0, "a copy that is recomputed must not use the weights of the original"
    assert told["own"] > 0
    assert told["same_loss"]
    assert (told["wrapped"], told["left"]) == (0, 0)


def test_backward_twice_computes_again_what_was_kept(found: dict[str, Any]) -> None:
    assert {name: told for name, told in found["twice"].items() if told == "True"}.keys() == {
        "nothing", "products", "drawn",
    }  # fmt: skip
    assert "is computed a third time" in found["twice"]["cannot_be_drawn"]


RECURRENT = """
import json
from stalloc import device
device.activate("virtual")
import stalloc, torch
from torch import nn
class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.norm = kind(64, 64), nn.LayerNorm(64)
    def forward(self, x):
        return self.norm(self.inner(x)[0] + x)
def train(kind, recompute):
    model = nn.Sequential(*(Layer(kind) for _ in range(6))).cuda()
    if recompute:
        stalloc.checkpoint(model, keep=["native_layer_norm"])
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        model(torch.randn(50, 32, 64, device="cuda")).sum().backward()
        model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated()
print(json.dumps([train(kind, True) < 0.7 * train(kind, False) for kind in (nn.LSTM, nn.GRU, nn.RNN)]))
"""


def test_recurrent_layers_of_cudnn_are_computed_again(run_checks: Callable[..., Any]) -> None:
    assert run_checks(RECURRENT) == [True, True, True]


SHARDED = """
import json, sys
from stalloc import device
device.activate("virtual")
import stalloc, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
sys.path.insert(0, sys.argv[1])
from transformer_block import Block
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
def train(recompute):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*model, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    done = stalloc.checkpoint(model, keep=["addmm"]) if recompute else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told = []
    for _ in range(3):
        loss = model(torch.randn(2, 16, 64)).square().mean()
        loss.backward()
        told += [loss.detach().clone(), *(one.grad.to_local().clone() for one in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return told, done
(plain, _), (again, done) = train(False), train(True)
equal = [torch.equal(one, other) for one, other in zip(plain, again, strict=True)]
print(json.dumps({"blocks": list(done.names), "left": done.left, "equal": equal}))
"""


def test_blocks_that_fsdp2_shards_are_computed_again_to_the_same_bits(
    run_checks: Callable[..., dict[str, Any]],
) -> None:
    found = run_checks(SHARDED, str(Path(__file__).parent / "programs" / "real"))
    assert found["blocks"] == ["0", "1", "2"]
    assert found["left"] == {}
    assert len(found["equal"]) > 3
    assert all(found["equal"])
