"""Recomputation of blocks with the program's hooks inside: none is called a second time that would notice."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("cuda_torch")

LATER = """
import json, warnings
from stalloc import device
device.activate("virtual")
import torch
from torch import nn
import stalloc

def model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])

def gradients(net):
    net(torch.linspace(0, 1, 16).reshape(2, 8)).square().sum().backward()
    return [one.grad.clone() for one in net.parameters()]

plain, net, seen = model(), model(), []
stalloc.checkpoint(net)
net[1][0].register_forward_hook(lambda module, given, result: seen.append(result.sum().item()))
with warnings.catch_warnings(record=True) as caught:
    same = all(torch.equal(one, other) for one, other in zip(gradients(plain), gradients(net)))
print(json.dumps({"seen": len(seen), "same": same, "said": [str(one.message) for one in caught]}))
"""

ROUTER_LOGITS = """
import json, warnings
from stalloc import device
device.activate("virtual")
import torch
import stalloc
from transformers import MixtralConfig, MixtralForCausalLM

def model():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, vocab_size=64, use_cache=False, output_router_logits=True,
    )).train()

def train(net):
    torch.manual_seed(1)
    for _ in range(2):
        tokens = torch.randint(0, 64, (2, 16))
        net(input_ids=tokens, labels=tokens).loss.backward()
    return [one.grad.clone() for one in net.parameters() if one.grad is not None]

plain, early, late = train(model()), model(), model()
names = [stalloc.checkpoint(early).names]
late(input_ids=torch.randint(0, 64, (2, 16)))  # which installs the hooks
names.append(stalloc.checkpoint(late).names)
with warnings.catch_warnings(record=True) as caught:
    same = [all(map(torch.equal, plain, train(net))) for net in (early, late)]
said = [str(one.message) for one in caught if "stalloc" in str(one.message)]
print(json.dumps({"blocks": [len(one) for one in names], "same": same, "said": said}))
"""


def test_a_hook_that_comes_after_the_wrapping_is_called_once(run_checks: Callable[..., dict[str, Any]]) -> None:
    found = run_checks(LATER)
    assert found["seen"] == 1
    assert found["same"]
    assert len(found["said"]) == 1
    assert "1 is not recomputed: 1.0 has got forward hooks" in found["said"][0]


def test_blocks_whose_results_transformers_collects_are_recomputed(run_checks: Callable[..., dict[str, Any]]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert run_checks(ROUTER_LOGITS) == {"blocks": [3, 3], "same": [True, True], "said": []}
