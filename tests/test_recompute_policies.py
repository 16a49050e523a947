"""What stalloc.checkpoint is told: blocks, policies by name, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch")

WRONG = """
import json
from stalloc import device
device.activate("virtual")
import stalloc, torch
from torch import nn
model = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
told = {}
for name, arguments in {
    "number": ((3,), {}), "flat": ((nn.Linear(2, 2),), {}), "many": ((model,), {"blocks": 4}),
    "name": ((model,), {"blocks": ["7"]}), "keep": ((model,), {"keep": "mm"}),
    "policy": ((model,), {"policy": "most"}), "number of policy": ((model,), {"policy": "blocks:x"}),
    "both": ((model,), {"policy": "blocks:2", "keep": ["mm"]}), "fit": ((model,), {"policy": "checkmate"}),
}.items():
    try:
        stalloc.checkpoint(*arguments[0], **arguments[1])
    except stalloc.BadInputError as error:
        told[name] = str(error)
told["again"] = [list(stalloc.checkpoint(model, blocks=2).names), dict(stalloc.checkpoint(model).left)]
print(json.dumps(told))
"""


def test_what_checkpoint_cannot_do_is_one_sentence(run_checks: Callable[..., dict[str, Any]]) -> None:
    told = run_checks(WRONG)
    assert told["number"] == "int is no torch module: give checkpoint() a model."
    assert "Linear has no repeated blocks" in told["flat"]
    assert told["many"] == "4 blocks are not possible: the model has 3."
    assert "no repeated block '7'" in told["name"]
    assert "give a list" in told["keep"]
    assert told["policy"].startswith("there is no policy 'most' for one model: give keep-attention or ")
    assert told["number of policy"] == "'blocks:x' has no number of blocks: give blocks:4, for example."
    assert told["both"].endswith("with keep or blocks beside it: give one or the other.")
    assert "use stalloc fit --policy checkmate" in told["fit"]
    assert told["again"] == [["0", "1"], {"0": "0 is recomputed already", "1": "1 is recomputed already"}]


BY_NAME = """
import json
from stalloc import device
device.activate("virtual")
import stalloc, torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))

class Names(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        called.append(str(func))
        return func(*args, **(kwargs or {}))

told = {}
for policy in (None, "keep-attention", "remat-aware", "blocks", "blocks:2"):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    names = stalloc.checkpoint(model, policy=policy).names if policy else ()
    called, loss = [], model(torch.randn(1, 4, 5, 8)).square().mean()
    with Names():
        loss.backward()
    again = sum("attention" in name and "backward" not in name for name in called)
    grads = [one.grad.tolist() for one in model.parameters()]
    told[policy] = [len(names), again, grads == told.setdefault("plain", grads)]
told.pop("plain")
print(json.dumps(told))
"""


def test_policies_by_name_recompute_what_they_say(run_checks: Callable[..., dict[str, Any]]) -> None:
    """Blocks that are recomputed, how often attention is, and whether gradients are those of the model."""
    assert run_checks(BY_NAME) == {
        "null": [0, 0, True],
        "keep-attention": [3, 0, True],
        "remat-aware": [3, 0, True],
        "blocks": [3, 3, True],
        "blocks:2": [2, 2, True],
    }
